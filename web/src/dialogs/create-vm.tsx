/** Creates a VM: specification, host, start. */
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { all, part, post } from '../api/http';
import type { CreateManagedVm, Firmware, ManagedNetwork, Video, VmSpec } from '../api/types';
import { Act, useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { FormDialog } from '../parts/form-dialog';
import { useName } from '../parts/id';
import { useLoaded } from '../parts/loaded';
import { hostLook } from '../parts/status';
import { hosts } from '../state/cluster';
import { go } from '../state/route';
import { FIRMWARE_NAMES } from '../text/firmware';
import { VIDEO_NAMES } from '../text/video';
import { FirstBoot, type FirstBootDraft, firstBootChange, NO_FIRST_BOOT } from './first-boot';
import { readLabels } from './labels';

export const openCreateVm = () => open((close) => <CreateVm close={close} />);

type Disk = NonNullable<VmSpec['disks']>[number];
type DiskBus = NonNullable<Disk['bus']>;

/** A disk in the form. Options that the form does not show stay as they are. */
export type DiskDraft = Disk & { readonly: boolean; bus: DiskBus };

const BUSES: DiskBus[] = ['virtio', 'scsi', 'sata', 'nvme'];

/** The form's content. */
interface Draft {
  name: string;
  vcpus: string;
  memory: string;
  cpuModel: string;
  firmware: Firmware;
  video: Video;
  host: string;
  labels: string;
  starts: boolean;
  disks: DiskDraft[];
  /** Size of a disk that is created with the VM; empty for none. */
  newDisk: string;
  /** Path of a CD image; empty for none. */
  cd: string;
  /** The network of each interface. */
  nics: string[];
  kernel: string;
  initrd: string;
  cmdline: string;
  firstBoot: FirstBootDraft;
}

const EMPTY: Draft = {
  name: '',
  vcpus: '2',
  memory: '2GiB',
  cpuModel: '',
  firmware: 'bios',
  video: 'none',
  host: '',
  labels: '',
  starts: true,
  disks: [],
  newDisk: '',
  cd: '',
  nics: [],
  kernel: '',
  initrd: '',
  cmdline: '',
  firstBoot: NO_FIRST_BOOT,
};

/** Content of a part of the form, and how to change it. */
interface PartProps {
  draft: Draft;
  change: (changed: Partial<Draft>) => void;
}

export const namedDisks = ({ disks }: Pick<Draft, 'disks'>) =>
  disks.filter((disk) => disk.path !== '');

/** Why a text is no number of vCPUs; null where it is one. */
export const wrongCount = (text: string) =>
  /^[1-9][0-9]*$/.test(text) ? null : 'A whole number, 1 or more';

/** Why a text is no size; null where it is one. */
export const wrongSize = (text: string) =>
  /^[0-9]+(\.[0-9]+)? ?([KMGT]i?B?)?$/i.test(text) ? null : 'A size, for example 512MiB or 4GiB';

/** Each field's error; null where the field is valid. */
function wrongIn(draft: Draft) {
  return {
    name: /^[A-Za-z0-9][A-Za-z0-9._-]*$/.test(draft.name)
      ? null
      : 'Letters, digits, “-”, “_” and “.”',
    vcpus: wrongCount(draft.vcpus),
    boot:
      draft.kernel || draft.newDisk || draft.cd || namedDisks(draft).length > 0
        ? null
        : 'Nothing to boot: add a disk or a kernel.',
    memory: wrongSize(draft.memory),
    newDisk: draft.newDisk === '' ? null : wrongSize(draft.newDisk),
  };
}

function requestOf(draft: Draft): CreateManagedVm {
  const { name, vcpus, memory, cpuModel, firmware, video, nics, kernel, initrd, cmdline } = draft;
  const spec: VmSpec = {
    name,
    vcpus: Number(vcpus),
    memory: [{ size: memory.replace(' ', ''), backing: 'shared' }],
  };
  if (cpuModel) spec.cpu_model = cpuModel;
  if (firmware !== 'bios') spec.firmware = firmware;
  if (video !== 'none') spec.video = video;
  const disks = namedDisks(draft);
  if (disks.length > 0) spec.disks = disks;
  if (draft.cd) spec.cdroms = [{ image: draft.cd }];
  if (nics.length > 0) spec.nics = nics.map((network) => ({ network }));
  if (kernel) spec.kernel = kernel;
  if (initrd) spec.initrd = initrd;
  if (cmdline) spec.cmdline = cmdline;
  Object.assign(spec, firstBootChange(NO_FIRST_BOOT, draft.firstBoot));
  return {
    spec,
    host: draft.host || null,
    labels: readLabels(draft.labels),
    start: draft.starts,
    new_disks: draft.newDisk ? [{ size: draft.newDisk.replace(' ', '') }] : [],
  };
}

function CreateVm({ close }: { close: () => void }) {
  const [draft, setDraft] = useState(EMPTY);
  const [isTried, setTried] = useState(false);
  const task = useTask();
  const wrong = wrongIn(draft);
  const make = () => {
    setTried(true);
    if (Object.values(wrong).some((why) => why !== null)) return;
    void task.run(async () => {
      await post('/vms', requestOf(draft));
      close();
      go(`/vms/${part(draft.name)}`);
    });
  };
  return (
    <FormDialog title="Create VM" verb="Create VM" task={task} send={make} close={close}>
      <DraftForm
        draft={draft}
        change={(changed) => setDraft((before) => ({ ...before, ...changed }))}
        wrong={isTried ? wrong : null}
      />
    </FormDialog>
  );
}

function DraftForm(props: PartProps & { wrong: ReturnType<typeof wrongIn> | null }) {
  const { draft, change, wrong } = props;
  return (
    <>
      <Field
        label="Name"
        wrong={wrong?.name ?? null}
        value={draft.name}
        onInput={(name) => change({ name })}
      />
      <div class="form-row">
        <Field
          label="vCPUs"
          wrong={wrong?.vcpus ?? null}
          value={draft.vcpus}
          onInput={(vcpus) => change({ vcpus })}
          inputMode="numeric"
        />
        <Field
          label="Memory"
          wrong={wrong?.memory ?? null}
          value={draft.memory}
          onInput={(memory) => change({ memory })}
        />
      </div>
      <div class="form-row">
        <Field
          label="CPU model"
          value={draft.cpuModel}
          onInput={(cpuModel) => change({ cpuModel })}
          hint="Default: the CPU baseline, else the agent's default"
        />
        <FirmwareChoice draft={draft} change={change} />
        <VideoChoice draft={draft} change={change} />
      </div>
      <HostChoice draft={draft} change={change} />
      <div class="form-row">
        <Field
          label="New disk"
          wrong={wrong?.newDisk ?? null}
          value={draft.newDisk}
          onInput={(newDisk) => change({ newDisk })}
          hint="Size of an empty disk that is created with the VM, for example 20GiB"
        />
        <Field
          label="CD image"
          value={draft.cd}
          onInput={(cd) => change({ cd })}
          hint="Path of an ISO image, for example to install from"
        />
      </div>
      <Disks draft={draft} change={change} />
      <Interfaces draft={draft} change={change} />
      {wrong?.boot && (
        <small class="tone-bad" role="alert">
          {wrong.boot}
        </small>
      )}
      <DirectBoot draft={draft} change={change} />
      <FirstBoot
        draft={draft.firstBoot}
        change={(changed) => change({ firstBoot: { ...draft.firstBoot, ...changed } })}
      />
      <Field
        label="Labels"
        value={draft.labels}
        onInput={(labels) => change({ labels })}
        hint="Used by rules, for example tier=front rack=1"
      />
      <label class="tick">
        <input
          type="checkbox"
          checked={draft.starts}
          onChange={(event) => change({ starts: event.currentTarget.checked })}
        />
        <span>Start after creation</span>
      </label>
    </>
  );
}

export function FirmwareChoice({
  draft,
  change,
}: {
  draft: Pick<Draft, 'firmware'>;
  change: (changed: Pick<Draft, 'firmware'>) => void;
}) {
  return (
    <label class="field">
      <span>Firmware</span>
      <select
        value={draft.firmware}
        onChange={(event) => change({ firmware: event.currentTarget.value as Firmware })}
      >
        {Object.entries(FIRMWARE_NAMES).map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function VideoChoice({
  draft,
  change,
}: {
  draft: Pick<Draft, 'video'>;
  change: (changed: Pick<Draft, 'video'>) => void;
}) {
  return (
    <label class="field">
      <span>Screen</span>
      <select
        value={draft.video}
        onChange={(event) => change({ video: event.currentTarget.value as Video })}
      >
        {Object.entries(VIDEO_NAMES).map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

function HostChoice({ draft, change }: PartProps) {
  return (
    <label class="field">
      <span>Host</span>
      <select value={draft.host} onChange={(event) => change({ host: event.currentTarget.value })}>
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
    </label>
  );
}

export function Disks({
  draft: { disks },
  change,
}: {
  draft: Pick<Draft, 'disks'>;
  change: (changed: Pick<Draft, 'disks'>) => void;
}) {
  return (
    <Many
      label="Disks"
      add="Add disk"
      onAdd={() =>
        change({
          disks: [...disks, { path: '', format: 'qcow2', readonly: false, bus: 'virtio' }],
        })
      }
    >
      {disks.map((disk, at) => (
        <DiskRow
          key={at}
          disk={disk}
          at={at}
          onChange={(next) =>
            change({ disks: disks.map((one, index) => (index === at ? next : one)) })
          }
          onRemove={() => change({ disks: disks.filter((_, index) => index !== at) })}
        />
      ))}
    </Many>
  );
}

function Interfaces({ draft: { nics }, change }: PartProps) {
  const networks = useLoaded('networks', (signal) => all<ManagedNetwork>('/networks', signal));
  return (
    <Many
      label="Networks"
      add="Add interface"
      onAdd={() => change({ nics: [...nics, networks.value?.[0]?.name ?? ''] })}
    >
      {nics.map((nic, at) => (
        <div class="many-row" key={at}>
          <select
            aria-label={`Network of interface ${at + 1}`}
            value={nic}
            onChange={(event) =>
              change({
                nics: nics.map((one, index) => (index === at ? event.currentTarget.value : one)),
              })
            }
          >
            {networks.value?.map((network) => (
              <option key={network.name} value={network.name}>
                {network.name}
              </option>
            ))}
          </select>
          <Act
            kind="quiet"
            name={`Remove interface ${at + 1}`}
            onClick={() => change({ nics: nics.filter((_, index) => index !== at) })}
          >
            Remove
          </Act>
        </div>
      ))}
    </Many>
  );
}

function DirectBoot({ draft, change }: PartProps) {
  return (
    <details>
      <summary>Boot a kernel directly</summary>
      <Field
        label="Kernel"
        value={draft.kernel}
        onInput={(kernel) => change({ kernel })}
        hint="A path on the host, below its vm_dirs"
      />
      <Field
        label="Initial RAM disk"
        value={draft.initrd}
        onInput={(initrd) => change({ initrd })}
      />
      <Field
        label="Command line"
        value={draft.cmdline}
        onInput={(cmdline) => change({ cmdline })}
      />
    </details>
  );
}

export function Field(props: {
  label: string;
  value: string;
  onInput: (value: string) => void;
  wrong?: string | null;
  hint?: string;
  inputMode?: 'numeric';
}) {
  const id = useName();
  const note = props.wrong ?? props.hint;
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="text"
        value={props.value}
        inputMode={props.inputMode}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={props.wrong ? true : undefined}
        aria-describedby={note ? `${id}-note` : undefined}
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
      {note && (
        <small id={`${id}-note`} class={props.wrong ? 'tone-bad' : 'muted'}>
          {note}
        </small>
      )}
    </div>
  );
}

function Many(props: {
  label: string;
  add: string;
  onAdd: () => void;
  children: ComponentChildren;
}) {
  return (
    <fieldset class="many">
      <legend>{props.label}</legend>
      {props.children}
      <Act onClick={props.onAdd}>{props.add}</Act>
    </fieldset>
  );
}

function DiskRow(props: {
  disk: DiskDraft;
  at: number;
  onChange: (disk: DiskDraft) => void;
  onRemove: () => void;
}) {
  const { disk, at, onChange } = props;
  return (
    <div class="many-row">
      <input
        type="text"
        class="grow"
        aria-label={`Path of disk ${at + 1}`}
        placeholder="/srv/images/web.qcow2"
        spellcheck={false}
        value={disk.path}
        onInput={(event) => onChange({ ...disk, path: event.currentTarget.value })}
      />
      <select
        aria-label={`Format of disk ${at + 1}`}
        value={disk.format}
        onChange={(event) =>
          onChange({ ...disk, format: event.currentTarget.value === 'raw' ? 'raw' : 'qcow2' })
        }
      >
        <option value="qcow2">qcow2</option>
        <option value="raw">raw</option>
      </select>
      <select
        aria-label={`Bus of disk ${at + 1}`}
        value={disk.bus}
        onChange={(event) => {
          const bus = BUSES.find((one) => one === event.currentTarget.value);
          if (bus) onChange({ ...disk, bus });
        }}
      >
        {BUSES.map((bus) => (
          <option key={bus} value={bus}>
            {bus === 'nvme' ? 'nvme (cannot move)' : bus}
          </option>
        ))}
      </select>
      <label class="tick">
        <input
          type="checkbox"
          checked={disk.readonly}
          onChange={(event) => onChange({ ...disk, readonly: event.currentTarget.checked })}
        />
        <span>read only</span>
      </label>
      <Act kind="quiet" name={`Remove disk ${at + 1}`} onClick={props.onRemove}>
        Remove
      </Act>
    </div>
  );
}
