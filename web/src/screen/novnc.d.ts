/** The part of noVNC (1.7) that the console uses: docs/API.md of its package. */
declare module '@novnc/novnc' {
  export interface RfbOptions {
    shared?: boolean;
    wsProtocols?: string[];
  }

  export default class RFB extends EventTarget {
    constructor(target: HTMLElement, channel: WebSocket, options?: RfbOptions);
    scaleViewport: boolean;
    clipViewport: boolean;
    viewOnly: boolean;
    background: string;
    disconnect(): void;
    focus(options?: FocusOptions): void;
    blur(): void;
    sendCtrlAltDel(): void;
  }
}
