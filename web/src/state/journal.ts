/** What happened since the page was loaded, in words: states and places, not every figure that moved. */
import { type Signal, signal } from '@preact/signals';
import type { ClusterEvent, Drain, HostSummary, Move, RuleInfo, VmSummary } from '../api/types';
import { onFrame } from './frames';

export interface Happening {
  number: number;
  unixMs: number;
  kind: 'host' | 'vm' | 'move' | 'drain' | 'rule' | 'cluster';
  /** What it is about. */
  name: string;
  text: string;
  isTrouble: boolean;
  /** Where the console shows it. */
  path: string | null;
}

const MOST_KEPT = 500;
let kept: Happening[] = [];
const changed: Signal<number> = signal(0);
const tell = () => {
  changed.value += 1;
};

export function note(happening: Happening): void {
  kept.push(happening);
  if (kept.length > MOST_KEPT * 2) kept = kept.slice(-MOST_KEPT);
  onFrame(tell);
}

/** The newest first. */
export function happenings(): Happening[] {
  changed.value;
  return kept.slice(-MOST_KEPT).reverse();
}

export function forget(): void {
  kept = [];
  onFrame(tell);
}

/** What was known before of that which changes. */
export interface Before {
  host?: HostSummary | undefined;
  vm?: VmSummary | undefined;
  move?: Move | undefined;
  drain?: Drain | undefined;
  rule?: RuleInfo | undefined;
}

/** The change in words; null where only figures moved. */
export function inWords(event: ClusterEvent, before: Before): Happening | null {
  const of = (
    kind: Happening['kind'],
    name: string,
    text: string | null,
    path: string | null,
    isTrouble = false,
  ): Happening | null =>
    text === null ? null : { number: event.number, unixMs: event.unix_ms, kind, name, text, isTrouble, path };
  const at = encodeURIComponent;
  switch (event.kind) {
    case 'host': {
      const host = event.data;
      return of('host', host.name, hostText(host, before.host), `/hosts/${at(host.name)}`, host.state === 'away');
    }
    case 'host-gone':
      return of('host', event.data, 'was taken out of the cluster', null);
    case 'vm': {
      const vm = event.data;
      const isTrouble = vm.state === 'failed' || vm.in_doubt === true || Boolean(vm.also_runs_at?.length);
      return of('vm', vm.name, vmText(vm, before.vm), `/vms/${at(vm.name)}`, isTrouble);
    }
    case 'vm-gone':
      return of('vm', event.data, 'is gone', null);
    case 'move': {
      const move = event.data;
      return of('move', move.vm, moveText(move, before.move), `/moves/${at(move.id)}`, move.state === 'failed');
    }
    case 'drain':
      return of('drain', event.data.host, drainText(event.data, before.drain), `/drains/${at(event.data.id)}`);
    case 'rule': {
      const rule = event.data;
      const text = before.rule?.state === rule.state ? null : `rule is ${rule.state}`;
      return of('rule', rule.name, text, '/rules', rule.state === 'broken');
    }
    case 'rule-gone':
      return of('rule', event.data, 'rule was deleted', '/rules');
    case 'cpu-baseline':
      return of('cluster', 'CPU baseline', `set to ${event.data.cpu_model} by ${event.data.set_by}`, '/baseline');
    case 'cpu-baseline-gone':
      return of('cluster', 'CPU baseline', 'was taken back', '/baseline');
    case 'limits':
      return of('cluster', 'Limits', 'of moves were changed', '/limits');
    default:
      // A kind of a later version.
      return null;
  }
}

function hostText(host: HostSummary, before: HostSummary | undefined): string | null {
  if (!before) return `joined the cluster, ${host.state}`;
  if (before.state !== host.state) {
    if (host.state === 'up') return 'is heard again';
    return host.reason ? `is ${host.state}: ${host.reason}` : `is ${host.state}`;
  }
  if (before.maintenance !== host.maintenance) return host.maintenance ? 'is in maintenance' : 'takes VMs again';
  return null;
}

function vmText(vm: VmSummary, before: VmSummary | undefined): string | null {
  if (!before) return `is new at ${vm.host}, ${vm.state}`;
  if (vm.also_runs_at?.length)
    return before.also_runs_at?.length ? null : `runs at ${vm.host} and at ${vm.also_runs_at.join(', ')}: two guests`;
  if (vm.in_doubt && !before.in_doubt) return 'is in doubt: it is not known which host runs it';
  if (before.host !== vm.host) return `is at ${vm.host} now, came from ${before.host}`;
  // That it is on its way its move says.
  if (isSettled(before) === isSettled(vm) && isSettled(vm)) return null;
  if (before.state !== vm.state) return vm.reason ? `${vm.state}: ${vm.reason}` : vm.state;
  return null;
}

const isSettled = (vm: VmSummary) => vm.state === 'running' || vm.state.startsWith('migrating');

/** Phases that somebody may want to know of; the others follow each other within every move. */
const NOTED = new Set(['reconnect', 'page-in']);

function moveText(move: Move, before: Move | undefined): string | null {
  const way = `${move.from} → ${move.to ?? 'a host to be chosen'}`;
  if (!before) return `move ${way} asked for by ${move.asked_by}`;
  if (before.state !== move.state && move.state !== 'starting') {
    if (move.state === 'failed' && move.failure) return `move ${way} failed: ${move.failure.message}`;
    return `move ${way} ${move.state}`;
  }
  const phase = move.progress?.phase;
  if (phase && phase !== before.progress?.phase && NOTED.has(phase)) return `move ${way}: ${phase}`;
  return null;
}

function drainText(drain: Drain, before: Drain | undefined): string | null {
  if (before && before.state === drain.state) return null;
  return `drain ${drain.state}`;
}
