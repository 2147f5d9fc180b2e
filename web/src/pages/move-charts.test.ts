import { expect, it } from 'vitest';
import type { Progress } from '../api/types';
import { lanesOf } from './move-charts';

const at = (lanes: Progress['lanes']) => ({ lanes }) as Progress;
const lane = (from: string | null, to: string | null, bytes_per_s: number) => ({
  from,
  to,
  bytes_per_s,
  bytes: 0,
  streams: 1,
});

it('has a line for each lane, with gaps where it was not there', () => {
  const points = [
    at(undefined),
    at([lane(null, null, 0)]),
    at([lane('10.0.0.1', 'b', 5)]),
    at([lane('10.0.0.1', 'b', 6), lane(null, '10.1.0.2:7701', 2)]),
  ];
  expect(lanesOf(points)).toEqual([
    { name: '10.0.0.1', rates: [null, null, 5, 6] },
    { name: '10.1.0.2:7701', rates: [null, null, null, 2] },
  ]);
});
