/** One move: its progress, then its report. */
import { useEffect } from 'preact/hooks';
import { get, getIfThere, part, remove } from '../api/http';
import type { DisksProgress, Move, MoveSamples } from '../api/types';
import {
  Act,
  Figure,
  HostLink,
  Link,
  PageHead,
  ProblemBox,
  useTask,
  VmLink,
  Waiting,
} from '../parts/basics';
import { download } from '../parts/download';
import { useLoaded } from '../parts/loaded';
import { etaMs, PhaseRail } from '../parts/phases';
import { moveLook, Status } from '../parts/status';
import { isOver, moves } from '../state/cluster';
import { samplesOf } from '../state/samples';
import { bytes, bytesPerSecond, countdown, dateTime, duration } from '../text/units';
import { MoveCharts } from './move-charts';
import { ReportView } from './report';

export function MovePage({ id }: { id: string }) {
  const live = moves.get(id);
  // Only the request for a single move returns the report. It is repeated when the move ends.
  const loaded = useLoaded(`${id} ${live ? isOver(live) : ''}`, (signal) =>
    get<Move>(`/moves/${part(id)}`, signal),
  );
  const move = merged(live, loaded.value);
  const task = useTask();
  useEffect(() => {
    void getIfThere<MoveSamples>(`/moves/${part(id)}/samples`)
      .then((earlier) => {
        if (earlier?.samples.length) samplesOf(id).prepend(earlier.samples);
      })
      .catch(() => undefined);
  }, [id]);
  if (!move)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  const samples = samplesOf(id);
  const report = move.report;
  return (
    <>
      <PageHead
        title={`Move of ${move.vm}`}
        above={
          <Link to={isOver(move) ? '/history' : '/queue'}>
            {isOver(move) ? 'History' : 'Queue'}
          </Link>
        }
        side={
          <>
            {report && (
              <Act onClick={() => downloadReport(move)} name="Download report as JSON">
                Download report
              </Act>
            )}
            {!isOver(move) && (
              <Act
                needs="operator"
                kind="danger"
                busy={task.busy}
                onClick={() => task.run(() => remove(`/moves/${part(id)}`))}
              >
                Cancel move
              </Act>
            )}
          </>
        }
      >
        <Status look={moveLook(move)} />
        <span>
          <VmLink name={move.vm} />: <HostLink name={move.from} /> →{' '}
          {move.to ? <HostLink name={move.to} /> : 'no host chosen yet'}
        </span>
        <span class="muted">
          requested by {move.asked_by}, {dateTime(move.asked_unix_ms)}
        </span>
        {move.drain && <Link to={`/drains/${part(move.drain)}`}>part of a drain</Link>}
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      {move.failure && (
        <ProblemBox
          problem={{
            status: 0,
            code: move.failure.code,
            title: 'Move failed',
            detail: move.failure.message,
            remedy: move.failure.remedy,
          }}
        />
      )}
      {move.waits && !isOver(move) && (
        <p class="notice">
          <strong>Waiting</strong> {move.waits.text}
        </p>
      )}
      <PhaseRail move={move} />
      <Figures move={move} />
      {samples.points.length > 1 || report?.bandwidth?.length ? (
        <MoveCharts
          samples={samples}
          throughput={report?.bandwidth?.length ? report.bandwidth : undefined}
        />
      ) : null}
      {move.to_reason && (
        <p class="reason">
          <strong>Placement</strong> {move.to_reason}
        </p>
      )}
      {report && <ReportView report={report} />}
    </>
  );
}

function merged(live: Move | undefined, loaded: Move | undefined): Move | undefined {
  if (!live || !loaded) return live ?? loaded;
  return isOver(loaded) && !isOver(live)
    ? loaded
    : { ...loaded, ...live, report: live.report ?? loaded.report ?? null };
}

function Figures({ move }: { move: Move }) {
  const { progress, report } = move;
  const predicted = report?.predicted;
  const rate = bytesPerSecond(progress?.bandwidth_bytes_per_s);
  const pending = isOver(move) ? 'not measured' : 'pending';
  return (
    <dl class="figures figures-big">
      <Figure
        size="big"
        label="Switchover"
        value={report?.switchover_ms != null ? duration(report.switchover_ms) : '–'}
        note={
          report?.switchover_ms == null
            ? pending
            : predicted
              ? `predicted ${duration(predicted.switchover_ms)}`
              : 'vCPU pause'
        }
      />
      <Figure
        size="big"
        label="Blackout"
        value={report?.blackout_ms != null ? duration(report.blackout_ms) : '–'}
        note={
          report
            ? report.blackout_ms == null
              ? 'Not measured: name an address to probe'
              : 'seen by a client'
            : pending
        }
      />
      {report ? (
        <>
          <Figure
            size="big"
            label="Migration time"
            value={duration(report.migration_time_ms)}
            note={
              predicted
                ? `predicted ${duration(predicted.migration_time_ms)}`
                : 'from request to release'
            }
          />
          <Figure
            size="big"
            label="Sent"
            value={bytes(report.wire_bytes)}
            note={`of ${bytes(report.guest_bytes)} guest memory`}
          />
        </>
      ) : (
        <>
          <Figure
            size="big"
            label="Time remaining"
            value={countdown(etaMs(progress))}
            note={progress ? `${countdown(progress.elapsed_ms)} elapsed` : 'not started'}
          />
          <Figure
            size="big"
            label="Remaining"
            value={bytes(progress?.remaining_bytes)}
            note={progress ? `of ${bytes(progress.total_bytes)}, ${rate}` : ''}
          />
          {progress?.disks && <DisksLeft disks={progress.disks} />}
        </>
      )}
    </dl>
  );
}

/** What is left of the disks, beside the memory. */
function DisksLeft({ disks }: { disks: DisksProgress }) {
  const limit = disks.limited_to_bytes_per_s;
  const rate = bytesPerSecond(disks.bytes_per_s);
  return (
    <Figure
      size="big"
      label="Disks remaining"
      value={bytes(disks.remaining_bytes)}
      note={
        limit != null
          ? `guest writes limited to ${bytesPerSecond(limit)}`
          : `of ${bytes(disks.total_bytes)}, ${rate}`
      }
    />
  );
}

/** The manager's report file where it serves one, else the report that is shown. */
async function downloadReport(move: Move): Promise<void> {
  const served = await getIfThere<unknown>(`/moves/${part(move.id)}/report`).catch(() => undefined);
  download(`${move.vm}-${move.id}.json`, served ?? move.report);
}
