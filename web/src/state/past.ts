/**
 * What happened before the page was loaded, from what the manager keeps: moves, drains and, for
 * admins, the changes in the audit log.
 */
import { get } from '../api/http';
import type { AuditEntry, Drain, Move, Page } from '../api/types';
import { userChange } from '../text/audit';
import { drains, moves } from './cluster';
import { drainKey, type JournalEntry, moveKey, moveNow, moveRequest, setPast } from './journal';

const MOST_AUDITED = 200;

const at = encodeURIComponent;

/**
 * Fills the journal. Only admins may read the audit log. Returns its entries, for the next time:
 * later changes of VMs and hosts come as events.
 */
export async function loadPast(
  isAdmin: boolean,
  known: AuditEntry[] | null,
  ended: AbortSignal,
): Promise<AuditEntry[] | null> {
  const audit = known ?? (isAdmin ? await loadAudit(ended) : []);
  if (!ended.aborted) setPast(pastEntries([...moves.values()], [...drains.values()], audit ?? []));
  return audit;
}

/** The newest entries of the audit log; null where the manager does not answer. */
const loadAudit = (ended: AbortSignal) =>
  get<Page<AuditEntry>>(`/audit?limit=${MOST_AUDITED}`, ended).then(
    ({ items }) => items,
    () => null,
  );

/** Entries of what began or ended, in the order of their times. */
export function pastEntries(
  ofMoves: Move[],
  ofDrains: Drain[],
  audit: AuditEntry[],
): JournalEntry[] {
  return [
    ...ofMoves.flatMap(moveEntries),
    ...ofDrains.flatMap(drainEntries),
    ...audit.flatMap(auditEntries),
  ].sort((a, b) => a.unixMs - b.unixMs);
}

type Described = Pick<JournalEntry, 'kind' | 'name' | 'path'>;

const entry = (
  of: Described,
  key: string,
  unixMs: number,
  text: string,
  isTrouble = false,
): JournalEntry => ({ ...of, key, number: null, unixMs, text, isTrouble });

function moveEntries(move: Move): JournalEntry[] {
  const of: Described = { kind: 'move', name: move.vm, path: `/moves/${at(move.id)}` };
  const key = moveKey(move, undefined) ?? '';
  const entries = [entry(of, key, move.asked_unix_ms, moveRequest(move))];
  if (move.ended_unix_ms) {
    const key = `move ${move.id} ${move.state}`;
    entries.push(entry(of, key, move.ended_unix_ms, moveNow(move), move.state === 'failed'));
  }
  return entries;
}

function drainEntries(drain: Drain): JournalEntry[] {
  const of: Described = { kind: 'drain', name: drain.host, path: `/drains/${at(drain.id)}` };
  const begun = { ...drain, state: 'running' } as const;
  const entries = [entry(of, drainKey(begun), drain.asked_unix_ms, 'drain running')];
  if (drain.ended_unix_ms)
    entries.push(entry(of, drainKey(drain), drain.ended_unix_ms, `drain ${drain.state}`));
  return entries;
}

/** Objects of the audit log that have a page; others are in the log alone. */
const PAGES: Record<string, (name: string | null) => Described | null> = {
  vms: (name) => (name ? { kind: 'vm', name, path: `/vms/${at(name)}` } : null),
  hosts: (name) => (name ? { kind: 'host', name, path: `/hosts/${at(name)}` } : null),
  rules: (name) => (name ? { kind: 'rule', name, path: '/rules' } : null),
  limits: () => ({ kind: 'cluster', name: 'Limits', path: '/limits' }),
  'cpu-baseline': () => ({ kind: 'cluster', name: 'CPU baseline', path: '/baseline' }),
};

function auditEntries(audited: AuditEntry): JournalEntry[] {
  const { what, who, made, unix_ms: unixMs } = audited;
  // Moves and drains have entries of their own.
  if (audited.outcome !== 'done' || /\/(moves|drain)$/.test(what)) return [];
  const change = userChange(what, made);
  const of = change && PAGES[change.kind]?.(change.object);
  if (!of) return [];
  // `set CPU baseline` of the CPU baseline is `set`.
  const isNamed = change.text.toLowerCase().endsWith(` ${of.name.toLowerCase()}`);
  const text = isNamed ? change.text.slice(0, -of.name.length - 1) : change.text;
  return [entry(of, `audit ${unixMs} ${what}`, unixMs, `${text}, by ${who}`)];
}
