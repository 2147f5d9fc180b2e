/** Running moves, adoptions and jobs; waiting moves with what they wait for. */
import { AdoptionRow, hostsUp, runningAdoptions, useAdoptions } from '../adoption/rows';
import { part } from '../api/http';
import type { Move } from '../api/types';
import { JobRow, runningJobs, useJobs } from '../jobs/rows';
import { Empty, Link, PageHead, Panel } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid } from '../parts/grid';
import { moves } from '../state/cluster';
import { parseFilter, passes } from '../state/filters';
import { route } from '../state/route';
import { clock } from '../text/units';
import { MoveRow } from './overview';

const COLUMNS: Column<Move>[] = [
  {
    id: 'vm',
    title: 'VM',
    track: 'minmax(110px, 1fr)',
    narrow: { track: 'minmax(60px, 1fr)' },
    cell: (move) => <Link to={`/moves/${part(move.id)}`}>{move.vm}</Link>,
  },
  {
    id: 'way',
    title: 'From → to',
    track: 'minmax(176px, 1.2fr)',
    narrow: { track: 'minmax(110px, 1.6fr)' },
    cell: (move) => `${move.from} → ${move.to ?? 'not chosen yet'}`,
  },
  {
    id: 'waits',
    title: 'Waiting for',
    track: 'minmax(180px, 3fr)',
    narrow: { track: 'minmax(100px, 1.6fr)' },
    cell: (move) => <span title={move.waits?.text}>{move.waits?.text ?? 'its turn'}</span>,
  },
  { id: 'priority', title: 'Priority', track: '76px', from: 760, cell: (move) => move.priority },
  {
    id: 'attempts',
    title: 'Tries',
    track: '56px',
    from: 1200,
    isNumber: true,
    cell: (move) => move.attempts || '–',
  },
  {
    id: 'by',
    title: 'User',
    track: '100px',
    from: 1200,
    cell: (move) =>
      move.drain ? <Link to={`/drains/${part(move.drain)}`}>drain</Link> : move.asked_by,
  },
  {
    id: 'since',
    title: 'Since',
    track: '80px',
    from: 680,
    isNumber: true,
    cell: (move) => clock(move.asked_unix_ms),
  },
];

export function QueuePage() {
  const all = [...moves.values()];
  const running = all
    .filter((move) => move.state === 'running' || move.state === 'starting')
    .sort((a, b) => (a.started_unix_ms ?? 0) - (b.started_unix_ms ?? 0));
  const waiting = all
    .filter((move) => move.state === 'waiting')
    .sort((a, b) => a.asked_unix_ms - b.asked_unix_ms);
  useAdoptions(hostsUp());
  useJobs(hostsUp());
  const adopting = runningAdoptions();
  const copying = runningJobs();
  const count = running.length + adopting.length + copying.length;
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown =
    terms.length === 0 ? waiting : waiting.filter((move) => passes(terms, fieldsOf(move)));
  return (
    <>
      <PageHead title="Queue">
        <span class="muted">
          {count} running, {waiting.length} waiting
        </span>
        <Link to="/limits">Limits</Link>
      </PageHead>
      <Panel title={`Running: ${count}`}>
        {count === 0 ? (
          <Empty>No moves are running.</Empty>
        ) : (
          <ul class="rows">
            {running.map((move) => (
              <MoveRow key={move.id} move={move} />
            ))}
            {adopting.map((one) => (
              <AdoptionRow key={`${one.host} ${one.adoption.id}`} {...one} />
            ))}
            {copying.map((one) => (
              <JobRow key={one.job.id} {...one} />
            ))}
          </ul>
        )}
      </Panel>
      <Panel title={`Waiting: ${waiting.length}`}>
        <FilterField
          label="Filter waiting moves"
          hint="vm, from:a, to:b, waits:memory"
          shown={shown.length}
          total={waiting.length}
        />
        <Grid
          label="Waiting moves"
          rows={shown}
          columns={COLUMNS}
          rowKey={(move) => move.id}
          empty="No moves are waiting."
          mostRows={20}
        />
      </Panel>
    </>
  );
}

function fieldsOf(move: Move) {
  return {
    vm: move.vm.toLowerCase(),
    from: move.from.toLowerCase(),
    to: (move.to ?? '').toLowerCase(),
    waits: `${move.waits?.code ?? ''} ${move.waits?.text ?? ''}`.toLowerCase(),
    by: move.asked_by.toLowerCase(),
    priority: move.priority,
  };
}
