/** Formats figures, with the units of the command line. */

const BINARY: [string, number][] = [
  ['TiB', 2 ** 40],
  ['GiB', 2 ** 30],
  ['MiB', 2 ** 20],
  ['KiB', 2 ** 10],
];

const MISSING = '–';

/** `1.2 GiB`, `512 MiB`, `17 B`. */
export function bytes(count: number | null | undefined): string {
  if (count === null || count === undefined || !Number.isFinite(count)) return MISSING;
  for (const [unit, size] of BINARY) {
    if (count >= size) {
      const value = count / size;
      const isWhole = Math.abs(value - Math.round(value)) < 0.005;
      return `${value < 99.95 && !isWhole ? value.toFixed(1) : Math.round(value)} ${unit}`;
    }
  }
  return `${Math.round(count)} B`;
}

/** `1.2 GiB/s`. */
export function bytesPerSecond(rate: number | null | undefined): string {
  const text = bytes(rate);
  return text === MISSING ? text : `${text}/s`;
}

/** `10 Gbit/s`, for links and limits. */
export function bitsPerSecond(bits: number | null | undefined): string {
  if (bits === null || bits === undefined) return MISSING;
  if (bits >= 1e9) return `${trim(bits / 1e9)} Gbit/s`;
  if (bits >= 1e6) return `${trim(bits / 1e6)} Mbit/s`;
  return `${trim(bits / 1e3)} kbit/s`;
}

function trim(value: number): string {
  return String(Number(value.toFixed(value < 100 ? 2 : 0)));
}

/** `9.0 ms`, `4.56 s`, `2 min 5 s`, `3 h 10 min`, `2 d 4 h`. */
export function duration(ms: number | null | undefined): string {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return MISSING;
  if (ms < 0.05) return '0 ms';
  if (ms < 999.95) return ms < 100 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
  if (ms < 59_950) return ms < 9_995 ? `${(ms / 1e3).toFixed(2)} s` : `${(ms / 1e3).toFixed(1)} s`;
  const seconds = Math.round(ms / 1e3);
  return inTwo(seconds, [86_400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']);
}

/** Like `duration`, in whole seconds, so that a countdown does not flicker. */
export function countdown(ms: number | null | undefined): string {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return MISSING;
  const seconds = Math.max(0, Math.ceil(ms / 1e3));
  return seconds < 60
    ? `${seconds} s`
    : inTwo(seconds, [86_400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']);
}

function inTwo(seconds: number, ...units: [number, string][]): string {
  const first = Math.max(
    0,
    units.findIndex(([size]) => seconds >= size),
  );
  const [large, largeName] = units[first] ?? [1, 's'];
  const small = units[first + 1];
  const head = `${Math.floor(seconds / large)} ${largeName}`;
  const rest = small ? Math.floor((seconds % large) / small[0]) : 0;
  return small && rest > 0 ? `${head} ${rest} ${small[1]}` : head;
}

/** Splits a number from its unit, for large figures. */
export function apart(text: string): [string, string] {
  const space = text.indexOf(' ');
  return space < 0 || text.indexOf(' ', space + 1) > 0
    ? [text, '']
    : [text.slice(0, space), text.slice(space + 1)];
}

/** `1,204`. */
export function count(value: number | null | undefined): string {
  return value === null || value === undefined
    ? MISSING
    : Math.round(value).toLocaleString('en-GB');
}

/** `1 VM`, `2 VMs`. */
export function counted(value: number, what: string): string {
  return `${count(value)} ${what}${value === 1 ? '' : 's'}`;
}

export function percent(share: number | null | undefined): string {
  return share === null || share === undefined || !Number.isFinite(share)
    ? MISSING
    : `${Math.round(share * 100)} %`;
}

const two = (value: number) => String(value).padStart(2, '0');

/** `14:03:21`, in the reader's time zone. */
export function clock(unixMs: number | null | undefined): string {
  if (!unixMs) return MISSING;
  const at = new Date(unixMs);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** `2026-11-23 14:03:21`. */
export function dateTime(unixMs: number | null | undefined): string {
  if (!unixMs) return MISSING;
  const at = new Date(unixMs);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(unixMs)}`;
}

/** `14:03:21` of today, otherwise `11-23 14:03`. */
export function moment(unixMs: number | null | undefined, nowMs = Date.now()): string {
  if (!unixMs) return MISSING;
  const text = dateTime(unixMs);
  const isToday = text.slice(0, 10) === dateTime(nowMs).slice(0, 10);
  return isToday ? clock(unixMs) : text.slice(5, 16);
}
