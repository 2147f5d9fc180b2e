/** A terminal's screen: bytes of a guest's serial console in, lines of cells out. No I/O, no page.
 *
 * Implements what a serial console needs of a VT220 and of xterm: cursor, erasing, scrolling
 * regions, inserting and deleting, the two screens, 16 and 256 colours, UTF-8. Unknown sequences
 * are dropped whole. */

export interface Cell {
  text: string;
  /** Attributes and colours, packed as in `Style`. */
  style: number;
}

/**
 * Bits of a style. Bit 0: has a foreground; 1–8: its colour. 9–17: background. Then the
 * attributes.
 */
export const Style = {
  plain: 0,
  bold: 1 << 18,
  underline: 1 << 19,
  inverse: 1 << 20,
  faint: 1 << 21,
} as const;

export const foreground = (style: number): number | null =>
  style & 1 ? (style >> 1) & 0xff : null;
export const background = (style: number): number | null =>
  (style >> 9) & 1 ? (style >> 10) & 0xff : null;
const withForeground = (style: number, colour: number | null) =>
  (style & ~0x1ff) | (colour === null ? 0 : 1 | (colour << 1));
const withBackground = (style: number, colour: number | null) =>
  (style & ~(0x1ff << 9)) | (colour === null ? 0 : (1 << 9) | (colour << 10));

const MOST_HISTORY = 2000;
const MOST_PARAMETER = 9999;
const BLANK: Cell = { text: ' ', style: 0 };

export type Line = Cell[];

interface Saved {
  row: number;
  column: number;
  style: number;
}

type State = 'text' | 'escape' | 'csi' | 'string' | 'string-end' | 'skip';

export class Screen {
  lines: Line[] = [];
  history: Line[] = [];
  row = 0;
  column = 0;
  isCursorShown = true;
  /** Whether the arrow keys send ESC O instead of ESC [. */
  isApplicationKeys = false;
  /** Sends the terminal's answer to a query of the guest. */
  answer: (text: string) => void = () => undefined;

  private style = 0;
  private top = 0;
  private bottom: number;
  private wraps = false;
  private saved: Saved = { row: 0, column: 0, style: 0 };
  private other: Line[] | null = null;
  private state: State = 'text';
  private parameters = '';
  private readonly decoder = new TextDecoder();

  constructor(
    public columns = 80,
    public rows = 24,
  ) {
    this.bottom = rows - 1;
    this.lines = this.blankLines(rows);
  }

  resize(columns: number, rows: number): void {
    for (const line of this.lines) {
      while (line.length < columns) line.push(BLANK);
      line.length = columns;
    }
    while (this.lines.length > rows) {
      const line = this.lines.shift();
      if (line && !this.other) this.remember(line);
      this.row = Math.max(0, this.row - 1);
    }
    while (this.lines.length < rows) this.lines.push(this.blankLine(columns));
    this.columns = columns;
    this.rows = rows;
    this.top = 0;
    this.bottom = rows - 1;
    this.column = Math.min(this.column, columns - 1);
    this.row = Math.min(this.row, rows - 1);
    this.wraps = false;
    this.other = this.other ? this.blankLines(rows) : null;
  }

  write(bytes: Uint8Array): void {
    for (const letter of this.decoder.decode(bytes, { stream: true })) this.take(letter);
  }

  private take(letter: string): void {
    const code = letter.codePointAt(0) ?? 0;
    switch (this.state) {
      case 'text':
        if (code < 0x20 || code === 0x7f) this.control(code);
        else this.put(letter);
        return;
      case 'escape':
        this.state = 'text';
        this.escape(letter);
        return;
      case 'csi':
        if (code >= 0x40 && code <= 0x7e) {
          this.state = 'text';
          this.csi(letter, this.parameters);
        } else if (code < 0x20) this.control(code);
        else if (this.parameters.length < 64) this.parameters += letter;
        return;
      case 'string':
        // A title or another string, up to BEL or ESC \.
        if (code === 0x07) this.state = 'text';
        else if (code === 0x1b) this.state = 'string-end';
        return;
      case 'string-end':
        this.state = letter === '\\' ? 'text' : 'string';
        return;
      case 'skip':
        this.state = 'text';
        return;
    }
  }

  private control(code: number): void {
    switch (code) {
      case 0x08:
        this.column = Math.max(0, this.column - 1);
        this.wraps = false;
        break;
      case 0x09:
        this.column = Math.min(this.columns - 1, (this.column | 7) + 1);
        break;
      case 0x0a:
      case 0x0b:
      case 0x0c:
        this.feed();
        break;
      case 0x0d:
        this.column = 0;
        this.wraps = false;
        break;
      case 0x1b:
        this.state = 'escape';
        break;
    }
  }

  private put(letter: string): void {
    if (this.wraps) {
      this.column = 0;
      this.feed();
    }
    const line = this.lines[this.row];
    if (line) line[this.column] = { text: letter, style: this.style };
    if (this.column + 1 < this.columns) this.column += 1;
    else this.wraps = true;
  }

