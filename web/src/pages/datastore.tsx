/** One datastore: its figures at each host, the disks in it, its settings and its last drain. */
import { useEffect } from 'preact/hooks';
import { all, get, part, patch, post, remove } from '../api/http';
import type { DatastoreDetails, DatastoreDrain } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openDatastore } from '../dialogs/datastore';
import { DiskPlan, openDatastoreDrain } from '../dialogs/drain-datastore';
import { LoadCharts } from '../load/charts';
import {
  Act,
  Empty,
  Figure,
  HostLink,
  Link,
  Meter,
  PageHead,
  Panel,
  ProblemBox,
  Tags,
  VmLink,
  Waiting,
} from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { drainLook, healthLook, Status } from '../parts/status';
import { bytes, bytesPerSecond, counted, dateTime, duration } from '../text/units';
import { provisioned, UsedSpace, writeLatency } from './datastore-figures';

/** Interval at which an open drain is loaded again. */
const POLL_MS = 1000;

export function DatastorePage({ id }: { id: string }) {
  const path = `/datastores/${part(id)}`;
  const loaded = useLoaded(`datastore ${id}`, (signal) => get<DatastoreDetails>(path, signal));
  const drains = useLoaded(`drains of ${id}`, (signal) =>
    all<DatastoreDrain>('/datastore-drains', signal),
  );
  const drain = drains.value?.filter((one) => one.datastore === loaded.value?.id).at(-1);
  const isOpen = drain?.state === 'running' || drain?.state === 'undoing';
  const reload = () => {
    loaded.reload();
    drains.reload();
  };
  useEffect(() => {
    if (!isOpen) return;
    const timer = setInterval(reload, POLL_MS);
    return () => clearInterval(timer);
  }, [isOpen]);
  const store = loaded.value;
  if (!store)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={8} />;
  return (
    <>
      <PageHead
        title={store.name}
        above={<Link to="/storage">Networks and datastores</Link>}
        side={<Actions store={store} isOpen={isOpen} reload={reload} />}
      >
        <Status look={healthLook(store.health, store.maintenance)} />
        <span>{store.kind ?? 'unknown kind'}</span>
        <span class="muted">
          <code>{store.path}</code>
        </span>
        <Tags tags={store.tags} />
      </PageHead>
      {store.description && <p>{store.description}</p>}
      <Panel title="Capacity">
        <UsedSpace store={store} />
        <dl class="figures">
          <Figure label="Free" value={bytes(store.free_bytes)} />
          <Figure label="Provisioned" value={provisioned(store)} />
          <Figure label="Write latency" value={writeLatency(store)} />
          <Figure label="Disks" value={String(store.disks ?? 0)} />
        </dl>
      </Panel>
      <LoadCharts object={`datastore:${store.id}`} />
      {drain && <LastDrain drain={drain} reload={reload} />}
      <Panel title="Hosts">
        <Hosts store={store} />
      </Panel>
      <Panel title="Disks">
        <Disks store={store} />
      </Panel>
    </>
  );
}

function Actions(props: { store: DatastoreDetails; isOpen: boolean; reload: () => void }) {
  const { store, isOpen, reload } = props;
  const path = `/datastores/${part(store.id)}`;
  const set = async () => {
    await patch(path, { maintenance: !store.maintenance });
    reload();
  };
  const text = store.maintenance
    ? 'The datastore takes new disks again.'
    : 'The datastore takes no new disks. The disks in it stay; a drain moves them.';
  return (
    <>
      <Act needs="admin" onClick={() => openDatastore(store, reload)}>
        Edit
      </Act>
      <Act
        needs="operator"
        blocked={isOpen ? 'A drain of the datastore is in progress.' : null}
        onClick={() =>
          confirm({
            title: `${store.maintenance ? 'End' : 'Begin'} maintenance of ${store.name}`,
            text,
            verb: store.maintenance ? 'End maintenance' : 'Begin maintenance',
            kind: 'primary',
            run: set,
          })
        }
      >
        {store.maintenance ? 'End maintenance' : 'Maintenance'}
      </Act>
      <Act
        needs="operator"
        blocked={isOpen ? 'A drain of the datastore is in progress.' : null}
        onClick={() => openDatastoreDrain(store, reload)}
      >
        Drain
      </Act>
    </>
  );
}

