/**
 * Imports, exports and moves of disks at hosts. Adoptions have their own list, which says more.
 */
import type { JobSummary } from '../api/types';
import { askHost, followList, type HostList } from './host-lists';
import { Table } from './table';

/** A job with its host. */
export interface HostJob {
  host: string;
  job: JobSummary;
}

export const jobs = new Table<HostJob>();

export const isRunningJob = ({ job }: HostJob) => job.state === 'running';

const isShown = ({ kind }: JobSummary) => kind !== 'adoption' && kind !== 'import-check';

/** Takes the list of a host; a restarted agent has none from before. */
export function takeJobs(host: string, list: JobSummary[]): void {
  const shown = list.filter(isShown);
  const ids = new Set(shown.map(({ id }) => id));
  for (const { host: of, job } of [...jobs.values()])
    if (of === host && !ids.has(job.id)) jobs.drop(job.id);
  for (const job of shown) jobs.put(job.id, { host, job });
}

const LIST: HostList<JobSummary> = {
  name: 'jobs',
  isBusy: (host) => [...jobs.values()].some((one) => one.host === host && isRunningJob(one)),
  take: takeJobs,
};

export const askJobs = (host: string) => askHost(LIST, host);

/** Follows the jobs of hosts until the signal. */
export const followJobs = (hosts: string[], signal: AbortSignal) => followList(LIST, hosts, signal);
