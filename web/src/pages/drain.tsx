/** One drain: its plan and its progress. */
import { get, part, post, remove } from '../api/http';
import type { Drain } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { Plan } from '../dialogs/drain';
import { Act, HostLink, Link, Meter, PageHead, Panel, ProblemBox, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { drainLook, Status } from '../parts/status';
import { drains, moves } from '../state/cluster';
import { dateTime } from '../text/units';
import { MoveRow } from './overview';

export function DrainPage({ id }: { id: string }) {
  const live = drains.get(id);
  const loaded = useLoaded(live ? null : `drain ${id}`, (signal) =>
    get<Drain>(`/drains/${part(id)}`, signal),
  );
  const drain = live ?? loaded.value;
  if (!drain)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={8} />;
  const gone = drain.vms.filter((vm) => vm.state === 'gone').length;
  const all = drain.vms.filter((vm) => vm.state !== 'stays').length;
  const running = [...moves.values()].filter(
    (move) => move.drain === id && (move.state === 'running' || move.state === 'starting'),
  );
  return (
    <>
      <PageHead
        title={`Drain of ${drain.host}`}
        above={<Link to="/history?of=drains">Drains</Link>}
        side={<Actions drain={drain} />}
      >
        <Status look={drainLook(drain.state)} />
        <span>
          host <HostLink name={drain.host} />
        </span>
        <span class="muted">
          requested by {drain.asked_by}, {dateTime(drain.asked_unix_ms)}
          {drain.ended_unix_ms ? `; ended ${dateTime(drain.ended_unix_ms)}` : ''}
        </span>
      </PageHead>
      <div class="drain-bar">
        <Meter
          label="Moved"
          share={all > 0 ? gone / all : 1}
          warnAt={2}
          badAt={2}
          text={`${gone} of ${all} moved`}
        />
      </div>
      {running.length > 0 && (
        <Panel title={`Running: ${running.length}`}>
          <ul class="rows">
            {running.map((move) => (
              <MoveRow key={move.id} move={move} />
            ))}
          </ul>
        </Panel>
      )}
      <Panel title="VMs">
        <Plan drain={drain} />
      </Panel>
    </>
  );
}

function Actions({ drain }: { drain: Drain }) {
  const path = `/drains/${part(drain.id)}`;
  if (drain.state === 'running') {
    return (
      <Act
        needs="operator"
        kind="danger"
        onClick={() =>
          confirm({
            title: `Cancel drain of ${drain.host}`,
            text: 'Waiting VMs stay, running moves finish. The host returns to its earlier state.',
            verb: 'Cancel drain',
            run: () => remove(path),
          })
        }
      >
        Cancel drain
      </Act>
    );
  }
  if (drain.state === 'done' || drain.state === 'cancelled') {
    return (
      <Act
        needs="operator"
        onClick={() =>
          confirm({
            title: `Undo drain of ${drain.host}`,
            text: 'The host leaves maintenance. The VMs that moved return, last moved first.',
            verb: 'Undo drain',
            kind: 'primary',
            run: () => post(`${path}/undo`),
          })
        }
      >
        Undo drain
      </Act>
    );
  }
  return null;
}
