/** Warnings in the answers to requests. Each stays on every page until it is closed. */
import { signal } from '@preact/signals';

/** Most warnings that are shown at once. */
const MOST = 5;

export const warnings = signal<string[]>([]);

/** Shows the warning of an answer, if it has one. */
export function warnOf(answer: { warning?: string | null } | undefined): void {
  if (!answer?.warning) return;
  closeWarning(answer.warning);
  warnings.value = [...warnings.value, answer.warning].slice(-MOST);
}

export function closeWarning(text: string): void {
  warnings.value = warnings.value.filter((one) => one !== text);
}
