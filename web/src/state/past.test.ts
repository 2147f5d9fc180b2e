import { describe, expect, it } from 'vitest';
import type { AuditEntry, Drain, Move } from '../api/types';
import { merged, moveKey } from './journal';
import { pastEntries } from './past';

const move = {
  id: 'm1',
  vm: 'web',
  from: 'a',
  to: 'b',
  asked_by: 'ana',
  asked_unix_ms: 100,
  ended_unix_ms: 300,
  state: 'failed',
  failure: { code: 'x', message: 'no route' },
} as unknown as Move;
const drain = {
  id: 'd1',
  host: 'a',
  state: 'done',
  asked_unix_ms: 150,
  ended_unix_ms: 400,
  vms: [],
} as unknown as Drain;
const audited = (what: string, made: string | null = null, outcome = 'done') =>
  ({ unix_ms: 200, who: 'ana', what, made, outcome, status: 200 }) as AuditEntry;

const texts = (audit: AuditEntry[] = []) =>
  pastEntries([move], [drain], audit).map((one) => `${one.unixMs} ${one.name}: ${one.text}`);

describe('the past', () => {
  it('has the moves and drains that the manager keeps', () => {
    expect(texts()).toEqual([
      '100 web: move a → b requested by ana',
      '150 a: drain running',
      '300 web: move a → b failed: no route',
      '400 a: drain done',
    ]);
  });

  it('has the changes of the audit log, each once', () => {
    const audit = [
      audited('POST /api/v1/vms', 'vm new on host b'),
      audited('DELETE /api/v1/hosts/c?force=true'),
      audited('POST /api/v1/vms/web/moves', 'move m1'),
      audited('POST /api/v1/vms/web/stop', null, 'refused'),
      audited('GET /api/v1/vms/web/console'),
      audited('PUT /api/v1/cpu-baseline'),
    ];
    expect(texts(audit).filter((text) => text.startsWith('200'))).toEqual([
      '200 new: create VM, by ana',
      '200 c: remove host, by ana',
      '200 CPU baseline: set, by ana',
    ]);
  });

  it('contains an event of the stream once', () => {
    const past = pastEntries([move], [], []);
    const key = moveKey(move, { ...move, state: 'running' }) ?? '';
    const live = { ...past[1], key, number: 7 } as (typeof past)[number];
    expect(merged(past, [live]).map((one) => one.number)).toEqual([null, 7]);
  });
});
