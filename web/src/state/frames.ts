/** Tasks that run once a frame, however often they are requested: many changes, one drawing. */
import { batch } from '@preact/signals';

/** Shortest time between two drawings. */
const GAP_MS = 100;
/** Interval while the page is hidden, when there are no frames. */
const HIDDEN_GAP_MS = 1000;

const waiting = new Set<() => void>();
let isPlanned = false;
let lastMs = Number.NEGATIVE_INFINITY;

/** Runs a task with the next drawing, once even if requested several times. */
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

/** Runs all waiting tasks at once. */
export function flush(): void {
  isPlanned = false;
  const tasks = [...waiting];
  waiting.clear();
  batch(() => {
    for (const task of tasks) task();
  });
}