function LastDrain({ drain, reload }: { drain: DatastoreDrain; reload: () => void }) {
  const path = `/datastore-drains/${part(drain.id)}`;
  const going = drain.disks.filter((disk) => disk.state !== 'stays');
  const there = going.filter((disk) => disk.state === 'moved' || disk.state === 'back');
  const act = async (send: Promise<unknown>) => {
    await send;
    reload();
  };
  const isRunning = drain.state === 'running' || drain.state === 'undoing';
  const mayUndo = drain.state === 'done' || drain.state === 'cancelled';
  return (
    <Panel
      title="Last drain"
      side={
        <span class="panel-acts">
          {isRunning && (
            <Act
              needs="operator"
              kind="danger"
              onClick={() =>
                confirm({
                  title: `Cancel drain of ${drain.name}`,
                  text:
                    'Waiting disks stay, disks that move keep their old images, and those that ' +
                    'have moved stay where they are. Maintenance is as it was before.',
                  verb: 'Cancel drain',
                  run: () => act(remove(path)),
                })
              }
            >
              Cancel drain
            </Act>
          )}
          {mayUndo && there.length > 0 && (
            <Act
              needs="operator"
              onClick={() =>
                confirm({
                  title: `Undo drain of ${drain.name}`,
                  text: 'The datastore leaves maintenance. The disks that moved return.',
                  verb: 'Undo drain',
                  kind: 'primary',
                  run: () => act(post(`${path}/undo`)),
                })
              }
            >
              Undo drain
            </Act>
          )}
        </span>
      }
    >
      <p>
        <Status look={drainLook(drain.state)} />{' '}
        <span class="muted">
          requested by {drain.asked_by}, {dateTime(drain.asked_unix_ms)}
          {drain.ended_unix_ms ? `; ended ${dateTime(drain.ended_unix_ms)}` : ''}
        </span>
      </p>
      <Meter
        label="Moved"
        share={going.length > 0 ? there.length / going.length : 1}
        warnAt={2}
        badAt={2}
        text={`${there.length} of ${counted(going.length, 'disk')} moved`}
      />
      <DiskPlan drain={drain} />
    </Panel>
  );
}

function Hosts({ store }: { store: DatastoreDetails }) {
  if (store.hosts.length === 0) return <Empty>No host has the datastore any more.</Empty>;
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Host</th>
            <th scope="col">Path</th>
            <th scope="col">State</th>
            <th scope="col" class="number">
              Free
            </th>
            <th scope="col" class="number">
              Write
            </th>
            <th scope="col" class="number">
              Read
            </th>
            <th scope="col" class="number">
              Throughput (write, read)
            </th>
          </tr>
        </thead>
        <tbody>
          {store.hosts.map((at) => (
            <tr key={`${at.host} ${at.path}`}>
              <th scope="row">
                <HostLink name={at.host} />
              </th>
              <td>
                <code>{at.path}</code>
              </td>
              <td>
                <Status look={healthLook(at.health)} title={at.problem ?? undefined} />
                {at.problem && <p class="muted">{at.problem}</p>}
              </td>
              <td class="number">{bytes(at.free_bytes)}</td>
              <td class="number">{latency(at.speed?.write_us)}</td>
              <td class="number">{latency(at.speed?.read_us)}</td>
              <td class="number">
                {at.speed
                  ? `${bytesPerSecond(at.speed.write_bytes_per_s)}, ${bytesPerSecond(
                      at.speed.read_bytes_per_s,
                    )}`
                  : '–'}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const latency = (us: number | null | undefined) => (us == null ? '–' : duration(us / 1000));

function Disks({ store }: { store: DatastoreDetails }) {
  const disks = store.used_by ?? [];
  if (disks.length === 0) return <Empty>No VM has a disk in it.</Empty>;
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">VM</th>
            <th scope="col">Host</th>
            <th scope="col">Image</th>
          </tr>
        </thead>
        <tbody>
          {disks.map((disk) => (
            <tr key={`${disk.vm} ${disk.path}`}>
              <th scope="row">
                <VmLink name={disk.vm} />
              </th>
              <td>
                <HostLink name={disk.host} />
              </td>
              <td>
                <code>{disk.path}</code>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
