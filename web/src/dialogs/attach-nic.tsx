/** Attaches a network interface to a VM, running or stopped. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { ManagedVm } from '../api/types';
import { ProblemBox, useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Wrong } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { isOff } from '../state/cluster';
import { type NicDraft, NicFields, NicOptions, useNetworks, wrongNics } from './vm-nics';

/** `done` is called after a change. */
export const openAttachNic = (vm: ManagedVm, done: () => void) =>
  open((close) => <AttachNic vm={vm} done={done} close={close} />);

function AttachNic(props: { vm: ManagedVm; done: () => void; close: () => void }) {
  const { vm, done, close } = props;
  const [draft, setDraft] = useState<NicDraft>({ network: '' });
  const [isTried, setTried] = useState(false);
  const { networks, problem } = useNetworks();
  const task = useTask();
  const nic = draft.network === '' ? { ...draft, network: networks[0] ?? '' } : draft;
  const wrong = wrongNics([nic]);
  const attach = () => {
    setTried(true);
    if (wrong) return;
    void task.run(async () => {
      await post(`/vms/${part(vm.name)}/nics`, { action: 'attach', nic });
      done();
      close();
    });
  };
  const isRunning = !isOff(vm);
  return (
    <FormDialog
      title={`Attach interface to ${vm.name}`}
      verb="Attach"
      task={task}
      send={attach}
      close={close}
    >
      {problem && <ProblemBox problem={problem} />}
      <NicFields nic={nic} name="the interface" networks={networks} change={setDraft} />
      <NicOptions nic={nic} change={setDraft} isInSlot={isRunning} />
      <Wrong why={isTried ? wrong : null} />
      {isRunning && (
        <p class="notice">
          The interface gets a free slot. cloud-init does not set it up: configure it in the guest.
        </p>
      )}
    </FormDialog>
  );
}
