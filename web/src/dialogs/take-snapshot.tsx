/** Takes a snapshot of a VM. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { VmSummary } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';

/** `done` is called after it is taken. */
export const openTakeSnapshot = (vm: VmSummary, done: () => void) =>
  open((close) => <TakeSnapshot vm={vm} done={done} close={close} />);

function TakeSnapshot(props: { vm: VmSummary; done: () => void; close: () => void }) {
  const { vm, done, close } = props;
  const [name, setName] = useState('');
  const task = useTask();
  const take = () => {
    if (name === '') return;
    void task.run(async () => {
      await post(`/vms/${part(vm.name)}/snapshots`, { name: name.trim() });
      done();
      close();
    });
  };
  return (
    <FormDialog
      title={`Take snapshot of ${vm.name}`}
      verb="Take snapshot"
      task={task}
      send={take}
      close={close}
    >
      <Field label="Name" value={name} onInput={setName} hint="For example before-upgrade" />
      <p class="notice">
        {vm.state === 'running' &&
          'The guest is paused while its memory is written to a file of its host. '}
        A VM with snapshots does not move.
      </p>
    </FormDialog>
  );
}
