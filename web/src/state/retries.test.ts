import { expect, it } from 'vitest';
import { Retries } from './retries';

it('waits longer each time, up to a bound, and starts again after a success', () => {
  const retries = new Retries();
  const waits = Array.from({ length: 8 }, () => {
    retries.failed();
    return retries.waitMs(1);
  });
  expect(waits).toEqual([500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
  expect(retries.waitMs(0)).toBe(5000);
  retries.succeeded();
  retries.failed();
  expect(retries.waitMs(0)).toBe(250);
});
