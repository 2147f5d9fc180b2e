import { expect, it } from 'vitest';
import { sizeBytes, sizeText } from './sizes';

it('reads sizes as the API does, and writes them with the largest exact unit', () => {
  expect(['4GiB', '512 M', '1536MiB', '7', 2048, '1.5G'].map(sizeBytes)).toEqual([
    2 ** 32,
    2 ** 29,
    1.5 * 2 ** 30,
    7,
    2048,
    1.5 * 2 ** 30,
  ]);
  expect(sizeBytes('2GiB + 1GiB')).toBeNaN();
  expect([2 ** 32, 1.5 * 2 ** 30, 7].map(sizeText)).toEqual(['4GiB', '1536MiB', '7']);
});
