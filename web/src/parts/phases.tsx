/** The phases of a migration, with the current one marked. */
import type { Move, Phase, Progress } from '../api/types';
import { isOver } from '../state/cluster';
import { duration } from '../text/units';
import { Mark } from './status';

const RAIL: Phase[] = [
  'preflight',
  'prepare',
  'pre-copy',
  'convergence',
  'switchover',
  'page-in',
  'announce',
  'report',
];

/** Predicted time to the end. There is none before pre-copy: no bandwidth has been measured yet. */
export function etaMs(progress: Progress | null | undefined): number | null {
  if (!progress || progress.phase === 'preflight' || progress.phase === 'prepare') return null;
  return progress.eta_ms ?? null;
}

export function PhaseRail({ move }: { move: Move }) {
  const now = move.progress?.phase;
  const times = new Map(move.report?.phases?.map((phase) => [phase.phase, phase.duration_ms]));
  const ended = isOver(move);
  const shown = RAIL.filter(
    (phase) => phase !== 'page-in' || now === 'page-in' || times.has('page-in'),
  );
  const at = now === 'reconnect' ? shown.indexOf('pre-copy') : now ? shown.indexOf(now) : -1;
  return (
    <ol class="rail" aria-label="Phases">
      {shown.map((phase, index) => {
        const isDone = move.state === 'done' || index < at;
        const isNow = !ended && index === at;
        const state = isNow ? 'now' : isDone ? 'done' : 'next';
        const time = times.get(phase);
        return (
          <li key={phase} class={`rail-${state}`} aria-current={isNow ? 'step' : undefined}>
            <Mark
              tone={isNow ? 'busy' : isDone ? 'ok' : 'idle'}
              shape={isNow ? 'arrow' : isDone ? 'check' : 'ring'}
            />
            <span>{phase}</span>
            {isNow && now === 'reconnect' && <span class="rail-note">link cut, reconnecting</span>}
            {isNow && now !== 'reconnect' && move.progress && phase === 'pre-copy' && (
              <span class="rail-note">round {move.progress.round}</span>
            )}
            {time !== undefined && <span class="rail-note">{duration(time)}</span>}
          </li>
        );
      })}
    </ol>
  );
}
