/** Deletes a VM, with its own disks if the user wants. */
import { useState } from 'preact/hooks';
import { get, part, remove } from '../api/http';
import type { VmImages, VmSummary } from '../api/types';
import { Act, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Tick } from '../parts/fields';
import { useLoaded } from '../parts/loaded';
import { isOff } from '../state/cluster';
import { go } from '../state/route';
import { counted } from '../text/units';

/** `snapshots`: how many the VM has. */
export const openDeleteVm = (vm: VmSummary, snapshots: number) =>
  open((close) => <DeleteVm vm={vm} snapshots={snapshots} close={close} />);

/** What a deletion by force ends; null where none is needed. */
export function forceText(vm: VmSummary, snapshots: number): string | null {
  const lost = [
    !isOff(vm) && `The VM is ${vm.state}: force a stop first, without a shutdown`,
    vm.state === 'suspended' && 'The VM is suspended: discard the memory of its guest',
    snapshots > 0 && `Delete its ${counted(snapshots, 'snapshot')} too`,
  ];
  return lost.filter(Boolean).join('. ') || null;
}

/** Images that were to be deleted and stay. */
export const stayed = (shown: VmImages | undefined, now: VmImages | undefined) =>
  (now?.kept ?? []).filter(({ path }) => shown?.deleted.includes(path));

function DeleteVm(props: { vm: VmSummary; snapshots: number; close: () => void }) {
  const { vm, snapshots, close } = props;
  const [isForced, setForced] = useState(false);
  const [withDisks, setWithDisks] = useState(false);
  const [left, setLeft] = useState<VmImages['kept'] | null>(null);
  const task = useTask();
  const path = `/vms/${part(vm.name)}`;
  const images = useLoaded(withDisks ? `images of ${vm.name}` : null, (signal) =>
    get<VmImages>(`${path}/images`, signal),
  );
  const force = forceText(vm, snapshots);
  const leave = () => {
    close();
    go('/vms');
  };
  const run = () =>
    task.run(async () => {
      const query = [isForced && 'force=true', withDisks && 'delete_disks=true'].filter(Boolean);
      const now = await remove<VmImages | undefined>(
        `${path}${query.length ? '?' : ''}${query.join('&')}`,
      );
      const unexpected = stayed(images.value, now);
      if (unexpected.length > 0) setLeft(unexpected);
      else leave();
    });
  if (left) return <Left vm={vm.name} left={left} close={leave} />;
  return (
    <Dialog
      title={`Delete ${vm.name}`}
      width="narrow"
      onClose={close}
      foot={
        <>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act
            kind="danger"
            busy={task.busy}
            blocked={withDisks && !images.value ? 'Wait for the list of images.' : null}
            onClick={run}
          >
            Delete
          </Act>
        </>
      }
    >
      <div class="form">
        {task.problem && <ProblemBox problem={task.problem} />}
        <p>
          The VM is removed.{' '}
          {withDisks ? 'Images that belong to it alone go too.' : 'Its disks are kept.'}
        </p>
        {force && <Tick text={force} checked={isForced} onChange={setForced} />}
        <Tick text="Also delete its disks" checked={withDisks} onChange={setWithDisks} />
        {withDisks && images.problem && <ProblemBox problem={images.problem} />}
        {withDisks && !images.value && !images.problem && <Waiting lines={2} />}
        {withDisks && images.value && <Images {...images.value} />}
      </div>
    </Dialog>
  );
}

function Images({ deleted, kept }: VmImages) {
  return (
    <>
      <h3>Deleted, and lost</h3>
      {deleted.length > 0 ? (
        <ul class="plain-list">
          {deleted.map((path) => (
            <li key={path}>
              <code>{path}</code>
            </li>
          ))}
        </ul>
      ) : (
        <p class="empty">No images.</p>
      )}
      {kept.length > 0 && (
        <>
          <h3>Kept</h3>
          <Kept kept={kept} />
        </>
      )}
    </>
  );
}

const Kept = ({ kept }: { kept: VmImages['kept'] }) => (
  <ul class="plain-list">
    {kept.map(({ path, why }) => (
      <li key={path}>
        <code>{path}</code> <span class="muted">{why}</span>
      </li>
    ))}
  </ul>
);

/** The VM is deleted, and not all that was to be deleted. */
function Left(props: { vm: string; left: VmImages['kept']; close: () => void }) {
  return (
    <Dialog
      title={`${props.vm} is deleted`}
      width="narrow"
      onClose={props.close}
      foot={
        <Act kind="primary" onClick={props.close}>
          Close
        </Act>
      }
    >
      <div class="form">
        <p class="notice">These images stay.</p>
        <Kept kept={props.left} />
      </div>
    </Dialog>
  );
}
