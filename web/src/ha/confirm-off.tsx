/** Confirms that a doubtful host has no power, so that its protected VMs start elsewhere. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { ConfirmOff, HaHostStatus } from '../api/types';
import { Act, ProblemBox, useTask } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Tick } from '../parts/fields';
import { renewedText } from './look';

/** `done` is called after the confirmation. */
export const openConfirmOff = (host: HaHostStatus, done: () => void) =>
  open((close) => <Confirm host={host} done={done} close={close} />);

function Confirm(props: { host: HaHostStatus; done: () => void; close: () => void }) {
  const { host, done, close } = props;
  const [isSure, setSure] = useState(false);
  const task = useTask();
  const send = async () => {
    const request: ConfirmOff = { term: host.term };
    const path = `/ha/hosts/${part(host.host)}/confirm-off`;
    if (!(await task.run(() => post(path, request)))) return;
    done();
    close();
  };
  return (
    <Dialog
      title={`Confirm that ${host.host} is off`}
      width="narrow"
      onClose={close}
      foot={
        <>
          <Act kind="quiet" onClick={close}>
            Close
          </Act>
          <Act
            kind="danger"
            needs="operator"
            blocked={isSure ? null : 'Confirm first that the host has no power.'}
            busy={task.busy}
            onClick={send}
          >
            Start its VMs elsewhere
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      <p>
        The last renewal in term {host.term}: {renewedText(host)}. If the host still runs, its
        protected VMs run twice after this, and their disks are destroyed.
      </p>
      <Tick text={`I have looked: ${host.host} has no power`} checked={isSure} onChange={setSure} />
    </Dialog>
  );
}
