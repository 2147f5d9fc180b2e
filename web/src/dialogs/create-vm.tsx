/** Creates a VM: specification, disks, first boot, host, start. */
import { useState } from 'preact/hooks';
import { get, part, post } from '../api/http';
import type { CreateManagedVm, DiskList, HostedVm, VmSpec } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, optional, Tick, Wrong, wrongCount, wrongSize } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { hostLook } from '../parts/status';
import { hosts } from '../state/cluster';
import { go } from '../state/route';
import { warnOf } from '../state/warnings';
import {
  FirstBoot,
  type FirstBootDraft,
  firstBootChange,
  GuestOptions,
  NO_FIRST_BOOT,
} from './first-boot';
import { readLabels } from './labels';
import { type DiskDraft, Disks, namedDisks } from './vm-disks';
import {
  BootOptions,
  Devices,
  type Hardware,
  hardwareChange,
  More,
  NEW_HARDWARE,
  Size,
  wrongMaxima,
} from './vm-hardware';
import { type NicDraft, Nics, wrongNics } from './vm-nics';
import {
  NO_SETTINGS,
  Settings,
  type SettingsDraft,
  settingsChange,
  wrongSettings,
} from './vm-settings';

export const openCreateVm = () => open((close) => <CreateVm close={close} />);

/** The form's content. */
interface Draft {
  name: string;
  hardware: Hardware;
  host: string;
  labels: string;
  starts: boolean;
  /** Path of the image that the new disk begins with; empty for none. */
  image: string;
  copiesImage: boolean;
  /** Size of the new disk; empty for that of its image. */
  newDisk: string;
  /** Path of a CD image; empty for none. */
  cd: string;
  disks: DiskDraft[];
  nics: NicDraft[];
  firstBoot: FirstBootDraft;
  settings: SettingsDraft;
}

export const EMPTY: Draft = {
  name: '',
  hardware: NEW_HARDWARE,
  host: '',
  labels: '',
  starts: true,
  image: '',
  copiesImage: false,
  newDisk: '',
  cd: '',
  disks: [],
  nics: [],
  firstBoot: NO_FIRST_BOOT,
  settings: NO_SETTINGS,
};

/** Content of a part of the form, and how to change it. */
interface PartProps {
  draft: Draft;
  change: (changed: Partial<Draft>) => void;
}

const wrongPath = (path: string) => (path.startsWith('/') ? null : 'An absolute path on the host');

/** Each field's error; null where the field is valid. */
function wrongIn(draft: Draft) {
  const { hardware, image, newDisk, cd, disks } = draft;
  const hasDrive = image || newDisk || cd || namedDisks(disks).length > 0;
  const boots = hardware.kernel || hasDrive || draft.nics.some((nic) => nic.boot_order);
  return {
    name: /^[A-Za-z0-9][A-Za-z0-9._-]*$/.test(draft.name)
      ? null
      : 'Letters, digits, “-”, “_” and “.”',
    vcpus: wrongCount(hardware.vcpus),
    memory: wrongSize(hardware.memory),
    image: optional(image, wrongPath),
    newDisk: optional(newDisk, wrongSize),
    nics: wrongNics(draft.nics),
    maxima: wrongMaxima(hardware),
    settings: wrongSettings(draft.settings),
    boot: boots
      ? null
      : 'Nothing to boot: add an image, a disk, a CD, a kernel or a boot order of an interface.',
  };
}

/** What the manager is asked for. */
export function requestOf(draft: Draft): CreateManagedVm {
  const { name, hardware, image, copiesImage, newDisk, cd, disks, nics } = draft;
  const spec: VmSpec = {
    name,
    ...hardwareChange(NEW_HARDWARE, hardware),
    vcpus: Number(hardware.vcpus),
    memory: [{ size: hardware.memory.replace(' ', ''), backing: 'shared' }],
    ...firstBootChange(NO_FIRST_BOOT, draft.firstBoot),
    ...settingsChange(NO_SETTINGS, draft.settings),
  };
  if (namedDisks(disks).length > 0) spec.disks = namedDisks(disks);
  if (cd) spec.cdroms = [{ image: cd }];
  if (nics.length > 0) spec.nics = nics;
  const request: CreateManagedVm = {
    spec,
    host: draft.host || null,
    labels: readLabels(draft.labels),
    start: draft.starts,
    new_disks: [],
  };
  if (image || newDisk)
    request.new_disks = [
      {
        ...(newDisk ? { size: newDisk.replace(' ', '') } : {}),
        ...(image ? { base: image.trim(), full_copy: copiesImage } : {}),
      },
    ];
  return request;
}

