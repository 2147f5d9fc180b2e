/** The form of an import: its content, its errors, and the request that it makes. Pure. */
import type { ImportVm, JobKind, WarmStep } from '../api/types';

export const SOURCES = [
  ['file', 'A file on the host'],
  ['text', 'Text that is pasted here'],
  ['libvirt', "A domain of the host's libvirt"],
] as const;

export type Source = (typeof SOURCES)[number][0];

/** What becomes of the disks. */
export const DISKS = [
  ['copy', 'Copied'],
  ['take', 'Used where they are'],
  ['warm', 'Copied while the guest runs (warm import)'],
] as const;

export type Disks = (typeof DISKS)[number][0];

export const STEPS: readonly (readonly [WarmStep, string])[] = [
  ['copy', 'First: copy everything'],
  ['again', 'Further: copy what differs'],
  ['cut-over', 'Last: the guest is shut down; create and start the VM'],
];

export interface Draft {
  host: string;
  source: Source;
  /** The path, the text, or the name of the domain. */
  from: string;
  name: string;
  /** A line for each network: its name in the definition, `=`, that of the host. */
  networks: string;
  disksIn: string;
  disks: Disks;
  /** Of a warm import: a line for each disk, an NBD URI or the path of a raw image. */
  sources: string;
  /** Pass of a warm import. */
  step: WarmStep;
  starts: boolean;
}

export const NEW_DRAFT: Draft = {
  host: '',
  source: 'file',
  from: '',
  name: '',
  networks: '',
  disksIn: '',
  disks: 'copy',
  sources: '',
  step: 'copy',
  starts: false,
};

export const linesOf = (text: string) =>
  text
    .split('\n')
    .map((line) => line.trim())
    .filter((line) => line !== '');

const NBD = /^nbd(\+unix)?:\/\//;

/** Whether only an admin may send it: it asks libvirt, or names a server. */
export const needsAdmin = ({ source, disks, sources }: Draft) =>
  source === 'libvirt' || (disks === 'warm' && linesOf(sources).some((line) => NBD.test(line)));

/** The kind of job that a draft begins. */
export const kindOf = ({ disks }: Draft): JobKind => (disks === 'warm' ? 'warm-import' : 'import');

/** The button that begins it. */
export function verbOf({ disks, step }: Draft): string {
  if (disks !== 'warm') return 'Import';
  return { copy: 'Copy', again: 'Copy again', 'cut-over': 'Cut over' }[step];
}

/** Reads the lines of networks; null if one has another form. */
export function readNetworks(text: string): Record<string, string> | null {
  const networks: Record<string, string> = {};
  for (const line of linesOf(text)) {
    // The name in the definition may contain the sign, that of a host does not.
    const at = line.lastIndexOf('=');
    const [theirs, ours] = [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    if (at < 0 || theirs === '' || ours === '') return null;
    networks[theirs] = ours;
  }
  return networks;
}

export const wrongPath = (path: string) =>
  path.startsWith('/') ? null : 'An absolute path on the host';

/** Each field's error; null where the field is valid. */
export function wrongIn(draft: Draft) {
  return {
    from: draft.source === 'file' ? wrongPath(draft.from) : draft.from.trim() ? null : 'Required',
    networks: readNetworks(draft.networks) ? null : 'A line for each: VM Network = lan',
    disksIn: draft.disksIn === '' ? null : wrongPath(draft.disksIn),
    sources: draft.disks === 'warm' ? wrongSources(linesOf(draft.sources)) : null,
  };
}

const wrongSources = (lines: string[]) =>
  lines.length > 0 && lines.every((line) => NBD.test(line) || line.startsWith('/'))
    ? null
    : 'A line for each disk: nbd://10.0.0.5/erp, or a path on the host';

/** The request. A dry run creates nothing. */
export function importRequest(draft: Draft, isDryRun: boolean): ImportVm {
  const { from, name, disksIn, disks, step, starts } = draft;
  const request: ImportVm = {
    from:
      draft.source === 'file'
        ? { file: from }
        : draft.source === 'text'
          ? { text: from }
          : { libvirt: from.trim() },
    networks: readNetworks(draft.networks) ?? {},
    take_disks: disks === 'take',
    start: starts && disks !== 'warm',
    dry_run: isDryRun,
  };
  if (disks === 'warm') request.warm = { sources: linesOf(draft.sources), step };
  if (name !== '') request.name = name;
  if (disksIn !== '') request.disks_in = disksIn;
  return request;
}
