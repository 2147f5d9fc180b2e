/** Changes a VM: its specification while it is stopped, and its labels. */
import { useState } from 'preact/hooks';
import { part, patch } from '../api/http';
import type { ChangeManagedVm, Firmware, ManagedVm, Video } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { FormDialog } from '../parts/form-dialog';
import {
  type DiskDraft,
  Disks,
  Field,
  FirmwareChoice,
  namedDisks,
  VideoChoice,
  wrongCount,
  wrongSize,
} from './create-vm';
import { FirstBoot, type FirstBootDraft, firstBootChange, firstBootOf } from './first-boot';
import { readLabels } from './labels';

/** `saved` is called after a change. */
export const openEditVm = (vm: ManagedVm, saved: () => void) =>
  open((close) => <EditVm vm={vm} saved={saved} close={close} />);

/** The form's content. */
interface Draft {
  vcpus: string;
  memory: string;
  cpuModel: string;
  firmware: Firmware;
  video: Video;
  disks: DiskDraft[];
  labels: string;
  firstBoot: FirstBootDraft;
}

function draftOf(vm: ManagedVm): Draft {
  const { spec } = vm.info;
  const labels = Object.entries(vm.labels ?? {});
  return {
    vcpus: String(spec.vcpus ?? vm.vcpus),
    memory: spec.memory?.map((block) => block.size).join(' + ') ?? '',
    cpuModel: spec.cpu_model ?? '',
    firmware: spec.firmware ?? 'bios',
    video: spec.video ?? 'none',
    // Options that the form does not show stay.
    disks: (spec.disks ?? []).map((disk) => ({
      ...disk,
      readonly: disk.readonly ?? false,
      bus: disk.bus ?? 'virtio',
    })),
    labels: labels.map(([key, value]) => `${key}=${value}`).join(' '),
    firstBoot: firstBootOf(spec),
  };
}

/** The changes only: what another user changes meanwhile stays. */
function requestOf(before: Draft, now: Draft): ChangeManagedVm {
  const spec = firstBootChange(before.firstBoot, now.firstBoot);
  if (now.vcpus !== before.vcpus) spec.vcpus = Number(now.vcpus);
  if (now.memory !== before.memory) spec.memory = now.memory.replace(' ', '');
  if (now.cpuModel !== before.cpuModel) spec.cpu_model = now.cpuModel || null;
  if (now.firmware !== before.firmware) spec.firmware = now.firmware;
  if (now.video !== before.video) spec.video = now.video;
  if (JSON.stringify(now.disks) !== JSON.stringify(before.disks)) spec.disks = namedDisks(now);
  const old = readLabels(before.labels);
  const labels: Record<string, string | null> = {};
  for (const [key, value] of Object.entries(readLabels(now.labels)))
    if (old[key] !== value) labels[key] = value;
  for (const key of Object.keys(old)) if (!(key in readLabels(now.labels))) labels[key] = null;
  return { spec, labels };
}

function EditVm(props: { vm: ManagedVm; saved: () => void; close: () => void }) {
  const { vm, saved, close } = props;
  const [before] = useState(() => draftOf(vm));
  const [draft, setDraft] = useState(before);
  const task = useTask();
  const change = (changed: Partial<Draft>) => setDraft((last) => ({ ...last, ...changed }));
  const isStopped = vm.state === 'stopped' || vm.state === 'failed';
  const wrong = {
    vcpus: wrongCount(draft.vcpus),
    memory: draft.memory === before.memory ? null : wrongSize(draft.memory),
  };
  const save = () => {
    if (isStopped && (wrong.vcpus ?? wrong.memory) !== null) return;
    void task.run(async () => {
      await patch(`/vms/${part(vm.name)}`, requestOf(before, draft));
      saved();
      close();
    });
  };
  return (
    <FormDialog title={`Edit ${vm.name}`} verb="Save" task={task} send={save} close={close}>
      {isStopped ? (
        <>
          <div class="form-row">
            <Field
              label="vCPUs"
              wrong={wrong.vcpus}
              value={draft.vcpus}
              onInput={(vcpus) => change({ vcpus })}
              inputMode="numeric"
            />
            <Field
              label="Memory"
              wrong={wrong.memory}
              value={draft.memory}
              onInput={(memory) => change({ memory })}
            />
          </div>
          <div class="form-row">
            <Field
              label="CPU model"
              value={draft.cpuModel}
              onInput={(cpuModel) => change({ cpuModel })}
              hint="Empty: the CPU baseline, else the agent's default"
            />
            <FirmwareChoice draft={draft} change={change} />
            <VideoChoice draft={draft} change={change} />
          </div>
          <Disks draft={draft} change={change} />
          <FirstBoot
            draft={draft.firstBoot}
            change={(changed) => change({ firstBoot: { ...draft.firstBoot, ...changed } })}
          />
        </>
      ) : (
        <p class="notice">Stop the VM to change its specification.</p>
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
