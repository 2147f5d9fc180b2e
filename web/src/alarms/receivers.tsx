/** Tests the receivers of notices about alarms: webhooks and mail. */
import type { AlarmTest } from '../api/types';
import { TestDialog } from '../dialogs/test';
import { Empty } from '../parts/basics';
import { open } from '../parts/dialog';
import { Status } from '../parts/status';

export const openTestReceivers = () =>
  open((close) => (
    <TestDialog<AlarmTest>
      title="Test receivers"
      path="/alarms/test"
      result={(test) => <Receivers test={test} />}
      close={close}
    />
  ));

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
