/** Bytes that keys send to a serial console. Pure. */

export interface Pressed {
  key: string;
  ctrlKey: boolean;
  altKey: boolean;
  metaKey: boolean;
}

const PLAIN: Record<string, string> = {
  Enter: '\r',
  Backspace: '\x7f',
  Tab: '\t',
  Escape: '\x1b',
  Delete: '\x1b[3~',
  Insert: '\x1b[2~',
  PageUp: '\x1b[5~',
  PageDown: '\x1b[6~',
  F1: '\x1bOP',
  F2: '\x1bOQ',
  F3: '\x1bOR',
  F4: '\x1bOS',
  F5: '\x1b[15~',
  F6: '\x1b[17~',
  F7: '\x1b[18~',
  F8: '\x1b[19~',
  F9: '\x1b[20~',
  F10: '\x1b[21~',
};

const CURSOR: Record<string, string> = {
  ArrowUp: 'A',
  ArrowDown: 'B',
  ArrowRight: 'C',
  ArrowLeft: 'D',
  Home: 'H',
  End: 'F',
};

/** The text that a key sends; null for keys that the browser handles. */
export function keyText(pressed: Pressed, isApplicationKeys: boolean): string | null {
  const { key } = pressed;
  if (pressed.metaKey) return null;
  const cursor = CURSOR[key];
  if (cursor) return `\x1b${isApplicationKeys ? 'O' : '['}${cursor}`;
  const plain = PLAIN[key];
  if (plain) return pressed.altKey ? `\x1b${plain}` : plain;
  if ([...key].length !== 1) return null;
  if (pressed.ctrlKey) {
    const code = key.toUpperCase().charCodeAt(0);
    if (key === ' ') return '\x00';
    return code >= 0x40 && code <= 0x5f ? String.fromCharCode(code - 0x40) : null;
  }
  return pressed.altKey ? `\x1b${key}` : key;
}
