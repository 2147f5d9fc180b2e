/** Keys of pages: single keys, and the way from the filter through the rows of a table. */
import { useLayoutEffect } from 'preact/hooks';

const STEPS: Record<string, number> = {
  ArrowDown: 1,
  ArrowUp: -1,
  PageDown: 15,
  PageUp: -15,
  Home: Number.NEGATIVE_INFINITY,
  End: Number.POSITIVE_INFINITY,
};

/** Kinds of `<input>` that take no text: keys of the page work in them. */
const NO_TEXT = new Set(['checkbox', 'radio', 'button', 'submit']);

function isWriting(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return !NO_TEXT.has(target.type);
  return target.isContentEditable || /^(TEXTAREA|SELECT)$/.test(target.tagName);
}

/**
 * Runs an action on a key while the page is shown and nothing is written. If the action returns
 * false, the key keeps its meaning in the browser.
 */
export function useKey(key: string, run: () => unknown): void {
  // Not a deferred effect: a key right after a change meets the action of that change.
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.key !== key || event.defaultPrevented) return;
      if (event.ctrlKey || event.metaKey || event.altKey || isWriting(event.target)) return;
      if (document.querySelector('dialog[open]')) return;
      if (run() !== false) event.preventDefault();
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  });
}

/** Whether the focus is on nothing that has keys of its own. */
const isIdle = (element: Element | null) =>
  element === null || /^(BODY|MAIN|H1)$/.test(element.tagName);

/** The arrow keys go to the rows of a page's table from the page's heading too. */
export function useArrowsFromHeading(isOfPage: boolean, rowPx: number): void {
  useKey('ArrowDown', () => {
    if (!isOfPage || !isIdle(document.activeElement)) return false;
    enterRows(rowPx);
    return true;
  });
}

/** The table that the filter and the arrow keys of the page belong to. */
const tableOfPage = () => document.querySelector<HTMLElement>('main .grid');

/** Moves between the rows of a table with the arrow keys. */
export function walk(event: KeyboardEvent, table: HTMLElement | null, rowPx: number): void {
  const step = STEPS[event.key];
  if (!step || !table || isWriting(event.target) || event.ctrlKey || event.metaKey || event.altKey)
    return;
  const row = (event.target as HTMLElement).closest<HTMLElement>('[data-at]');
  const at = row ? Number(row.dataset.at) : null;
  event.preventDefault();
  if (at === 0 && event.key === 'ArrowUp') {
    document.getElementById('filter')?.focus();
    return;
  }
  const from = at ?? (step > 0 && Number.isFinite(step) ? -1 : 0);
  focusRow(table, from + step, rowPx);
}

/** Goes from the filter to the first row. */
export function enterRows(rowPx: number): void {
  const table = tableOfPage();
  if (table) focusRow(table, 0, rowPx);
}

/** Opens the first row. */
export function openFirstRow(): void {
  tableOfPage()?.querySelector<HTMLElement>('[data-at="0"] a')?.click();
}

/** The row's first link gets the focus, so that Enter opens it; else the row itself. */
function focusRow(table: HTMLElement, wanted: number, rowPx: number): void {
  const count = Number(table.getAttribute('aria-rowcount')) - 1;
  if (count <= 0) return;
  const at = Math.min(count - 1, Math.max(0, wanted));
  const above = at * rowPx;
  const room = table.clientHeight - rowPx * 2;
  if (above < table.scrollTop) table.scrollTop = above;
  else if (above > table.scrollTop + room) table.scrollTop = above - room;
  const focus = () => {
    const row = table.querySelector<HTMLElement>(`[data-at="${at}"]`);
    const link = row?.querySelector<HTMLElement>('a, button');
    (link ?? row)?.focus({ preventScroll: true });
    return row !== null;
  };
  // A row far away is drawn in the first of two frames.
  if (!focus()) requestAnimationFrame(() => requestAnimationFrame(focus));
}
