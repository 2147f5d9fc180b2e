/** Moves, drains, adoptions and jobs that have ended. */
import { useState } from 'preact/hooks';
import { EndedAdoptions, hostsUp } from '../adoption/rows';
import { part } from '../api/http';
import type { Drain, Move } from '../api/types';
import { EndedJobs } from '../jobs/rows';
import { Act, Link, PageHead, ProblemBox, useTask } from '../parts/basics';
import { download } from '../parts/download';
import { FilterField } from '../parts/filter';
import { type Column, Grid, type Sorting } from '../parts/grid';
import { drainLook, Mark, moveLook, Status } from '../parts/status';
import { drains, isOver, moves } from '../state/cluster';
import { parseFilter, passes } from '../state/filters';
import { route, setQuery } from '../state/route';
import { dateTime, duration, moment } from '../text/units';
import { lackingText, reportsOf } from './reports';

const took = (move: Move) =>
  move.started_unix_ms && move.ended_unix_ms ? move.ended_unix_ms - move.started_unix_ms : null;

export const MOVE_COLUMNS: Column<Move>[] = [
  {
    id: 'ended',
    title: 'Ended',
    track: '150px',
    cell: (move) => <Link to={`/moves/${part(move.id)}`}>{dateTime(move.ended_unix_ms)}</Link>,
    narrow: {
      track: '74px',
      cell: (move) => <Link to={`/moves/${part(move.id)}`}>{moment(move.ended_unix_ms)}</Link>,
    },
    compare: (a, b) => (a.ended_unix_ms ?? 0) - (b.ended_unix_ms ?? 0),
  },
  {
    id: 'state',
    title: 'State',
    track: '110px',
    narrow: { track: '16px', hasIcon: true, cell: (move) => <StateIcon move={move} /> },
    cell: (move) => <Status look={moveLook(move)} title={move.failure?.message} />,
    compare: (a, b) => a.state.localeCompare(b.state),
  },
  {
    id: 'vm',
    title: 'VM',
    track: 'minmax(100px, 1fr)',
    narrow: { track: 'minmax(60px, 1fr)' },
    cell: (move) => <Link to={`/vms/${part(move.vm)}`}>{move.vm}</Link>,
    compare: (a, b) => a.vm.localeCompare(b.vm, 'en', { numeric: true }),
  },
  {
    id: 'way',
    title: 'From → to',
    track: 'minmax(150px, 1.4fr)',
    narrow: { track: 'minmax(150px, 1.4fr)' },
    until: 560,
    cell: (move) => `${move.from} → ${move.to ?? '–'}`,
    compare: (a, b) => a.from.localeCompare(b.from),
  },
  {
    id: 'from',
    title: 'From',
    track: 'minmax(90px, 1fr)',
    from: 560,
    cell: (move) => move.from,
    compare: (a, b) => a.from.localeCompare(b.from),
  },
  {
    id: 'to',
    title: 'To',
    track: 'minmax(90px, 1fr)',
    from: 560,
    cell: (move) => move.to ?? '–',
    compare: (a, b) => (a.to ?? '').localeCompare(b.to ?? ''),
  },
  {
    id: 'took',
    title: 'Duration',
    track: '88px',
    from: 560,
    isNumber: true,
    cell: (move) => duration(took(move)),
    compare: (a, b) => (took(a) ?? 0) - (took(b) ?? 0),
  },
  {
    id: 'by',
    title: 'User',
    track: '100px',
    from: 760,
    cell: (move) =>
      move.drain ? <Link to={`/drains/${part(move.drain)}`}>drain</Link> : move.asked_by,
  },
  {
    id: 'why',
    title: 'Reason',
    track: 'minmax(160px, 2fr)',
    from: 980,
    cell: (move) => (
      <span title={move.failure?.message ?? move.to_reason ?? ''}>
        {move.failure?.message ?? move.to_reason ?? '–'}
      </span>
    ),
  },
];

const DRAIN_COLUMNS: Column<Drain>[] = [
  {
    id: 'asked',
    title: 'Requested',
    track: '150px',
    cell: (drain) => <Link to={`/drains/${part(drain.id)}`}>{dateTime(drain.asked_unix_ms)}</Link>,
    narrow: {
      track: '80px',
      cell: (drain) => <Link to={`/drains/${part(drain.id)}`}>{moment(drain.asked_unix_ms)}</Link>,
    },
    compare: (a, b) => a.asked_unix_ms - b.asked_unix_ms,
  },
  {
    id: 'state',
    title: 'State',
    track: '110px',
    narrow: { track: '80px' },
    cell: (drain) => <Status look={drainLook(drain.state)} />,
  },
  {
    id: 'host',
    title: 'Host',
    track: 'minmax(100px, 1fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: (drain) => <Link to={`/hosts/${part(drain.host)}`}>{drain.host}</Link>,
  },
  {
    id: 'gone',
    title: 'Moved',
    track: '64px',
    isNumber: true,
    cell: (drain) => drain.vms.filter((vm) => vm.state === 'gone').length,
  },
  {
    id: 'stay',
    title: 'Stayed',
    track: '64px',
    from: 420,
    isNumber: true,
    cell: (drain) => drain.vms.filter((vm) => vm.state === 'stays').length,
  },
  {
    id: 'took',
    title: 'Duration',
    track: '100px',
    from: 560,
    isNumber: true,
    cell: (drain) =>
      duration(drain.ended_unix_ms ? drain.ended_unix_ms - drain.asked_unix_ms : null),
  },
  { id: 'by', title: 'User', track: '120px', from: 640, cell: (drain) => drain.asked_by },
];

