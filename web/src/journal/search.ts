/** Searches of the journal, as the page's address and the manager's API have them. Pure. */
import type { JournalEntry } from '../api/types';

export interface Search {
  text: string;
  object: string;
  kind: string;
  severity: string;
  /** Local time, as the field for it has it: `2026-11-27T08:15`. */
  from: string;
  to: string;
}

const FIELDS = ['text', 'object', 'kind', 'severity', 'from', 'to'] as const;

export const searchOf = (query: URLSearchParams): Search =>
  Object.fromEntries(FIELDS.map((field) => [field, query.get(field) ?? ''])) as unknown as Search;

export const isEmpty = (search: Search) => FIELDS.every((field) => search[field] === '');

/** The query of a request for a page of what was found. */
export function queryOf(search: Search, limit: number, cursor?: string | null): string {
  const query = new URLSearchParams({ limit: String(limit) });
  for (const field of ['text', 'object', 'kind', 'severity'] as const) {
    const value = search[field].trim();
    if (value !== '') query.set(field, value);
  }
  const [from, to] = times(search);
  if (from !== null) query.set('from', String(from));
  if (to !== null) query.set('to', String(to));
  if (cursor) query.set('cursor', cursor);
  return query.toString();
}

/** Whether a new entry is among what was searched for. */
export function finds(search: Search, entry: JournalEntry): boolean {
  const [from, to] = times(search);
  const object = search.object.trim();
  const text = search.text.trim().toLowerCase();
  const texts = [entry.text, entry.why ?? '', entry.who ?? ''];
  return (
    (object === '' || entry.objects.includes(object)) &&
    (search.kind === '' || entry.kind === search.kind) &&
    (search.severity === '' || rank(entry.severity) >= rank(search.severity)) &&
    (text === '' || texts.some((one) => one.toLowerCase().includes(text))) &&
    (from === null || entry.at_unix_ms >= from) &&
    (to === null || entry.at_unix_ms < to)
  );
}

const rank = (severity: string) => ['info', 'warning', 'error'].indexOf(severity);

/** Both ends in milliseconds since 1970; null: none, or not a time yet. */
const times = ({ from, to }: Search) => [from, to].map(unixMs) as [number | null, number | null];

function unixMs(local: string): number | null {
  const at = local === '' ? Number.NaN : new Date(local).getTime();
  return Number.isFinite(at) ? at : null;
}
