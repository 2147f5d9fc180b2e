/** Work that is done once for each frame, however often it is asked for: many changes, one drawing. */
import { batch } from '@preact/signals';

/** Between two drawings at least: more often than this nobody reads a table. */
const GAP_MS = 100;
/** Where the page is not seen there are no frames. */
const HIDDEN_GAP_MS = 1000;

const waiting = new Set<() => void>();
let isPlanned = false;
let lastMs = Number.NEGATIVE_INFINITY;

/** Runs a task with the next drawing; asked for again before that, it is run once. */
export function onFrame(task: () => void): void {
  waiting.add(task);
  if (!isPlanned) plan();
}

function plan(): void {
  isPlanned = true;
  if (typeof document === 'undefined' || document.hidden) setTimeout(flush, HIDDEN_GAP_MS);
  else requestAnimationFrame(frame);
}

function frame(nowMs: number): void {
  if (nowMs - lastMs < GAP_MS) {
    requestAnimationFrame(frame);
    return;
  }
  lastMs = nowMs;
  flush();
}

/** Runs all that waits, at once. */
export function flush(): void {
  isPlanned = false;
  const tasks = [...waiting];
  waiting.clear();
  batch(() => {
    for (const task of tasks) task();
  });
}