export function HistoryPage() {
  const [sorting, setSorting] = useState<Sorting>({ column: 'ended', isDown: true });
  const [drainSorting, setDrainSorting] = useState<Sorting>({ column: 'asked', isDown: true });
  const query = route.value.query;
  const terms = parseFilter(query.get('filter') ?? '');
  const of = query.get('of') ?? 'moves';
  const isDrains = of === 'drains';
  const isMoves = !isDrains && of !== 'adoptions' && of !== 'jobs';
  const ended = [...moves.values()].filter(isOver);
  const shown =
    terms.length === 0 ? ended : ended.filter((move) => passes(terms, moveFields(move)));
  const allDrains = [...drains.values()];
  const shownDrains =
    terms.length === 0 ? allDrains : allDrains.filter((drain) => passes(terms, drainFields(drain)));
  const task = useTask();
  const [lacking, setLacking] = useState<string | null>(null);
  return (
    <div class="page-fill">
      <PageHead
        title="History"
        side={
          isMoves && (
            <Act
              busy={task.busy}
              blocked={shown.length === 0 ? 'No reports to download.' : null}
              onClick={() => task.run(async () => setLacking(await downloadAll(shown)))}
            >
              Download reports
            </Act>
          )
        }
      >
        <nav class="switch" aria-label="Show">
          <button type="button" aria-pressed={isMoves} onClick={() => setQuery('of', '')}>
            Moves
          </button>
          <button type="button" aria-pressed={isDrains} onClick={() => setQuery('of', 'drains')}>
            Drains
          </button>
          <button
            type="button"
            aria-pressed={of === 'adoptions'}
            onClick={() => setQuery('of', 'adoptions')}
          >
            Adoptions
          </button>
          <button type="button" aria-pressed={of === 'jobs'} onClick={() => setQuery('of', 'jobs')}>
            Jobs
          </button>
        </nav>
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      <div role="status">{lacking && !task.busy && <p class="notice">{lacking}</p>}</div>
      {of === 'adoptions' && <EndedAdoptions />}
      {of === 'jobs' && <EndedJobs hosts={hostsUp()} />}
      {isDrains && (
        <>
          <FilterField
            label="Filter drains"
            hint="host, state:done, by:ana"
            shown={shownDrains.length}
            total={allDrains.length}
          />
          <Grid
            label="Drains"
            rows={shownDrains}
            columns={DRAIN_COLUMNS}
            rowKey={(drain) => drain.id}
            sorting={drainSorting}
            onSort={setDrainSorting}
            empty="No drains."
          />
        </>
      )}
      {isMoves && (
        <>
          <FilterField
            label="Filter moves"
            hint="vm, state:failed, from:a, to:b, by:ana"
            shown={shown.length}
            total={ended.length}
          />
          <Grid
            label="Ended moves"
            rows={shown}
            columns={MOVE_COLUMNS}
            rowKey={(move) => move.id}
            sorting={sorting}
            onSort={setSorting}
            empty={ended.length === 0 ? 'No ended moves.' : 'No moves match the filter.'}
          />
        </>
      )}
    </div>
  );
}

/** A state where there is no room for its word. */
function StateIcon({ move }: { move: Move }) {
  const { tone, shape, text } = moveLook(move);
  return (
    <span title={move.failure?.message ?? text}>
      <Mark tone={tone} shape={shape} />
      <span class="unseen">{text}</span>
    </span>
  );
}

function moveFields(move: Move) {
  return {
    vm: move.vm.toLowerCase(),
    state: move.state,
    from: move.from.toLowerCase(),
    to: (move.to ?? '').toLowerCase(),
    by: move.asked_by.toLowerCase(),
    why: (move.failure?.message ?? '').toLowerCase(),
  };
}

function drainFields(drain: Drain) {
  return { host: drain.host.toLowerCase(), state: drain.state, by: drain.asked_by.toLowerCase() };
}

/** Saves the reports; returns a note about moves that the file does not contain. */
async function downloadAll(shown: Move[]): Promise<string | null> {
  const reports = await reportsOf(shown);
  download('godwit-moves.json', reports.moves);
  return lackingText(reports);
}
