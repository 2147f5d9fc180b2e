/** What can be done with a VM: the buttons of its page, and their questions. */
import { get, part, post, put } from '../api/http';
import type { HostedVm, ManagedVm, VmSummary } from '../api/types';
import { openCloneVm } from '../dialogs/clone-vm';
import { confirm } from '../dialogs/confirm';
import { openDeleteVm } from '../dialogs/delete-vm';
import { openEditVm } from '../dialogs/edit-vm';
import { openMove } from '../dialogs/move';
import { openRenameVm } from '../dialogs/rename-vm';
import { openExport } from '../jobs/open';
import { Act, type useTask } from '../parts/basics';
import { isOff, isStopped } from '../state/cluster';
import { warnOf } from '../state/warnings';

export function VmActions(props: {
  vm: VmSummary;
  task: ReturnType<typeof useTask>;
  changed: () => void;
  /** How many snapshots the VM has. */
  snapshots: number;
}) {
  const { vm, task, changed, snapshots } = props;
  const path = `/vms/${part(vm.name)}`;
  const isTemplate = vm.state === 'template';
  const resumes = vm.state === 'paused' || vm.state === 'suspended';
  const moving = vm.move ? 'The VM has a running or waiting move.' : null;
  return (
    <>
      {(isStopped(vm) || resumes) && (
        <Act
          needs="operator"
          busy={task.busy}
          onClick={() => task.run(async () => warnOf(await post<HostedVm>(`${path}/start`)))}
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
      {!isOff(vm) && (
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
      {isStopped(vm) && (
        <>
          <Act needs="operator" blocked={moving} onClick={() => openRenameVm(vm.name)}>
            Rename
          </Act>
          <Act needs="operator" blocked={moving} onClick={() => openExport(vm)}>
            Export
          </Act>
          <Act
            needs="operator"
            blocked={snapshots > 0 ? 'A VM with snapshots is not made a template.' : moving}
            onClick={() => askTemplate(vm, path, changed)}
          >
            Make template
          </Act>
        </>
      )}
      {isTemplate && (
        <Act needs="operator" onClick={() => askOrdinary(vm, path, changed)}>
          Make ordinary VM
        </Act>
      )}
      {(isStopped(vm) || isTemplate) && (
        <Act
          needs="operator"
          {...(isTemplate ? { kind: 'primary' } : {})}
          blocked={moving}
          busy={task.busy}
          onClick={() => task.run(async () => openCloneVm(await get<ManagedVm>(path)))}
        >
          Clone
        </Act>
      )}
      <Act
        needs="operator"
        kind="danger"
        blocked={moving}
        onClick={() => openDeleteVm(vm, snapshots)}
      >
        Delete
      </Act>
      {!isTemplate && (
        <Act
          kind="primary"
          needs="operator"
          blocked={whyNoMove(vm, snapshots) ?? moving}
          onClick={() => openMove(vm.name)}
        >
          Move
        </Act>
      )}
    </>
  );
}

function whyNoMove(vm: VmSummary, snapshots: number): string | null {
  if (vm.state !== 'running') return 'Only a running VM can be moved.';
  return snapshots > 0 ? 'The VM has snapshots, which are files of its host.' : null;
}

function askTemplate(vm: VmSummary, path: string, changed: () => void): void {
  confirm({
    title: `Make ${vm.name} a template`,
    text:
      'A template is never started or changed, and no VM may write its images. It has linked ' +
      'clones.',
    verb: 'Make template',
    kind: 'primary',
    run: async () => {
      await put(`${path}/template`, { template: true });
      changed();
    },
  });
}

function askOrdinary(vm: VmSummary, path: string, changed: () => void): void {
  confirm({
    title: `Make ${vm.name} an ordinary VM`,
    text: 'This is possible while no linked clone needs its images.',
    verb: 'Make ordinary VM',
    kind: 'primary',
    run: async () => {
      await put(`${path}/template`, { template: false });
      changed();
    },
  });
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
