/** Disks and CD-ROM drives of a VM in forms. */
import type { VmSpec } from '../api/types';
import { Act } from '../parts/basics';
import {
  changed,
  Field,
  Many,
  Options,
  optional,
  Select,
  Tick,
  without,
  wrongCount,
} from '../parts/fields';

type Disk = NonNullable<VmSpec['disks']>[number];
type Cdrom = NonNullable<VmSpec['cdroms']>[number];
type DiskBus = NonNullable<Disk['bus']>;
type DiskCache = NonNullable<Disk['cache']>;

/** A disk in the form. Options that the form does not show stay as they are. */
export type DiskDraft = Disk & { readonly: boolean; bus: DiskBus };

export const BUSES = [
  ['virtio', 'virtio'],
  ['scsi', 'scsi'],
  ['sata', 'sata'],
  ['nvme', 'nvme (cannot move)'],
] as const;
export const FORMATS = [
  ['qcow2', 'qcow2'],
  ['raw', 'raw'],
] as const;
const CACHES = [
  ['writeback', 'writeback'],
  ['writethrough', 'writethrough'],
] as const;
const CD_BUSES = [
  ['sata', 'sata'],
  ['scsi', 'scsi'],
] as const;

export const NEW_DISK: DiskDraft = { path: '', format: 'qcow2', readonly: false, bus: 'virtio' };

export const disksOf = (spec: VmSpec): DiskDraft[] =>
  (spec.disks ?? []).map((disk) => ({
    ...disk,
    readonly: disk.readonly ?? false,
    bus: disk.bus ?? 'virtio',
  }));

export const namedDisks = (disks: DiskDraft[]) => disks.filter((disk) => disk.path !== '');

/** `value` with `key` set, or without it where it is empty. */
export function withOption<T extends object, K extends keyof T>(
  value: T,
  key: K,
  set: T[K] | '',
): T {
  const next = { ...value };
  if (set === '') delete next[key];
  else next[key] = set;
  return next;
}

export const numberOr = (text: string): number | '' => (/^[0-9]+$/.test(text) ? Number(text) : '');

export function Disks(props: {
  label: string;
  disks: DiskDraft[];
  change: (disks: DiskDraft[]) => void;
}) {
  const { label, disks, change } = props;
  return (
    <Many label={label} add="Add disk" onAdd={() => change([...disks, NEW_DISK])}>
      {disks.map((disk, at) => (
        <div class="many-part" key={at}>
          <DiskFields
            disk={disk}
            name={`disk ${at + 1}`}
            change={(next) => change(changed(disks, at, next))}
            remove={() => change(without(disks, at))}
          />
          <DiskOptions disk={disk} change={(next) => change(changed(disks, at, next))} />
        </div>
      ))}
    </Many>
  );
}

function DiskFields(props: {
  disk: DiskDraft;
  name: string;
  change: (disk: DiskDraft) => void;
  remove: () => void;
}) {
  const { disk, name, change, remove } = props;
  return (
    <div class="many-row">
      <input
        type="text"
        class="grow"
        aria-label={`Path of ${name}`}
        placeholder="/srv/images/web.qcow2"
        spellcheck={false}
        value={disk.path}
        onInput={(event) => change({ ...disk, path: event.currentTarget.value })}
      />
      <Options
        name={`Format of ${name}`}
        value={disk.format}
        values={FORMATS}
        onChange={(format) => change({ ...disk, format })}
      />
      <Options
        name={`Bus of ${name}`}
        value={disk.bus}
        values={BUSES}
        onChange={(bus) => change({ ...disk, bus })}
      />
      <Act kind="quiet" name={`Remove ${name}`} onClick={remove}>
        Remove
      </Act>
    </div>
  );
}

/** Options that most disks do not need. */
function DiskOptions({ disk, change }: { disk: DiskDraft; change: (disk: DiskDraft) => void }) {
  return (
    <details>
      <summary>Boot order, cache, limits</summary>
      <div class="form-row">
        <BootOrder
          value={disk.boot_order}
          change={(order) => change(withOption(disk, 'boot_order', order))}
        />
        <Field
          label="Serial number"
          value={disk.serial ?? ''}
          onInput={(serial) => change(withOption(disk, 'serial', serial))}
        />
        <Select<DiskCache>
          label="Cache"
          value={disk.cache ?? 'writeback'}
          values={CACHES}
          onChange={(cache) => change({ ...disk, cache })}
          hint="When a write of the guest is complete: in the host's cache, or on the disk"
        />
        <Field
          label="Requests per second"
          value={disk.iops ? String(disk.iops) : ''}
          onInput={(iops) => change(withOption(disk, 'iops', numberOr(iops)))}
          inputMode="numeric"
          hint="Empty: no limit"
        />
        <Field
          label="Bytes per second"
          value={disk.bytes_per_second ?? ''}
          onInput={(rate) => change(withOption(disk, 'bytes_per_second', rate))}
          hint="For example 100MiB; empty: no limit"
        />
      </div>
      <Tick
        text="Read only"
        checked={disk.readonly}
        onChange={(readonly) => change({ ...disk, readonly })}
      />
      <Tick
        text="Space that the guest discards is freed on the host"
        checked={disk.discard ?? true}
        onChange={(discard) => change({ ...disk, discard })}
      />
      {(disk.bus === 'virtio' || disk.bus === 'scsi') && (
        <Tick
          text="A thread of its own in QEMU (iothread); disks on bus scsi share one"
          checked={disk.iothread ?? false}
          onChange={(iothread) => change({ ...disk, iothread })}
        />
      )}
      <Tick
        text="Blocks of zeros take no space; costs CPU time"
        checked={disk.detect_zeroes ?? false}
        onChange={(zeroes) => change({ ...disk, detect_zeroes: zeroes })}
      />
    </details>
  );
}

export function Cdroms(props: { cdroms: Cdrom[]; change: (cdroms: Cdrom[]) => void }) {
  const { cdroms, change } = props;
  return (
    <Many label="CD-ROM drives" add="Add drive" onAdd={() => change([...cdroms, { bus: 'sata' }])}>
      {cdroms.map((drive, at) => (
        <div class="many-part" key={at}>
          <div class="many-row">
            <input
              type="text"
              class="grow"
              aria-label={`Image in drive ${at + 1}`}
              placeholder="empty"
              spellcheck={false}
              value={drive.image ?? ''}
              onInput={(event) =>
                change(changed(cdroms, at, withOption(drive, 'image', event.currentTarget.value)))
              }
            />
            <Options
              name={`Bus of drive ${at + 1}`}
              value={drive.bus === 'scsi' ? 'scsi' : 'sata'}
              values={CD_BUSES}
              onChange={(bus) => change(changed(cdroms, at, { ...drive, bus }))}
            />
            <Act
              kind="quiet"
              name={`Remove drive ${at + 1}`}
              onClick={() => change(without(cdroms, at))}
            >
              Remove
            </Act>
          </div>
          <details>
            <summary>Boot order</summary>
            <BootOrder
              value={drive.boot_order}
              change={(order) =>
                change(changed(cdroms, at, withOption(drive, 'boot_order', order)))
              }
            />
          </details>
        </div>
      ))}
    </Many>
  );
}

export function BootOrder(props: {
  value: number | null | undefined;
  change: (order: number | '') => void;
}) {
  const text = props.value == null ? '' : String(props.value);
  return (
    <Field
      label="Boot order"
      value={text}
      wrong={optional(text, wrongCount)}
      onInput={(order) => props.change(numberOr(order))}
      inputMode="numeric"
      hint="1 is tried first; devices without a number follow"
    />
  );
}
