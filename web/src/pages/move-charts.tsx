/**
 * Charts of a running migration: remaining bytes, dirty rate and bandwidth, lanes, guest latency.
 */
import type { Progress } from '../api/types';
import { Chart, type Mark } from '../charts/chart';
import type { PhaseMark, Samples } from '../state/samples';
import { bytes, bytesPerSecond, duration } from '../text/units';

const PAGE_BYTES = 4096;
const LANE_COLOURS = ['series-1', 'series-2', 'series-3', 'series-4', 'series-5', 'series-6'];

export function MoveCharts({
  samples,
  throughput,
}: {
  samples: Samples;
  throughput?: { ms: number; bytes: number }[] | undefined;
}) {
  samples.version.value;
  const points = samples.points;
  const marks = marksOf(samples.marks);
  const times = points.map((point) => point.elapsed_ms / 1e3);
  const last = points.at(-1);
  const lanes = lanesOf(points);
  const latency = points.map((point) => point.guest_round_trip_ms ?? null);
  const throttled = points.map((point) =>
    point.throttled_to_pages_per_s != null ? point.throttled_to_pages_per_s * PAGE_BYTES : null,
  );
  const disks = points.map((point) => point.disks?.remaining_bytes ?? null);
  const hasDisks = disks.some((value) => value !== null);
  const hasLatency = latency.some((value) => value !== null);
  return (
    <div class="charts">
      {hasDisks && (
        <Chart
          title="Disks remaining in this round"
          times={times}
          marks={marks}
          format={bytes}
          isBytes
          series={[{ label: 'remaining', colour: 'series-6', values: disks, isFilled: true }]}
          spoken={bytes(last?.disks?.remaining_bytes)}
        />
      )}
      <Chart
        title="Remaining in this round"
        times={times}
        marks={marks}
        format={bytes}
        isBytes
        series={[
          {
            label: 'remaining',
            colour: 'series-1',
            values: points.map((point) => point.remaining_bytes),
            isFilled: true,
          },
        ]}
        spoken={
          last ? `${bytes(last.remaining_bytes)} of ${bytes(last.total_bytes)}` : 'no data yet'
        }
      />
      <Chart
        title="Dirty rate and bandwidth"
        times={times}
        marks={marks}
        format={bytesPerSecond}
        isBytes
        series={[
          {
            label: 'bandwidth',
            colour: 'series-1',
            values: points.map((point) => point.bandwidth_bytes_per_s),
          },
          {
            label: 'dirty rate',
            colour: 'series-2',
            values: points.map((point) => point.dirty_bytes_per_s),
          },
          ...(throttled.some((value) => value !== null)
            ? [{ label: 'throttled to', colour: 'series-4', values: throttled, dash: [4, 3] }]
            : []),
        ]}
        spoken={
          last
            ? `dirty rate ${bytesPerSecond(last.dirty_bytes_per_s)}, ` +
              `bandwidth ${bytesPerSecond(last.bandwidth_bytes_per_s)}`
            : 'no data yet'
        }
      />
      {lanes.length > 0 ? (
        <Chart
          title="Bandwidth by lane"
          isNamed
          times={times}
          marks={marks}
          format={bytesPerSecond}
          isBytes
          series={lanes.map((lane, at) => ({
            label: lane.name,
            colour: LANE_COLOURS[at % LANE_COLOURS.length] ?? 'series-1',
            values: lane.rates,
          }))}
          spoken={lanes
            .map((lane) => `${lane.name} ${bytesPerSecond(lane.rates.at(-1))}`)
            .join(', ')}
        />
      ) : (
        throughput === undefined && (
          <Chart
            title="Total sent"
            times={times}
            marks={marks}
            format={bytes}
            isBytes
            series={[
              {
                label: 'sent',
                colour: 'series-3',
                values: points.map((point) => point.sent_bytes),
                isFilled: true,
              },
            ]}
            spoken={last ? bytes(last.sent_bytes) : 'no data yet'}
          />
        )
      )}
      {hasLatency && (
        <Chart
          title="Guest latency"
          times={times}
          marks={marks}
          format={duration}
          series={[{ label: 'round trip', colour: 'series-4', values: latency }]}
          spoken={`client to guest ${duration(latency.findLast((value) => value !== null))}`}
        />
      )}
      {throughput && throughput.length > 1 && <Throughput points={throughput} />}
    </div>
  );
}

/** Bandwidth between the points of a report. */
function Throughput({ points }: { points: { ms: number; bytes: number }[] }) {
  const rates = points.map((point, at) => {
    const before = points[at - 1] ?? { ms: 0, bytes: 0 };
    const span = point.ms - before.ms;
    return span > 0 ? ((point.bytes - before.bytes) / span) * 1e3 : null;
  });
  return (
    <Chart
      title="Total bandwidth"
      times={points.map((point) => point.ms / 1e3)}
      format={bytesPerSecond}
      isBytes
      series={[{ label: 'bandwidth', colour: 'series-1', values: rates, isFilled: true }]}
      spoken={`${bytes(points.at(-1)?.bytes)} in total`}
    />
  );
}

function marksOf(marks: PhaseMark[]): Mark[] {
  return marks.map((mark) => ({ label: mark.phase, at: mark.atMs / 1e3 }));
}

interface LaneLine {
  name: string;
  rates: (number | null)[];
}

/** Each lane's rate over time; null where the lane did not exist. */
export function lanesOf(points: Progress[]): LaneLine[] {
  const names = new Set<string>();
  for (const point of points) for (const lane of point.lanes ?? []) names.add(laneName(lane));
  // A lane without an address has not carried anything yet.
  names.delete('');
  return [...names].map((name) => ({
    name,
    rates: points.map(
      (point) => point.lanes?.find((lane) => laneName(lane) === name)?.bytes_per_s ?? null,
    ),
  }));
}

const laneName = (lane: { from?: string | null; to?: string | null }) => lane.from ?? lane.to ?? '';
