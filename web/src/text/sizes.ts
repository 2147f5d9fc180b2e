/** Sizes as the API reads and writes them: whole numbers with binary units. */

const UNITS = ['B', 'K', 'M', 'G', 'T'];

/** The bytes of a size such as `4GiB`, `512 M` or a number; NaN for any other text. */
export function sizeBytes(size: string | number): number {
  const [, digits, unit = ''] =
    /^([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(?:i?B)?$/i.exec(String(size).trim()) ?? [];
  if (digits === undefined) return Number.NaN;
  return Number(digits) * 1024 ** Math.max(0, UNITS.indexOf(unit.toUpperCase()));
}

/** Bytes with the largest unit that is exact: `1536MiB`. */
export function sizeText(bytes: number): string {
  for (let unit = UNITS.length - 1; unit > 0; unit--)
    if (bytes >= 1024 ** unit && bytes % 1024 ** unit === 0)
      return `${bytes / 1024 ** unit}${UNITS[unit]}iB`;
  return String(bytes);
}
