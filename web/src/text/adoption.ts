/** Words for guests that another program runs, and for their adoption. */
import type { Adoption, Fault, ForeignPlace } from '../api/types';

/** The program that runs a guest. */
export const programOf = (from: ForeignPlace) => ('libvirt' in from ? 'libvirt' : 'its own QEMU');

/** `libvirt's domain "web"`, `the QEMU at /run/web.qmp`. */
export const placeText = (from: ForeignPlace) =>
  'libvirt' in from ? `libvirt's domain "${from.libvirt}"` : `the QEMU at ${from.qmp}`;

/** What is known of an adoption of a listed guest: `possible`, or the first finding. */
export function adoptableText(findings: Fault[]): string {
  const [first, ...more] = findings;
  if (!first) return 'possible';
  return more.length > 0 ? `${first.message} (and ${more.length} more)` : first.message;
}

/** Why an adoption cannot be undone any more; null if it can. */
export function whyNotUndone(adoption: Pick<Adoption, 'state' | 'phase'>): string | null {
  if (adoption.state !== 'running') return 'The adoption has ended.';
  if (adoption.phase === 'announce' || adoption.phase === 'report')
    return 'The guest is handed over. Godwit runs it now.';
  return null;
}

/** Why a text is no path of a QMP socket; null where it is one. */
export const wrongSocket = (path: string) =>
  path.startsWith('/') && !path.endsWith('/') ? null : 'An absolute path';
