/** Imports and exports in lists: those that run beside the moves, and all of a host. */
import { useEffect, useState } from 'preact/hooks';
import type { JobSummary } from '../api/types';
import { HostLink, Meter, Panel } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid, type Sorting } from '../parts/grid';
import { type Look, Status } from '../parts/status';
import { parseFilter, passes } from '../state/filters';
import { followJobs, type HostJob, isRunningJob, jobs } from '../state/jobs';
import { route } from '../state/route';
import { jobName, kindText, progressText, shareOf } from '../text/jobs';
import { dateTime, duration } from '../text/units';
import { openJob } from './open';

const LOOKS: Record<JobSummary['state'], Look> = {
  running: { tone: 'busy', shape: 'arrow', text: 'running' },
  done: { tone: 'ok', shape: 'check', text: 'done' },
  failed: { tone: 'bad', shape: 'cross', text: 'failed' },
  cancelled: { tone: 'idle', shape: 'slash', text: 'cancelled' },
};

/** Follows the jobs of hosts while the page is shown. */
export function useJobs(names: string[]): void {
  const question = names.join(' ');
  useEffect(() => {
    const ended = new AbortController();
    void followJobs(names, ended.signal);
    return () => ended.abort();
  }, [question]);
}

export const runningJobs = () => [...jobs.values()].filter(isRunningJob);

function OpenJob(one: HostJob) {
  return (
    <button type="button" class="as-link" onClick={() => openJob(one)}>
      {jobName(one.job)}
    </button>
  );
}

export function JobRow(one: HostJob) {
  const { kind, state, done_bytes: done, total_bytes: total } = one.job;
  return (
    <li class="move-row">
      <OpenJob {...one} />
      <span class="move-row-way">
        {kindText(kind).toLowerCase()} on {one.host}
      </span>
      <Status look={LOOKS[state]} />
      <Meter
        label={`${kindText(kind)} of ${jobName(one.job)}`}
        share={shareOf(done, total)}
        warnAt={2}
        badAt={2}
        text={progressText(done, total)}
      />
      <span />
    </li>
  );
}

const order = (a: HostJob, b: HostJob) => a.job.begun_unix_ms - b.job.begun_unix_ms;
const byText = (a: string, b: string) => a.localeCompare(b, 'en', { numeric: true });

const COLUMNS: Column<HostJob>[] = [
  {
    id: 'vm',
    title: 'VM',
    track: 'minmax(100px, 1fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: (one) => <OpenJob {...one} />,
    compare: (a, b) => byText(jobName(a.job), jobName(b.job)),
  },
  {
    id: 'kind',
    title: 'Kind',
    track: '104px',
    narrow: { track: '92px' },
    cell: ({ job }) => kindText(job.kind),
    compare: (a, b) => byText(a.job.kind, b.job.kind),
  },
  {
    id: 'state',
    title: 'State',
    track: '110px',
    narrow: { track: '86px' },
    cell: ({ job }) => <Status look={LOOKS[job.state]} title={job.error?.message} />,
    compare: (a, b) => byText(a.job.state, b.job.state),
  },
  {
    id: 'host',
    title: 'Host',
    track: 'minmax(90px, 1fr)',
    from: 560,
    cell: ({ host }) => <HostLink name={host} />,
    compare: (a, b) => byText(a.host, b.host),
  },
  {
    id: 'progress',
    title: 'Copied',
    track: '132px',
    from: 660,
    isNumber: true,
    cell: ({ job }) => progressText(job.done_bytes, job.total_bytes),
  },
  {
    id: 'begun',
    title: 'Begun',
    track: '150px',
    from: 760,
    cell: ({ job }) => dateTime(job.begun_unix_ms),
    compare: order,
  },
  {
    id: 'took',
    title: 'Duration',
    track: '88px',
    from: 980,
    isNumber: true,
    cell: ({ job }) => duration(job.ended_unix_ms ? job.ended_unix_ms - job.begun_unix_ms : null),
  },
  {
    id: 'place',
    title: 'From or to',
    track: 'minmax(140px, 2fr)',
    from: 860,
    cell: ({ job }) => <span title={job.place}>{job.place}</span>,
  },
];

const NEWEST: Sorting = { column: 'begun', isDown: true };
const keyOf = ({ job }: HostJob) => job.id;

/** The imports and exports of a host, if there are any. */
export function JobsOfHost({ host }: { host: string }) {
  const [sorting, setSorting] = useState(NEWEST);
  useJobs([host]);
  const here = [...jobs.values()].filter((one) => one.host === host);
  if (here.length === 0) return null;
  return (
    <Panel title={`Imports and exports: ${here.length}`}>
      <Grid
        label={`Imports and exports on ${host}`}
        rows={here}
        columns={COLUMNS.filter(({ id }) => id !== 'host')}
        rowKey={keyOf}
        sorting={sorting}
        onSort={setSorting}
        empty=""
        mostRows={8}
      />
    </Panel>
  );
}

/** Ended imports and exports that the hosts still know. */
export function EndedJobs({ hosts }: { hosts: string[] }) {
  const [sorting, setSorting] = useState(NEWEST);
  useJobs(hosts);
  const all = [...jobs.values()].filter((one) => !isRunningJob(one));
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((one) => passes(terms, fieldsOf(one)));
  return (
    <>
      <FilterField
        label="Filter imports and exports"
        hint="vm, kind:export, state:failed, host:a"
        shown={shown.length}
        total={all.length}
      />
      <Grid
        label="Ended imports and exports"
        rows={shown}
        columns={COLUMNS}
        rowKey={keyOf}
        sorting={sorting}
        onSort={setSorting}
        empty={
          all.length === 0
            ? 'No ended imports or exports. A host keeps them until its agent restarts.'
            : 'No imports or exports match the filter.'
        }
      />
    </>
  );
}

function fieldsOf({ host, job }: HostJob) {
  return {
    vm: jobName(job).toLowerCase(),
    kind: kindText(job.kind).toLowerCase(),
    state: job.state,
    host: host.toLowerCase(),
    place: job.place.toLowerCase(),
    why: (job.error?.message ?? '').toLowerCase(),
  };
}
