/** Draws a terminal screen as selectable text in the page. */
import { background, type Cell, foreground, type Line, type Screen, Style } from './screen';

export class TerminalView {
  private isPlanned = false;
  private drawn: string[] = [];
  private drawnHistory = 0;
  private readonly past: HTMLElement;
  private readonly now: HTMLElement;

  constructor(
    private readonly place: HTMLElement,
    private readonly screen: Screen,
  ) {
    this.past = document.createElement('div');
    this.now = document.createElement('div');
    place.replaceChildren(this.past, this.now);
  }

  plan(): void {
    if (this.isPlanned) return;
    this.isPlanned = true;
    requestAnimationFrame(() => this.draw());
  }

  draw(): void {
    this.isPlanned = false;
    const { place, screen } = this;
    const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    this.drawHistory();
    while (this.now.children.length > screen.lines.length) this.now.lastElementChild?.remove();
    screen.lines.forEach((line, row) => {
      const cursor = screen.isCursorShown && row === screen.row ? screen.column : -1;
      const key = lineKey(line, cursor);
      if (this.drawn[row] === key && this.now.children[row]) return;
      this.drawn[row] = key;
      const element = lineElement(line, cursor);
      const old = this.now.children[row];
      if (old) old.replaceWith(element);
      else this.now.append(element);
    });
    if (isAtEnd) place.scrollTop = place.scrollHeight;
  }

  private drawHistory(): void {
    const { history } = this.screen;
    const isOther =
      history.length < this.drawnHistory ||
      (history.length === this.drawnHistory && history.length >= 2000);
    if (isOther) {
      this.past.replaceChildren();
      this.drawnHistory = 0;
    }
    if (this.drawnHistory === history.length) return;
    this.past.append(...history.slice(this.drawnHistory).map((line) => lineElement(line, -1)));
    this.drawnHistory = history.length;
  }
}

function lineKey(line: Line, cursor: number): string {
  let key = `${cursor}|`;
  for (const cell of line) key += cell.text + cell.style;
  return key;
}

function lineElement(line: Line, cursor: number): HTMLElement {
  const element = document.createElement('div');
  let end = line.length;
  while (end > cursor + 1 && end > 0 && isBlank(line[end - 1])) end -= 1;
  for (let at = 0; at < end; ) {
    const style = line[at]?.style ?? 0;
    let to = at + 1;
    if (at !== cursor) while (to < end && to !== cursor && line[to]?.style === style) to += 1;
    const text = line
      .slice(at, to)
      .map((cell) => cell.text)
      .join('');
    element.append(piece(text, style, at === cursor));
    at = to;
  }
  if (end === 0) element.append('\u200b');
  return element;
}

const isBlank = (cell: Cell | undefined) =>
  cell === undefined || (cell.text === ' ' && cell.style === 0);

function piece(text: string, style: number, isCursor: boolean): Node {
  if (style === 0 && !isCursor) return document.createTextNode(text);
  const span = document.createElement('span');
  span.textContent = text;
  const names: string[] = [];
  if (isCursor) names.push('term-cursor');
  if (style & Style.bold) names.push('term-bold');
  if (style & Style.faint) names.push('term-faint');
  if (style & Style.underline) names.push('term-underline');
  if (style & Style.inverse) names.push('term-inverse');
  colour(span, names, 'f', foreground(style));
  colour(span, names, 'b', background(style));
  span.className = names.join(' ');
  return span;
}

function colour(span: HTMLElement, names: string[], ground: 'f' | 'b', index: number | null): void {
  if (index === null) return;
  if (index < 16) names.push(`term-${ground}${index}`);
  else if (ground === 'f') span.style.color = cube(index);
  else span.style.backgroundColor = cube(index);
}

/** Colours 16 to 255 of xterm's palette. */
function cube(index: number): string {
  if (index >= 232) {
    const grey = 8 + (index - 232) * 10;
    return `rgb(${grey},${grey},${grey})`;
  }
  const at = index - 16;
  const level = (value: number) => (value === 0 ? 0 : 55 + value * 40);
  return `rgb(${level(Math.floor(at / 36))},${level(Math.floor(at / 6) % 6)},${level(at % 6)})`;
}
