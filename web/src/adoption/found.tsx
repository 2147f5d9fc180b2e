/** Guests that other programs run on hosts. The list only shows them; they are not Godwit's. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { get, part, problemOf } from '../api/http';
import type { ForeignGuest } from '../api/types';
import { Act, HostLink, Link, Panel, Waiting } from '../parts/basics';
import { type Column, Grid, type Sorting } from '../parts/grid';
import { useLoaded } from '../parts/loaded';
import { Status } from '../parts/status';
import { adoptionPath, adoptions, isRunning } from '../state/adoptions';
import { passes, type Term } from '../state/filters';
import { ofHosts } from '../state/host-lists';
import { adoptableText, programOf } from '../text/adoption';
import { bytes, counted } from '../text/units';
import { openAdopt } from './dialog';
import { useAdoptions } from './rows';

interface FoundGuest {
  host: string;
  guest: ForeignGuest;
}

interface Found {
  guests: FoundGuest[];
  /** Hosts that did not say what they run. */
  failures: { host: string; why: string }[];
}

const byName = new Intl.Collator('en', { numeric: true }).compare;
const order = (a: FoundGuest, b: FoundGuest) =>
  byName(a.guest.name, b.guest.name) || byName(a.host, b.host);

async function find(hosts: string[], signal: AbortSignal): Promise<Found> {
  const found: Found = { guests: [], failures: [] };
  await ofHosts(hosts, async (host) => {
    try {
      const guests = await get<ForeignGuest[]>(`/hosts/${part(host)}/foreign-guests`, signal);
      found.guests.push(...guests.map((guest) => ({ host, guest })));
    } catch (error) {
      found.failures.push({ host, why: problemOf(error).detail });
    }
  });
  found.guests.sort(order);
  found.failures.sort((a, b) => byName(a.host, b.host));
  return found;
}

const COLUMNS: Column<FoundGuest>[] = [
  {
    id: 'name',
    title: 'Name',
    track: 'minmax(110px, 1.2fr)',
    narrow: { track: 'minmax(70px, 1fr)' },
    cell: ({ host, guest }) => (
      <button type="button" class="as-link" onClick={() => openAdopt(host, guest)}>
        {guest.name}
      </button>
    ),
    compare: order,
  },
  {
    id: 'state',
    title: 'State there',
    track: '110px',
    from: 560,
    cell: ({ guest }) => <Status look={{ tone: 'idle', shape: 'square', text: guest.state }} />,
    compare: (a, b) => a.guest.state.localeCompare(b.guest.state) || order(a, b),
  },
  {
    id: 'host',
    title: 'Host',
    track: 'minmax(90px, 1fr)',
    narrow: { track: 'minmax(70px, 0.8fr)' },
    cell: ({ host }) => <HostLink name={host} />,
    compare: (a, b) => byName(a.host, b.host) || order(a, b),
  },
  {
    id: 'by',
    title: 'Run by',
    track: '92px',
    from: 760,
    cell: ({ guest }) => programOf(guest.from),
  },
  {
    id: 'vcpus',
    title: 'vCPUs',
    track: '64px',
    from: 660,
    isNumber: true,
    cell: ({ guest }) => guest.vcpus ?? '–',
    compare: (a, b) => (a.guest.vcpus ?? 0) - (b.guest.vcpus ?? 0),
  },
  {
    id: 'memory',
    title: 'Memory',
    track: '88px',
    from: 560,
    isNumber: true,
    cell: ({ guest }) => bytes(guest.memory_bytes),
    compare: (a, b) => (a.guest.memory_bytes ?? 0) - (b.guest.memory_bytes ?? 0),
  },
  {
    id: 'adoption',
    title: 'Adoption',
    track: 'minmax(160px, 2.4fr)',
    narrow: { track: 'minmax(110px, 1.6fr)' },
    cell: (row) => <Adoptable {...row} />,
    compare: (a, b) => a.guest.findings.length - b.guest.findings.length || order(a, b),
  },
];

