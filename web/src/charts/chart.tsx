/** A chart over time. What draws it is loaded when the first one is shown; its place is kept from the beginning. */
import { useEffect, useRef } from 'preact/hooks';
import { colours } from '../state/theme';
import type { Drawing } from './draw';

export interface Series {
  label: string;
  /** A custom property of the style sheet that has its colour. */
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
  /** What the last values are, in words, for who does not see the picture. */
  spoken: string;
  height?: number;
  steps?: boolean;
  /** Its line is named even where it is the only one. */
  isNamed?: boolean;
  /** Its values are bytes: the axis goes in powers of two. */
  isBytes?: boolean;
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
      // The manager has been replaced meanwhile by one with other files.
      () => place.current?.replaceChildren('The chart could not be loaded: load the page anew.'),
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
