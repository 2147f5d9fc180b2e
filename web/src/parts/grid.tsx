/**
 * A table of any length: only visible rows are in the page. Without room, the least needed columns
 * are hidden.
 */
import type { ComponentChildren } from 'preact';
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';

export interface Column<T> {
  id: string;
  title: string;
  /** A CSS grid track. */
  track: string;
  isNumber?: boolean;
  /** Hidden where the table is narrower than this, in pixels. */
  from?: number;
  cell: (row: T) => ComponentChildren;
  compare?: (a: T, b: T) => number;
}

export interface Sorting {
  column: string;
  isDown: boolean;
}

export const ROW_PX = 30;
const BEYOND = 8;

export function Grid<T>(props: {
  label: string;
  rows: T[];
  columns: Column<T>[];
  rowKey: (row: T) => string;
  sorting?: Sorting | undefined;
  onSort?: (sorting: Sorting) => void;
  empty: ComponentChildren;
  /** Most visible rows, for a table that does not fill its page. */
  mostRows?: number;
}) {
  const view = useRef<HTMLDivElement>(null);
  const { top, height, width } = useView(view);
  const columns = props.columns.filter(
    (column) => !column.from || width === 0 || width >= column.from,
  );
  const rows = sorted(props.rows, props.columns, props.sorting);
  const first = Math.max(0, Math.floor(top / ROW_PX) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW_PX) + BEYOND);
  const tracks = { '--tracks': columns.map((column) => column.track).join(' ') };
  // An empty table needs room for its text.
  const high = rows.length === 0 ? 3 : Math.min(props.mostRows ?? 0, rows.length) + 1;
  const limit = props.mostRows ? { maxHeight: `${high * ROW_PX + 2}px` } : {};
  return (
    <div
      class={`grid ${props.mostRows ? 'grid-short' : 'grid-fill'}`}
      role="table"
      aria-label={props.label}
      aria-rowcount={rows.length + 1}
      ref={view}
      style={{ ...tracks, ...limit }}
      onKeyDown={(event) => walk(event, view.current, rows.length)}
    >
      <div class="grid-row grid-head" role="row" aria-rowindex={1}>
        {columns.map((column) => (
          <Head key={column.id} column={column} sorting={props.sorting} onSort={props.onSort} />
        ))}
      </div>
      {rows.length === 0 && <div class="empty">{props.empty}</div>}
      <div class="grid-body" role="rowgroup" style={{ height: `${rows.length * ROW_PX}px` }}>
        {rows.slice(first, last).map((row, at) => (
          <div
            class="grid-row"
            role="row"
            key={props.rowKey(row)}
            aria-rowindex={first + at + 2}
            data-at={first + at}
            style={{ top: `${(first + at) * ROW_PX}px` }}
          >
            {columns.map((column) => (
              <div class={column.isNumber ? 'cell number' : 'cell'} role="cell" key={column.id}>
                {column.cell(row)}
              </div>
            ))}
          </div>
        ))}
      </div>
    </div>
  );
}

function Head<T>(props: {
  column: Column<T>;
  sorting?: Sorting | undefined;
  onSort?: ((sorting: Sorting) => void) | undefined;
}) {
  const { column, sorting, onSort } = props;
  const isThis = sorting?.column === column.id;
  const order = isThis ? (sorting?.isDown ? 'descending' : 'ascending') : undefined;
  const className = column.isNumber ? 'cell number' : 'cell';
  return (
    <div class={className} role="columnheader" aria-sort={order}>
      {onSort && column.compare ? (
        <button
          type="button"
          class="sort"
          onClick={() => onSort({ column: column.id, isDown: isThis ? !sorting?.isDown : false })}
        >
          {column.title}
          <span class="sort-mark" aria-hidden="true">
            {isThis ? (sorting?.isDown ? '▾' : '▴') : ''}
          </span>
        </button>
      ) : (
        column.title
      )}
    </div>
  );
}

function sorted<T>(rows: T[], columns: Column<T>[], sorting: Sorting | undefined): T[] {
  const compare = columns.find((column) => column.id === sorting?.column)?.compare;
  if (!sorting || !compare) return rows;
  const ordered = [...rows].sort(compare);
  return sorting.isDown ? ordered.reverse() : ordered;
}

/** The visible part of the table. */
function useView(view: { current: HTMLDivElement | null }) {
  const [seen, setSeen] = useState({ top: 0, height: 900, width: 0 });
  useLayoutEffect(() => {
    const element = view.current;
    if (!element) return;
    const look = () => {
      const next = {
        top: element.scrollTop,
        height: element.clientHeight,
        width: element.clientWidth,
      };
      setSeen((before) =>
        before.height === next.height &&
        before.width === next.width &&
        Math.floor(before.top / ROW_PX) === Math.floor(next.top / ROW_PX)
          ? before
          : next,
      );
    };
    look();
    const sizes = new ResizeObserver(look);
    sizes.observe(element);
    element.addEventListener('scroll', look, { passive: true });
    return () => {
      sizes.disconnect();
      element.removeEventListener('scroll', look);
    };
  }, []);
  return seen;
}

const STEPS: Record<string, number> = {
  ArrowDown: 1,
  ArrowUp: -1,
  PageDown: 15,
  PageUp: -15,
  Home: Number.NEGATIVE_INFINITY,
  End: Number.POSITIVE_INFINITY,
};

/**
 * Moves between rows with the arrow keys. The row's first link gets the focus, so that Enter opens
 * it.
 */
function walk(event: KeyboardEvent, view: HTMLDivElement | null, count: number): void {
  const step = STEPS[event.key];
  const target = event.target as HTMLElement;
  if (!step || !view || count === 0 || target.tagName === 'INPUT' || target.tagName === 'SELECT')
    return;
  const row = target.closest<HTMLElement>('[data-at]');
  const from = row ? Number(row.dataset.at) : step > 0 && Number.isFinite(step) ? -1 : 0;
  const to = Math.min(count - 1, Math.max(0, from + step));
  event.preventDefault();
  const above = to * ROW_PX;
  const room = view.clientHeight - ROW_PX * 2;
  if (above < view.scrollTop) view.scrollTop = above;
  else if (above > view.scrollTop + room) view.scrollTop = above - room;
  const focus = () =>
    view
      .querySelector<HTMLElement>(`[data-at="${to}"] a, [data-at="${to}"] button`)
      ?.focus({ preventScroll: true });
  requestAnimationFrame(() => requestAnimationFrame(focus));
}

/** Runs an action on a key while the page is shown. */
export function useKey(key: string, run: () => void): void {
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      const isWriting =
        target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
      if (event.key !== key || event.ctrlKey || event.metaKey || event.altKey || isWriting) return;
      if (document.querySelector('dialog[open]')) return;
      event.preventDefault();
      run();
    };
    addEventListener('keydown', pressed);
    return () => removeEventListener('keydown', pressed);
  });
}
