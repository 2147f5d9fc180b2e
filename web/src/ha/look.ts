/** States of hosts under high availability, and what they say, as text. */
import type { HaHostStatus, HaShortfall } from '../api/types';
import type { Look } from '../parts/status';
import { bytes, countdown } from '../text/units';

const LOOKS: Record<HaHostStatus['phase'], Look> = {
  watching: { tone: 'ok', shape: 'disc', text: 'watching' },
  fencing: { tone: 'busy', shape: 'half', text: 'cutting power' },
  doubtful: { tone: 'bad', shape: 'triangle', text: 'doubtful' },
  over: { tone: 'idle', shape: 'ring', text: 'over' },
};

export function phaseLook(host: HaHostStatus): Look {
  if (host.rests) return { tone: 'idle', shape: 'ring', text: 'in maintenance' };
  if (host.term === 0) return { tone: 'idle', shape: 'ring', text: 'no term' };
  return LOOKS[host.phase] ?? { tone: 'idle', shape: 'query', text: host.phase };
}

/** Hosts of which an operator must confirm that they are off. */
export const doubtful = (hosts: HaHostStatus[]) =>
  hosts.filter((host) => host.phase === 'doubtful' && host.term > 0);

export const renewedText = (host: HaHostStatus): string =>
  host.heard_ms_ago == null ? 'never' : `${countdown(host.heard_ms_ago)} ago`;

/** What stops the protected VMs of the host if its agent does not. */
export function guardsText(host: HaHostStatus): string {
  const guards = [host.watchdog && 'watchdog', host.fencing && 'fencing device'];
  return guards.filter(Boolean).join(', ') || 'none';
}

export const shortfallText = (shortfall: HaShortfall): string =>
  `After the failure of ${shortfall.hosts.join(' and ')}, ${bytes(shortfall.memory_bytes)} of ` +
  `memory is missing for ${shortfall.vms.join(', ')}.`;
