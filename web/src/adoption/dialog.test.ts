import { expect, it } from 'vitest';
import { adoptRequest } from './dialog';

it("sends a name only if it is not the guest's own", () => {
  const from = { libvirt: 'web' };
  expect(adoptRequest(from, 'web', 'web')).toEqual({ from });
  expect(adoptRequest(from, '', 'web')).toEqual({ from });
  expect(adoptRequest(from, 'shop', 'web')).toEqual({ from, name: 'shop' });
  expect(adoptRequest({ qmp: '/run/a' }, '', null)).toEqual({ from: { qmp: '/run/a' } });
});
