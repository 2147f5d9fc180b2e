/** The form of an import: its content, its errors, and the request that it makes. Pure. */
import type { ImportVm } from '../api/types';

export const SOURCES = [
  ['file', 'A file on the host'],
  ['text', 'Text that is pasted here'],
  ['libvirt', "A domain of the host's libvirt"],
] as const;

export type Source = (typeof SOURCES)[number][0];

export interface Draft {
  host: string;
  source: Source;
  /** The path, the text, or the name of the domain. */
  from: string;
  name: string;
  /** A line for each network: its name in the definition, `=`, that of the host. */
  networks: string;
  disksIn: string;
  takesDisks: boolean;
  starts: boolean;
}

/** Reads the lines of networks; null if one has another form. */
export function readNetworks(text: string): Record<string, string> | null {
  const networks: Record<string, string> = {};
  for (const line of text.split('\n').filter((one) => one.trim() !== '')) {
    // The name in the definition may contain the sign, that of a host does not.
    const at = line.lastIndexOf('=');
    const [theirs, ours] = [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    if (at < 0 || theirs === '' || ours === '') return null;
    networks[theirs] = ours;
  }
  return networks;
}

const wrongPath = (path: string) => (path.startsWith('/') ? null : 'An absolute path on the host');

/** Each field's error; null where the field is valid. */
export function wrongIn(draft: Draft) {
  return {
    from: draft.source === 'file' ? wrongPath(draft.from) : draft.from.trim() ? null : 'Required',
    networks: readNetworks(draft.networks) ? null : 'A line for each: VM Network = lan',
    disksIn: draft.disksIn === '' ? null : wrongPath(draft.disksIn),
  };
}

/** The request. A dry run creates nothing. */
export function importRequest(draft: Draft, isDryRun: boolean): ImportVm {
  const { from, name, disksIn, takesDisks, starts } = draft;
  const request: ImportVm = {
    from:
      draft.source === 'file'
        ? { file: from }
        : draft.source === 'text'
          ? { text: from }
          : { libvirt: from.trim() },
    networks: readNetworks(draft.networks) ?? {},
    take_disks: takesDisks,
    start: starts,
    dry_run: isDryRun,
  };
  if (name !== '') request.name = name;
  if (disksIn !== '') request.disks_in = disksIn;
  return request;
}
