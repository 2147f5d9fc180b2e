/** A VM's text console: one of its serial ports over a WebSocket of the manager. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { API, bearer, part } from '../api/http';
import { Act } from '../parts/basics';
import { Choice } from '../parts/filter';
import { Status } from '../parts/status';
import { Retries } from '../state/retries';
import { whyNot } from '../state/session';
import { base64Url } from '../text/base64';
import { keyText } from './keys';
import { Screen } from './screen';
import { TerminalView } from './view';

type Link = { state: 'opening' | 'open' | 'closed'; why?: string };

const LOOKS = {
  opening: { tone: 'busy', shape: 'half', text: 'connecting' },
  open: { tone: 'ok', shape: 'disc', text: 'connected' },
  closed: { tone: 'warn', shape: 'bars', text: 'not connected' },
} as const;

/** Attempts for a console that never opened: it was refused, or the manager has none. */
const NEVER_OPEN_TRIES = 2;
/** Close code of the manager: the console cannot open or continue; the reason says why. */
const CANNOT_GO_ON = 4000;

interface Of {
  vm: string;
  /** Number of its serial ports. */
  ports: number;
  isRunning: boolean;
}

export default function TextConsole({ vm, ports, isRunning }: Of) {
  const place = useRef<HTMLDivElement>(null);
  const send = useRef<(text: string) => void>(() => undefined);
  const [link, setLink] = useState<Link>({ state: 'opening' });
  const [turn, setTurn] = useState(0);
  const [chosen, setChosen] = useState(1);
  const port = Math.min(chosen, ports);
  const refused = whyNot('operator');
  useEffect(() => {
    const element = place.current;
    if (!element || !isRunning || refused) return;
    const screen = new Screen(80, 25);
    const view = new TerminalView(element, screen);
    view.draw();
    const line = new ConsoleLine(vm, port, setLink, (bytes) => {
      screen.write(bytes);
      view.plan();
    });
    screen.answer = (text) => line.send(text);
    send.current = (text) => line.send(text);
    const press = (event: KeyboardEvent) => {
      // Control-Shift-C and -V are copy and paste; Control-Shift-Tab leaves the terminal.
      if (event.ctrlKey && event.shiftKey) return;
      const text = keyText(event, screen.isApplicationKeys);
      if (text === null) return;
      event.preventDefault();
      event.stopPropagation();
      line.send(text);
    };
    const paste = (event: ClipboardEvent) => {
      event.preventDefault();
      line.send((event.clipboardData?.getData('text') ?? '').replace(/\r?\n/g, '\r'));
    };
    element.addEventListener('keydown', press);
    element.addEventListener('paste', paste);
    line.open();
    return () => {
      line.close();
      element.removeEventListener('keydown', press);
      element.removeEventListener('paste', paste);
    };
  }, [vm, port, isRunning, turn, refused]);
  if (refused) return <p class="notice">{refused}</p>;
  if (!isRunning)
    return <p class="empty">The VM is not running. Start it to use its text console.</p>;
  return (
    <div class="term-frame">
      <div class="term-bar">
        <Status look={LOOKS[link.state]} />
        {link.why && <span class="muted">{link.why}</span>}
        <span class="grow" />
        {ports > 1 && (
          <Choice
            label="Serial port"
            value={String(port)}
            values={portsOf(ports)}
            onChange={(value) => setChosen(Number(value))}
          />
        )}
        <span class="muted term-hint">Ctrl+Shift+Tab leaves the console</span>
        <Act kind="quiet" onClick={() => send.current('\x03')} name="Send Control-C">
          Ctrl+C
        </Act>
        {link.state === 'closed' && (
          <Act onClick={() => setTurn((before) => before + 1)}>Connect</Act>
        )}
      </div>
      <div
        class="term"
        ref={place}
        role="textbox"
        aria-multiline="true"
        aria-label={`Text console of ${vm}`}
        tabIndex={0}
      />
    </div>
  );
}

/** The serial ports of a VM, to choose from. */
export function portsOf(ports: number): [string, string][] {
  return Array.from({ length: ports }, (_, at) => [String(at + 1), `${at + 1} (ttyS${at})`]);
}

/** The connection. It reconnects when it breaks, so a console follows a VM that moves. */
class ConsoleLine {
  private socket: WebSocket | null = null;
  private readonly retries = new Retries();
  private timer = 0;
  private isEnded = false;
  private wasOpen = false;
  private readonly encoder = new TextEncoder();

  constructor(
    private readonly vm: string,
    private readonly port: number,
    private readonly report: (link: Link) => void,
    private readonly take: (bytes: Uint8Array) => void,
  ) {}

  open(): void {
    const scheme = location.protocol === 'https:' ? 'wss' : 'ws';
    // A manager of an older version knows only the first.
    const query = this.port > 1 ? `?port=${this.port}` : '';
    const url = `${scheme}://${location.host}${API}/vms/${part(this.vm)}/console${query}`;
    const socket = new WebSocket(url, [
      'godwit.console.v1',
      `godwit.bearer.${base64Url(bearer() ?? '')}`,
    ]);
    socket.binaryType = 'arraybuffer';
    this.socket = socket;
    this.report({ state: 'opening' });
    socket.onopen = () => {
      this.wasOpen = true;
      this.retries.succeeded();
      this.report({ state: 'open' });
    };
    socket.onmessage = ({ data }) => {
      this.take(
        typeof data === 'string' ? this.encoder.encode(data) : new Uint8Array(data as ArrayBuffer),
      );
    };
    socket.onclose = (event) => this.closed(event.code, event.reason);
  }

  send(text: string): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(this.encoder.encode(text));
  }

  close(): void {
    this.isEnded = true;
    clearTimeout(this.timer);
    this.socket?.close();
  }

  private closed(code: number, reason: string): void {
    if (this.isEnded) return;
    const tries = this.retries.failed();
    if (code === CANNOT_GO_ON || (!this.wasOpen && tries >= NEVER_OPEN_TRIES)) {
      this.report({
        state: 'closed',
        why: reason || 'The manager refused the console or does not support text consoles.',
      });
      return;
    }
    this.report({ state: 'opening', why: reason || 'Connection lost, reconnecting.' });
    this.timer = window.setTimeout(() => this.open(), this.retries.waitMs(Math.random()));
  }
}
