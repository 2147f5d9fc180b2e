/** States of hosts under high availability, and what they say, as text. */
import type { HaHostStatus, HaOwnVmStatus, HaShortfall } from '../api/types';
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

const STANDINGS: Record<HaOwnVmStatus['standing'], Look> = {
  held: { tone: 'ok', shape: 'disc', text: 'held' },
  stopping: { tone: 'busy', shape: 'half', text: 'stopping' },
  watched: { tone: 'warn', shape: 'half', text: 'watched' },
  doubtful: { tone: 'bad', shape: 'triangle', text: 'doubtful' },
  resting: { tone: 'idle', shape: 'bars', text: 'resting' },
  stopped: { tone: 'idle', shape: 'square', text: 'stopped' },
};

/** How hosts stand to a VM that they restart among themselves. */
export const standingLook = ({ standing }: HaOwnVmStatus): Look =>
  STANDINGS[standing] ?? { tone: 'idle', shape: 'query', text: standing };

/** The command that says that the host of a doubtful VM is off; null: nothing is to be said. */
export const confirmCommand = ({ vm, term, confirm_at }: HaOwnVmStatus): string | null =>
  confirm_at ? `godwit host ha confirm-off ${confirm_at} ${vm} --term ${term}` : null;

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
