/** Opens the dialogues of imports and exports; each one leads to the next. */
import { open } from '../parts/dialog';
import type { HostJob } from '../state/jobs';
import { jobName } from '../text/jobs';
import { ExportDialog } from './export';
import { ImportDialog } from './import';
import type { Draft } from './import-request';
import { JobDialog, type JobKey } from './job';

/** Forms of imports that began in this tab, by the ID of the job: the next pass begins with one. */
const drafts = new Map<string, Draft>();
const MOST_DRAFTS = 64;

function keep(id: string, draft: Draft): void {
  drafts.set(id, draft);
  for (const oldest of drafts.keys()) {
    if (drafts.size <= MOST_DRAFTS) break;
    drafts.delete(oldest);
  }
}

/** `known`: what the page knows of the VM, for example the host and the name of a domain. */
export const openImport = (known: Partial<Draft> = {}) =>
  open((close) => (
    <ImportDialog
      known={known}
      close={close}
      begun={(key, draft) => {
        keep(key.id, draft);
        close();
        showJob(key, true);
      }}
    />
  ));

/** `vm`: a stopped VM. */
export const openExport = (vm: { name: string; host: string }) =>
  open((close) => (
    <ExportDialog
      vm={vm}
      close={close}
      begun={(key) => {
        close();
        showJob(key, false);
      }}
    />
  ));

/** Opens the dialogue of an import or export again. */
export const openJob = ({ host, job }: HostJob) =>
  showJob({ host, id: job.id, kind: job.kind, name: jobName(job) }, false);

function showJob(of: JobKey, leads: boolean): void {
  open((close) => (
    <JobDialog
      of={of}
      draft={drafts.get(of.id)}
      leads={leads}
      again={(draft) => openImport(draft)}
      close={close}
    />
  ));
}
