/** The live state of the cluster. */
import { signal } from '@preact/signals';
import { all, get } from '../api/http';
import type {
  Alarm,
  Cluster,
  ClusterEvent,
  CpuBaseline,
  Drain,
  HostSummary,
  Move,
  MoveLimits,
  RuleInfo,
  VmSummary,
} from '../api/types';
import { alarms, takeAlarm } from './alarms';
import { takeEntries } from './journal';
import { samplesOf } from './samples';
import { Table } from './table';

export const hosts = new Table<HostSummary>();
export const vms = new Table<VmSummary>();
export const moves = new Table<Move>();
export const drains = new Table<Drain>();
export const rules = new Table<RuleInfo>();
export const cluster = signal<Cluster | null>(null);
export const limits = signal<MoveLimits | null>(null);
/**
 * The CPU baseline of the last change event; a page that shows the baseline reloads on a change.
 */
export const baselineNews = signal<CpuBaseline | null | undefined>(undefined);
export const isLoaded = signal(false);

/** Most ended moves that are kept here; the manager has the others. */
const MOST_ENDED = 2000;
const MOST_DRAINS = 200;
/** Wait before rules are evaluated again, so that VMs that move together count once. */
const RELOAD_RULES_AFTER_MS = 2000;

export const isOver = (move: Move) =>
  move.state === 'done' || move.state === 'failed' || move.state === 'cancelled';

/** Whether the VM is stopped, so that all of it can be changed. */
export const isStopped = (vm: VmSummary) => vm.state === 'stopped' || vm.state === 'failed';

/** Whether the VM has no process, and none is being started. */
export const isOff = (vm: VmSummary) =>
  isStopped(vm) || vm.state === 'suspended' || vm.state === 'template';

/** Loads the whole state. */
export async function loadAll(signal_: AbortSignal): Promise<void> {
  const [theCluster, allHosts, allVms, allMoves, allDrains, allRules, allAlarms] =
    await Promise.all([
      get<Cluster>('/cluster', signal_),
      all<HostSummary>('/hosts', signal_),
      all<VmSummary>('/vms', signal_),
      all<Move>('/moves', signal_),
      all<Drain>('/drains', signal_),
      all<RuleInfo>('/rules', signal_),
      all<Alarm>('/alarms', signal_),
    ]);
  cluster.value = theCluster;
  limits.value = theCluster.limits;
  hosts.replace(allHosts.map((host) => [host.name, host]));
  vms.replace(allVms.map((vm) => [vm.name, vm]));
  moves.replace(newest(allMoves).map((move) => [move.id, move]));
  drains.replace(allDrains.slice(-MOST_DRAINS).map((drain) => [drain.id, drain]));
  rules.replace(allRules.map((rule) => [rule.name, rule]));
  alarms.replace(allAlarms.map((alarm) => [alarm.id, alarm]));
  for (const move of allMoves)
    if (move.progress && !isOver(move)) samplesOf(move.id).add(move.progress);
  isLoaded.value = true;
}

function newest(list: Move[]): Move[] {
  const ended = list.filter(isOver).sort((a, b) => (b.ended_unix_ms ?? 0) - (a.ended_unix_ms ?? 0));
  return [...list.filter((move) => !isOver(move)), ...ended.slice(0, MOST_ENDED)];
}

/** Applies one change. */
export function apply(event: ClusterEvent): void {
  switch (event.kind) {
    case 'host':
      hosts.put(event.data.name, event.data);
      break;
    case 'host-gone':
      hosts.drop(event.data);
      break;
    case 'vm':
      if (vms.peek(event.data.name)?.host !== event.data.host) reloadRules();
      vms.put(event.data.name, event.data);
      break;
    case 'vm-gone':
      vms.drop(event.data);
      reloadRules();
      break;
    case 'move':
      takeMove(event.data);
      break;
    case 'drain':
      drains.put(event.data.id, event.data);
      break;
    case 'rule':
      rules.put(event.data.name, event.data);
      break;
    case 'rule-gone':
      rules.drop(event.data);
      break;
    case 'cpu-baseline':
      baselineNews.value = event.data;
      break;
    case 'cpu-baseline-gone':
      baselineNews.value = null;
      break;
    case 'limits':
      limits.value = event.data;
      break;
    case 'alarm':
      takeAlarm(event.data);
      break;
    case 'journal':
      takeEntries([event.data]);
      break;
  }
}

let reloading: ReturnType<typeof setTimeout> | null = null;

/**
 * Loads the rules again. Their state depends on where VMs run, and events report only changed
 * rules.
 */
function reloadRules(): void {
  if (reloading !== null || rules.size === 0) return;
  reloading = setTimeout(async () => {
    reloading = null;
    // After a failure, the next VM that moves or the next full load brings the rules up to date.
    const current = await all<RuleInfo>('/rules', AbortSignal.timeout(10_000)).catch(() => null);
    if (current) rules.replace(current.map((rule) => [rule.name, rule]));
  }, RELOAD_RULES_AFTER_MS);
}

const endedIds: string[] = [];

function takeMove(move: Move): void {
  const known = moves.peek(move.id);
  // Lists and events carry no report: keep one that was loaded before.
  moves.put(move.id, known?.report && !move.report ? { ...move, report: known.report } : move);
  if (move.progress) samplesOf(move.id).add(move.progress);
  if (isOver(move) && !(known && isOver(known))) {
    endedIds.push(move.id);
    if (endedIds.length > MOST_ENDED) moves.drop(endedIds.shift() as string);
  }
}
