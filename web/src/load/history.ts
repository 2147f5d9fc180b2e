/** Load of an object over time, as charts show it. Pure. */
import type { LoadHistory } from '../api/types';
import { bytes, bytesPerSecond, count, duration } from '../text/units';

export interface Range {
  id: string;
  title: string;
  lengthMs: number;
  resolution: LoadHistory['resolution'];
  /** Interval at which it is loaded again. */
  pollMs: number;
}

/** What the manager keeps in each resolution. */
export const RANGES = [
  { id: 'hour', title: 'Hour', lengthMs: 3_600_000, resolution: '5s', pollMs: 10_000 },
  { id: 'day', title: 'Day', lengthMs: 86_400_000, resolution: '1min', pollMs: 60_000 },
  { id: 'year', title: 'Year', lengthMs: 365 * 86_400_000, resolution: '1h', pollMs: 600_000 },
] as const satisfies Range[];

/** The range with this ID, the first one for others. */
export const rangeOf = (id: string | null): Range =>
  RANGES.find((range) => range.id === id) ?? RANGES[0];

type Series = LoadHistory['series'][number];
type Metric = Series['metric'];

interface Plan {
  title: string;
  lines: readonly (readonly [Metric, string])[];
  format: (value: number) => string;
  isBytes?: boolean;
  /** What the object has of it, for the title. */
  whole?: (capacity: LoadHistory['capacity']) => string | null;
  /** Whether the overview shows it too. */
  isBrief?: boolean;
}

/** `0.8 cores`. */
export const cores = (millicores: number) =>
  `${(millicores / 1000).toFixed(millicores < 9995 ? 2 : 1)} cores`;
const perSecond = (value: number) => `${count(value)}/s`;
const ofBytes = (value: number | null | undefined) => (value ? bytes(value) : null);

const PLANS: readonly Plan[] = [
  {
    title: 'CPU',
    lines: [
      ['cpu_used_millicores', 'used'],
      ['cpu_ready_millicores', 'waited for'],
    ],
    format: cores,
    whole: ({ cpu_millicores: all }) => (all ? `${count(all / 1000)} cores` : null),
    isBrief: true,
  },
  {
    title: 'Memory',
    lines: [
      ['memory_used_bytes', 'used'],
      ['memory_ballooned_bytes', 'ballooned'],
    ],
    format: bytes,
    isBytes: true,
    whole: ({ memory_bytes: all }) => ofBytes(all),
    isBrief: true,
  },
  {
    title: 'Space',
    lines: [['space_used_bytes', 'used']],
    format: bytes,
    isBytes: true,
    whole: ({ space_bytes: all }) => ofBytes(all),
  },
  {
    title: 'Disk throughput',
    lines: [
      ['read_bytes_per_s', 'read'],
      ['write_bytes_per_s', 'written'],
    ],
    format: bytesPerSecond,
    isBytes: true,
    isBrief: true,
  },
  {
    title: 'Disk operations',
    lines: [
      ['reads_per_s', 'reads'],
      ['writes_per_s', 'writes'],
    ],
    format: perSecond,
  },
  {
    title: 'Disk latency',
    lines: [['latency_us', 'mean']],
    format: (us) => duration(us / 1000),
  },
  {
    title: 'Network',
    lines: [
      ['rx_bytes_per_s', 'received'],
      ['tx_bytes_per_s', 'sent'],
    ],
    format: bytesPerSecond,
    isBytes: true,
    isBrief: true,
  },
  {
    title: 'Dirty rate while migrating',
    lines: [['dirty_bytes_per_s', 'dirtied']],
    format: bytesPerSecond,
    isBytes: true,
  },
];

export interface LoadLine {
  label: string;
  mean: (number | null)[];
  /** Highest values; absent where each point is one measurement. */
  max?: (number | null)[];
}

export interface LoadChart {
  title: string;
  lines: LoadLine[];
  format: (value: number) => string;
  isBytes: boolean;
}

/** The charts of which something was measured. `isBrief`: only those of the overview. */
export function chartsOf(history: LoadHistory, isBrief: boolean): LoadChart[] {
  const plans = PLANS.filter((plan) => plan.isBrief || !isBrief);
  return plans.flatMap((plan) => {
    const lines = plan.lines.flatMap(([metric, label]) => {
      const series = history.series.find((one) => one.metric === metric);
      return series ? [lineOf(series, label, history)] : [];
    });
    if (lines.length === 0) return [];
    const whole = plan.whole?.(history.capacity);
    const title = whole ? `${plan.title}, of ${whole}` : plan.title;
    return [{ title, lines, format: plan.format, isBytes: plan.isBytes === true }];
  });
}

function lineOf({ mean, max }: Series, label: string, { resolution }: LoadHistory): LoadLine {
  return resolution === '5s' ? { label, mean } : { label, mean, max };
}

/** Begins of the periods, in seconds since 1970. */
export const timesOf = ({ from_unix_ms, step_ms, points }: LoadHistory): number[] =>
  Array.from({ length: points }, (_, at) => (from_unix_ms + at * step_ms) / 1000);

/** The last value of each line, and whether something is missing, in words. */
export function spokenOf({ lines, format }: LoadChart): string {
  const values = lines.map(({ label, mean }) => {
    const last = mean.findLast((value) => value !== null);
    return `${label} ${last == null ? 'unknown' : format(last)}`;
  });
  const hasGaps = lines.some(({ mean }) => mean.includes(null));
  return `${values.join(', ')}${hasGaps ? '; with gaps' : ''}`;
}
