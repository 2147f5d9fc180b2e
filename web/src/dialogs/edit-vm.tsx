/**
 * Changes a VM: all of it while it is stopped, what it takes while it runs, the settings of a
 * template and a suspended VM, labels at any time.
 */
import { useState } from 'preact/hooks';
import { part, patch } from '../api/http';
import type { ChangedVm, ChangeManagedVm, ManagedVm, VmSpec } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Wrong, wrongCount, wrongSize } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { isStopped } from '../state/cluster';
import { NEEDS_STOP } from '../state/growth';
import { warnOf } from '../state/warnings';
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
  More,
  PageIn,
  Size,
  wrongGrowth,
  wrongMaxima,
} from './vm-hardware';
import { type NicDraft, Nics, wrongNics } from './vm-nics';
import {
  Settings,
  type SettingsDraft,
  settingsChange,
  settingsOf,
  wrongSettings,
} from './vm-settings';

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
  settings: SettingsDraft;
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
    settings: settingsOf(spec),
  };
}

const differs = (one: unknown, other: unknown) => JSON.stringify(one) !== JSON.stringify(other);

/** The changes only: what another user changes meanwhile stays. */
export function changeOf(before: EditDraft, now: EditDraft): ChangeManagedVm {
  const spec: Record<string, unknown> = {
    ...hardwareChange(before.hardware, now.hardware),
    ...firstBootChange(before.firstBoot, now.firstBoot),
    ...settingsChange(before.settings, now.settings),
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

/** What can be changed in a state: all, what a running VM takes, settings and labels, or labels. */
type Extent = 'all' | 'running' | 'settings' | 'labels';

function extentOf(vm: ManagedVm): Extent {
  if (isStopped(vm)) return 'all';
  if (vm.state === 'template' || vm.state === 'suspended') return 'settings';
  return vm.state === 'running' || vm.state === 'paused' ? 'running' : 'labels';
}

function whyNoMore(vm: ManagedVm): string {
  if (vm.state === 'template') return 'The rest needs an ordinary VM: a template is not changed.';
  if (vm.state === 'suspended') return 'Resume the VM or discard its memory to change the rest.';
  return `The VM is ${vm.state}: its labels can change.`;
}

/** Each part's error; null where it is valid. */
function wrongIn(before: EditDraft, now: EditDraft, extent: Extent) {
  const { hardware } = now;
  const isSame = hardware.memory === before.hardware.memory;
  const all = {
    vcpus: wrongCount(hardware.vcpus),
    memory: isSame ? null : wrongSize(hardware.memory),
    nics: wrongNics(now.nics),
    maxima: wrongMaxima(hardware),
  };
  const running = { ...wrongGrowth(before.hardware, hardware), nics: null, maxima: null };
  const settings = wrongSettings(now.settings);
  if (extent === 'settings')
    return { vcpus: null, memory: null, nics: null, maxima: null, settings };
  return { ...(extent === 'running' ? running : all), settings };
}

function EditVm(props: { vm: ManagedVm; saved: () => void; close: () => void }) {
  const { vm, saved, close } = props;
  const [before] = useState(() => draftOf(vm.info.spec, vm.labels));
  const [draft, setDraft] = useState(before);
  const task = useTask();
  const change = (changed: Partial<EditDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const extent = extentOf(vm);
  const wrong = wrongIn(before, draft, extent);
  const save = () => {
    if (extent !== 'labels' && Object.values(wrong).some((why) => why !== null)) return;
    void task.run(async () => {
      warnOf(await patch<ChangedVm>(`/vms/${part(vm.name)}`, changeOf(before, draft)));
      saved();
      close();
    });
  };
  return (
    <FormDialog title={`Edit ${vm.name}`} verb="Save" task={task} send={save} close={close}>
      {(extent === 'labels' || extent === 'settings') && <p class="notice">{whyNoMore(vm)}</p>}
      {extent === 'settings' && (
        <>
          <Settings
            draft={draft.settings}
            change={(changed) => change({ settings: { ...draft.settings, ...changed } })}
          />
          <Wrong why={wrong.settings} />
        </>
      )}
      {(extent === 'all' || extent === 'running') && (
        <Specification
          draft={draft}
          change={change}
          wrong={wrong}
          {...(extent === 'running' ? { running: before.hardware } : {})}
        />
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

/** `running`: the hardware of a VM that runs, which keeps all but what it can get meanwhile. */
function Specification(props: {
  draft: EditDraft;
  change: (changed: Partial<EditDraft>) => void;
  wrong: ReturnType<typeof wrongIn>;
  running?: Hardware;
}) {
  const { draft, change, wrong, running } = props;
  const hardware = {
    draft: draft.hardware,
    change: (changed: Partial<Hardware>) => change({ hardware: { ...draft.hardware, ...changed } }),
  };
  const firstBoot = {
    draft: draft.firstBoot,
    change: (changed: Partial<FirstBootDraft>) =>
      change({ firstBoot: { ...draft.firstBoot, ...changed } }),
  };
  const isRunning = running !== undefined;
  return (
    <>
      <Size {...hardware} wrong={wrong} {...(running ? { running } : {})} />
      <Settings
        draft={draft.settings}
        change={(changed) => change({ settings: { ...draft.settings, ...changed } })}
      />
      <Wrong why={wrong.settings} />
      {isRunning && <PageIn {...hardware} />}
      <fieldset class="form still" disabled={isRunning}>
        {isRunning && (
          <legend>{NEEDS_STOP}; disks, CDs and interfaces have buttons on the VM's page</legend>
        )}
        <Devices {...hardware} />
        <Disks label="Disks" disks={draft.disks} change={(disks) => change({ disks })} />
        <Cdroms cdroms={draft.cdroms} change={(cdroms) => change({ cdroms })} />
        <Nics nics={draft.nics} change={(nics) => change({ nics })} />
        <Wrong why={wrong.nics} />
        <BootOptions {...hardware} running={isRunning} />
        <GuestOptions {...firstBoot} />
        <FirstBoot {...firstBoot} />
        <More {...hardware} />
        <Wrong why={wrong.maxima} />
      </fieldset>
    </>
  );
}
