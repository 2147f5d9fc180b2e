/** A VM's screen, with its keyboard and pointer. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { Act } from '../parts/basics';
import { Status } from '../parts/status';
import { whyNot } from '../state/session';
import { type LinkState, ScreenLink } from './link';

const LOOKS = {
  opening: { tone: 'busy', shape: 'half', text: 'connecting' },
  open: { tone: 'ok', shape: 'disc', text: 'connected' },
  closed: { tone: 'warn', shape: 'bars', text: 'not connected' },
} as const;

export default function VmScreen({ vm, isRunning }: { vm: string; isRunning: boolean }) {
  const frame = useRef<HTMLDivElement>(null);
  const place = useRef<HTMLDivElement>(null);
  const last = useRef<HTMLCanvasElement>(null);
  const link = useRef<ScreenLink | null>(null);
  const [state, setState] = useState<LinkState>({ state: 'opening' });
  const [turn, setTurn] = useState(0);
  const [scales, setScales] = useState(true);
  const refused = whyNot('operator');
  useEffect(() => {
    if (!place.current || !last.current || !isRunning || refused) return;
    const opened = new ScreenLink(vm, place.current, last.current, setState);
    link.current = opened;
    opened.open();
    return () => opened.close();
  }, [vm, isRunning, turn, refused]);
  useEffect(() => link.current?.scale(scales), [scales, turn]);
  useEffect(() => {
    const element = frame.current;
    const press = (event: KeyboardEvent) => {
      if (event.key !== 'Tab' || !event.ctrlKey || !event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation();
      link.current?.leave();
      element?.querySelector<HTMLElement>('.term-bar button')?.focus();
    };
    element?.addEventListener('keydown', press, true);
    return () => element?.removeEventListener('keydown', press, true);
  }, [isRunning, refused]);
  if (refused) return <p class="notice">{refused}</p>;
  if (!isRunning) return <p class="empty">The VM is not running. Start it to see its screen.</p>;
  return (
    <div class="term-frame" ref={frame}>
      <div class="term-bar">
        <Status look={LOOKS[state.state]} />
        {state.why && <span class="muted">{state.why}</span>}
        <span class="grow" />
        <span class="muted term-hint">Ctrl+Shift+Tab leaves the screen</span>
        <label class="tick">
          <input
            type="checkbox"
            checked={scales}
            onChange={(event) => setScales(event.currentTarget.checked)}
          />
          <span>Fit to window</span>
        </label>
        <Act
          kind="quiet"
          name="Send Control-Alt-Delete"
          onClick={() => link.current?.sendCtrlAltDel()}
        >
          Ctrl+Alt+Del
        </Act>
        <Act kind="quiet" onClick={() => void frame.current?.requestFullscreen()}>
          Full screen
        </Act>
        {state.state === 'closed' && (
          <Act onClick={() => setTurn((before) => before + 1)}>Connect</Act>
        )}
      </div>
      <div class="screen" role="application" aria-label={`Screen of ${vm}`}>
        <canvas class={scales ? 'screen-last' : 'screen-last screen-whole'} ref={last} hidden />
        <div class="screen-place" ref={place} />
      </div>
    </div>
  );
}
