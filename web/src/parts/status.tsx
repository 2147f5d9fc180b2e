/** States as a shape, a colour and a word. Colour alone never carries the meaning. */
import type { HostSummary, Move, Verdict, VmSummary } from '../api/types';

export type Tone = 'ok' | 'busy' | 'warn' | 'bad' | 'idle';
export type Shape =
  | 'disc'
  | 'ring'
  | 'half'
  | 'bars'
  | 'arrow'
  | 'check'
  | 'cross'
  | 'triangle'
  | 'square'
  | 'query'
  | 'slash';

const SHAPES: Record<Shape, string> = {
  disc: 'M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9Z',
  ring: 'M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9Zm0 1.6a2.9 2.9 0 1 1 0 5.8a2.9 2.9 0 1 1 0-5.8Z',
  half: 'M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9Zm0 1.6a2.9 2.9 0 0 1 0 5.8Z',
  bars: 'M2.5 2h2.5v8h-2.5ZM7 2h2.5v8h-2.5Z',
  arrow: 'M1 5h5.5v-2.8L11 6l-4.5 3.8V7H1Z',
  check: 'M1.2 6.3l1.4-1.4 2.1 2.1 4.7-4.9 1.4 1.4-6.1 6.4Z',
  cross:
    'M2.9 1.5 6 4.6l3.1-3.1 1.4 1.4L7.4 6l3.1 3.1-1.4 1.4L6 7.4l-3.1 3.1-1.4-1.4L4.6 6 1.5 2.9Z',
  triangle: 'M6 1 11.4 10.6H.6ZM5.3 4.4v3h1.4v-3ZM5.3 8.2v1.3h1.4V8.2Z',
  square: 'M2 2h8v8H2Zm1.6 1.6v4.8h4.8V3.6Z',
  query:
    'M6 1.2c1.8 0 3.1 1.1 3.1 2.6 0 1.2-.7 1.8-1.4 2.3-.6.4-.9.7-.9 1.4H5.2c0-1.5.700-2 1.4-2.5.500-.4.8-.6.8-1.2 0-.7-.6-1.1-1.4-1.1s-1.4.400-1.5 1.3H2.9C3 2.3 4.2 1.2 6 1.2ZM5.2 8.6h1.6v1.7H5.2Z',
  slash: 'M6 1.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9ZM3.4 5.2h5.2v1.6H3.4Z',
};

export interface Look {
  tone: Tone;
  shape: Shape;
  text: string;
  /** What it means, for a tool tip. */
  title?: string;
}

const UNKNOWN: Look = { tone: 'idle', shape: 'query', text: 'unknown' };

export function Mark({ tone, shape }: { tone: Tone; shape: Shape }) {
  return (
    <svg class={`mark tone-${tone}`} viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
      <path d={SHAPES[shape]} fill-rule="evenodd" />
    </svg>
  );
}

export function Status({ look, title }: { look: Look; title?: string | undefined }) {
  return (
    <span class="status" title={title ?? look.title}>
      <Mark tone={look.tone} shape={look.shape} />
      <span class={`status-text tone-${look.tone}`}>{look.text}</span>
    </span>
  );
}

const VM_LOOKS: Record<VmSummary['state'], Look> = {
  running: { tone: 'ok', shape: 'disc', text: 'running' },
  stopped: { tone: 'idle', shape: 'ring', text: 'stopped' },
  starting: { tone: 'busy', shape: 'half', text: 'starting' },
  stopping: { tone: 'busy', shape: 'half', text: 'stopping' },
  paused: { tone: 'warn', shape: 'bars', text: 'paused' },
  'migrating-out': { tone: 'busy', shape: 'arrow', text: 'migrating' },
  'migrating-in': { tone: 'busy', shape: 'arrow', text: 'migrating in' },
  failed: { tone: 'bad', shape: 'cross', text: 'failed' },
  suspended: { tone: 'idle', shape: 'bars', text: 'suspended' },
  template: { tone: 'idle', shape: 'square', text: 'template' },
};

