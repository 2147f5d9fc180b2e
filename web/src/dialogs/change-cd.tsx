/** Inserts an image into a CD-ROM drive of a VM, or ejects what is in it. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import { Act, useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';

/** `drive`: the drive's position; `image`: what is in it. `done` is called after a change. */
export const openChangeCd = (vm: string, drive: number, image: string | null, done: () => void) =>
  open((close) => <ChangeCd vm={vm} drive={drive} image={image} done={done} close={close} />);

function ChangeCd(props: {
  vm: string;
  drive: number;
  image: string | null;
  done: () => void;
  close: () => void;
}) {
  const { vm, drive, done, close } = props;
  const [image, setImage] = useState(props.image ?? '');
  const [force, setForce] = useState(false);
  const task = useTask();
  const change = (body: Record<string, unknown>) =>
    task.run(async () => {
      await post(`/vms/${part(vm)}/drives`, { drive, force, ...body });
      done();
      close();
    });
  const insert = () => {
    if (image !== '') void change({ action: 'insert', image });
  };
  return (
    <FormDialog
      title={`CD of ${vm}`}
      verb="Insert"
      task={task}
      send={insert}
      close={close}
      others={
        props.image !== null && (
          <Act needs="operator" busy={task.busy} onClick={() => void change({ action: 'eject' })}>
            Eject
          </Act>
        )
      }
    >
      <Field
        label="Image"
        value={image}
        onInput={setImage}
        hint="Path of an ISO image that every host of the VM has"
      />
      <label class="tick">
        <input
          type="checkbox"
          checked={force}
          onChange={(event) => setForce(event.currentTarget.checked)}
        />
        <span>Open the tray even if the guest has locked it</span>
      </label>
    </FormDialog>
  );
}