  /** Moves to the next line; at the end of the region, scrolls the region up. */
  private feed(): void {
    this.wraps = false;
    if (this.row === this.bottom) this.scrollUp(1);
    else if (this.row < this.rows - 1) this.row += 1;
  }

  private scrollUp(count: number): void {
    for (let turn = 0; turn < Math.min(count, this.rows); turn += 1) {
      const [gone] = this.lines.splice(this.top, 1);
      if (gone && this.top === 0 && !this.other) this.remember(gone);
      this.lines.splice(this.bottom, 0, this.blankLine());
    }
  }

  private scrollDown(count: number): void {
    for (let turn = 0; turn < Math.min(count, this.rows); turn += 1) {
      this.lines.splice(this.bottom, 1);
      this.lines.splice(this.top, 0, this.blankLine());
    }
  }

  private remember(line: Line): void {
    this.history.push(line);
    if (this.history.length > MOST_HISTORY)
      this.history.splice(0, this.history.length - MOST_HISTORY);
  }

  private escape(letter: string): void {
    switch (letter) {
      case '[':
        this.parameters = '';
        this.state = 'csi';
        break;
      case ']':
      case 'P':
      case '_':
      case '^':
        this.state = 'string';
        break;
      case '(':
      case ')':
      case '#':
      case '%':
        this.state = 'skip';
        break;
      case '7':
        this.saved = { row: this.row, column: this.column, style: this.style };
        break;
      case '8':
        this.goTo(this.saved.row, this.saved.column);
        this.style = this.saved.style;
        break;
      case 'D':
        this.feed();
        break;
      case 'E':
        this.column = 0;
        this.feed();
        break;
      case 'M':
        if (this.row === this.top) this.scrollDown(1);
        else this.row = Math.max(0, this.row - 1);
        break;
      case 'c':
        this.reset();
        break;
    }
  }

  private reset(): void {
    this.lines = this.blankLines(this.rows);
    this.other = null;
    this.style = 0;
    this.top = 0;
    this.bottom = this.rows - 1;
    this.isCursorShown = true;
    this.isApplicationKeys = false;
    this.goTo(0, 0);
  }

  private csi(final: string, text: string): void {
    const isPrivate = text.startsWith('?');
    const numbers = text
      .replace(/^[?>=]/, '')
      .split(/[;:]/)
      .map((part) => Math.min(MOST_PARAMETER, Number.parseInt(part, 10) || 0));
    const first = numbers[0] ?? 0;
    const count = Math.max(1, first);
    if (isPrivate) {
      if (final === 'h' || final === 'l')
        for (const mode of numbers) this.mode(mode, final === 'h');
      return;
    }
    if (/^[>=]/.test(text)) return;
    switch (final) {
      case 'A':
        this.goTo(Math.max(this.row >= this.top ? this.top : 0, this.row - count), this.column);
        break;
      case 'B':
      case 'e':
        this.goTo(
          Math.min(this.row <= this.bottom ? this.bottom : this.rows - 1, this.row + count),
          this.column,
        );
        break;
      case 'C':
      case 'a':
        this.goTo(this.row, this.column + count);
        break;
      case 'D':
        this.goTo(this.row, this.column - count);
        break;
      case 'E':
        this.goTo(this.row + count, 0);
        break;
      case 'F':
        this.goTo(this.row - count, 0);
        break;
      case 'G':
      case '`':
        this.goTo(this.row, count - 1);
        break;
      case 'd':
        this.goTo(count - 1, this.column);
        break;
      case 'H':
      case 'f':
        this.goTo(count - 1, Math.max(1, numbers[1] ?? 1) - 1);
        break;
      case 'J':
        this.eraseScreen(first);
        break;
      case 'K':
        this.eraseLine(first);
        break;
      case 'L':
      case 'M':
        this.shiftLines(count, final === 'L');
        break;
      case 'P':
        this.shiftCells(count, false);
        break;
      case '@':
        this.shiftCells(count, true);
        break;
      case 'X':
        this.fill(this.row, this.column, this.column + count);
        break;
      case 'S':
        this.scrollUp(count);
        break;
      case 'T':
        this.scrollDown(count);
        break;
      case 'm':
        this.rendition(numbers);
        break;
      case 'r':
        this.region(count - 1, (numbers[1] || this.rows) - 1);
        break;
      case 's':
        this.saved = { row: this.row, column: this.column, style: this.style };
        break;
      case 'u':
        this.goTo(this.saved.row, this.saved.column);
        break;
      case 'n':
        if (first === 6) this.answer(`\x1b[${this.row + 1};${this.column + 1}R`);
        else if (first === 5) this.answer('\x1b[0n');
        break;
      case 'c':
        this.answer('\x1b[?62;22c');
        break;
    }
  }

  private mode(mode: number, isSet: boolean): void {
    if (mode === 1) this.isApplicationKeys = isSet;
    else if (mode === 25) this.isCursorShown = isSet;
    else if (mode === 47 || mode === 1047 || mode === 1049) this.swap(isSet);
  }

