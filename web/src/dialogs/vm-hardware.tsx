/** CPU, memory, firmware and boot options of a VM in forms. */
import type { Firmware, Video, VmSpec } from '../api/types';
import { Field, optional, Select, Tick, wrongCount, wrongSize } from '../parts/fields';
import { memoryBytes, NEEDS_STOP } from '../state/growth';
import { FIRMWARE_NAMES } from '../text/firmware';
import { sizeBytes, sizeText } from '../text/sizes';
import { VIDEO_NAMES } from '../text/video';

type Accel = NonNullable<VmSpec['accel']>;

export interface Hardware {
  vcpus: string;
  memory: string;
  /** What it may grow to while it runs; empty: what it has. */
  maxCpus: string;
  maxMemory: string;
  slots: string;
  tpm: boolean;
  serialPorts: string;
  cpuModel: string;
  firmware: Firmware;
  video: Video;
  machine: string;
  accel: Accel;
  scsiController: boolean;
  pageIn: boolean;
  kernel: string;
  initrd: string;
  cmdline: string;
}

export const NEW_HARDWARE: Hardware = {
  vcpus: '2',
  memory: '2GiB',
  maxCpus: '',
  maxMemory: '',
  slots: '',
  tpm: false,
  serialPorts: '1',
  cpuModel: '',
  firmware: 'bios',
  video: 'none',
  machine: '',
  accel: 'auto',
  scsiController: false,
  pageIn: true,
  kernel: '',
  initrd: '',
  cmdline: '',
};

/** The memory as text. That of a VM which may grow is one size, also if it has several modules. */
function memoryText(spec: VmSpec): string {
  const blocks = spec.memory ?? [];
  const grows = spec.max_memory != null || blocks.some((block) => block.address != null);
  return grows ? sizeText(memoryBytes(spec)) : blocks.map((block) => block.size).join(' + ');
}

export function hardwareOf(spec: VmSpec): Hardware {
  return {
    vcpus: String(spec.vcpus ?? 1),
    memory: memoryText(spec),
    maxCpus: spec.max_cpus ? String(spec.max_cpus) : '',
    maxMemory: spec.max_memory ?? '',
    slots: spec.hotplug_slots ? String(spec.hotplug_slots) : '',
    tpm: spec.tpm ?? false,
    serialPorts: String(spec.serial_ports ?? 1),
    cpuModel: spec.cpu_model ?? '',
    firmware: spec.firmware ?? 'bios',
    video: spec.video ?? 'none',
    machine: spec.machine ?? '',
    accel: spec.accel ?? 'auto',
    scsiController: spec.scsi_controller ?? false,
    pageIn: !(spec.refuses_page_in ?? false),
    kernel: spec.kernel ?? '',
    initrd: spec.initrd ?? '',
    cmdline: spec.cmdline ?? '',
  };
}

/** The keys of a specification that differ, as a merge patch. */
export function hardwareChange(before: Hardware, now: Hardware): Record<string, unknown> {
  const spec: Record<string, unknown> = {};
  const put = (field: keyof Hardware, key: string, value: unknown) => {
    if (now[field] !== before[field]) spec[key] = value;
  };
  put('vcpus', 'vcpus', Number(now.vcpus));
  put('memory', 'memory', now.memory.replace(' ', ''));
  put('maxCpus', 'max_cpus', now.maxCpus ? Number(now.maxCpus) : null);
  put('maxMemory', 'max_memory', now.maxMemory.replace(' ', '') || null);
  put('slots', 'hotplug_slots', Number(now.slots));
  put('tpm', 'tpm', now.tpm);
  put('serialPorts', 'serial_ports', Number(now.serialPorts));
  put('cpuModel', 'cpu_model', now.cpuModel || null);
  put('firmware', 'firmware', now.firmware);
  put('video', 'video', now.video);
  put('machine', 'machine', now.machine || null);
  put('accel', 'accel', now.accel);
  put('scsiController', 'scsi_controller', now.scsiController);
  put('pageIn', 'refuses_page_in', !now.pageIn);
  put('kernel', 'kernel', now.kernel || null);
  put('initrd', 'initrd', now.initrd || null);
  put('cmdline', 'cmdline', now.cmdline || null);
  return spec;
}

interface Props {
  draft: Hardware;
  change: (changed: Partial<Hardware>) => void;
}

/** Unit of memory that a running guest takes (docs/hotplug.md). */
const MEMORY_UNIT = 128 * 2 ** 20;
const MOST_SLOTS = 16;

/** Why a running VM does not get these vCPUs and this memory; null where it does. */
export function wrongGrowth(before: Hardware, now: Hardware) {
  return { vcpus: wrongCpus(before, now), memory: wrongMemory(before, now) };
}

function wrongCpus(before: Hardware, now: Hardware): string | null {
  if (wrongCount(now.vcpus)) return wrongCount(now.vcpus);
  if (Number(now.vcpus) < Number(before.vcpus))
    return `${NEEDS_STOP}: a running VM keeps its vCPUs`;
  return Number(now.vcpus) > Number(before.maxCpus || before.vcpus)
    ? `${NEEDS_STOP}: more than its maximum`
    : null;
}

function wrongMemory(before: Hardware, now: Hardware): string | null {
  if (now.memory === before.memory) return null;
  if (wrongSize(now.memory)) return wrongSize(now.memory);
  const grown = sizeBytes(now.memory) - sizeBytes(before.memory);
  if (grown < 0) return `${NEEDS_STOP}: a running VM keeps its memory`;
  if (sizeBytes(now.memory) > sizeBytes(before.maxMemory || before.memory))
    return `${NEEDS_STOP}: more than its maximum`;
  return grown % MEMORY_UNIT === 0 ? null : 'Memory is added in units of 128 MiB';
}

