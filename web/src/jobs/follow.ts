/** Follows an import or export. */
import { get, part } from '../api/http';
import type { JobStatus } from '../api/types';

const POLL_MS = 500;

export const jobPath = (host: string, id: string) => `/hosts/${part(host)}/jobs/${part(id)}`;

/** Asks until the job has ended; `shown` gets each answer. */
export async function followJob(
  path: string,
  shown: (job: JobStatus) => void,
  signal: AbortSignal,
): Promise<JobStatus> {
  for (;;) {
    const job = await get<JobStatus>(path, signal);
    signal.throwIfAborted();
    shown(job);
    if (job.state !== 'running') return job;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
  }
}
