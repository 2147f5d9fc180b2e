/** Adoptions in lists of moves: the running ones, and those that have ended. */
import { useEffect, useState } from 'preact/hooks';
import type { Adoption } from '../api/types';
import { HostLink, Link, Meter } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid, type Sorting } from '../parts/grid';
import { type Look, Status } from '../parts/status';
import {
  adoptionPath,
  adoptions,
  followAdoptions,
  type HostAdoption,
  isRunning,
} from '../state/adoptions';
import { hosts } from '../state/cluster';
import { parseFilter, passes } from '../state/filters';
import { route } from '../state/route';
import { programOf } from '../text/adoption';
import { bytes, countdown, duration } from '../text/units';

const LOOKS: Record<Adoption['state'], Look> = {
  running: { tone: 'busy', shape: 'arrow', text: 'running' },
  completed: { tone: 'ok', shape: 'check', text: 'done' },
  failed: { tone: 'bad', shape: 'cross', text: 'failed' },
  cancelled: { tone: 'idle', shape: 'slash', text: 'undone' },
};

export const adoptionLook = (adoption: Adoption): Look => LOOKS[adoption.state];

/** The name of the VM; an adoption that has just begun may have none yet. */
export const nameOf = ({ vm, from }: Adoption) =>
  vm || ('libvirt' in from ? from.libvirt : from.qmp);

/** Hosts that answer. */
export const hostsUp = () =>
  hosts
    .sorted()
    .filter((host) => host.state === 'up')
    .map((host) => host.name);

/** Follows the adoptions of hosts while the page is shown. */
export function useAdoptions(names: string[]): void {
  const question = names.join(' ');
  useEffect(() => {
    const ended = new AbortController();
    void followAdoptions(names, ended.signal);
    return () => ended.abort();
  }, [question]);
}

export const runningAdoptions = () => [...adoptions.values()].filter(isRunning);

export function AdoptionRow({ host, adoption }: HostAdoption) {
  const { total_bytes: total, remaining_bytes: left } = adoption;
  return (
    <li class="move-row">
      <Link to={adoptionPath(host, adoption.id)} class="move-row-vm">
        {nameOf(adoption)}
      </Link>
      <span class="move-row-way">
        adoption from {programOf(adoption.from)} on {host}
      </span>
      <Status look={{ ...adoptionLook(adoption), text: adoption.phase }} />
      <Meter
        label={`Adoption of ${nameOf(adoption)}`}
        share={total > 0 ? 1 - left / total : 0}
        warnAt={2}
        badAt={2}
        text={total > 0 ? `${bytes(left)} left` : 'not started'}
      />
      <span class="number muted" title="Time since its start">
        {countdown(adoption.elapsed_ms)}
      </span>
    </li>
  );
}

const COLUMNS: Column<HostAdoption>[] = [
  {
    id: 'vm',
    title: 'VM',
    track: 'minmax(100px, 1fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: ({ host, adoption }) => (
      <Link to={adoptionPath(host, adoption.id)}>{nameOf(adoption)}</Link>
    ),
    compare: (a, b) =>
      nameOf(a.adoption).localeCompare(nameOf(b.adoption), 'en', { numeric: true }),
  },
  {
    id: 'state',
    title: 'State',
    track: '110px',
    narrow: { track: '86px' },
    cell: ({ adoption }) => (
      <Status look={adoptionLook(adoption)} title={adoption.error?.message} />
    ),
    compare: (a, b) => a.adoption.state.localeCompare(b.adoption.state),
  },
  {
    id: 'host',
    title: 'Host',
    track: 'minmax(90px, 1fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: ({ host }) => <HostLink name={host} />,
    compare: (a, b) => a.host.localeCompare(b.host, 'en', { numeric: true }),
  },
  {
    id: 'from',
    title: 'Run by',
    track: '100px',
    from: 560,
    cell: ({ adoption }) => programOf(adoption.from),
  },
  {
    id: 'pause',
    title: 'Pause',
    track: '72px',
    isNumber: true,
    cell: ({ adoption }) => duration(adoption.pause_ms),
    compare: (a, b) => (a.adoption.pause_ms ?? 0) - (b.adoption.pause_ms ?? 0),
  },
  {
    id: 'took',
    title: 'Duration',
    track: '88px',
    from: 560,
    isNumber: true,
    cell: ({ adoption }) => duration(adoption.elapsed_ms),
    compare: (a, b) => a.adoption.elapsed_ms - b.adoption.elapsed_ms,
  },
  {
    id: 'why',
    title: 'Result',
    track: 'minmax(160px, 2.4fr)',
    from: 760,
    cell: ({ adoption }) => {
      const text = adoption.error?.message ?? adoption.notes.join('; ');
      return <span title={text}>{text || '–'}</span>;
    },
  },
];

/** Ended adoptions that the hosts still know. */
export function EndedAdoptions() {
  const [sorting, setSorting] = useState<Sorting>();
  useAdoptions(hostsUp());
  const all = [...adoptions.values()].filter((one) => !isRunning(one)).reverse();
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((one) => passes(terms, fieldsOf(one)));
  return (
    <>
      <FilterField
        label="Filter adoptions"
        hint="vm, state:failed, host:a"
        shown={shown.length}
        total={all.length}
      />
      <Grid
        label="Ended adoptions"
        rows={shown}
        columns={COLUMNS}
        rowKey={({ host, adoption }) => `${host} ${adoption.id}`}
        sorting={sorting}
        onSort={setSorting}
        empty={
          all.length === 0
            ? 'No ended adoptions. A host keeps them until its agent restarts.'
            : 'No adoptions match the filter.'
        }
      />
    </>
  );
}

function fieldsOf({ host, adoption }: HostAdoption) {
  return {
    vm: nameOf(adoption).toLowerCase(),
    state: `${adoption.state} ${adoptionLook(adoption).text}`,
    host: host.toLowerCase(),
    why: (adoption.error?.message ?? '').toLowerCase(),
  };
}
