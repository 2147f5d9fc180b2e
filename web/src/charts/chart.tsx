/**
 * A chart over time. The drawing code is loaded with the first chart; the space is reserved before.
 */
import { useEffect, useRef } from 'preact/hooks';
import { colours } from '../state/theme';
import type { Drawing } from './draw';

export interface Series {
  label: string;
  /** Custom property of the style sheet with the colour. */
  colour: string;
  values: (number | null)[];
  isFilled?: boolean;
  dash?: number[];
}

export interface Mark {
  label: string;
  at: number;
}

export interface ChartProps {
  title: string;
  /** Seconds. */
  times: number[];
  series: Series[];
  marks?: Mark[];
  format: (value: number) => string;
  /** The last values in words, for screen readers. */
  spoken: string;
  height?: number;
  steps?: boolean;
  /** Names the line even if it is the only one. */
  isNamed?: boolean;
  /** The values are bytes: the axis uses powers of two. */
  isBytes?: boolean;
  /** The times are seconds since 1970: the axis has times of day. */
  isClock?: boolean;
  /** A missing value is a gap: no line crosses it. */
  hasGaps?: boolean;
}

export function Chart(props: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  const drawing = useRef<Drawing | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const shape = props.series.map((series) => series.label).join('|');
  const scheme = colours.value;
  useEffect(() => {
    let isGone = false;
    let made: Drawing | null = null;
    import('./draw').then(
      ({ draw }) => {
        if (isGone || !place.current) return;
        made = draw(place.current, latest.current);
        drawing.current = made;
      },
      // An upgrade of the manager has replaced the console's files.
      () => place.current?.replaceChildren('Cannot load the chart. Reload the page.'),
    );
    return () => {
      isGone = true;
      made?.end();
      drawing.current = null;
    };
  }, [shape, scheme]);
  useEffect(() => {
    drawing.current?.update(props);
  });
  const height = props.height ?? 168;
  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{props.title}</span>
        {props.series.length > 0 && (
          <span class="legend" aria-hidden="true">
            {props.series.map((series) => (
              <span key={series.label}>
                <span class={`swatch ${series.colour}`} />
                {props.series.length > 1 || props.isNamed ? `${series.label} ` : ''}
                <b>{lastOf(series.values, props.format)}</b>
              </span>
            ))}
          </span>
        )}
      </figcaption>
      <div
        class="chart-place"
        role="img"
        aria-label={`${props.title}: ${props.spoken}`}
        ref={place}
        style={{ height: `${height}px` }}
      />
    </figure>
  );
}

function lastOf(values: (number | null)[], format: (value: number) => string): string {
  const last = values.findLast((value) => value !== null);
  return last === undefined || last === null ? '–' : format(last);
}
