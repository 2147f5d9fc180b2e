import { describe, expect, it } from 'vitest';
import type { LoadHistory } from '../api/types';
import { chartsOf, rangeOf, spokenOf, timesOf } from './history';

const history = (more: Partial<LoadHistory> = {}): LoadHistory => ({
  object: 'vm:web',
  resolution: '1min',
  from_unix_ms: 60_000,
  step_ms: 60_000,
  points: 3,
  capacity: { cpu_millicores: 2000 },
  series: [
    { metric: 'cpu_used_millicores', mean: [812, null, 640], max: [1990, null, 702] },
    { metric: 'latency_us', mean: [310, 300, 295], max: [1204, 500, 350] },
  ],
  ...more,
});

describe('charts of load', () => {
  it('show what was measured, of how much, with its gaps', () => {
    const [cpu, latency, ...others] = chartsOf(history(), false);
    expect([cpu?.title, latency?.title, others.length]).toEqual([
      'CPU, of 2 cores',
      'Disk latency',
      0,
    ]);
    expect(cpu?.lines).toEqual([{ label: 'used', mean: [812, null, 640], max: [1990, null, 702] }]);
    expect(cpu && spokenOf(cpu)).toBe('used 0.64 cores; with gaps');
    expect(latency && spokenOf(latency)).toBe('mean 0.3 ms');
    expect(chartsOf(history({ series: [] }), false)).toEqual([]);
  });

  it('of the overview are few, and single measurements have no maximum', () => {
    const [cpu, ...others] = chartsOf(history({ resolution: '5s', capacity: {} }), true);
    expect([cpu?.title, others.length]).toEqual(['CPU', 0]);
    expect(cpu?.lines[0]?.max).toBeUndefined();
  });

  it('begin each period at its time', () => {
    expect(timesOf(history())).toEqual([60, 120, 180]);
  });

  it('begin with the last hour', () => {
    expect(['day', 'hour', 'weather', null].map((id) => rangeOf(id).id)).toEqual([
      'day',
      'hour',
      'hour',
      'hour',
    ]);
  });
});
