/** The phases of a migration, with the current one marked. */
import type { Move, Phase, Progress } from '../api/types';
import { isOver } from '../state/cluster';
import { duration } from '../text/units';
import { Mark } from './status';

const RAIL: Phase[] = [
  'preflight',
  'disks',
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
  const isCut = now === 'reconnect';
  const hasDisks = Boolean(move.progress?.disks ?? move.report?.disks);
  return (
    <Rail
      phases={RAIL.filter(
        (phase) =>
          (phase !== 'page-in' || now === 'page-in' || times.has('page-in')) &&
          (phase !== 'disks' || now === 'disks' || times.has('disks') || hasDisks),
      )}
      now={isCut ? 'pre-copy' : now}
      isDone={move.state === 'done'}
      isEnded={ended}
      note={(phase, isNow) => {
        const time = times.get(phase);
        return [
          isNow && isCut && 'link cut, reconnecting',
          isNow &&
            !isCut &&
            move.progress &&
            phase === 'pre-copy' &&
            `round ${move.progress.round}`,
          isNow && phase === 'disks' && `round ${move.progress?.disks?.round ?? 0}`,
          time !== undefined && duration(time),
        ].filter((text) => typeof text === 'string');
      }}
    />
  );
}

/** Phases in a row. Those before `now` are done, and all if `isDone`. */
export function Rail(props: {
  phases: Phase[];
  now: Phase | undefined;
  isDone: boolean;
  isEnded: boolean;
  note?: (phase: Phase, isNow: boolean) => string[];
}) {
  const { phases, now, isDone: isAllDone, isEnded } = props;
  const at = now ? phases.indexOf(now) : -1;
  return (
    <ol class="rail" aria-label="Phases">
      {phases.map((phase, index) => {
        const isDone = isAllDone || index < at;
        const isNow = !isEnded && index === at;
        const state = isNow ? 'now' : isDone ? 'done' : 'next';
        return (
          <li key={phase} class={`rail-${state}`} aria-current={isNow ? 'step' : undefined}>
            <Mark
              tone={isNow ? 'busy' : isDone ? 'ok' : 'idle'}
              shape={isNow ? 'arrow' : isDone ? 'check' : 'ring'}
            />
            <span>{phase}</span>
            {props.note?.(phase, isNow).map((text) => (
              <span key={text} class="rail-note">
                {text}
              </span>
            ))}
          </li>
        );
      })}
    </ol>
  );
}
