/**
 * Imports a VM of another platform: shows first what would be created and what changes, then the
 * progress of the copy.
 */
import { useEffect, useRef, useState } from 'preact/hooks';
import { get, part, post, remove } from '../api/http';
import type { ImportFinding, ImportPlan, JobStatus } from '../api/types';
import { Act, Facts, Meter, ProblemBox, sentence, useTask, Waiting } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, TextArea, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { Status } from '../parts/status';
import { hosts } from '../state/cluster';
import { go } from '../state/route';
import { whyNot } from '../state/session';
import { bytes } from '../text/units';
import { type Draft, importRequest, SOURCES, wrongIn } from './request';

/** `known`: what the page knows of the VM, for example the host and the name of a domain. */
export const openImport = (known: Partial<Draft> = {}) =>
  open((close) => <ImportDialog known={known} close={close} />);

const POLL_MS = 500;

/** Follows a job to its end. */
async function follow(
  host: string,
  begun: JobStatus,
  shown: (job: JobStatus) => void,
  signal: AbortSignal,
): Promise<JobStatus> {
  let job = begun;
  while (job.state === 'running') {
    shown(job);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    signal.throwIfAborted();
    job = await get<JobStatus>(`/hosts/${part(host)}/jobs/${part(job.id)}`, signal);
  }
  return job;
}

function ImportDialog({ known, close }: { known: Partial<Draft>; close: () => void }) {
  const up = hosts.sorted().filter((host) => host.state === 'up');
  const [draft, setDraft] = useState<Draft>({
    host: up[0]?.name ?? '',
    source: 'file',
    from: '',
    name: '',
    networks: '',
    disksIn: '',
    takesDisks: false,
    starts: false,
    ...known,
  });
  const change = (changed: Partial<Draft>) => setDraft({ ...draft, ...changed });
  // The last answer, with the form that it is of.
  const [answer, setAnswer] = useState<{ of: string; job: JobStatus } | null>(null);
  const [copying, setCopying] = useState<JobStatus | null>(null);
  const [isCancelled, setCancelled] = useState(false);
  const ended = useRef(new AbortController());
  useEffect(() => () => ended.current.abort(), []);
  const task = useTask();
  const wrong = wrongIn(draft);
  const form = JSON.stringify(draft);
  const job = answer?.of === form ? answer.job : null;
  const isReady = job?.state === 'done';
  const run = (isDryRun: boolean) =>
    task.run(async () => {
      setCancelled(false);
      setAnswer(null);
      const { host } = draft;
      const request = importRequest(draft, isDryRun);
      const begun = await post<JobStatus>(`/hosts/${part(host)}/imports`, request);
      const shown = isDryRun ? () => undefined : setCopying;
      const last = await follow(host, begun, shown, ended.current.signal).finally(() =>
        setCopying(null),
      );
      if (isDryRun || last.state === 'failed') setAnswer({ of: form, job: last });
      else if (last.state === 'cancelled') setCancelled(true);
      else {
        close();
        go(`/vms/${part(last.vm?.name ?? last.plan?.spec.name ?? '')}`);
      }
    });
  const cancelling = useTask();
  const cancel = (id: string) =>
    cancelling.run(() => remove(`/hosts/${part(draft.host)}/jobs/${part(id)}`));
  const why =
    (draft.source === 'libvirt' ? whyNot('admin') : null) ??
    (Object.values(wrong).some(Boolean) ? 'Some fields are invalid.' : null);
  return (
    <FormDialog
      title="Import VM"
      verb={isReady ? 'Import' : 'Check'}
      task={task}
      blocked={draft.host === '' ? 'No host responds.' : why}
      send={() => run(!isReady)}
      close={close}
      others={
        copying && (
          <Act kind="danger" busy={cancelling.busy} onClick={() => cancel(copying.id)}>
            Cancel import
          </Act>
        )
      }
    >
      <fieldset class="form still" disabled={copying !== null}>
        <Fields draft={draft} change={change} wrong={wrong} hosts={up.map(({ name }) => name)} />
      </fieldset>
      <div aria-live="polite" aria-busy={task.busy}>
        {cancelling.problem && <ProblemBox problem={cancelling.problem} />}
        {isCancelled && <p class="notice">The import is cancelled. Nothing of it remains.</p>}
        {copying ? <Copying job={copying} /> : task.busy && <Waiting lines={3} />}
        {job && <Answer job={job} />}
      </div>
    </FormDialog>
  );
}

