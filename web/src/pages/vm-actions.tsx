/** What can be done with a VM: the buttons of its page, and their questions. */
import { get, part, post, remove } from '../api/http';
import type { ManagedVm, VmSummary } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openEditVm } from '../dialogs/edit-vm';
import { openMove } from '../dialogs/move';
import { openRenameVm } from '../dialogs/rename-vm';
import { Act, type useTask } from '../parts/basics';
import { isOff } from '../state/cluster';
import { go } from '../state/route';

export function VmActions(props: {
  vm: VmSummary;
  task: ReturnType<typeof useTask>;
  changed: () => void;
}) {
  const { vm, task, changed } = props;
  const path = `/vms/${part(vm.name)}`;
  const isStopped = isOff(vm);
  const resumes = vm.state === 'paused' || vm.state === 'suspended';
  const moving = vm.move ? 'The VM has a running or waiting move.' : null;
  return (
    <>
      {(isStopped || resumes) && (
        <Act
          needs="operator"
          busy={task.busy}
          onClick={() => task.run(() => post(`${path}/start`))}
        >
          {resumes ? 'Resume' : 'Start'}
        </Act>
      )}
      {vm.state === 'running' && (
        <Act needs="operator" blocked={moving} onClick={() => askSuspend(vm, path)}>
          Suspend
        </Act>
      )}
      {vm.state === 'suspended' && (
        <Act needs="operator" kind="danger" onClick={() => askDiscard(vm, path)}>
          Discard memory
        </Act>
      )}
      {!isStopped && (
        <>
          <Act
            needs="operator"
            blocked={vm.in_doubt ? 'The host that runs the VM is unknown.' : moving}
            onClick={() => askRestart(vm, path)}
          >
            Restart
          </Act>
          <Act needs="operator" blocked={moving} onClick={() => askStop(vm, path)}>
            Stop
          </Act>
        </>
      )}
      <Act
        needs="operator"
        busy={task.busy}
        onClick={() => task.run(async () => openEditVm(await get<ManagedVm>(path), changed))}
      >
        Edit
      </Act>
      {(vm.state === 'stopped' || vm.state === 'failed') && (
        <Act needs="operator" blocked={moving} onClick={() => openRenameVm(vm.name)}>
          Rename
        </Act>
      )}
      <Act needs="operator" kind="danger" blocked={moving} onClick={() => askDelete(vm, path)}>
        Delete
      </Act>
      <Act
        kind="primary"
        needs="operator"
        blocked={vm.state === 'running' ? moving : 'Only a running VM can be moved.'}
        onClick={() => openMove(vm.name)}
      >
        Move
      </Act>
    </>
  );
}

function askSuspend(vm: VmSummary, path: string): void {
  confirm({
    title: `Suspend ${vm.name}`,
    text:
      'The memory of the guest goes to a file of its host, and its process ends. Resume ' +
      'continues the guest where it was.',
    verb: 'Suspend',
    run: () => post(`${path}/suspend`),
  });
}

function askDiscard(vm: VmSummary, path: string): void {
  confirm({
    title: `Discard the memory of ${vm.name}`,
    text: 'The VM is then stopped. The guest loses what it had not written to its disks.',
    verb: 'Discard',
    run: () => post(`${path}/stop`, { force: true }),
  });
}

function askStop(vm: VmSummary, path: string): void {
  confirm({
    title: `Stop ${vm.name}`,
    ...stopText(vm),
    verb: 'Stop',
    run: (force) => post(`${path}/stop`, { force }),
  });
}

function askRestart(vm: VmSummary, path: string): void {
  confirm({
    title: `Restart ${vm.name}`,
    ...stopText(vm),
    tick: 'Reset it instead, without a shutdown: the guest loses what it has not written',
    verb: 'Restart',
    run: (resets) => post(`${path}/${resets ? 'reset' : 'restart'}`),
  });
}

/** What a stop does to the guest. A paused guest cannot react to the power button. */
function stopText(vm: VmSummary): { text: string; tick?: string } {
  if (vm.in_doubt)
    return {
      text:
        'The host that runs the VM is unknown. The copy on this host may be the only one of the ' +
        'guest, and the VM stays in doubt.',
      tick: 'End the copy on this host anyway',
    };
  if (vm.state === 'paused')
    return {
      text: 'The guest is paused and cannot react to the power button. It is ended at once.',
    };
  return {
    text: 'The power button is pressed, and the guest gets time to shut down.',
    tick: 'Force stop: end it at once, without a shutdown',
  };
}

function askDelete(vm: VmSummary, path: string): void {
  const isRunning = !isOff(vm);
  const tick = isRunning
    ? `The VM is ${vm.state}: force a stop first, without a shutdown`
    : vm.state === 'suspended'
      ? 'The VM is suspended: discard the memory of its guest'
      : null;
  confirm({
    title: `Delete ${vm.name}`,
    text: 'The VM is removed. Its disks are kept.',
    ...(tick ? { tick } : {}),
    verb: 'Delete',
    run: async (force) => {
      await remove(`${path}${force ? '?force=true' : ''}`);
      go('/vms');
    },
  });
}
