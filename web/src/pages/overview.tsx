/** The first page: cluster totals, running moves, hosts, problems and recent events. */
import { AdoptionRow, runningAdoptions, useAdoptions } from '../adoption/rows';
import { managerNow } from '../api/clock';
import type { HostSummary, Move, VmSummary } from '../api/types';
import { openCreateVm } from '../dialogs/create-vm';
import { Objects } from '../journal/entry';
import { LoadCharts } from '../load/charts';
import {
  Act,
  Empty,
  Figure,
  HostLink,
  Link,
  Meter,
  PageHead,
  Panel,
  VmLink,
} from '../parts/basics';
import { ObjectLink } from '../parts/object-link';
import { etaMs } from '../parts/phases';
import { hostLook, Mark, moveLook, Status } from '../parts/status';
import { alarms, ordered } from '../state/alarms';
import { cluster, hosts, isOver, moves, rules, vms } from '../state/cluster';
import { newestEntries } from '../state/journal';
import { objectOf } from '../state/objects';
import { bytes, count, countdown, counted, moment, percent } from '../text/units';
import { loadShare, loadText, memoryShare, memoryText } from './host-figures';

/** How long a failed move stays in the list of problems. */
const RECENT_MS = 3_600_000;
const MOST_ROWS = 16;

export function OverviewPage() {
  const allHosts = hosts.sorted();
  const allVms = vms.sorted();
  const allMoves = [...moves.values()];
  return (
    <>
      <PageHead
        title="Overview"
        side={
          <Act needs="operator" onClick={openCreateVm}>
            Create VM
          </Act>
        }
      >
        <span class="muted">
          {cluster.value?.leader
            ? `Manager ${cluster.value.leader.name}: active`
            : 'No active manager'}
          , version {cluster.value?.version ?? '–'}
        </span>
      </PageHead>
      <Totals hosts={allHosts} vms={allVms} moves={allMoves} />
      <div class="columns">
        <div class="column-wide">
          <Running moves={allMoves} />
          <Load hosts={allHosts} />
          <LoadCharts object="cluster" isBrief />
        </div>
        <div class="column-narrow">
          <Attention hosts={allHosts} vms={allVms} moves={allMoves} />
          <RecentEvents />
        </div>
      </div>
    </>
  );
}

function Totals(props: { hosts: HostSummary[]; vms: VmSummary[]; moves: Move[] }) {
  const up = props.hosts.filter((host) => host.state === 'up');
  const running = props.vms.filter(
    (vm) => vm.is_current && (vm.state === 'running' || vm.state === 'migrating-out'),
  ).length;
  const unknown = props.vms.filter((vm) => !vm.is_current).length;
  const sum = (of: (host: HostSummary) => number) =>
    up.reduce((whole, host) => whole + of(host), 0);
  const memory = sum((host) => host.memory_total_bytes ?? 0);
  const free = sum((host) => host.memory_available_bytes);
  const cores = sum((host) => host.logical_cores ?? 0);
  const load = sum((host) => host.load_average_1min ?? 0);
  const moving = props.moves.filter(
    (move) => move.state === 'running' || move.state === 'starting',
  ).length;
  const waiting = props.moves.filter((move) => move.state === 'waiting').length;
  const maintained = props.hosts.filter((host) => host.maintenance).length;
  return (
    <dl class="figures figures-strip">
      <Figure
        label="VMs running"
        value={count(running)}
        note={`of ${count(props.vms.length)}${unknown > 0 ? `, ${count(unknown)} unknown` : ''}`}
      />
      <Figure
        label="Hosts up"
        value={count(up.length)}
        note={`of ${props.hosts.length}${maintained > 0 ? `, ${maintained} in maintenance` : ''}`}
      />
      <Figure
        label="Moves running"
        value={count(moving)}
        note={waiting > 0 ? `${waiting} waiting` : 'none waiting'}
      />
      <Figure
        label="Memory used"
        value={
          memory > 0
            ? percent(1 - free / memory)
            : bytes(sum((host) => host.memory_committed_bytes))
        }
        note={`${bytes(free)} free`}
      />
      <Figure
        label="Load"
        value={cores > 0 ? percent(load / cores) : '–'}
        note={cores > 0 ? `${load.toFixed(0)} of ${count(cores)} cores` : undefined}
      />
    </dl>
  );
}

