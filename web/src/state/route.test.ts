import { expect, it } from 'vitest';
import { parseRoute } from './route';

it('reads the path and the query behind the #', () => {
  expect(parseRoute('#/vms/a%2Fb?tab=log&filter=x%20y').parts).toEqual(['vms', 'a/b']);
  expect(parseRoute('#/vms?filter=x%20y').query.get('filter')).toBe('x y');
  expect(parseRoute('').parts).toEqual([]);
  expect(parseRoute('#/vms/%').parts).toEqual(['vms', '%']);
});
