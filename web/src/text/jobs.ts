/** Words for imports, exports and moves of disks. */
import type { JobKind, JobStatus, JobSummary } from '../api/types';
import { bytes } from './units';

const KINDS: Record<JobKind, string> = {
  import: 'Import',
  'import-check': 'Check of an import',
  'warm-import': 'Warm import',
  export: 'Export',
  'live-export': 'Live export',
  'disk-move': 'Move of a disk',
  adoption: 'Adoption',
};

export const kindText = (kind: JobKind) => KINDS[kind] ?? kind;

/** The name of the VM; what an import reads may have none yet. */
export const jobName = ({ vm, place }: Pick<JobSummary, 'vm' | 'place'>) => vm || place || 'a VM';

/** `Import of wiki`. */
export const jobTitle = (kind: JobKind, name: string) => `${kindText(kind)} of ${name}`;

/** What its button cancels. */
export function nounOf(kind: JobKind): string {
  if (kind === 'disk-move') return 'move';
  return kind === 'export' || kind === 'live-export' ? 'export' : 'import';
}

export const shareOf = (done = 0, total = 0) => (total > 0 ? done / total : 0);

/** `1.2 GiB of 20 GiB`. */
export const progressText = (done = 0, total = 0) =>
  total > 0 ? `${bytes(done)} of ${bytes(total)}` : 'not started';

/** What remains of a job that was cancelled. */
export function cancelledText(kind: JobKind): string {
  if (kind === 'live-export') return 'The export is cancelled. The guest runs on where it was.';
  if (kind === 'warm-import')
    return 'The pass is cancelled. Copies of earlier passes stay, if there are any.';
  return `The ${kindText(kind).toLowerCase()} is cancelled. Nothing of it remains.`;
}

/** What a pass of a warm import did. */
export const passText = ({ done_bytes: read, written_bytes: written }: JobStatus) =>
  `The pass is done: it read ${bytes(read)} and wrote ${bytes(written ?? 0)}.`;