  /** Switches to the second screen, which has no history, or back. */
  private swap(toOther: boolean): void {
    if (toOther === (this.other !== null)) return;
    if (toOther) {
      this.saved = { row: this.row, column: this.column, style: this.style };
      this.other = this.lines;
      this.lines = this.blankLines(this.rows);
    } else if (this.other) {
      this.lines = this.other;
      this.other = null;
      this.goTo(this.saved.row, this.saved.column);
    }
  }

  private region(top: number, bottom: number): void {
    if (top >= bottom || bottom >= this.rows) {
      this.top = 0;
      this.bottom = this.rows - 1;
    } else {
      this.top = top;
      this.bottom = bottom;
    }
    this.goTo(0, 0);
  }

  private goTo(row: number, column: number): void {
    this.row = Math.min(this.rows - 1, Math.max(0, row));
    this.column = Math.min(this.columns - 1, Math.max(0, column));
    this.wraps = false;
  }

  private eraseScreen(how: number): void {
    if (how === 0) {
      this.eraseLine(0);
      for (let row = this.row + 1; row < this.rows; row += 1) this.fill(row, 0, this.columns);
    } else if (how === 1) {
      this.eraseLine(1);
      for (let row = 0; row < this.row; row += 1) this.fill(row, 0, this.columns);
    } else {
      for (let row = 0; row < this.rows; row += 1) this.fill(row, 0, this.columns);
      if (how === 3) this.history = [];
    }
  }

  private eraseLine(how: number): void {
    if (how === 0) this.fill(this.row, this.column, this.columns);
    else if (how === 1) this.fill(this.row, 0, this.column + 1);
    else this.fill(this.row, 0, this.columns);
  }

  private fill(row: number, from: number, to: number): void {
    const line = this.lines[row];
    if (!line) return;
    // Erased cells keep only the background.
    const cell: Cell = { text: ' ', style: this.style & (0x1ff << 9) };
    for (let column = from; column < Math.min(to, this.columns); column += 1) line[column] = cell;
    this.wraps = false;
  }

  private shiftLines(count: number, isInsert: boolean): void {
    if (this.row < this.top || this.row > this.bottom) return;
    for (let turn = 0; turn < Math.min(count, this.rows); turn += 1) {
      this.lines.splice(isInsert ? this.bottom : this.row, 1);
      this.lines.splice(isInsert ? this.row : this.bottom, 0, this.blankLine());
    }
  }

  private shiftCells(count: number, isInsert: boolean): void {
    const line = this.lines[this.row];
    if (!line) return;
    const many = Math.min(count, this.columns - this.column);
    const blanks = Array.from({ length: many }, () => BLANK);
    if (isInsert) {
      line.splice(this.column, 0, ...blanks);
      line.length = this.columns;
    } else {
      line.splice(this.column, many);
      line.push(...blanks);
    }
  }

  private rendition(numbers: number[]): void {
    for (let at = 0; at < numbers.length; at += 1) {
      const one = numbers[at] ?? 0;
      if (one === 0) this.style = 0;
      else if (one === 1) this.style |= Style.bold;
      else if (one === 2) this.style |= Style.faint;
      else if (one === 4) this.style |= Style.underline;
      else if (one === 7) this.style |= Style.inverse;
      else if (one === 22) this.style &= ~(Style.bold | Style.faint);
      else if (one === 24) this.style &= ~Style.underline;
      else if (one === 27) this.style &= ~Style.inverse;
      else if (one >= 30 && one <= 37) this.style = withForeground(this.style, one - 30);
      else if (one === 39) this.style = withForeground(this.style, null);
      else if (one >= 40 && one <= 47) this.style = withBackground(this.style, one - 40);
      else if (one === 49) this.style = withBackground(this.style, null);
      else if (one >= 90 && one <= 97) this.style = withForeground(this.style, one - 90 + 8);
      else if (one >= 100 && one <= 107) this.style = withBackground(this.style, one - 100 + 8);
      else if (one === 38 || one === 48) {
        const [colour, used] = readColour(numbers, at + 1);
        if (colour !== null)
          this.style = (one === 38 ? withForeground : withBackground)(this.style, colour);
        at += used;
      }
    }
  }

  private blankLine(columns = this.columns): Line {
    return Array.from({ length: columns }, () => BLANK);
  }

  private blankLines(rows: number): Line[] {
    return Array.from({ length: rows }, () => this.blankLine());
  }
}

/**
 * Parses a colour: `5;n` is colour n, `2;r;g;b` the nearest of the cube. Also returns the count of
 * numbers read.
 */
function readColour(numbers: number[], at: number): [number | null, number] {
  if (numbers[at] === 5) return [(numbers[at + 1] ?? 0) & 0xff, 2];
  if (numbers[at] === 2) {
    const level = (value: number | undefined) => Math.round((Math.min(255, value ?? 0) / 255) * 5);
    return [
      16 + 36 * level(numbers[at + 1]) + 6 * level(numbers[at + 2]) + level(numbers[at + 3]),
      4,
    ];
  }
  return [null, 0];
}
