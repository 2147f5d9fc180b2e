/**
 * The newest entries of the manager's journal: those that it kept when the page was loaded, and
 * each one since.
 */
import { type Signal, signal } from '@preact/signals';
import { get } from '../api/http';
import type { JournalEntry, Page } from '../api/types';
import { onFrame } from './frames';

export const MOST_KEPT = 500;
/** Entries that are loaded with the page. */
const LOADED = 100;

let kept: JournalEntry[] = [];
const changed: Signal<number> = signal(0);
const notify = () => {
  changed.value += 1;
};

/** The newest first. */
export function newestEntries(): JournalEntry[] {
  changed.value;
  return kept;
}

export function takeEntries(entries: JournalEntry[]): void {
  kept = merged(kept, entries).slice(0, MOST_KEPT);
  onFrame(notify);
}

/** Both lists, each entry once, the newest first: IDs sort that way. */
export function merged(some: JournalEntry[], others: JournalEntry[]): JournalEntry[] {
  const known = new Set(some.map(({ id }) => id));
  const all = [...some, ...others.filter(({ id }) => !known.has(id))];
  return all.sort((a, b) => (a.id < b.id ? -1 : a.id > b.id ? 1 : 0));
}

/** Loads the newest entries. Without an answer the page has those that follow. */
export async function loadJournal(ended: AbortSignal): Promise<void> {
  const page = await get<Page<JournalEntry>>(`/journal?limit=${LOADED}`, ended).catch(() => null);
  if (page && !ended.aborted) takeEntries(page.items);
}

export function forget(): void {
  kept = [];
  onFrame(notify);
}
