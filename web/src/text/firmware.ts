/** Names of firmware, as other consoles of VMs show them. */
import type { Firmware } from '../api/types';

export const FIRMWARE_NAMES: Record<Firmware, string> = {
  bios: 'BIOS',
  uefi: 'UEFI',
  'uefi-secure': 'UEFI with Secure Boot',
};
