/** Alarms of the cluster, from the time at which they are raised until they are cleared. */
import type { Alarm } from '../api/types';
import { Table } from './table';

export const alarms = new Table<Alarm>();

/** Applies an event. */
export function takeAlarm(alarm: Alarm): void {
  if (alarm.cleared_unix_ms) alarms.drop(alarm.id);
  else alarms.put(alarm.id, alarm);
}

/** Those that nobody has acknowledged, the most urgent and newest first, then the others. */
export const ordered = (list: Iterable<Alarm>): Alarm[] =>
  [...list].sort((a, b) => rank(a) - rank(b) || b.raised_unix_ms - a.raised_unix_ms);

const rank = (alarm: Alarm) =>
  (alarm.acknowledged ? 2 : 0) + (alarm.severity === 'critical' ? 0 : 1);

export interface AlarmCount {
  /** Number of alarms that nobody has acknowledged. */
  open: number;
  /** Whether one of them is critical. */
  isCritical: boolean;
}

export function openAlarms(list: Iterable<Alarm>): AlarmCount {
  const open = [...list].filter((alarm) => !alarm.acknowledged);
  return { open: open.length, isCritical: open.some(({ severity }) => severity === 'critical') };
}
