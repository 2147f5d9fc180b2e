/** Saves what a search of the journal finds, as JSON lines like `godwit control journal export`. */
import { get } from '../api/http';
import type { JournalEntry, Page } from '../api/types';
import { downloadText } from '../parts/download';
import { queryOf, type Search } from './search';

const PAGE_ENTRIES = 1000;
/** Most entries in the file: it is built in the browser's memory. */
const MOST_ENTRIES = 20_000;

/** Returns a note about entries that the file does not contain. */
export async function exportJournal(search: Search): Promise<string | null> {
  const lines: string[] = [];
  let cursor: string | null = null;
  do {
    const page: Page<JournalEntry> = await get(`/journal?${queryOf(search, PAGE_ENTRIES, cursor)}`);
    for (const entry of page.items) lines.push(JSON.stringify(entry));
    // A page may be empty though others follow: few entries match.
    cursor = page.next ?? null;
  } while (cursor && lines.length < MOST_ENTRIES);
  downloadText('godwit-journal.jsonl', 'application/jsonl', `${lines.join('\n')}\n`);
  return cursor
    ? `The file has the newest ${lines.length} entries. To get all of them, run ` +
        'godwit control journal export.'
    : null;
}
