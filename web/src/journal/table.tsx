/** Entries of the journal in a table, with those that come while it is shown. */
import { useState } from 'preact/hooks';
import { get } from '../api/http';
import type { JournalEntry, Page } from '../api/types';
import { Act, ProblemBox, useTask, Waiting } from '../parts/basics';
import { type Column, Grid } from '../parts/grid';
import { type Loaded, useLoaded } from '../parts/loaded';
import { Mark } from '../parts/status';
import { merged, newestEntries } from '../state/journal';
import { kindName } from '../text/journal';
import { dateTime, moment } from '../text/units';
import { Objects, openEntry, severityLook } from './entry';
import { finds, queryOf, type Search } from './search';

const PAGE_ENTRIES = 200;
/** Most entries in a table; a narrower search finds the others. */
const MOST_ROWS = 5000;

const COLUMNS: Column<JournalEntry>[] = [
  {
    id: 'severity',
    title: 'Severity',
    track: '30px',
    hasIcon: true,
    cell: ({ severity }) => {
      const { tone, shape, text } = severityLook(severity);
      return (
        <span title={text}>
          <Mark tone={tone} shape={shape} />
          <span class="unseen">{text}</span>
        </span>
      );
    },
  },
  {
    id: 'time',
    title: 'Time',
    track: '88px',
    narrow: { track: '76px' },
    isNumber: true,
    cell: (entry) => <time title={dateTime(entry.at_unix_ms)}>{moment(entry.at_unix_ms)}</time>,
  },
  {
    id: 'object',
    title: 'Object',
    track: 'minmax(110px, 1fr)',
    from: 480,
    cell: (entry) => <Objects entry={entry} most={1} />,
  },
  {
    id: 'kind',
    title: 'Type',
    track: '150px',
    from: 800,
    cell: (entry) => kindName(entry.kind),
  },
  {
    id: 'text',
    title: 'Event',
    track: 'minmax(160px, 4fr)',
    cell: (entry) => {
      const text = entry.why ? `${entry.text} (${entry.why})` : entry.text;
      return (
        <button type="button" class="as-link" title={text} onClick={() => openEntry(entry)}>
          {text}
        </button>
      );
    },
  },
  { id: 'who', title: 'User', track: '110px', from: 640, cell: (entry) => entry.who ?? '–' },
];

export interface Found {
  loaded: Loaded<Page<JournalEntry>>;
  /** What is known of it, the newest first. */
  entries: JournalEntry[];
  /** Cursor behind the last entry; null if there are no more. */
  next: string | null;
  /** Takes a further page. */
  take: (page: Page<JournalEntry>) => void;
}

/** Looks up a search, and takes each new entry that belongs to it. */
export function useFound(search: Search): Found {
  const question = queryOf(search, PAGE_ENTRIES);
  const loaded = useLoaded(`journal ${question}`, (signal) =>
    get<Page<JournalEntry>>(`/journal?${question}`, signal),
  );
  const [further, setFurther] = useState<{ of: string; pages: Page<JournalEntry>[] }>({
    of: '',
    pages: [],
  });
  const pages = further.of === question ? further.pages : [];
  const first = loaded.value;
  const known = first ? [first, ...pages] : [];
  const news = newestEntries().filter((entry) => finds(search, entry));
  const entries = known.flatMap(({ items }) => items);
  const last = entries.at(-1);
  const next = known.at(-1)?.next ?? null;
  // Entries behind the last page are not shown before that page is loaded: others would lack.
  const isShown = (entry: JournalEntry) => !next || !last || entry.id < last.id;
  return {
    loaded,
    entries: first ? merged(entries, news.filter(isShown)) : [],
    next,
    take: (page) => setFurther({ of: question, pages: [...pages, page] }),
  };
}

export function JournalTable({ found, search }: { found: Found; search: Search }) {
  const { loaded, entries, next, take } = found;
  const task = useTask();
  const more = () =>
    task.run(async () =>
      take(await get<Page<JournalEntry>>(`/journal?${queryOf(search, PAGE_ENTRIES, next)}`)),
    );
  if (loaded.problem) return <ProblemBox problem={loaded.problem} />;
  if (!loaded.value) return <Waiting lines={10} />;
  return (
    <>
      {task.problem && <ProblemBox problem={task.problem} />}
      <Grid
        label="Journal"
        rows={entries}
        columns={COLUMNS}
        rowKey={(entry) => entry.id}
        empty={next ? 'None of the newest entries was found.' : 'No entries were found.'}
      />
      {next && (
        <p class="journal-more">
          <Act
            busy={task.busy}
            blocked={entries.length >= MOST_ROWS ? 'Search for less to see older entries.' : null}
            onClick={more}
          >
            Load older entries
          </Act>
        </p>
      )}
    </>
  );
}
