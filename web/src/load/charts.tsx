/** Charts of the load of a VM, host, datastore or the cluster, over an hour, a day or a year. */
import { useEffect } from 'preact/hooks';
import { managerNow } from '../api/clock';
import { get, part } from '../api/http';
import type { LoadHistory } from '../api/types';
import { Chart, type Series } from '../charts/chart';
import { Empty, ProblemBox, Waiting } from '../parts/basics';
import { type Loaded, useLoaded } from '../parts/loaded';
import { route, setQuery } from '../state/route';
import {
  chartsOf,
  type LoadChart,
  RANGES,
  type Range,
  rangeOf,
  spokenOf,
  timesOf,
} from './history';

/** `object`: `vm:web`, for example. The range is part of the address. */
export function LoadCharts({ object, isBrief = false }: { object: string; isBrief?: boolean }) {
  const range = rangeOf(route.value.query.get('range'));
  const loaded = useHistory(object, range);
  return (
    <section class="load" aria-label="Load">
      <header class="load-head">
        <h2>Load</h2>
        <nav class="switch" aria-label="Range of the charts">
          {RANGES.map(({ id, title }) => (
            <button
              key={id}
              type="button"
              aria-pressed={id === range.id}
              onClick={() => setQuery('range', id === RANGES[0].id ? '' : id)}
            >
              {title}
            </button>
          ))}
        </nav>
      </header>
      <Body loaded={loaded} isBrief={isBrief} />
    </section>
  );
}

function useHistory(object: string, range: Range): Loaded<LoadHistory> {
  const loaded = useLoaded(`load ${object} ${range.id}`, (signal) => {
    const to = managerNow();
    const query =
      `object=${part(object)}&resolution=${range.resolution}` +
      `&from=${Math.round(to - range.lengthMs)}&to=${Math.round(to)}`;
    return get<LoadHistory>(`/load?${query}`, signal);
  });
  useEffect(() => {
    const timer = setInterval(loaded.reload, range.pollMs);
    return () => clearInterval(timer);
  }, [object, range.id]);
  return loaded;
}

function Body({ loaded, isBrief }: { loaded: Loaded<LoadHistory>; isBrief: boolean }) {
  const history = loaded.value;
  if (!history)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  const charts = chartsOf(history, isBrief);
  if (charts.length === 0) return <Empty>No load was measured in this time.</Empty>;
  const times = timesOf(history);
  return (
    <div class="charts">
      {charts.map((chart) => (
        <Chart
          key={chart.title}
          title={chart.title}
          times={times}
          series={seriesOf(chart)}
          format={chart.format}
          spoken={spokenOf(chart)}
          isBytes={chart.isBytes}
          isNamed
          isClock
          hasGaps
        />
      ))}
    </div>
  );
}

const COLOURS = ['series-1', 'series-2'];

/** Means as lines; where the periods have several measurements, the highest as thinner ones. */
function seriesOf({ lines }: LoadChart): Series[] {
  return lines.flatMap(({ label, mean, max }, at) => {
    const colour = COLOURS[at] ?? 'series-3';
    const line: Series = { label, colour, values: mean, isFilled: lines.length === 1 };
    return max ? [line, { label: `${label}, highest`, colour, values: max, dash: [2, 3] }] : [line];
  });
}