const isSame = (a: ForeignGuest['from'], b: ForeignGuest['from']) =>
  JSON.stringify(a) === JSON.stringify(b);

function Adoptable({ host, guest }: FoundGuest) {
  const running = [...adoptions.values()].find(
    (one) => one.host === host && isRunning(one) && isSame(one.adoption.from, guest.from),
  );
  if (running) return <Link to={adoptionPath(host, running.adoption.id)}>is running</Link>;
  const text = adoptableText(guest.findings);
  if (guest.findings.length === 0) return <Status look={{ tone: 'ok', shape: 'check', text }} />;
  const all = guest.findings.map(({ message }) => message).join('; ');
  return <Status look={{ tone: 'idle', shape: 'slash', text }} title={all} />;
}

/** Hosts' guests of other programs. `hosts`: those that answer; `terms`: the page's filter. */
export function FoundGuests(props: { hosts: string[]; terms?: Term[]; ofHost?: string }) {
  const { hosts, terms = [], ofHost } = props;
  const [sorting, setSorting] = useState<Sorting>();
  const loaded = useLoaded(`guests found at ${hosts.join(' ')}`, (signal) => find(hosts, signal));
  const all = loaded.value?.guests ?? [];
  useAdoptions([...new Set(all.map(({ host }) => host))]);
  // An adopted guest is not the other program's any more.
  const adopted = [...adoptions.values()].filter(
    ({ host, adoption }) => hosts.includes(host) && adoption.state === 'completed',
  ).length;
  const before = useRef(adopted);
  useEffect(() => {
    if (before.current !== adopted) loaded.reload();
    before.current = adopted;
  }, [adopted]);
  const shown = terms.length === 0 ? all : all.filter((row) => passes(terms, fieldsOf(row)));
  const failures = loaded.value?.failures ?? [];
  return (
    <Panel
      title={`Found guests, not Godwit's${loaded.value ? `: ${all.length}` : ''}`}
      class="found"
      side={
        <span class="row-actions">
          {ofHost && (
            <Act kind="quiet" needs="admin" onClick={() => openAdopt(ofHost, null)}>
              Adopt by QMP socket
            </Act>
          )}
          <Act kind="quiet" busy={loaded.isLoading} onClick={loaded.reload}>
            Look again
          </Act>
        </span>
      }
    >
      {failures.length > 0 && <Failures failures={failures} />}
      {loaded.value ? (
        <Grid
          label="Found guests"
          rows={shown}
          columns={ofHost ? COLUMNS.filter(({ id }) => id !== 'host') : COLUMNS}
          rowKey={({ host, guest }) => `${host} ${JSON.stringify(guest.from)}`}
          sorting={sorting}
          onSort={setSorting}
          empty={emptyText(all.length, ofHost)}
          mostRows={8}
        />
      ) : (
        <Waiting lines={3} />
      )}
    </Panel>
  );
}

function emptyText(count: number, ofHost: string | undefined): string {
  if (count > 0) return 'No found guests match the filter.';
  return ofHost ? 'libvirt runs no guests on this host.' : 'libvirt runs no guests on the hosts.';
}

function Failures({ failures }: { failures: Found['failures'] }) {
  const [first, ...more] = failures;
  const others = more.map(({ host }) => host).join(', ');
  return (
    <p class="notice" role="status">
      {counted(failures.length, 'host')} did not say what other programs run there.{' '}
      {`${first?.host}: ${first?.why}${others && `. Also: ${others}`}`}
    </p>
  );
}

function fieldsOf({ host, guest }: FoundGuest) {
  return {
    name: guest.name.toLowerCase(),
    state: guest.state.toLowerCase(),
    host: host.toLowerCase(),
    by: programOf(guest.from),
    memory: bytes(guest.memory_bytes).toLowerCase().replace(' ', ''),
    adoption: adoptableText(guest.findings).toLowerCase(),
  };
}
