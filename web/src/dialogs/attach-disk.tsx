/** Attaches a disk to a VM, running or stopped. */
import { useState } from 'preact/hooks';
import { get, part, post } from '../api/http';
import type { DiskList, ManagedVm } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { isOff } from '../state/cluster';
import { freeSlots } from '../state/growth';
import { BUSES, FORMATS, NEW_DISK } from './vm-disks';

/** `done` is called after a change. */
export const openAttachDisk = (vm: ManagedVm, done: () => void) =>
  open((close) => <AttachDisk vm={vm} done={done} close={close} />);

function AttachDisk(props: { vm: ManagedVm; done: () => void; close: () => void }) {
  const { vm, done, close } = props;
  const isRunning = !isOff(vm);
  // A running VM takes disks on bus scsi, and on bus virtio in a free slot.
  const taken: string[] = freeSlots(vm.info.spec) > 0 ? ['scsi', 'virtio'] : ['scsi'];
  const [disk, setDisk] = useState({ ...NEW_DISK, bus: isRunning ? 'scsi' : NEW_DISK.bus });
  const images = useLoaded(`images ${vm.host}`, (signal) =>
    get<DiskList>(`/hosts/${part(vm.host)}/disks`, signal),
  );
  const unused = images.value?.disks.filter((image) => !image.vms?.length) ?? [];
  const task = useTask();
  const attach = () => {
    if (disk.path === '') return;
    void task.run(async () => {
      await post(`/vms/${part(vm.name)}/drives`, { action: 'attach', disk });
      done();
      close();
    });
  };
  const name = (path: string) => {
    const format = unused.find((image) => image.path === path)?.format ?? disk.format;
    setDisk({ ...disk, path, format });
  };
  return (
    <FormDialog
      title={`Attach disk to ${vm.name}`}
      verb="Attach"
      task={task}
      send={attach}
      close={close}
    >
      <Field
        label="Image"
        value={disk.path}
        onInput={name}
        offers={unused.map((image) => image.path)}
        hint="Path of a disk image that every host of the VM has"
      />
      <div class="form-row">
        <Select
          label="Format"
          value={disk.format}
          values={FORMATS}
          onChange={(format) => setDisk({ ...disk, format })}
        />
        <Select
          label="Bus"
          value={disk.bus}
          values={isRunning ? BUSES.filter(([bus]) => taken.includes(bus)) : BUSES}
          onChange={(bus) => setDisk({ ...disk, bus })}
          {...(isRunning
            ? { hint: 'A running VM takes disks on bus scsi, and virtio in free slots' }
            : {})}
        />
      </div>
      <Tick
        text="Read only"
        checked={disk.readonly}
        onChange={(readonly) => setDisk({ ...disk, readonly })}
      />
    </FormDialog>
  );
}
