/** Gives a stopped VM another name. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import { Act, ProblemBox, useTask } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { go } from '../state/route';
import { Field } from './create-vm';

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
    <Dialog
      title={`Rename ${vm}`}
      onClose={close}
      foot={
        <>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act kind="primary" needs="operator" busy={task.busy} onClick={save}>
            Rename
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      <form
        class="form"
        onSubmit={(event) => {
          event.preventDefault();
          save();
        }}
      >
        <Field
          label="Name"
          value={name}
          onInput={setName}
          hint="Labels, UUID and hardware addresses stay"
        />
        <button type="submit" class="unseen" tabIndex={-1} aria-hidden="true">
          Rename
        </button>
      </form>
    </Dialog>
  );
}