/** Why a value of `Growth` is invalid; null where none is. */
export function wrongMaxima(draft: Hardware): string | null {
  const { maxCpus, maxMemory, slots, serialPorts } = draft;
  if (optional(maxCpus, wrongCount)) return 'The maximum of vCPUs is a whole number.';
  if (maxCpus && Number(maxCpus) < Number(draft.vcpus))
    return 'The maximum of vCPUs is below the vCPUs.';
  if (optional(maxMemory, wrongSize)) return 'The maximum of memory is a size such as 16GiB.';
  if (maxMemory && sizeBytes(maxMemory) < sizeBytes(draft.memory))
    return 'The maximum of memory is below the memory.';
  if (maxMemory && sizeBytes(maxMemory) % MEMORY_UNIT !== 0)
    return 'The maximum of memory is a multiple of 128 MiB.';
  if (slots && !(/^[0-9]+$/.test(slots) && Number(slots) <= MOST_SLOTS))
    return `0 to ${MOST_SLOTS} slots are possible.`;
  return /^[1-4]$/.test(serialPorts) ? null : '1 to 4 serial ports are possible.';
}

/** vCPUs and memory. `running`: those of a VM that runs, which takes more up to its maxima. */
export function Size(
  props: Props & { wrong: { vcpus: string | null; memory: string | null }; running?: Hardware },
) {
  const { draft, change, wrong, running } = props;
  const limited = (max: string, now: string) => {
    if (!running) return {};
    const grows = max !== '' && max !== now;
    return { isOff: !grows, hint: grows ? `Up to ${max}` : `${NEEDS_STOP}: at its maximum` };
  };
  return (
    <div class="form-row">
      <Field
        label="vCPUs"
        wrong={wrong.vcpus}
        value={draft.vcpus}
        onInput={(vcpus) => change({ vcpus })}
        inputMode="numeric"
        {...limited(running?.maxCpus ?? '', running?.vcpus ?? '')}
      />
      <Field
        label="Memory"
        wrong={wrong.memory}
        value={draft.memory}
        onInput={(memory) => change({ memory })}
        {...limited(running?.maxMemory ?? '', running?.memory ?? '')}
      />
    </div>
  );
}

/** What the VM may get while it runs, and devices that few VMs need. */
export function More({ draft, change }: Props) {
  return (
    <details>
      <summary>More: growth while it runs, TPM, serial ports</summary>
      <div class="form-row">
        <Field
          label="Most vCPUs"
          value={draft.maxCpus}
          onInput={(maxCpus) => change({ maxCpus })}
          inputMode="numeric"
          hint="Up to these while it runs; empty: none are added"
        />
        <Field
          label="Most memory"
          value={draft.maxMemory}
          onInput={(maxMemory) => change({ maxMemory })}
          hint="Up to this while it runs, for example 16GiB"
        />
        <Field
          label="Slots"
          value={draft.slots}
          onInput={(slots) => change({ slots })}
          inputMode="numeric"
          hint="For interfaces and virtio disks that come while it runs, up to 16"
        />
        <Field
          label="Serial ports"
          value={draft.serialPorts}
          onInput={(serialPorts) => change({ serialPorts })}
          inputMode="numeric"
          hint="1 to 4, each with a text console and a log"
        />
      </div>
      <Tick
        text="TPM 2.0, with a state of its own"
        checked={draft.tpm}
        onChange={(tpm) => change({ tpm })}
      />
    </details>
  );
}

const FIRMWARES = Object.entries(FIRMWARE_NAMES) as [Firmware, string][];
const VIDEOS = Object.entries(VIDEO_NAMES) as [Video, string][];
const ACCELS = [
  ['auto', 'automatic'],
  ['kvm', 'KVM'],
  ['tcg', 'TCG (emulation)'],
] as const;

export function Devices({ draft, change }: Props) {
  return (
    <div class="form-row">
      <Field
        label="CPU model"
        value={draft.cpuModel}
        onInput={(cpuModel) => change({ cpuModel })}
        hint="Empty: the CPU baseline, else the agent's default"
      />
      <Select
        label="Firmware"
        value={draft.firmware}
        values={FIRMWARES}
        onChange={(firmware) => change({ firmware })}
      />
      <Select
        label="Screen"
        value={draft.video}
        values={VIDEOS}
        onChange={(video) => change({ video })}
      />
    </div>
  );
}

export function PageIn({ draft, change }: Props) {
  return (
    <Tick
      text="Page-in: a move may run the guest before all of its pages have arrived"
      checked={draft.pageIn}
      onChange={(pageIn) => change({ pageIn })}
    />
  );
}

/** Boot of a kernel, and options that few VMs need. `running`: page-in is elsewhere. */
export function BootOptions({ draft, change, running }: Props & { running?: boolean }) {
  return (
    <>
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
      <details>
        <summary>Machine</summary>
        <div class="form-row">
          <Field
            label="Machine type"
            value={draft.machine}
            onInput={(machine) => change({ machine })}
            hint="Empty: q35 of the host's QEMU"
          />
          <Select
            label="Accelerator"
            value={draft.accel}
            values={ACCELS}
            onChange={(accel) => change({ accel })}
          />
        </div>
        <Tick
          text="SCSI controller, so that disks can be attached while the VM runs"
          checked={draft.scsiController}
          onChange={(scsiController) => change({ scsiController })}
        />
        {!running && <PageIn draft={draft} change={change} />}
      </details>
    </>
  );
}
