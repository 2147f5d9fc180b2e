/** Gives a stopped VM another name. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { go } from '../state/route';

export const openRenameVm = (vm: string) => open((close) => <RenameVm vm={vm} close={close} />);

function RenameVm(props: { vm: string; close: () => void }) {
  const { vm, close } = props;
  const [name, setName] = useState(vm);
  const task = useTask();
  const save = () => {
    void task.run(async () => {
      await post(`/vms/${part(vm)}/rename`, { name });
      close();
      go(`/vms/${part(name)}`);
    });
  };
  return (
    <FormDialog title={`Rename ${vm}`} verb="Rename" task={task} send={save} close={close}>
      <Field
        label="Name"
        value={name}
        onInput={setName}
        hint="Labels, UUID and hardware addresses stay"
      />
    </FormDialog>
  );
}
