/** Events since the page was loaded. */
import { Link, PageHead } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid } from '../parts/grid';
import { parseFilter, passes } from '../state/filters';
import { type JournalEntry, journalEntries } from '../state/journal';
import { route } from '../state/route';
import { clock } from '../text/units';

const COLUMNS: Column<JournalEntry>[] = [
  {
    id: 'number',
    title: 'Number',
    track: '80px',
    from: 560,
    isNumber: true,
    cell: (one) => one.number,
  },
  {
    id: 'time',
    title: 'Time',
    track: '80px',
    isNumber: true,
    cell: (one) => <time>{clock(one.unixMs)}</time>,
  },
  { id: 'kind', title: 'Type', track: '72px', cell: (one) => one.kind },
  {
    id: 'name',
    title: 'Name',
    track: 'minmax(110px, 1fr)',
    cell: (one) => (one.path ? <Link to={one.path}>{one.name}</Link> : one.name),
  },
  {
    id: 'text',
    title: 'Event',
    track: 'minmax(160px, 3fr)',
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
          The newest 500 since this page was loaded. <code>godwit control events</code> shows all.
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
        rowKey={(one) => String(one.number)}
        empty="No events since this page was loaded."
      />
    </div>
  );
}

const fieldsOf = (one: JournalEntry) => ({
  type: one.kind,
  name: one.name.toLowerCase(),
  event: one.text.toLowerCase(),
});
