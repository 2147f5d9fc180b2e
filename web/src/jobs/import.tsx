/**
 * Imports a VM of another platform: shows first what would be created and what changes. Then the
 * job has a dialogue of its own.
 */
import { useEffect, useRef, useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { ImportPlan, JobStatus } from '../api/types';
import { Facts, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Field, Select, TextArea, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { hosts } from '../state/cluster';
import { whyNot } from '../state/session';
import { bytes } from '../text/units';
import { Findings } from './findings';
import { followJob, jobPath } from './follow';
import {
  DISKS,
  type Disks,
  type Draft,
  importRequest,
  kindOf,
  NEW_DRAFT,
  needsAdmin,
  SOURCES,
  STEPS,
  verbOf,
  wrongIn,
} from './import-request';
import type { JobKey } from './job';

export function ImportDialog(props: {
  known: Partial<Draft>;
  /** Takes over when the import has begun. */
  begun: (key: JobKey, draft: Draft) => void;
  close: () => void;
}) {
  const { known, close } = props;
  const up = hosts.sorted().filter((host) => host.state === 'up');
  const [draft, setDraft] = useState<Draft>({
    ...NEW_DRAFT,
    host: up[0]?.name ?? '',
    ...known,
  });
  const change = (changed: Partial<Draft>) => setDraft({ ...draft, ...changed });
  // The last answer, with the form that it is of.
  const [answer, setAnswer] = useState<{ of: string; job: JobStatus } | null>(null);
  const ended = useRef(new AbortController());
  useEffect(() => () => ended.current.abort(), []);
  const task = useTask();
  const wrong = wrongIn(draft);
  const form = JSON.stringify(draft);
  const job = answer?.of === form ? answer.job : null;
  const isReady = job?.state === 'done';
  const { host } = draft;
  const begin = (isDryRun: boolean) =>
    post<JobStatus>(`/hosts/${part(host)}/imports`, importRequest(draft, isDryRun));
  const check = () =>
    task.run(async () => {
      setAnswer(null);
      const { id } = await begin(true);
      const signal = ended.current.signal;
      setAnswer({ of: form, job: await followJob(jobPath(host, id), () => undefined, signal) });
    });
  const run = () =>
    task.run(async () => {
      const { id } = await begin(false);
      const name = job?.plan?.spec.name ?? draft.name;
      props.begun({ host, id, kind: kindOf(draft), name }, draft);
    });
  const why =
    (needsAdmin(draft) ? whyNot('admin') : null) ??
    (Object.values(wrong).some(Boolean) ? 'Some fields are invalid.' : null);
  return (
    <FormDialog
      title="Import VM"
      verb={isReady ? verbOf(draft) : 'Check'}
      task={task}
      blocked={host === '' ? 'No host responds.' : why}
      send={isReady ? run : check}
      close={close}
    >
      <Fields draft={draft} change={change} wrong={wrong} hosts={up.map(({ name }) => name)} />
      <div aria-live="polite" aria-busy={task.busy}>
        {task.busy && !isReady && <Waiting lines={3} />}
        {job && <Answer job={job} />}
      </div>
    </FormDialog>
  );
}

interface FieldsProps {
  draft: Draft;
  change: (changed: Partial<Draft>) => void;
  wrong: ReturnType<typeof wrongIn>;
  hosts: string[];
}

const shown = (why: string | null, text: string) => (text === '' ? null : why);

function Fields(props: FieldsProps) {
  const { draft, change, wrong } = props;
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
      <DiskFields {...props} />
    </>
  );
}

function DiskFields({ draft, change, wrong }: FieldsProps) {
  const isWarm = draft.disks === 'warm';
  return (
    <>
      <Select<Disks>
        label="Disks"
        value={draft.disks}
        values={DISKS}
        onChange={(disks) => change({ disks })}
      />
      {isWarm ? (
        <>
          <TextArea
            label="Sources of the disks"
            rows={2}
            value={draft.sources}
            onInput={(sources) => change({ sources })}
            wrong={shown(wrong.sources, draft.sources)}
            hint="A line for each disk: nbd://10.0.0.5/erp, or the path of a raw image"
          />
          <Select
            label="Pass"
            value={draft.step}
            values={STEPS}
            onChange={(step) => change({ step })}
          />
        </>
      ) : (
        <>
          <Field
            label="Directory of its disks"
            value={draft.disksIn}
            onInput={(disksIn) => change({ disksIn })}
            wrong={wrong.disksIn}
            hint="If the definition does not say where they are"
          />
          <Tick text="Start it" checked={draft.starts} onChange={(starts) => change({ starts })} />
        </>
      )}
    </>
  );
}

/** What a check found. */
function Answer({ job }: { job: JobStatus }) {
  const findings = job.findings ?? [];
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
      {findings.length > 0 ? (
        <Findings findings={findings} caption="What changes or prevents the import" />
      ) : (
        <p class="muted">Nothing changes.</p>
      )}
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
