import { describe, expect, it } from 'vitest';
import type { JournalEntry } from '../api/types';
import { merged } from '../state/journal';
import { finds, isEmpty, queryOf, searchOf } from './search';

const entry = (more: Partial<JournalEntry> = {}) =>
  ({
    id: 'b',
    at_unix_ms: Date.parse('2026-11-27T10:00:00'),
    kind: 'move-failed',
    severity: 'warning',
    objects: ['vm:web', 'host:a'],
    text: 'VM web did not move',
    why: 'No route to host',
    who: 'ana',
    ...more,
  }) as JournalEntry;
const search = (text: string) => searchOf(new URLSearchParams(text));

describe('a search of the journal', () => {
  it('is a query of the API', () => {
    expect(queryOf(search(''), 50)).toBe('limit=50');
    expect(queryOf(search('text= no+route&object=vm:web&kind=move-failed'), 50, 'c')).toBe(
      'limit=50&text=no+route&object=vm%3Aweb&kind=move-failed&cursor=c',
    );
    const from = Date.parse('2026-11-27T08:15');
    expect(queryOf(search('from=2026-11-27T08:15&to=soon'), 1)).toBe(`limit=1&from=${from}`);
    expect([isEmpty(search('tab=x')), isEmpty(search('to=x'))]).toEqual([true, false]);
  });

  it('finds new entries by object, kind, severity, text and time', () => {
    for (const found of [
      '',
      'object=host:a',
      'kind=move-failed',
      'severity=info',
      'severity=warning',
      'text=NO ROUTE',
      'text=ana',
      'from=2026-11-27T10:00&to=2026-11-27T10:01',
    ])
      expect(finds(search(found), entry()), found).toBe(true);
    for (const other of [
      'object=vm:we',
      'kind=move-done',
      'severity=error',
      'text=web2',
      'from=2026-11-27T10:01',
      'to=2026-11-27T10:00',
    ])
      expect(finds(search(other), entry()), other).toBe(false);
  });
});

describe('lists of entries', () => {
  it('are joined, each entry once, the newest first', () => {
    const ids = (list: JournalEntry[]) => list.map(({ id }) => id);
    const list = [entry({ id: 'b' }), entry({ id: 'd' })];
    expect(ids(merged(list, [entry({ id: 'c' }), entry({ id: 'b' }), entry({ id: 'a' })]))).toEqual(
      ['a', 'b', 'c', 'd'],
    );
  });
});
