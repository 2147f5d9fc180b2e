import { beforeEach, describe, expect, it } from 'vitest';
import type { Alarm } from '../api/types';
import { alarms, openAlarms, ordered, takeAlarm } from './alarms';
import { objectOf } from './objects';

const alarm = (id: string, more: Partial<Alarm> = {}) =>
  ({
    id,
    kind: 'host-away',
    severity: 'warning',
    object: 'host:a',
    text: '',
    remedy: '',
    raised_unix_ms: 1,
    ...more,
  }) as Alarm;
const acknowledged = { by: 'ana', at_unix_ms: 2 };

beforeEach(() => alarms.replace([]));

describe('alarms', () => {
  it('are listed until they are cleared', () => {
    takeAlarm(alarm('1'));
    takeAlarm(alarm('2'));
    takeAlarm(alarm('1', { acknowledged }));
    expect(alarms.get('1')?.acknowledged?.by).toBe('ana');
    takeAlarm(alarm('1', { cleared_unix_ms: 3 }));
    // A clearing of an alarm that was never listed.
    takeAlarm(alarm('3', { cleared_unix_ms: 3 }));
    expect([...alarms.values()].map(({ id }) => id)).toEqual(['2']);
  });

  it('begin with those that nobody has acknowledged, the critical and newest first', () => {
    const list = [
      alarm('seen', { severity: 'critical', acknowledged, raised_unix_ms: 9 }),
      alarm('old', { raised_unix_ms: 2 }),
      alarm('new', { raised_unix_ms: 3 }),
      alarm('critical', { severity: 'critical' }),
    ];
    expect(ordered(list).map(({ id }) => id)).toEqual(['critical', 'new', 'old', 'seen']);
    expect(openAlarms(list)).toEqual({ open: 3, isCritical: true });
    expect(openAlarms(list.slice(0, 2))).toEqual({ open: 1, isCritical: false });
  });
});

describe('an object', () => {
  it('has the page of its kind', () => {
    expect(objectOf('host:a')).toEqual({ kind: 'host', name: 'a', path: '/hosts/a' });
    expect(objectOf('datastore:a b').path).toBe('/storage/a%20b');
    expect(objectOf('rule:apart').path).toBe('/rules');
    expect(objectOf('cluster:ha').path).toBe('/ha');
    expect(objectOf('manager:m1').path).toBeNull();
    expect(objectOf('constructor:x').path).toBeNull();
    expect(objectOf('cluster')).toEqual({ kind: '', name: 'cluster', path: null });
    expect(objectOf('vm:a:b').name).toBe('a:b');
  });
});
