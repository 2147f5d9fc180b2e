/**
 * Events in words: changes of states and hosts, not of figures. What happened before the page was
 * loaded comes from `past.ts`.
 */
import { type Signal, signal } from '@preact/signals';
import type { ClusterEvent, Drain, HostSummary, Move, RuleInfo, VmSummary } from '../api/types';
import { onFrame } from './frames';

export interface JournalEntry {
  /** The same for an event that came by the stream and by a list. */
  key: string;
  /** Number of the event; null for one of the past. */
  number: number | null;
  unixMs: number;
  kind: 'host' | 'vm' | 'move' | 'drain' | 'rule' | 'cluster';
  /** The object of the event. */
  name: string;
  text: string;
  isTrouble: boolean;
  /** The page of that object. */
  path: string | null;
}

const MOST_KEPT = 500;
let past: JournalEntry[] = [];
let kept: JournalEntry[] = [];
const changed: Signal<number> = signal(0);
const notify = () => {
  changed.value += 1;
};

export function note(entry: JournalEntry): void {
  kept.push(entry);
  if (kept.length > MOST_KEPT * 2) kept = kept.slice(-MOST_KEPT);
  onFrame(notify);
}

/** Takes what the manager keeps, in the order of its times, in place of what it kept before. */
export function setPast(entries: JournalEntry[]): void {
  past = entries.slice(-MOST_KEPT);
  onFrame(notify);
}

/** The newest first. */
export function journalEntries(): JournalEntry[] {
  changed.value;
  return merged(past, kept).slice(-MOST_KEPT).reverse();
}

/** Both lists in the order of their times, each event once. */
export function merged(before: JournalEntry[], live: JournalEntry[]): JournalEntry[] {
  const seen = new Set(live.map((one) => one.key));
  const others = before.filter((one) => !seen.has(one.key));
  return [...others, ...live].sort((a, b) => a.unixMs - b.unixMs);
}

export function forget(): void {
  past = [];
  kept = [];
  onFrame(notify);
}

/** The object's state before the change. */
export interface Before {
  host?: HostSummary | undefined;
  vm?: VmSummary | undefined;
  move?: Move | undefined;
  drain?: Drain | undefined;
  rule?: RuleInfo | undefined;
}

/** The change in words; null if only figures changed. */
export function toEntry(event: ClusterEvent, before: Before): JournalEntry | null {
  const of = (
    kind: JournalEntry['kind'],
    name: string,
    text: string | null,
    path: string | null,
    isTrouble = false,
    key?: string,
  ): JournalEntry | null =>
    text === null
      ? null
      : {
          key: key ?? `event ${event.number}`,
          number: event.number,
          unixMs: event.unix_ms,
          kind,
          name,
          text,
          isTrouble,
          path,
        };
  const at = encodeURIComponent;
  switch (event.kind) {
    case 'host': {
      const host = event.data;
      return of(
        'host',
        host.name,
        hostText(host, before.host),
        `/hosts/${at(host.name)}`,
        host.state === 'away',
      );
    }
    case 'host-gone':
      return of('host', event.data, 'removed from the cluster', null);
    case 'vm': {
      const vm = event.data;
      const isTrouble =
        vm.state === 'failed' || vm.in_doubt === true || Boolean(vm.also_runs_at?.length);
      return of('vm', vm.name, vmText(vm, before.vm), `/vms/${at(vm.name)}`, isTrouble);
    }
    case 'vm-gone':
      return of('vm', event.data, 'removed', null);
    case 'move': {
      const move = event.data;
      return of(
        'move',
        move.vm,
        moveText(move, before.move),
        `/moves/${at(move.id)}`,
        move.state === 'failed',
        moveKey(move, before.move),
      );
    }
    case 'drain':
      return of(
        'drain',
        event.data.host,
        drainText(event.data, before.drain),
        `/drains/${at(event.data.id)}`,
        false,
        drainKey(event.data),
      );
    case 'rule': {
      const rule = event.data;
      const text = before.rule?.state === rule.state ? null : `rule is ${rule.state}`;
      return of('rule', rule.name, text, '/rules', rule.state === 'broken');
    }
    case 'rule-gone':
      return of('rule', event.data, 'rule deleted', '/rules');
    case 'cpu-baseline':
      return of(
        'cluster',
        'CPU baseline',
        `set to ${event.data.cpu_model} by ${event.data.set_by}`,
        '/baseline',
      );
    case 'cpu-baseline-gone':
      return of('cluster', 'CPU baseline', 'removed', '/baseline');
    case 'limits':
      return of('cluster', 'Limits', 'changed', '/limits');
    default:
      // A kind of a newer manager.
      return null;
  }
}

function hostText(host: HostSummary, before: HostSummary | undefined): string | null {
  if (!before) return `joined the cluster, ${host.state}`;
  if (before.state !== host.state) {
    if (host.state === 'up') return 'responds again';
    const state = host.state === 'away' ? 'does not respond' : `is ${host.state}`;
    return host.reason ? `${state}: ${host.reason}` : state;
  }
  if (before.maintenance !== host.maintenance)
    return host.maintenance ? 'entered maintenance' : 'left maintenance';
  return null;
}

function vmText(vm: VmSummary, before: VmSummary | undefined): string | null {
  if (!before) return `added on ${vm.host}: ${vm.state}`;
  if (vm.also_runs_at?.length)
    return before.also_runs_at?.length
      ? null
      : `VMs with this name run on ${vm.host} and on ${vm.also_runs_at.join(', ')}`;
  if (vm.in_doubt && !before.in_doubt) return 'in doubt: the host that runs it is unknown';
  if (before.host !== vm.host) return `moved from ${before.host} to ${vm.host}`;
  // The events of its move cover the migration.
  if (isSettled(before) === isSettled(vm) && isSettled(vm)) return null;
  if (before.state !== vm.state) return vm.reason ? `${vm.state}: ${vm.reason}` : vm.state;
  return null;
}

const isSettled = (vm: VmSummary) => vm.state === 'running' || vm.state.startsWith('migrating');

/** Phases worth an event; the others occur in every move. */
const NOTED = new Set(['reconnect', 'page-in']);

const wayOf = (move: Move) => `${move.from} → ${move.to ?? '(not chosen yet)'}`;

export const moveRequest = (move: Move) => `move ${wayOf(move)} requested by ${move.asked_by}`;

/** The state of a move in words. */
export function moveNow(move: Move): string {
  if (move.state === 'failed' && move.failure)
    return `move ${wayOf(move)} failed: ${move.failure.message}`;
  return `move ${wayOf(move)} ${move.state}`;
}

function moveText(move: Move, before: Move | undefined): string | null {
  if (!before) return moveRequest(move);
  if (before.state !== move.state && move.state !== 'starting') return moveNow(move);
  const phase = move.progress?.phase;
  if (phase && phase !== before.progress?.phase && NOTED.has(phase))
    return `move ${wayOf(move)}: ${phase}`;
  return null;
}

/** Keys of what the manager's lists contain too; undefined for other events of a move. */
export function moveKey(move: Move, before: Move | undefined): string | undefined {
  if (!before) return `move ${move.id} requested`;
  return move.ended_unix_ms && before.state !== move.state
    ? `move ${move.id} ${move.state}`
    : undefined;
}

export const drainKey = (drain: Drain) => `drain ${drain.id} ${drain.state}`;

function drainText(drain: Drain, before: Drain | undefined): string | null {
  if (before && before.state === drain.state) return null;
  return `drain ${drain.state}`;
}