function Fields(props: {
  draft: Draft;
  change: (changed: Partial<Draft>) => void;
  wrong: ReturnType<typeof wrongIn>;
  hosts: string[];
}) {
  const { draft, change, wrong } = props;
  const shown = (why: string | null, text: string) => (text === '' ? null : why);
  const from = { value: draft.from, onInput: (text: string) => change({ from: text }) };
  return (
    <>
      <Select
        label="Host"
        value={draft.host}
        values={props.hosts.map((name) => [name, name] as const)}
        onChange={(host) => change({ host })}
      />
      <Select
        label="Definition"
        value={draft.source}
        values={SOURCES}
        onChange={(source) => change({ source, from: '' })}
        hint="A libvirt domain, a Proxmox VE configuration, an OVF descriptor or an OVA"
      />
      {draft.source === 'text' && <TextArea label="Text of the definition" rows={6} {...from} />}
      {draft.source === 'file' && (
        <Field
          label="Path of the definition"
          {...from}
          wrong={shown(wrong.from, draft.from)}
          hint="For example /srv/import/wiki.ova"
        />
      )}
      {draft.source === 'libvirt' && (
        <Field label="Name of the domain" {...from} hint="Must be shut off" />
      )}
      <Field
        label="Name at Godwit"
        value={draft.name}
        onInput={(name) => change({ name })}
        hint="Default: that of the definition"
      />
      <TextArea
        label="Networks"
        rows={2}
        value={draft.networks}
        onInput={(networks) => change({ networks })}
        wrong={wrong.networks}
        hint="Name in the definition = network of the host, a line for each"
      />
      <Field
        label="Directory of its disks"
        value={draft.disksIn}
        onInput={(disksIn) => change({ disksIn })}
        wrong={wrong.disksIn}
        hint="If the definition does not say where they are"
      />
      <Tick
        text="Use the disks where they are, instead of copies"
        checked={draft.takesDisks}
        onChange={(takesDisks) => change({ takesDisks })}
      />
      <Tick text="Start it" checked={draft.starts} onChange={(starts) => change({ starts })} />
    </>
  );
}

function Copying({ job }: { job: JobStatus }) {
  const { done_bytes: done = 0, total_bytes: total = 0 } = job;
  return (
    <>
      <h3>Copying disks</h3>
      <Meter
        label="Copied"
        share={total > 0 ? done / total : 0}
        warnAt={2}
        badAt={2}
        text={`${bytes(done)} of ${bytes(total)}`}
      />
      <p class="muted">The import continues if you close this dialog.</p>
    </>
  );
}

/** What a check found, or why an import failed. */
function Answer({ job }: { job: JobStatus }) {
  return (
    <>
      {job.error && (
        <ProblemBox
          problem={{
            status: 0,
            code: job.error.code,
            title: 'Import is not possible',
            detail: job.error.message,
            remedy: job.error.remedy,
          }}
        />
      )}
      {job.plan && !job.error && <Plan plan={job.plan} />}
      <Findings findings={job.findings ?? []} />
    </>
  );
}

function Plan({ plan: { spec, disks } }: { plan: ImportPlan }) {
  return (
    <>
      <h3>What is created</h3>
      <Facts
        rows={[
          ['VM', spec.name],
          [
            'vCPUs, memory',
            `${spec.vcpus ?? '–'}, ${spec.memory?.map(({ size }) => size).join(' + ') ?? '–'}`,
          ],
          ...disks.map((disk): [string, string] => [
            `Disk ${disk.name}`,
            `${bytes(disk.bytes)} ${disk.source ? `from ${disk.source}` : '(empty)'}`,
          ]),
        ]}
      />
    </>
  );
}

function Findings({ findings }: { findings: ImportFinding[] }) {
  if (findings.length === 0) return <p class="muted">Nothing changes.</p>;
  // What refuses the import comes first.
  const sorted = [...findings].sort(
    (a, b) => Number(b.refuses === true) - Number(a.refuses === true),
  );
  return (
    <table class="plain checks">
      <caption class="unseen">What changes or prevents the import</caption>
      <thead>
        <tr>
          <th scope="col">Effect</th>
          <th scope="col">Part</th>
          <th scope="col">Why</th>
        </tr>
      </thead>
      <tbody>
        {sorted.map(({ what, why, refuses }, at) => (
          <tr key={`${what} ${at}`}>
            <td>
              <Status
                look={
                  refuses
                    ? { tone: 'bad', shape: 'cross', text: 'refused' }
                    : { tone: 'warn', shape: 'triangle', text: 'changes' }
                }
              />
            </td>
            <th scope="row">{what}</th>
            <td>{sentence(why)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
