/** The report of a migration. */
import type { DisksReport, Phase, Report, SwitchoverReport } from '../api/types';
import { Pieces } from '../charts/bars';
import { Facts, Panel } from '../parts/basics';
import { bytes, bytesPerSecond, count, dateTime, duration, percent } from '../text/units';

const PAGE_BYTES = 4096;

const PHASE_COLOURS: Record<Phase, string> = {
  preflight: 'series-6',
  prepare: 'series-5',
  disks: 'series-6',
  'pre-copy': 'series-1',
  reconnect: 'series-4',
  convergence: 'series-3',
  switchover: 'series-2',
  'page-in': 'series-4',
  announce: 'series-5',
  report: 'series-6',
};

const PAUSE: [keyof SwitchoverReport, string, string][] = [
  ['last_pages_ms', 'last pages', 'series-1'],
  ['device_state_ms', 'device state', 'series-2'],
  ['flight_ms', 'transfer', 'series-3'],
  ['load_ms', 'load', 'series-4'],
  ['resume_ms', 'resume', 'series-5'],
];

export function ReportView({ report }: { report: Report }) {
  const { switchover, rounds = [], lanes = [], encodings = [], cuts = [] } = report;
  return (
    <div class="report">
      <Panel title="Report">
        <Summary report={report} />
        {report.phases.length > 0 && (
          <Pieces
            label="Time in each phase"
            pieces={report.phases.map(({ phase, duration_ms }) => ({
              name: phase,
              ms: duration_ms,
              colour: PHASE_COLOURS[phase] ?? 'series-6',
            }))}
          />
        )}
      </Panel>
      {switchover && <Switchover switchover={switchover} />}
      {report.predicted && <Predicted report={report} />}
      {rounds.length > 0 && <Rounds report={report} />}
      {report.disks && <Disks disks={report.disks} />}
      {report.tracking && <Tracking tracking={report.tracking} />}
      {report.throttle && <Throttle throttle={report.throttle} />}
      {report.page_in && <PageIn pageIn={report.page_in} />}
      {lanes.length > 0 && <Lanes lanes={lanes} />}
      {encodings.length > 0 && <Encodings encodings={encodings} />}
      {cuts.length > 0 && <Cuts cuts={cuts} />}
    </div>
  );
}

function Summary({ report }: { report: Report }) {
  const seconds = report.migration_time_ms / 1e3;
  const rows: [string, string][] = [
    ['Outcome', report.outcome],
    ['Engine', report.engine],
    ['Policy', report.policy ?? '–'],
    ['Method', report.means ?? '–'],
    ['Switchover budget', duration(report.switchover_budget_ms)],
    ['Mean bandwidth', bytesPerSecond(seconds > 0 ? report.wire_bytes / seconds : null)],
    ['Lane round trip', duration(report.round_trip_ms)],
  ];
  return <Facts rows={rows.filter(([, value]) => value !== '–')} />;
}

function Switchover({ switchover }: { switchover: SwitchoverReport }) {
  return (
    <Panel title="Switchover breakdown">
      <Pieces
        label="Pause"
        pieces={PAUSE.map(([key, name, colour]) => ({ name, ms: switchover[key], colour }))}
      />
    </Panel>
  );
}

function Predicted({ report }: { report: Report }) {
  const predicted = report.predicted;
  if (!predicted) return null;
  const rows: [string, string, string][] = [
    ['Migration time', duration(predicted.migration_time_ms), duration(report.migration_time_ms)],
    ['Switchover', duration(predicted.switchover_ms), duration(report.switchover_ms)],
    ['Sent', bytes(predicted.wire_bytes), bytes(report.wire_bytes)],
    ['Rounds', count(predicted.rounds), count(report.rounds?.length)],
    ['Method', predicted.means, report.means ?? '–'],
  ];
  return (
    <Panel title="Predicted and measured">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Figure</th>
            <th scope="col" class="number">
              Predicted
            </th>
            <th scope="col" class="number">
              Measured
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, expected, measured]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td class="number">{expected}</td>
              <td class="number">{measured}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Panel>
  );
}

