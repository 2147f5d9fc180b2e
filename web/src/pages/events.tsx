/** Events: what the manager keeps from before the page was loaded, and all since then. */
import { Link, PageHead } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid } from '../parts/grid';
import { parseFilter, passes } from '../state/filters';
import { type JournalEntry, journalEntries } from '../state/journal';
import { route } from '../state/route';
import { whyNot } from '../state/session';
import { moment } from '../text/units';

const COLUMNS: Column<JournalEntry>[] = [
  {
    id: 'number',
    title: 'Number',
    track: '80px',
    from: 560,
    isNumber: true,
    cell: (one) => one.number ?? '–',
  },
  {
    id: 'time',
    title: 'Time',
    track: '88px',
    narrow: { track: '76px' },
    isNumber: true,
    cell: (one) => <time>{moment(one.unixMs)}</time>,
  },
  { id: 'kind', title: 'Type', track: '72px', from: 480, cell: (one) => one.kind },
  {
    id: 'name',
    title: 'Name',
    track: 'minmax(110px, 1fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: (one) => (one.path ? <Link to={one.path}>{one.name}</Link> : one.name),
  },
  {
    id: 'text',
    title: 'Event',
    track: 'minmax(160px, 3fr)',
    narrow: { track: 'minmax(120px, 2fr)' },
    cell: (one) => (
      <span class={one.isTrouble ? 'tone-bad' : ''} title={one.text}>
        {one.text}
      </span>
    ),
  },
];

export function EventsPage() {
  const all = journalEntries();
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((one) => passes(terms, fieldsOf(one)));
  return (
    <div class="page-fill">
      <PageHead title="Events">
        <span class="muted">
          The newest 500: moves, drains
          {whyNot('admin') === null && ', changes by users'}, and all events since this page was
          loaded.
        </span>
      </PageHead>
      <FilterField
        label="Filter events"
        hint="name, type:move, event:failed"
        shown={shown.length}
        total={all.length}
      />
      <Grid
        label="Events"
        rows={shown}
        columns={COLUMNS}
        rowKey={(one) => one.key}
        empty={all.length === 0 ? 'No events.' : 'No events match the filter.'}
      />
    </div>
  );
}

const fieldsOf = (one: JournalEntry) => ({
  type: one.kind,
  name: one.name.toLowerCase(),
  event: one.text.toLowerCase(),
});
