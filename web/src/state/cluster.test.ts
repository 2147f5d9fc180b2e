import { beforeEach, describe, expect, it } from 'vitest';
import type { ClusterEvent, HostSummary, Move, VmSummary } from '../api/types';
import { apply, hosts, moves, rules, vms } from './cluster';
import { forget, journalEntries } from './journal';

let number = 0;
function receive(change: object): void {
  number += 1;
  apply({ ...change, number, unix_ms: number } as ClusterEvent);
}

const vm = (more: Partial<VmSummary> = {}) =>
  ({
    name: 'web',
    host: 'a',
    state: 'running',
    memory_bytes: 1,
    vcpus: 1,
    is_current: true,
    ...more,
  }) as VmSummary;
const host = (more: Partial<HostSummary> = {}) =>
  ({ name: 'a', state: 'up', maintenance: false, ...more }) as HostSummary;
const move = (more: Partial<Move> = {}) =>
  ({ id: 'm1', vm: 'web', from: 'a', to: 'b', state: 'waiting', asked_by: 'ana', ...more }) as Move;
const texts = () => journalEntries().map((one) => `${one.name} ${one.text}`);

beforeEach(() => {
  for (const table of [vms, hosts, moves, rules]) table.replace([]);
  forget();
});

describe('events', () => {
  it('add, change and remove rows', () => {
    receive({ kind: 'vm', data: vm() });
    receive({ kind: 'vm', data: vm({ name: 'db' }) });
    receive({ kind: 'vm', data: vm({ host: 'b' }) });
    expect(vms.sorted().map((one) => [one.name, one.host])).toEqual([
      ['db', 'a'],
      ['web', 'b'],
    ]);
    receive({ kind: 'vm-gone', data: 'db' });
    expect(vms.size).toBe(1);
    expect(texts()).toEqual([
      'db removed',
      'web moved from a to b',
      'db added on a: running',
      'web added on a: running',
    ]);
  });

  it('appear for changes of state, not of figures', () => {
    receive({ kind: 'host', data: host() });
    receive({ kind: 'host', data: host({ load_average_1min: 3 }) });
    receive({ kind: 'host', data: host({ state: 'away', reason: 'refused' }) });
    receive({ kind: 'host', data: host({ maintenance: true }) });
    expect(texts()).toEqual([
      'a responds again',
      'a does not respond: refused',
      'a joined the cluster, up',
    ]);
  });

  it('show the beginning and the end of a move, not each step', () => {
    receive({ kind: 'vm', data: vm() });
    receive({ kind: 'move', data: move() });
    receive({ kind: 'move', data: move({ state: 'starting' }) });
    receive({ kind: 'vm', data: vm({ state: 'migrating-out' }) });
    receive({ kind: 'move', data: move({ state: 'running' }) });
    receive({ kind: 'move', data: move({ state: 'done' }) });
    receive({ kind: 'vm', data: vm({ host: 'b' }) });
    expect(texts().reverse().slice(1)).toEqual([
      'web move a → b requested by ana',
      'web move a → b running',
      'web move a → b done',
      'web moved from a to b',
    ]);
  });

  it('keep a report that was loaded', () => {
    receive({ kind: 'move', data: move({ state: 'running' }) });
    moves.put('m1', move({ state: 'done', report: { outcome: 'completed' } as Move['report'] }));
    receive({ kind: 'move', data: move({ state: 'done' }) });
    expect(moves.peek('m1')?.report?.outcome).toBe('completed');
  });

  it('of a newer manager are ignored', () => {
    receive({ kind: 'weather', data: 'rain' });
    expect(texts()).toEqual([]);
  });

  it('keep a bounded number of ended moves', () => {
    for (let at = 0; at < 2100; at += 1) {
      receive({ kind: 'move', data: move({ id: `m${at}`, state: 'running' }) });
      receive({ kind: 'move', data: move({ id: `m${at}`, state: 'done' }) });
    }
    expect(moves.size).toBe(2000);
  });
});
