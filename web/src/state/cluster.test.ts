import { beforeEach, describe, expect, it } from 'vitest';
import type { ClusterEvent, Move, VmSummary } from '../api/types';
import { alarms } from './alarms';
import { apply, hosts, moves, rules, vms } from './cluster';
import { forget, MOST_KEPT, newestEntries } from './journal';

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
const move = (more: Partial<Move> = {}) =>
  ({ id: 'm1', vm: 'web', from: 'a', to: 'b', state: 'waiting', asked_by: 'ana', ...more }) as Move;

beforeEach(() => {
  for (const table of [vms, hosts, moves, rules, alarms]) table.replace([]);
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
  });

  it('bring alarms and entries of the journal', () => {
    receive({ kind: 'alarm', data: { id: 'a1', raised_unix_ms: 1 } });
    receive({ kind: 'alarm', data: { id: 'a2', raised_unix_ms: 1 } });
    receive({ kind: 'alarm', data: { id: 'a1', raised_unix_ms: 1, cleared_unix_ms: 2 } });
    expect([...alarms.values()].map(({ id }) => id)).toEqual(['a2']);
    for (const id of ['c', 'a', 'b', 'a']) receive({ kind: 'journal', data: { id } });
    expect(newestEntries().map(({ id }) => id)).toEqual(['a', 'b', 'c']);
    for (let at = 0; at < MOST_KEPT; at += 1)
      receive({ kind: 'journal', data: { id: `0${String(MOST_KEPT - at).padStart(4, '0')}` } });
    expect(
      newestEntries()
        .map(({ id }) => id)
        .slice(0, 2),
    ).toEqual(['00001', '00002']);
    expect(newestEntries().length).toBe(MOST_KEPT);
  });

  it('keep a report that was loaded', () => {
    receive({ kind: 'move', data: move({ state: 'running' }) });
    moves.put('m1', move({ state: 'done', report: { outcome: 'completed' } as Move['report'] }));
    receive({ kind: 'move', data: move({ state: 'done' }) });
    expect(moves.peek('m1')?.report?.outcome).toBe('completed');
  });

  it('of a newer manager are ignored', () => {
    receive({ kind: 'weather', data: 'rain' });
    expect(newestEntries()).toEqual([]);
  });

  it('keep a bounded number of ended moves', () => {
    for (let at = 0; at < 2100; at += 1) {
      receive({ kind: 'move', data: move({ id: `m${at}`, state: 'running' }) });
      receive({ kind: 'move', data: move({ id: `m${at}`, state: 'done' }) });
    }
    expect(moves.size).toBe(2000);
  });
});
