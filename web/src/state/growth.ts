/** What a running VM takes, by its specification. Pure. */
import type { VmSpec } from '../api/types';
import { sizeBytes } from '../text/sizes';

/** Why a change has to wait for a stop. */
export const NEEDS_STOP = 'Needs a stop';

export const memoryBytes = (spec: VmSpec): number =>
  (spec.memory ?? []).reduce((sum, block) => sum + sizeBytes(block.size), 0);

/** Slots that no NIC and no disk has. */
export function freeSlots(spec: VmSpec): number {
  const devices = [...(spec.nics ?? []), ...(spec.disks ?? [])];
  const taken = devices.filter((device) => device.slot != null).length;
  return Math.max(0, (spec.hotplug_slots ?? 0) - taken);
}

/** Whether a running VM releases the device: one that it has from its start stays. */
export const isInSlot = (device: { slot?: number | null }) => device.slot != null;
