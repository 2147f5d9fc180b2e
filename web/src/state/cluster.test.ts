import { beforeEach, describe, expect, it } from 'vitest';
import type { ClusterEvent, HostSummary, Move, VmSummary } from '../api/types';
import { apply, hosts, moves, rules, vms } from './cluster';
import { forget, happenings } from './journal';

let number = 0;
function tell(change: object): void {
  number += 1;
  apply({ ...change, number, unix_ms: number } as ClusterEvent);
}

const vm = (more: Partial<VmSummary> = {}) =>
  ({ name: 'web', host: 'a', state: 'running', memory_bytes: 1, vcpus: 1, is_current: true, ...more }) as VmSummary;
const host = (more: Partial<HostSummary> = {}) =>
  ({ name: 'a', state: 'up', maintenance: false, ...more }) as HostSummary;
const move = (more: Partial<Move> = {}) =>
  ({ id: 'm1', vm: 'web', from: 'a', to: 'b', state: 'waiting', asked_by: 'ana', ...more }) as Move;
const told = () => happenings().map((one) => `${one.name} ${one.text}`);

beforeEach(() => {
  for (const table of [vms, hosts, moves, rules]) table.replace([]);
  forget();
});

describe('events', () => {
  it('bring rows, change them and take them away', () => {
    tell({ kind: 'vm', data: vm() });
    tell({ kind: 'vm', data: vm({ name: 'db' }) });
    tell({ kind: 'vm', data: vm({ host: 'b' }) });
    expect(vms.sorted().map((one) => [one.name, one.host])).toEqual([
      ['db', 'a'],
      ['web', 'b'],
    ]);
    tell({ kind: 'vm-gone', data: 'db' });
    expect(vms.size).toBe(1);
    expect(told()).toEqual([
      'db is gone',
      'web is at b now, came from a',
      'db is new at a, running',
      'web is new at a, running',
    ]);
  });

  it('are noted where something happened, not where a figure moved', () => {
    tell({ kind: 'host', data: host() });
    tell({ kind: 'host', data: host({ load_average_1min: 3 }) });
    tell({ kind: 'host', data: host({ state: 'away', reason: 'refused' }) });
    tell({ kind: 'host', data: host({ maintenance: true }) });
    expect(told()).toEqual(['a is heard again', 'a is away: refused', 'a joined the cluster, up']);
  });

  it('tell a move by its beginning and its end, not step by step', () => {
    tell({ kind: 'vm', data: vm() });
    tell({ kind: 'move', data: move() });
    tell({ kind: 'move', data: move({ state: 'starting' }) });
    tell({ kind: 'vm', data: vm({ state: 'migrating-out' }) });
    tell({ kind: 'move', data: move({ state: 'running' }) });
    tell({ kind: 'move', data: move({ state: 'done' }) });
    tell({ kind: 'vm', data: vm({ host: 'b' }) });
    expect(told().reverse().slice(1)).toEqual([
      'web move a → b asked for by ana',
      'web move a → b running',
      'web move a → b done',
      'web is at b now, came from a',
    ]);
  });

  it('keep a report that was asked for', () => {
    tell({ kind: 'move', data: move({ state: 'running' }) });
    moves.put('m1', move({ state: 'done', report: { outcome: 'completed' } as Move['report'] }));
    tell({ kind: 'move', data: move({ state: 'done' }) });
    expect(moves.peek('m1')?.report?.outcome).toBe('completed');
  });

  it('of a later version are passed over', () => {
    tell({ kind: 'weather', data: 'rain' });
    expect(told()).toEqual([]);
  });

  it('keep no more moves that are over than a bound', () => {
    for (let at = 0; at < 2100; at += 1) {
      tell({ kind: 'move', data: move({ id: `m${at}`, state: 'running' }) });
      tell({ kind: 'move', data: move({ id: `m${at}`, state: 'done' }) });
    }
    expect(moves.size).toBe(2000);
  });
});
