import { describe, expect, it } from 'vitest';
import type { Progress } from '../api/types';
import { MOST_SAMPLES, Samples } from './samples';

const at = (elapsed_ms: number, phase: Progress['phase'] = 'pre-copy') =>
  ({ elapsed_ms, phase, remaining_bytes: 1 }) as Progress;

describe('samples of a migration', () => {
  it('are bounded, keep the first and the last, and stay in order', () => {
    const samples = new Samples();
    for (let ms = 0; ms < 10_000; ms += 1) samples.add(at(ms));
    expect(samples.points.length).toBeLessThanOrEqual(MOST_SAMPLES);
    expect(samples.points[0]?.elapsed_ms).toBe(0);
    expect(samples.points.at(-1)?.elapsed_ms).toBe(9999);
    const times = samples.points.map((point) => point.elapsed_ms);
    expect(times).toEqual([...times].sort((a, b) => a - b));
  });
  it('mark where phases begin', () => {
    const samples = new Samples();
    samples.add(at(0, 'preflight'));
    samples.add(at(5, 'prepare'));
    samples.add(at(6, 'prepare'));
    samples.add(at(9, 'pre-copy'));
    expect(samples.marks).toEqual([
      { phase: 'preflight', atMs: 0 },
      { phase: 'prepare', atMs: 5 },
      { phase: 'pre-copy', atMs: 9 },
    ]);
  });
  it('start again with a new attempt, and accept earlier samples', () => {
    const samples = new Samples();
    samples.add(at(500));
    samples.add(at(3));
    expect(samples.points.length).toBe(1);
    samples.prepend([at(0, 'preflight'), at(1, 'prepare'), at(3), at(4)]);
    expect(samples.points.map((point) => point.elapsed_ms)).toEqual([0, 1, 3]);
    expect(samples.marks[0]?.phase).toBe('preflight');
  });
});
