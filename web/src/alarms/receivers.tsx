/** Tests the receivers of notices about alarms: webhooks and mail. */
import { useEffect, useState } from 'preact/hooks';
import { post } from '../api/http';
import type { AlarmTest } from '../api/types';
import { Act, Empty, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Status } from '../parts/status';

export const openTestReceivers = () => open((close) => <TestReceivers close={close} />);

function TestReceivers({ close }: { close: () => void }) {
  const task = useTask();
  const [done, setDone] = useState<AlarmTest | null>(null);
  const send = () => task.run(async () => setDone(await post<AlarmTest>('/alarms/test')));
  useEffect(() => void send(), []);
  return (
    <Dialog
      title="Test receivers"
      onClose={close}
      foot={
        <>
          <Act kind="quiet" onClick={close}>
            Close
          </Act>
          <Act needs="operator" busy={task.busy} onClick={send}>
            Test again
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {task.busy && <Waiting lines={2} />}
      {done && !task.busy && <Receivers test={done} />}
    </Dialog>
  );
}

function Receivers({ test }: { test: AlarmTest }) {
  if (test.receivers.length === 0)
    return (
      <Empty>
        No receivers. The manager's configuration names them (docs/alarms.md): webhooks and mail.
      </Empty>
    );
  return (
    <ul class="plain-list">
      {test.receivers.map((receiver) => (
        <li key={receiver.name}>
          <Status
            look={
              receiver.delivered
                ? { tone: 'ok', shape: 'check', text: 'delivered' }
                : { tone: 'bad', shape: 'cross', text: 'not delivered' }
            }
          />{' '}
          <strong>{receiver.name}</strong> <span class="muted">{receiver.kind}</span>
          {receiver.error && <p class="muted">{receiver.error}</p>}
        </li>
      ))}
    </ul>
  );
}
