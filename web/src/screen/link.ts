/** A viewer's connection to a VM's screen: RFB over a WebSocket of the manager, drawn by noVNC. */
import RFB from '@novnc/novnc';
import { API, bearer, part } from '../api/http';
import { base64Url } from '../text/base64';
import { Attempts } from './attempts';

export type LinkState = { state: 'opening' | 'open' | 'closed'; why?: string };

/** Time after which a new connection has drawn its first picture over the last one. */
const FIRST_PICTURE_MS = 400;

export class ScreenLink {
  private readonly attempts = new Attempts();
  private rfb: RFB | null = null;
  private timer = 0;
  private isEnded = false;
  private scales = true;

  /** `place` gets noVNC's canvas; `last` shows the last picture while there is no connection. */
  constructor(
    private readonly vm: string,
    private readonly place: HTMLElement,
    private readonly last: HTMLCanvasElement,
    private readonly report: (state: LinkState) => void,
  ) {}

  open(): void {
    const scheme = location.protocol === 'https:' ? 'wss' : 'ws';
    const url = `${scheme}://${location.host}${API}/vms/${part(this.vm)}/screen`;
    const socket = new WebSocket(url, [
      'godwit.screen.v1',
      `godwit.bearer.${base64Url(bearer() ?? '')}`,
    ]);
    // Before noVNC's own, which removes its canvas.
    socket.addEventListener('close', (event) => this.closed(event.code, event.reason));
    const rfb = new RFB(this.place, socket, { shared: true });
    rfb.background = 'transparent';
    rfb.scaleViewport = this.scales;
    rfb.addEventListener('connect', () => {
      this.attempts.opened();
      this.report({ state: 'open' });
      rfb.focus({ preventScroll: true });
      window.setTimeout(() => {
        if (this.rfb === rfb) this.last.hidden = true;
      }, FIRST_PICTURE_MS);
    });
    this.rfb = rfb;
  }

  close(): void {
    this.isEnded = true;
    clearTimeout(this.timer);
    this.rfb?.disconnect();
    this.rfb = null;
  }

  /** Shows the picture in the size of the page, or in its own. */
  scale(scales: boolean): void {
    this.scales = scales;
    if (this.rfb) this.rfb.scaleViewport = scales;
  }

  sendCtrlAltDel(): void {
    this.rfb?.sendCtrlAltDel();
    this.rfb?.focus();
  }

  /** Lets the keyboard go: the guest sees its keys released. */
  leave(): void {
    window.dispatchEvent(new Event('blur'));
    this.rfb?.blur();
  }

  private closed(code: number, reason: string): void {
    if (this.isEnded) return;
    this.keepPicture();
    this.rfb = null;
    const next = this.attempts.closed(code, reason, Math.random());
    if (next.waitMs === null) {
      this.report({ state: 'closed', why: next.why });
      return;
    }
    this.report({ state: 'opening', why: next.why });
    this.timer = window.setTimeout(() => this.open(), next.waitMs);
  }

  private keepPicture(): void {
    const shown = this.place.querySelector('canvas');
    const to = this.last.getContext('2d');
    if (!shown || !to || shown.width === 0 || shown.height === 0) return;
    this.last.width = shown.width;
    this.last.height = shown.height;
    to.drawImage(shown, 0, 0);
    this.last.hidden = false;
  }
}
