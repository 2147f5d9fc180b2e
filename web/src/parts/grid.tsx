/**
 * A table of any length: only visible rows are in the page. Without room, the least needed columns
 * are hidden.
 */
import type { ComponentChildren } from 'preact';
import { useLayoutEffect, useRef, useState } from 'preact/hooks';
import { useArrowsFromHeading, walk } from './keys';

export interface Column<T> {
  id: string;
  title: string;
  /** A CSS grid track. */
  track: string;
  isNumber?: boolean;
  /** Hidden where the table is narrower than this, in pixels. */
  from?: number;
  /** Hidden where the table is this wide or wider. */
  until?: number;
  /** How it is shown in a table narrower than `NARROW_PX`. */
  narrow?: { track?: string; cell?: (row: T) => ComponentChildren; hasIcon?: boolean };
  /** Whether it is too narrow for its title, which screen readers still get. */
  hasIcon?: boolean;
  cell: (row: T) => ComponentChildren;
  compare?: (a: T, b: T) => number;
}

export interface Sorting {
  column: string;
  isDown: boolean;
}

export const ROW_PX = 30;
/** Width below which columns take their narrow form: a phone held upright. */
const NARROW_PX = 480;
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
  const columns = shownColumns(props.columns, width);
  const rows = sorted(props.rows, props.columns, props.sorting);
  useArrowsFromHeading(!props.mostRows, ROW_PX);
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
      onKeyDown={(event) => walk(event, view.current, ROW_PX)}
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
            tabIndex={-1}
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

/** The columns that a table of this width has room for; 0: not known yet. */
export function shownColumns<T>(columns: Column<T>[], width: number): Column<T>[] {
  if (width === 0) return columns.filter((column) => !column.until);
  return columns
    .filter(({ from, until }) => width >= (from ?? 0) && width < (until ?? Infinity))
    .map((column) => (width < NARROW_PX ? { ...column, ...column.narrow } : column));
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
  const title = column.hasIcon ? <span class="unseen">{column.title}</span> : column.title;
  return (
    <div class={className} role="columnheader" aria-sort={order}>
      {onSort && column.compare ? (
        <button
          type="button"
          class="sort"
          onClick={() => onSort({ column: column.id, isDown: isThis ? !sorting?.isDown : false })}
        >
          {title}
          <span class="sort-mark" aria-hidden="true">
            {isThis ? (sorting?.isDown ? '▾' : '▴') : ''}
          </span>
        </button>
      ) : (
        title
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