function Running({ moves: all }: { moves: Move[] }) {
  const running = all.filter((move) => move.state === 'running' || move.state === 'starting');
  const waiting = all.filter((move) => move.state === 'waiting').length;
  running.sort((a, b) => (a.started_unix_ms ?? 0) - (b.started_unix_ms ?? 0));
  // Those that are known: this page does not ask every host.
  const adopting = runningAdoptions();
  useAdoptions([...new Set(adopting.map(({ host }) => host))]);
  return (
    <Panel
      title="Running moves"
      side={
        <Link to="/queue" class="panel-link">
          {waiting > 0 ? `Queue: ${waiting} waiting` : 'Queue'}
        </Link>
      }
    >
      {running.length + adopting.length === 0 ? (
        <div class="rows-steady">
          <Empty>No moves are running.</Empty>
        </div>
      ) : (
        <ul class="rows rows-steady">
          {running.slice(0, MOST_ROWS).map((move) => (
            <MoveRow key={move.id} move={move} />
          ))}
          {adopting.map((one) => (
            <AdoptionRow key={`${one.host} ${one.adoption.id}`} {...one} />
          ))}
          {running.length > MOST_ROWS && (
            <li class="rows-more">
              <Link to="/queue">and {running.length - MOST_ROWS} more</Link>
            </li>
          )}
        </ul>
      )}
    </Panel>
  );
}

export function MoveRow({ move }: { move: Move }) {
  const progress = move.progress;
  // What travels now: disks before the memory.
  const now = progress?.phase === 'disks' ? (progress.disks ?? progress) : progress;
  const done = now && now.total_bytes > 0 ? 1 - now.remaining_bytes / now.total_bytes : 0;
  return (
    <li class="move-row">
      <Link to={`/moves/${encodeURIComponent(move.id)}`} class="move-row-vm">
        {move.vm}
      </Link>
      <span class="move-row-way">
        {move.from} → {move.to ?? '?'}
      </span>
      <Status look={{ ...moveLook(move), text: progress?.phase ?? move.state }} />
      <Meter
        label={`Round ${now?.round ?? 0} of ${move.vm}`}
        share={done}
        warnAt={2}
        badAt={2}
        text={now ? `${bytes(now.remaining_bytes)} left` : 'not started'}
      />
      <span class="number muted">{countdown(etaMs(progress))}</span>
    </li>
  );
}