function Rounds({ report }: { report: Report }) {
  return (
    <Panel title="Rounds">
      <div class="scroll-x">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col" class="number">
                Round
              </th>
              <th scope="col" class="number">
                Pages
              </th>
              <th scope="col" class="number">
                Zero pages
              </th>
              <th scope="col" class="number">
                Sent
              </th>
              <th scope="col" class="number">
                Time
              </th>
              <th scope="col" class="number">
                Dirty rate
              </th>
              <th scope="col" class="number">
                Throttled to
              </th>
            </tr>
          </thead>
          <tbody>
            {report.rounds?.map((round) => (
              <tr key={round.round}>
                <td class="number">{round.round}</td>
                <td class="number">{count(round.pages)}</td>
                <td class="number">{count(round.zero_pages)}</td>
                <td class="number">{bytes(round.bytes)}</td>
                <td class="number">{duration(round.duration_ms)}</td>
                <td class="number">{bytesPerSecond(round.dirty_pages_per_s * PAGE_BYTES)}</td>
                <td class="number">
                  {round.throttled_to_pages_per_s != null
                    ? bytesPerSecond(round.throttled_to_pages_per_s * PAGE_BYTES)
                    : '–'}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

/** How a source knows what the guest writes to disks that travel. */
const FOUND_BY: Record<NonNullable<DisksReport['means']>, string> = {
  bitmaps: 'dirty bitmaps',
  mirror: 'mirror',
};

function Disks({ disks }: { disks: DisksReport }) {
  const referenced = disks.disks.reduce((sum, disk) => sum + (disk.referenced_bytes ?? 0), 0);
  const rows: [string, string][] = [
    ['On the wire', bytes(disks.wire_bytes)],
    ['Sent by reference', referenced ? bytes(referenced) : '–'],
    ['Guest writes found by', disks.means ? FOUND_BY[disks.means] : '–'],
    ['Rounds', count(disks.rounds.length)],
    ['Last round, in the pause', duration(disks.last_round_ms)],
    ['Sent again', disks.resent_bytes ? bytes(disks.resent_bytes) : '–'],
    [
      'Guest writes limited to',
      disks.limited_to_bytes_per_s != null
        ? `${bytesPerSecond(disks.limited_to_bytes_per_s)} for ${duration(disks.limited_ms)}`
        : '–',
    ],
    ['Old images kept until', dateTime(disks.kept_until_unix_ms)],
  ];
  return (
    <Panel title="Disks">
      <div class="scroll-x">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">From</th>
              <th scope="col">To</th>
              <th scope="col" class="number">
                Size
              </th>
              <th scope="col" class="number">
                Sent
              </th>
              <th scope="col" class="number">
                Zero
              </th>
              <th scope="col">Base</th>
            </tr>
          </thead>
          <tbody>
            {disks.disks.map((disk) => (
              <tr key={disk.from}>
                <td>{disk.from}</td>
                <td>{disk.to}</td>
                <td class="number">{bytes(disk.virtual_bytes)}</td>
                <td class="number">{bytes(disk.sent_bytes)}</td>
                <td class="number">{bytes(disk.zero_bytes)}</td>
                <td>{disk.base_was_there ? 'was there' : '–'}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Facts rows={rows.filter(([, value]) => value !== '–')} />
    </Panel>
  );
}

function Tracking({ tracking }: { tracking: NonNullable<Report['tracking']> }) {
  return (
    <Panel title="Dirty pages">
      <Facts
        rows={[
          ['Found by', tracking.means],
          ['Memory tracked by faults', bytes(tracking.by_faults_bytes)],
          ['Faults', count(tracking.faults)],
          ['Time to answer them', duration(tracking.answering_ms)],
        ]}
      />
    </Panel>
  );
}

function Throttle({ throttle }: { throttle: NonNullable<Report['throttle']> }) {
  return (
    <Panel title="Throttle">
      <Facts
        rows={[
          ['Method', throttle.means],
          ['Delayed writes', count(throttle.faults)],
          ['vCPU delay', duration(throttle.held_ms)],
          [
            'Lowest CPU share',
            throttle.least_cpu_percent != null ? `${throttle.least_cpu_percent.toFixed(1)} %` : '–',
          ],
        ]}
      />
    </Panel>
  );
}

function PageIn({ pageIn }: { pageIn: NonNullable<Report['page_in']> }) {
  return (
    <Panel title="Page-in">
      <Facts
        rows={[
          ['Missing pages at the start', count(pageIn.pages)],
          ['Requested by the guest', count(pageIn.demanded_pages)],
          ['Duration', duration(pageIn.duration_ms)],
          ['Wait, median', duration(pageIn.fetch_ms.median)],
          ['Wait, 99th percentile', duration(pageIn.fetch_ms.p99)],
          ['Wait, maximum', duration(pageIn.fetch_ms.max)],
          ['Link cuts', count(pageIn.cuts)],
        ]}
      />
    </Panel>
  );
}

function Lanes({ lanes }: { lanes: NonNullable<Report['lanes']> }) {
  return (
    <Panel title="Lanes">
      <div class="scroll-x">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">From</th>
              <th scope="col">To</th>
              <th scope="col" class="number">
                Streams
              </th>
              <th scope="col" class="number">
                Sent
              </th>
              <th scope="col">Errors</th>
            </tr>
          </thead>
          <tbody>
            {lanes.map((lane) => (
              <tr key={`${lane.from} ${lane.to}`}>
                <td>{lane.from ?? 'chosen by the kernel'}</td>
                <td>{lane.to}</td>
                <td class="number">{lane.streams}</td>
                <td class="number">{bytes(lane.bytes)}</td>
                <td>{lane.broken.join('; ') || 'none'}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Encodings({ encodings }: { encodings: NonNullable<Report['encodings']> }) {
  return (
    <Panel title="Page encodings">
      <div class="scroll-x">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">Encoding</th>
              <th scope="col" class="number">
                Pages
              </th>
              <th scope="col" class="number">
                Memory
              </th>
              <th scope="col" class="number">
                On the wire
              </th>
              <th scope="col" class="number">
                Share
              </th>
            </tr>
          </thead>
          <tbody>
            {encodings.map((one) => (
              <tr key={one.name}>
                <td>{one.name}</td>
                <td class="number">{count(one.pages)}</td>
                <td class="number">{bytes(one.raw_bytes)}</td>
                <td class="number">{bytes(one.wire_bytes)}</td>
                <td class="number">
                  {percent(one.raw_bytes > 0 ? one.wire_bytes / one.raw_bytes : 0)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Cuts({ cuts }: { cuts: NonNullable<Report['cuts']> }) {
  return (
    <Panel title="Link cuts">
      <ul class="plain-list">
        {cuts.map((cut) => (
          <li key={cut.at_ms}>
            at {duration(cut.at_ms)}, lasted {duration(cut.lasted_ms)}: {cut.why}
          </li>
        ))}
      </ul>
    </Panel>
  );
}