export function vmLook(vm: VmSummary): Look {
  if (vm.also_runs_at?.length) return { tone: 'bad', shape: 'triangle', text: 'duplicate' };
  if (vm.in_doubt) return { tone: 'bad', shape: 'triangle', text: 'in doubt' };
  const look = VM_LOOKS[vm.state] ?? { tone: 'idle', shape: 'query', text: vm.state };
  return vm.is_current ? look : { ...UNKNOWN, title: `${look.text} when its host last responded` };
}

export function hostLook(host: HostSummary): Look {
  if (host.state === 'away') return { tone: 'bad', shape: 'cross', text: 'not responding' };
  if (host.state === 'unknown') return { tone: 'idle', shape: 'query', text: 'connecting' };
  if (host.maintenance) return { tone: 'warn', shape: 'square', text: 'maintenance' };
  if (host.lacks_of_baseline?.length)
    return { tone: 'warn', shape: 'triangle', text: 'below baseline' };
  return { tone: 'ok', shape: 'disc', text: 'up' };
}

const MOVE_LOOKS: Record<Move['state'], Look> = {
  waiting: { tone: 'idle', shape: 'ring', text: 'waiting' },
  starting: { tone: 'busy', shape: 'half', text: 'starting' },
  running: { tone: 'busy', shape: 'arrow', text: 'running' },
  done: { tone: 'ok', shape: 'check', text: 'done' },
  failed: { tone: 'bad', shape: 'cross', text: 'failed' },
  cancelled: { tone: 'idle', shape: 'slash', text: 'cancelled' },
};

export function moveLook(move: Move): Look {
  return MOVE_LOOKS[move.state] ?? { tone: 'idle', shape: 'query', text: move.state };
}

const VERDICT_LOOKS: Record<Verdict, Look> = {
  pass: { tone: 'ok', shape: 'check', text: 'pass' },
  warn: { tone: 'warn', shape: 'triangle', text: 'warn' },
  unknown: { tone: 'idle', shape: 'query', text: 'unknown' },
  fail: { tone: 'bad', shape: 'cross', text: 'fail' },
};

export const verdictLook = (verdict: Verdict): Look => VERDICT_LOOKS[verdict];

const HEALTH_LOOKS: Record<string, Look> = {
  ok: { tone: 'ok', shape: 'disc', text: 'ok' },
  slow: { tone: 'warn', shape: 'half', text: 'slow' },
  full: { tone: 'bad', shape: 'triangle', text: 'full' },
  'read-only': { tone: 'warn', shape: 'slash', text: 'read-only' },
  'no-answer': { tone: 'bad', shape: 'cross', text: 'not responding' },
};

/** Health of a datastore; `isMaintained`: it takes no new disks. */
export function healthLook(health: string | null | undefined, isMaintained = false): Look {
  const look = HEALTH_LOOKS[health ?? ''] ?? UNKNOWN;
  if (!isMaintained) return look;
  const text = health && health !== 'ok' ? `maintenance, ${look.text}` : 'maintenance';
  return { tone: 'warn', shape: 'square', text };
}

const DRAIN_LOOKS: Record<string, Look> = {
  planned: { tone: 'idle', shape: 'ring', text: 'planned' },
  running: { tone: 'busy', shape: 'arrow', text: 'running' },
  done: { tone: 'ok', shape: 'check', text: 'done' },
  cancelled: { tone: 'idle', shape: 'slash', text: 'cancelled' },
  undoing: { tone: 'busy', shape: 'arrow', text: 'undoing' },
  undone: { tone: 'idle', shape: 'slash', text: 'undone' },
  'would-go': { tone: 'idle', shape: 'arrow', text: 'will move' },
  going: { tone: 'busy', shape: 'arrow', text: 'moving' },
  gone: { tone: 'ok', shape: 'check', text: 'moved' },
  stays: { tone: 'warn', shape: 'square', text: 'stays' },
  back: { tone: 'idle', shape: 'slash', text: 'moved back' },
  waiting: { tone: 'idle', shape: 'ring', text: 'waiting' },
  moving: { tone: 'busy', shape: 'arrow', text: 'moving' },
  moved: { tone: 'ok', shape: 'check', text: 'moved' },
};

export const drainLook = (state: string): Look =>
  DRAIN_LOOKS[state] ?? { tone: 'idle', shape: 'query', text: state };
