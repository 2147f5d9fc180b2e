/** Changes a VM: its specification while it is stopped, and its labels at any time. */
import { useState } from 'preact/hooks';
import { part, patch } from '../api/http';
import type { ChangeManagedVm, ManagedVm, VmSpec } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, wrongCount, wrongSize } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import {
  FirstBoot,
  type FirstBootDraft,
  firstBootChange,
  firstBootOf,
  GuestOptions,
} from './first-boot';
import { readLabels } from './labels';
import { Cdroms, type DiskDraft, Disks, disksOf, namedDisks } from './vm-disks';
import {
  BootOptions,
  Devices,
  type Hardware,
  hardwareChange,
  hardwareOf,
  Size,
} from './vm-hardware';
import { type NicDraft, Nics, wrongNics } from './vm-nics';

/** `saved` is called after a change. */
export const openEditVm = (vm: ManagedVm, saved: () => void) =>
  open((close) => <EditVm vm={vm} saved={saved} close={close} />);

/** The form's content. */
export interface EditDraft {
  hardware: Hardware;
  disks: DiskDraft[];
  cdroms: NonNullable<VmSpec['cdroms']>;
  nics: NicDraft[];
  labels: string;
  firstBoot: FirstBootDraft;
}

export function draftOf(spec: VmSpec, labels: Record<string, string> = {}): EditDraft {
  return {
    hardware: hardwareOf(spec),
    disks: disksOf(spec),
    cdroms: spec.cdroms ?? [],
    nics: spec.nics ?? [],
    labels: Object.entries(labels)
      .map(([key, value]) => `${key}=${value}`)
      .join(' '),
    firstBoot: firstBootOf(spec),
  };
}

const differs = (one: unknown, other: unknown) => JSON.stringify(one) !== JSON.stringify(other);

/** The changes only: what another user changes meanwhile stays. */
export function changeOf(before: EditDraft, now: EditDraft): ChangeManagedVm {
  const spec: Record<string, unknown> = {
    ...hardwareChange(before.hardware, now.hardware),
    ...firstBootChange(before.firstBoot, now.firstBoot),
  };
  if (differs(now.disks, before.disks)) spec.disks = namedDisks(now.disks);
  if (differs(now.cdroms, before.cdroms)) spec.cdroms = now.cdroms;
  if (differs(now.nics, before.nics)) spec.nics = now.nics;
  const [old, next] = [readLabels(before.labels), readLabels(now.labels)];
  const labels: Record<string, string | null> = {};
  for (const [key, value] of Object.entries(next)) if (old[key] !== value) labels[key] = value;
  for (const key of Object.keys(old)) if (!(key in next)) labels[key] = null;
  return { spec, labels };
}

function EditVm(props: { vm: ManagedVm; saved: () => void; close: () => void }) {
  const { vm, saved, close } = props;
  const [before] = useState(() => draftOf(vm.info.spec, vm.labels));
  const [draft, setDraft] = useState(before);
  const task = useTask();
  const change = (changed: Partial<EditDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const isStopped = vm.state === 'stopped' || vm.state === 'failed';
  const { hardware } = draft;
  const wrong = {
    vcpus: wrongCount(hardware.vcpus),
    memory: hardware.memory === before.hardware.memory ? null : wrongSize(hardware.memory),
    nics: wrongNics(draft.nics),
  };
  const save = () => {
    if (isStopped && Object.values(wrong).some((why) => why !== null)) return;
    void task.run(async () => {
      await patch(`/vms/${part(vm.name)}`, changeOf(before, draft));
      saved();
      close();
    });
  };
  return (
    <FormDialog title={`Edit ${vm.name}`} verb="Save" task={task} send={save} close={close}>
      {isStopped ? (
        <Specification draft={draft} change={change} wrong={wrong} />
      ) : (
        <p class="notice">
          Stop the VM to change its specification. While it runs, its page changes CDs, links and
          disks on bus scsi.
        </p>
      )}
      <Field
        label="Labels"
        value={draft.labels}
        onInput={(labels) => change({ labels })}
        hint="Used by rules, for example tier=front rack=1"
      />
    </FormDialog>
  );
}

function Specification(props: {
  draft: EditDraft;
  change: (changed: Partial<EditDraft>) => void;
  wrong: { memory: string | null; nics: string | null };
}) {
  const { draft, change, wrong } = props;
  const hardware = {
    draft: draft.hardware,
    change: (changed: Partial<Hardware>) => change({ hardware: { ...draft.hardware, ...changed } }),
  };
  const firstBoot = {
    draft: draft.firstBoot,
    change: (changed: Partial<FirstBootDraft>) =>
      change({ firstBoot: { ...draft.firstBoot, ...changed } }),
  };
  return (
    <>
      <Size {...hardware} wrong={wrong} />
      <Devices {...hardware} />
      <Disks label="Disks" disks={draft.disks} change={(disks) => change({ disks })} />
      <Cdroms cdroms={draft.cdroms} change={(cdroms) => change({ cdroms })} />
      <Nics nics={draft.nics} change={(nics) => change({ nics })} />
      {wrong.nics && (
        <small class="tone-bad" role="alert">
          {wrong.nics}
        </small>
      )}
      <BootOptions {...hardware} />
      <GuestOptions {...firstBoot} />
      <FirstBoot {...firstBoot} />
    </>
  );
}