function Load({ hosts: all }: { hosts: HostSummary[] }) {
  // Rounded to tenths: small changes of a figure must not reorder the list while someone reads it.
  const weight = (host: HostSummary) =>
    host.state === 'up' ? Math.round(memoryShare(host) * 10) : 100;
  const ordered = [...all].sort((a, b) => weight(b) - weight(a));
  return (
    <Panel
      title="Hosts"
      side={
        <Link to="/hosts" class="panel-link">
          All hosts
        </Link>
      }
    >
      {ordered.length === 0 ? (
        <Empty>
          No hosts. Create a join token with <code>godwit control join-token create NAME</code>,
          then run <code>godwit host join</code> on the host.
        </Empty>
      ) : (
        <ul class="rows">
          {ordered.slice(0, MOST_ROWS).map((host) => (
            <li class="host-row" key={host.name}>
              <HostLink name={host.name} />
              <Status look={hostLook(host)} title={host.reason ?? undefined} />
              <span class="number">{counted(host.vms, 'VM')}</span>
              <Meter label="Memory" share={memoryShare(host)} text={memoryText(host)} />
              <Meter label="Load" share={loadShare(host)} text={loadText(host)} />
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

interface Trouble {
  key: string;
  tone: 'bad' | 'warn';
  what: preact.ComponentChildren;
  why: string;
}

/** Most VMs that are named where there may be many. */
const MOST_NAMED = 4;

/** Why the host is away, and the VMs whose state is unknown meanwhile. */
function awayText(host: HostSummary, allVms: VmSummary[]): string {
  const why = host.reason ?? 'the agent does not respond';
  const names = allVms.filter((vm) => vm.host === host.name).map((vm) => vm.name);
  if (names.length === 0) return why;
  const others = names.length - MOST_NAMED;
  const named = names.slice(0, MOST_NAMED).join(', ') + (others > 0 ? ` and ${others} more` : '');
  return `${why}. Unknown: ${counted(names.length, 'VM')}: ${named}`;
}

function troubles(allHosts: HostSummary[], allVms: VmSummary[], allMoves: Move[]): Trouble[] {
  const found: Trouble[] = [];
  for (const host of allHosts) {
    if (host.state === 'away')
      found.push({
        key: `h${host.name}`,
        tone: 'bad',
        what: <HostLink name={host.name} />,
        why: awayText(host, allVms),
      });
    else if (host.lacks_of_baseline?.length)
      found.push({
        key: `b${host.name}`,
        tone: 'warn',
        what: <HostLink name={host.name} />,
        why: `below the CPU baseline: lacks ${host.lacks_of_baseline.join(', ')}`,
      });
  }
  for (const vm of allVms) {
    if (vm.also_runs_at?.length)
      found.push({
        key: `v${vm.name}`,
        tone: 'bad',
        what: <VmLink name={vm.name} />,
        why: `also runs on ${vm.also_runs_at.join(', ')}: one of these VMs must be ended`,
      });
    else if (vm.in_doubt)
      found.push({
        key: `v${vm.name}`,
        tone: 'bad',
        what: <VmLink name={vm.name} />,
        why: 'in doubt: the host that runs it is unknown',
      });
    else if (vm.state === 'failed')
      found.push({
        key: `v${vm.name}`,
        tone: 'bad',
        what: <VmLink name={vm.name} />,
        why: vm.reason ?? 'failed',
      });
  }
  for (const rule of rules.sorted()) {
    if (rule.state === 'broken')
      found.push({
        key: `r${rule.name}`,
        tone: rule.strength === 'must' ? 'bad' : 'warn',
        what: <Link to="/rules">{rule.name}</Link>,
        why: `rule is broken by ${counted(rule.broken_by_count, 'VM')}`,
      });
  }
  const since = managerNow() - RECENT_MS;
  for (const move of allMoves) {
    if (isOver(move) && move.state === 'failed' && (move.ended_unix_ms ?? 0) > since)
      found.push({
        key: `m${move.id}`,
        tone: 'warn',
        what: <Link to={`/moves/${encodeURIComponent(move.id)}`}>{move.vm}</Link>,
        why: `move failed: ${move.failure?.message ?? 'see the report'}`,
      });
  }
  const known = new Set(found.map(({ key }) => key));
  for (const alarm of ordered(alarms.values()))
    if (!alarm.acknowledged && !known.has(troubleKey(alarm.object)))
      found.push({
        key: `a${alarm.id}`,
        tone: alarm.severity === 'critical' ? 'bad' : 'warn',
        what: <ObjectLink object={alarm.object} />,
        why: alarm.text,
      });
  return found.sort((a, b) => a.tone.localeCompare(b.tone));
}

/** The key of an object of an alarm: hosts, VMs and rules may be in the list already. */
function troubleKey(object: string): string {
  const { kind, name } = objectOf(object);
  return `${kind.charAt(0)}${name}`;
}

function Attention(props: { hosts: HostSummary[]; vms: VmSummary[]; moves: Move[] }) {
  const found = troubles(props.hosts, props.vms, props.moves);
  return (
    <Panel
      title="Needs attention"
      side={found.length > 0 ? <span class="badge">{found.length}</span> : undefined}
    >
      {found.length === 0 ? (
        <p class="calm">
          <Mark tone="ok" shape="check" /> No problems. All hosts respond, no VM is in doubt, all
          rules are kept, and there are no alarms to acknowledge.
        </p>
      ) : (
        <ul class="troubles">
          {found.slice(0, MOST_ROWS).map((one) => (
            <li key={one.key}>
              <Mark tone={one.tone} shape={one.tone === 'bad' ? 'cross' : 'triangle'} />
              <span>
                {one.what} <span class="muted">{one.why}</span>
              </span>
            </li>
          ))}
          {found.length > MOST_ROWS && (
            <li class="rows-more">and {found.length - MOST_ROWS} more</li>
          )}
        </ul>
      )}
    </Panel>
  );
}

const TONES = { info: 'muted', warning: 'tone-warn', error: 'tone-bad' };

function RecentEvents() {
  const latest = newestEntries().slice(0, 14);
  return (
    <Panel
      title="Recent events"
      side={
        <Link to="/journal" class="panel-link">
          Journal
        </Link>
      }
    >
      {latest.length === 0 ? (
        <Empty>No events.</Empty>
      ) : (
        <ul class="happenings">
          {latest.map((one) => (
            <li key={one.id}>
              <time>{moment(one.at_unix_ms)}</time>
              <span>
                <Objects entry={one} most={1} /> <span class={TONES[one.severity]}>{one.text}</span>
              </span>
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}
