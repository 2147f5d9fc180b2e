/** CPU, memory, firmware and boot options of a VM in forms. */
import type { Firmware, Video, VmSpec } from '../api/types';
import { Field, Select, Tick, wrongCount } from '../parts/fields';
import { FIRMWARE_NAMES } from '../text/firmware';
import { VIDEO_NAMES } from '../text/video';

type Accel = NonNullable<VmSpec['accel']>;

export interface Hardware {
  vcpus: string;
  memory: string;
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

export function hardwareOf(spec: VmSpec): Hardware {
  return {
    vcpus: String(spec.vcpus ?? 1),
    memory: spec.memory?.map((block) => block.size).join(' + ') ?? '',
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

export function Size(props: Props & { wrong: { memory: string | null } }) {
  const { draft, change, wrong } = props;
  return (
    <div class="form-row">
      <Field
        label="vCPUs"
        wrong={wrongCount(draft.vcpus)}
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

/** Boot of a kernel, and options that few VMs need. */
export function BootOptions({ draft, change }: Props) {
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
        <Tick
          text="Page-in: a move may run the guest before all of its pages have arrived"
          checked={draft.pageIn}
          onChange={(pageIn) => change({ pageIn })}
        />
      </details>
    </>
  );
}
