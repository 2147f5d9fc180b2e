import type { Alarm } from '../api/types';
import type { Look } from '../parts/status';

export const alarmLook = ({ severity }: Pick<Alarm, 'severity'>): Look =>
  severity === 'critical'
    ? { tone: 'bad', shape: 'cross', text: 'critical' }
    : { tone: 'warn', shape: 'triangle', text: 'warning' };
