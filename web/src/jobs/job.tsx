/** One import, export or move of a disk: its progress with Cancel, then its result. */
import { useEffect, useState } from 'preact/hooks';
import { part, problemOf, remove, type ShownProblem } from '../api/http';
import type { JobKind, JobStatus, WarmStep } from '../api/types';
import { Act, Meter, ProblemBox, useTask, VmLink, Waiting } from '../parts/basics';
import { Dialog } from '../parts/dialog';
import { askJobs } from '../state/jobs';
import { go } from '../state/route';
import {
  cancelledText,
  jobTitle,
  kindText,
  nounOf,
  passText,
  progressText,
  shareOf,
} from '../text/jobs';
import { Findings } from './findings';
import { followJob, jobPath } from './follow';
import type { Draft } from './import-request';

/** What is known of a job when its dialogue opens. */
export interface JobKey {
  host: string;
  id: string;
  kind: JobKind;
  name: string;
}

export function JobDialog(props: {
  of: JobKey;
  /** The form of an import that began here. */
  draft: Draft | undefined;
  /** Whether the page of an imported VM opens. */
  leads: boolean;
  /** Opens the form again. */
  again: (draft: Draft) => void;
  close: () => void;
}) {
  const { of, draft, again, close } = props;
  const path = jobPath(of.host, of.id);
  const [job, setJob] = useState<JobStatus | null>(null);
  const [lost, setLost] = useState<ShownProblem | null>(null);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const ended = new AbortController();
    void askJobs(of.host);
    followJob(path, setJob, ended.signal).then(
      (last) => {
        void askJobs(of.host);
        if (!props.leads || !last.vm) return;
        close();
        go(`/vms/${part(last.vm.name)}`);
      },
      (error) => !ended.signal.aborted && setLost(problemOf(error)),
    );
    return () => ended.abort();
  }, [path, turn]);
  const task = useTask();
  const reopen = (changed: Partial<Draft>) => {
    if (!draft) return;
    close();
    again({ ...draft, ...changed });
  };
  const isPass = job?.state === 'done' && of.kind === 'warm-import' && !job.vm;
  const pass = (step: WarmStep) => reopen({ step });
  return (
    <Dialog
      title={jobTitle(of.kind, of.name)}
      onClose={close}
      foot={
        <>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          {lost && (
            <Act
              onClick={() => {
                setLost(null);
                setTurn(turn + 1);
              }}
            >
              Try again
            </Act>
          )}
          {job?.state === 'running' && (
            <Act
              kind="danger"
              needs={of.kind === 'live-export' ? 'admin' : 'operator'}
              busy={task.busy}
              onClick={() => task.run(() => remove(path))}
            >
              {`Cancel ${nounOf(of.kind)}`}
            </Act>
          )}
          {job?.state === 'failed' && draft && (
            <Act kind="primary" onClick={() => reopen({})}>
              Change import
            </Act>
          )}
          {isPass && draft && (
            <>
              <Act onClick={() => pass('again')}>Copy again</Act>
              <Act kind="primary" onClick={() => pass('cut-over')}>
                Cut over
              </Act>
            </>
          )}
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {lost && <ProblemBox problem={lost} />}
      <div aria-live="polite" aria-busy={job?.state === 'running'}>
        {job ? <View of={of} job={job} /> : !lost && <Waiting lines={3} />}
        {isPass && !draft && (
          <p class="muted">
            For the next pass, choose Import VM with the same definition and sources.
          </p>
        )}
      </div>
    </Dialog>
  );
}

function View({ of, job }: { of: JobKey; job: JobStatus }) {
  const findings = job.findings ?? [];
  return (
    <>
      {job.state === 'running' && <Copying of={of} job={job} />}
      {job.state === 'cancelled' && <p class="notice">{cancelledText(of.kind)}</p>}
      {job.state === 'failed' && (
        <ProblemBox
          problem={{
            status: 0,
            code: job.error?.code ?? 'failed',
            title: `${kindText(of.kind)} failed`,
            detail: job.error?.message ?? 'Operators see the reason.',
            remedy: job.error?.remedy ?? '',
          }}
        />
      )}
      {job.state === 'done' && <Done of={of} job={job} />}
      {job.state !== 'cancelled' && findings.length > 0 && (
        <Findings findings={findings} caption={captionOf(of)} />
      )}
    </>
  );
}

function captionOf({ kind }: JobKey): string {
  if (kind === 'import' || kind === 'warm-import') return 'What changes or prevents the import';
  return kind === 'export' ? 'What the export leaves out' : 'What is left to do';
}

function Copying({ of, job }: { of: JobKey; job: JobStatus }) {
  const { done_bytes: done, total_bytes: total } = job;
  const isLive = of.kind === 'live-export';
  return (
    <>
      <h3>{isLive ? 'Sending memory' : 'Copying disks'}</h3>
      <Meter
        label={isLive ? 'Sent' : 'Copied'}
        share={shareOf(done, total)}
        warnAt={2}
        badAt={2}
        text={progressText(done, total)}
      />
      <p class="muted">It continues if you close this dialog. The queue has it until it ends.</p>
    </>
  );
}

function Done({ of, job }: { of: JobKey; job: JobStatus }) {
  if (job.vm)
    return (
      <p class="reason" role="status">
        <strong>{of.kind === 'disk-move' ? 'Disk moved' : 'Imported'}</strong>
        <VmLink name={job.vm.name} /> is {job.vm.state}.
      </p>
    );
  if (of.kind === 'warm-import')
    return (
      <p class="notice" role="status">
        {passText(job)} The copies are no VM yet. Copy again as often as you like; then shut the
        guest down and cut over.
      </p>
    );
  // A guest that went to libvirt leaves none.
  if (!job.files?.length) return null;
  return (
    <>
      <h3>Files on {of.host}</h3>
      <ul class="plain-list">
        {job.files.map((file) => (
          <li key={file}>
            <code>{file}</code>
          </li>
        ))}
      </ul>
    </>
  );
}
