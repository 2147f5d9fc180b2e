/** Draws charts with uPlot on a canvas. */
import uPlot from 'uplot';
import 'uplot/dist/uPlot.min.css';
import type { ChartProps, Mark, Series } from './chart';

/** Steps of an axis in bytes: 256 MiB, not 250 million. */
const POWERS = Array.from({ length: 51 }, (_, power) => 2 ** power);

const DAY_S = 86_400;

export interface Drawing {
  update(props: ChartProps): void;
  end(): void;
}

export function draw(place: HTMLElement, first: ChartProps): Drawing {
  const style = getComputedStyle(place);
  const colour = (name: string) => resolved(place, style.getPropertyValue(`--${name}`).trim());
  const faint = colour('line');
  const text = colour('muted');
  const font = `11px ${style.fontFamily}`;
  let marks = first.marks ?? [];
  const options: uPlot.Options = {
    width: Math.max(120, place.clientWidth),
    height: place.clientHeight,
    padding: [20, 8, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: {
      x: { time: first.isClock === true },
      y: { range: (_chart, _least, most) => [0, most > 0 ? most * 1.08 : 1] },
    },
    axes: [
      {
        stroke: text,
        font,
        size: 24,
        gap: 4,
        grid: { show: false },
        ticks: { show: false },
        values: (_chart, splits, _axis, _space, step) =>
          splits.map((at) => (first.isClock ? clockText(at, step) : `${Number(at.toFixed(2))} s`)),
      },
      {
        stroke: text,
        font,
        size: 72,
        gap: 6,
        grid: { stroke: faint, width: 1 },
        ticks: { show: false },
        space: 36,
        ...(first.isBytes ? { incrs: POWERS } : {}),
        values: (_chart, splits) => splits.map((value) => first.format(value)),
      },
    ],
    series: [{}, ...first.series.map((series) => line(series, colour, first))],
    plugins: [
      {
        hooks: {
          drawClear: [(chart) => drawMarks(chart, marks, colour('line-strong'), text, font)],
        },
      },
    ],
  };
  const chart = new uPlot(options, data(first), place);
  const sizes = new ResizeObserver(() => {
    if (place.clientWidth > 0)
      chart.setSize({ width: place.clientWidth, height: place.clientHeight });
  });
  sizes.observe(place);
  return {
    update(props) {
      marks = props.marks ?? [];
      chart.setData(data(props));
    },
    end() {
      sizes.disconnect();
      chart.destroy();
    },
  };
}

/** A colour that canvas accepts: `light-dark()` works only in style sheets. */
function resolved(place: HTMLElement, value: string): string {
  const probe = document.createElement('span');
  probe.style.color = value;
  place.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function line(series: Series, colour: (name: string) => string, chart: ChartProps): uPlot.Series {
  const stroke = colour(series.colour);
  const options: uPlot.Series = {
    label: series.label,
    stroke,
    width: 1.5,
    points: { show: false, ...(chart.hasGaps ? { filter: alone, size: 4, fill: stroke } : {}) },
    spanGaps: !chart.hasGaps,
  };
  if (series.isFilled) options.fill = stroke.replace(/^rgb\((.*)\)$/, 'rgba($1, 0.14)');
  if (series.dash) options.dash = series.dash;
  const stepped = uPlot.paths.stepped;
  if (chart.steps && stepped) options.paths = stepped({ align: 1 });
  return options;
}

/** Points between two gaps, which no line shows. */
const alone: uPlot.Series.Points.Filter = (chart, at) => {
  const values = chart.data[at] ?? [];
  const isMissing = (index: number) => values[index] == null;
  return Array.from(values.keys()).filter(
    (index) => !isMissing(index) && isMissing(index - 1) && isMissing(index + 1),
  );
};

const two = (value: number) => String(value).padStart(2, '0');

/** A time of day; a date where the steps of the axis are days. Both are the reader's. */
function clockText(unixS: number, stepS: number): string {
  const at = new Date(unixS * 1000);
  const isMidnight = at.getHours() === 0 && at.getMinutes() === 0 && at.getSeconds() === 0;
  return stepS >= DAY_S || isMidnight
    ? `${two(at.getMonth() + 1)}-${two(at.getDate())}`
    : `${two(at.getHours())}:${two(at.getMinutes())}`;
}

function data(props: ChartProps): uPlot.AlignedData {
  return [props.times, ...props.series.map((series) => series.values)] as uPlot.AlignedData;
}

/** Marks of phases: a line where each begins, with its name where there is room. */
function drawMarks(chart: uPlot, marks: Mark[], faint: string, text: string, font: string): void {
  const { ctx, bbox } = chart;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = font.replace(/^\d+px/, `${10 * ratio}px`);
  ctx.textBaseline = 'top';
  ctx.textAlign = 'left';
  const right = bbox.left + bbox.width;
  const places = marks.map((mark) => Math.round(chart.valToPos(mark.at, 'x', true)));
  marks.forEach((mark, at) => {
    const x = places[at] ?? 0;
    if (x < bbox.left || x > right) return;
    ctx.globalAlpha = 0.5;
    ctx.strokeStyle = faint;
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - 12 * ratio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    // Draws the name only if it fits into the phase's width.
    const room = (places[at + 1] ?? right) - x;
    if (ctx.measureText(mark.label).width + 6 * ratio <= room) {
      ctx.fillStyle = text;
      ctx.fillText(mark.label, x + 4 * ratio, bbox.top - 13 * ratio);
    }
  });
  ctx.restore();
}
