/** Shares and texts of a host's memory and load. */
import type { HostSummary } from '../api/types';
import { bytes } from '../text/units';

export function memoryShare(host: HostSummary): number {
  const total =
    host.memory_total_bytes || host.memory_available_bytes + host.memory_committed_bytes;
  return total > 0 ? 1 - host.memory_available_bytes / total : 0;
}

export function memoryText(host: HostSummary): string {
  return host.state === 'unknown' ? '–' : `${bytes(host.memory_available_bytes)} free`;
}

export function loadShare(host: HostSummary): number {
  return host.logical_cores ? (host.load_average_1min ?? 0) / host.logical_cores : 0;
}

export function loadText(host: HostSummary): string {
  return host.logical_cores
    ? `${(host.load_average_1min ?? 0).toFixed(1)} of ${host.logical_cores} cores`
    : '–';
}
