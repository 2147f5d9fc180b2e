/**
 * Samples of a running migration, bounded: beyond the bound, every other one of the older half is
 * dropped.
 */
import { type Signal, signal } from '@preact/signals';
import type { Phase, Progress } from '../api/types';
import { onFrame } from './frames';

export const MOST_SAMPLES = 600;

export interface PhaseMark {
  phase: Phase;
  atMs: number;
}

export class Samples {
  points: Progress[] = [];
  marks: PhaseMark[] = [];
  readonly version: Signal<number> = signal(0);
  private readonly notify = () => {
    this.version.value += 1;
  };

  add(progress: Progress): void {
    const last = this.points.at(-1);
    if (last && progress.elapsed_ms < last.elapsed_ms) this.clear();
    else if (last && progress.elapsed_ms === last.elapsed_ms && progress.phase === last.phase)
      return;
    if (this.marks.at(-1)?.phase !== progress.phase)
      this.marks.push({ phase: progress.phase, atMs: progress.elapsed_ms });
    this.points.push(progress);
    if (this.points.length > MOST_SAMPLES) {
      const half = this.points.length >> 1;
      this.points = this.points.filter((_, at) => at >= half || at % 2 === 0);
    }
    if (this.marks.length > MOST_SAMPLES) this.marks.splice(1, 2);
    onFrame(this.notify);
  }

  /** Adds the manager's samples from before the page was opened. */
  prepend(points: Progress[]): void {
    const firstMs = this.points[0]?.elapsed_ms ?? Number.POSITIVE_INFINITY;
    const now = this.points;
    this.clear();
    for (const point of points) if (point.elapsed_ms < firstMs) this.add(point);
    for (const point of now) this.add(point);
  }

  private clear(): void {
    this.points = [];
    this.marks = [];
  }
}

/** Most migrations whose samples are kept. */
const MOST_KEPT = 40;
const kept = new Map<string, Samples>();

export function samplesOf(move: string): Samples {
  let samples = kept.get(move);
  if (!samples) {
    samples = new Samples();
    kept.set(move, samples);
    for (const oldest of kept.keys()) {
      if (kept.size <= MOST_KEPT) break;
      kept.delete(oldest);
    }
  }
  return samples;
}