function CreateVm({ close }: { close: () => void }) {
  const [draft, setDraft] = useState(EMPTY);
  const [isTried, setTried] = useState(false);
  const task = useTask();
  const wrong = wrongIn(draft);
  const change = (changed: Partial<Draft>) => setDraft((before) => ({ ...before, ...changed }));
  const make = () => {
    setTried(true);
    if (Object.values(wrong).some((why) => why !== null)) return;
    void task.run(async () => {
      warnOf(await post<HostedVm>('/vms', requestOf(draft)));
      close();
      go(`/vms/${part(draft.name)}`);
    });
  };
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
    <FormDialog title="Create VM" verb="Create VM" task={task} send={make} close={close}>
      <Field
        label="Name"
        wrong={isTried ? wrong.name : null}
        value={draft.name}
        onInput={(name) => change({ name })}
      />
      <Size {...hardware} wrong={wrong} />
      <NewDisk draft={draft} change={change} wrong={isTried ? wrong : null} />
      <FirstBoot {...firstBoot} isOpen={draft.image !== ''} />
      <Nics nics={draft.nics} change={(nics) => change({ nics })} />
      <Wrong why={isTried ? wrong.nics : null} />
      <Devices {...hardware} />
      <Disks label="Disks that exist" disks={draft.disks} change={(disks) => change({ disks })} />
      <Wrong why={isTried ? wrong.boot : null} />
      <BootOptions {...hardware} />
      <GuestOptions {...firstBoot} />
      <More {...hardware} />
      <Wrong why={isTried ? wrong.maxima : null} />
      <details>
        <summary>Description, tags, start with the host</summary>
        <Settings
          draft={draft.settings}
          change={(changed) => change({ settings: { ...draft.settings, ...changed } })}
        />
      </details>
      <Wrong why={isTried ? wrong.settings : null} />
      <HostChoice draft={draft} change={change} />
      <Field
        label="Labels"
        value={draft.labels}
        onInput={(labels) => change({ labels })}
        hint="Used by rules, for example tier=front rack=1"
      />
      <Tick
        text="Start after creation"
        checked={draft.starts}
        onChange={(starts) => change({ starts })}
      />
    </FormDialog>
  );
}

/** The disk that is created with the VM, and the CD to install from. */
function NewDisk(props: PartProps & { wrong: ReturnType<typeof wrongIn> | null }) {
  const { draft, change, wrong } = props;
  const images = useImages(draft.host);
  const isCd = (path: string) => path.toLowerCase().endsWith('.iso');
  const setImage = (image: string) => {
    const firstBoot = { ...draft.firstBoot, cloudInit: image !== '' };
    // An image of a cloud waits for these settings.
    change((image === '') === (draft.image === '') ? { image } : { image, firstBoot });
  };
  return (
    <>
      <div class="form-row">
        <Field
          label="Image"
          wrong={wrong?.image ?? null}
          value={draft.image}
          onInput={setImage}
          offers={images.filter((path) => !isCd(path))}
          hint="What the new disk begins with, for example /srv/vms/debian-12.qcow2"
        />
        <Field
          label="New disk"
          wrong={wrong?.newDisk ?? null}
          value={draft.newDisk}
          onInput={(newDisk) => change({ newDisk })}
          hint="Its size, for example 20GiB. With an image, empty is the image's size"
        />
      </div>
      {draft.image !== '' && (
        <Tick
          text="Copy the whole image, so that the disk does not need it afterwards"
          checked={draft.copiesImage}
          onChange={(copiesImage) => change({ copiesImage })}
        />
      )}
      <Field
        label="CD image"
        value={draft.cd}
        onInput={(cd) => change({ cd })}
        offers={images.filter(isCd)}
        hint="Path of an ISO image, for example to install from"
      />
    </>
  );
}

/** Images of the chosen host, else of the first one: images are usually on every host. */
function useImages(chosen: string): string[] {
  const host = chosen || hosts.sorted().find((one) => one.state === 'up')?.name;
  const loaded = useLoaded(host ? `images ${host}` : null, (signal) =>
    get<DiskList>(`/hosts/${part(host ?? '')}/disks`, signal),
  );
  return loaded.value?.disks.map((disk) => disk.path) ?? [];
}

function HostChoice({ draft, change }: PartProps) {
  const id = 'host-of-vm';
  return (
    <div class="field">
      <label for={id}>Host</label>
      <select
        id={id}
        value={draft.host}
        onChange={(event) => change({ host: event.currentTarget.value })}
      >
        <option value="">automatic</option>
        {hosts.sorted().map((one) => (
          <option key={one.name} value={one.name} disabled={one.state !== 'up' || one.maintenance}>
            {one.name}
            {one.maintenance
              ? ' (maintenance)'
              : one.state !== 'up'
                ? ` (${hostLook(one).text})`
                : ''}
          </option>
        ))}
      </select>
    </div>
  );
}
