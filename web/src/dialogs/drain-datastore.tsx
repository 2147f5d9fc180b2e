/** Drains a datastore. Shows the plan first: which disk goes where and why, and which stays. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { DatastoreDetails, DatastoreDrain } from '../api/types';
import { Act, Empty, ProblemBox, useTask, VmLink, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { useLoaded } from '../parts/loaded';
import { drainLook, Status } from '../parts/status';
import { bytes, counted } from '../text/units';

export const openDatastoreDrain = (store: DatastoreDetails, done: () => void) =>
  open((close) => <DrainDialog store={store} done={done} close={close} />);

function DrainDialog(props: { store: DatastoreDetails; done: () => void; close: () => void }) {
  const { store, done, close } = props;
  const [flatten, setFlatten] = useState(false);
  const path = `/datastores/${part(store.id)}/drain`;
  const loaded = useLoaded(`${store.id} ${flatten}`, () =>
    post<DatastoreDrain>(path, { plan_only: true, flatten }),
  );
  const plan = loaded.value;
  const task = useTask();
  const begin = () =>
    task.run(async () => {
      await post<DatastoreDrain>(path, { flatten });
      close();
      done();
    });
  const going = plan?.disks.filter((disk) => disk.state === 'waiting').length ?? 0;
  return (
    <Dialog
      title={`Drain ${store.name}`}
      width="wide"
      onClose={close}
      foot={
        <>
          <label class="tick">
            <input
              type="checkbox"
              checked={flatten}
              onChange={(event) => setFlatten(event.currentTarget.checked)}
            />
            Copy backing files, too
          </label>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act
            kind="primary"
            needs="operator"
            blocked={plan ? null : 'The plan is not ready yet.'}
            busy={task.busy}
            onClick={begin}
          >
            {plan ? `Drain: move ${counted(going, 'disk')}` : 'Drain'}
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      <p class="muted">
        {store.name} enters maintenance, and the disks in it move to other datastores of their
        hosts, also while guests run. This is the plan; nothing has been moved yet.
      </p>
      {plan ? <DiskPlan drain={plan} /> : !loaded.problem && <Waiting lines={6} />}
    </Dialog>
  );
}

/** The disks of a drain. Those that stay come first: they need attention. */
export function DiskPlan({ drain }: { drain: DatastoreDrain }) {
  const isPlan = drain.state === 'planned';
  const stays = drain.disks.filter((disk) => disk.state === 'stays');
  const others = drain.disks.filter((disk) => disk.state !== 'stays');
  if (drain.disks.length === 0) return <Empty>No VM has a disk in it.</Empty>;
  return (
    <div class="scroll-x">
      <table class="plain plan">
        <thead>
          <tr>
            <th scope="col">VM</th>
            <th scope="col">Disk</th>
            <th scope="col">State</th>
            <th scope="col">To</th>
            <th scope="col">Copied</th>
            <th scope="col">Reason</th>
          </tr>
        </thead>
        <tbody>
          {[...stays, ...others].map((disk) => (
            <tr key={`${disk.vm} ${disk.path}`}>
              <th scope="row">
                <VmLink name={disk.vm} />
              </th>
              <td>
                <code>{disk.path}</code>
              </td>
              <td>
                <Status
                  look={drainLook(isPlan && disk.state === 'waiting' ? 'would-go' : disk.state)}
                />
              </td>
              <td>{disk.to ?? '–'}</td>
              <td class="number">
                {disk.state === 'moving' && disk.total_bytes
                  ? `${bytes(disk.done_bytes)} of ${bytes(disk.total_bytes)}`
                  : '–'}
              </td>
              <td>{disk.reason}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
