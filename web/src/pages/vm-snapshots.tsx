/** Snapshots of a VM, with what can be done with each. */
import { get, part, post, remove } from '../api/http';
import type { SnapshotInfo, VmSummary } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openTakeSnapshot } from '../dialogs/take-snapshot';
import { Act, Panel, ProblemBox, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { isOff } from '../state/cluster';
import { counted, dateTime } from '../text/units';

const MOST_SNAPSHOTS = 16;

/** `changed` is called after each change, which may change the VM too. */
export function Snapshots({ vm, changed }: { vm: VmSummary; changed: () => void }) {
  const loaded = useLoaded(`snapshots ${vm.name} ${vm.host} ${vm.state}`, (signal) =>
    get<SnapshotInfo[]>(`/vms/${part(vm.name)}/snapshots`, signal),
  );
  const done = () => {
    loaded.reload();
    changed();
  };
  const all = loaded.value ?? [];
  const isFull = all.length >= MOST_SNAPSHOTS;
  return (
    <Panel
      title="Snapshots"
      side={
        <Act
          kind="quiet"
          needs="operator"
          blocked={
            underWay(vm) ?? (isFull ? `A VM has at most ${MOST_SNAPSHOTS} snapshots.` : null)
          }
          onClick={() => openTakeSnapshot(vm, done)}
        >
          Take snapshot
        </Act>
      }
    >
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {!loaded.value && loaded.isLoading && <Waiting />}
      {loaded.value?.length === 0 && <p class="empty">No snapshots.</p>}
      {all.length > 0 && <SnapshotList vm={vm} all={all} done={done} />}
    </Panel>
  );
}

/** Why no snapshot is taken, reverted to or deleted now. */
function underWay(vm: VmSummary): string | null {
  if (vm.move) return 'The VM has a running or waiting move.';
  if (vm.in_doubt) return 'The host that runs the VM is unknown.';
  return isOff(vm) || vm.state === 'running' ? null : `The VM is ${vm.state}.`;
}

const textOf = ({ created_unix_ms, memory, disks }: SnapshotInfo) =>
  `${dateTime(created_unix_ms)}, ${counted(disks, 'disk')}${memory ? ', memory' : ''}`;

function SnapshotList(props: { vm: VmSummary; all: SnapshotInfo[]; done: () => void }) {
  const { vm, all, done } = props;
  const blocked = underWay(vm);
  return (
    <ul class="plain-list device-list">
      {all.map((snapshot) => (
        <li key={snapshot.name}>
          <span>
            <strong>{snapshot.name}</strong> {textOf(snapshot)}
          </span>
          <span class="row-actions">
            <Act
              kind="quiet"
              needs="operator"
              name={`Revert to ${snapshot.name}`}
              blocked={blocked ?? (isOff(vm) ? null : 'Only a VM that does not run reverts.')}
              onClick={() => askRevert(vm, snapshot, done)}
            >
              Revert
            </Act>
            <Act
              kind="quiet"
              needs="operator"
              name={`Delete snapshot ${snapshot.name}`}
              blocked={blocked}
              onClick={() => askDelete(vm, snapshot, done)}
            >
              Delete
            </Act>
          </span>
        </li>
      ))}
    </ul>
  );
}

const pathOf = (vm: VmSummary, snapshot: SnapshotInfo) =>
  `/vms/${part(vm.name)}/snapshots/${part(snapshot.name)}`;

function askRevert(vm: VmSummary, snapshot: SnapshotInfo, done: () => void): void {
  const lost = `The VM loses its specification and what its guest has written since
    ${dateTime(snapshot.created_unix_ms)}, except what other snapshots have`;
  const memory = vm.state === 'suspended' ? ', and the memory of its suspended guest' : '';
  const after = snapshot.memory
    ? ' The VM is suspended afterwards: Resume continues the guest where it was.'
    : ' The VM is stopped afterwards.';
  confirm({
    title: `Revert ${vm.name} to ${snapshot.name}`,
    text: `${lost}${memory}.${after}`,
    verb: 'Revert',
    run: async () => {
      await post(`${pathOf(vm, snapshot)}/revert`);
      done();
    },
  });
}

function askDelete(vm: VmSummary, snapshot: SnapshotInfo, done: () => void): void {
  const merged = isOff(vm)
    ? 'Layers of its disks that no snapshot needs are merged.'
    : 'Layers of its disks stay until a snapshot is deleted while the VM does not run.';
  confirm({
    title: `Delete snapshot ${snapshot.name} of ${vm.name}`,
    text: `The VM cannot go back to ${dateTime(snapshot.created_unix_ms)} any more. What it has now
      stays. ${merged}`,
    verb: 'Delete',
    run: async () => {
      await remove(pathOf(vm, snapshot));
      done();
    },
  });
}
