import { expect, it } from 'vitest';
import type { JobSummary } from '../api/types';
import { isRunningJob, jobs, takeJobs } from './jobs';

const job = (id: string, of: Partial<JobSummary> = {}): JobSummary => ({
  id,
  kind: 'import',
  vm: 'wiki',
  place: '/srv/wiki.ova',
  state: 'running',
  done_bytes: 0,
  total_bytes: 0,
  begun_unix_ms: 0,
  ...of,
});

it('lists imports and exports, and forgets what a restarted agent forgot', () => {
  takeJobs('a', [
    job('1'),
    job('2', { kind: 'export' }),
    job('3', { kind: 'adoption' }),
    job('4', { kind: 'import-check' }),
  ]);
  takeJobs('b', [job('5')]);
  expect([...jobs.values()].map((one) => one.job.id)).toEqual(['1', '2', '5']);
  takeJobs('a', [job('1', { state: 'done' })]);
  expect([...jobs.values()].map(({ host }) => host)).toEqual(['a', 'b']);
  expect([...jobs.values()].filter(isRunningJob).map((one) => one.job.id)).toEqual(['5']);
});
