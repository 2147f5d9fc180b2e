/** Asks the fencing devices for the power state of their hosts. Nothing is switched. */
import { useEffect, useState } from 'preact/hooks';
import { post } from '../api/http';
import type { FencingTest } from '../api/types';
import { Act, Empty, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { type Look, Status } from '../parts/status';

export const openTestFencing = () => open((close) => <TestFencing close={close} />);

/** State of a host's power; anything else is why it is unknown. */
export function powerLook(state: string): Look {
  if (state === 'on') return { tone: 'ok', shape: 'disc', text: 'on' };
  if (state === 'off') return { tone: 'idle', shape: 'ring', text: 'off' };
  return { tone: 'bad', shape: 'cross', text: 'unknown' };
}

function TestFencing({ close }: { close: () => void }) {
  const task = useTask();
  const [done, setDone] = useState<FencingTest | null>(null);
  const send = () => task.run(async () => setDone(await post<FencingTest>('/ha/fencing/test')));
  useEffect(() => void send(), []);
  return (
    <Dialog
      title="Test fencing devices"
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
      {done && !task.busy && <Devices test={done} />}
    </Dialog>
  );
}

function Devices({ test }: { test: FencingTest }) {
  const hosts = Object.entries(test.hosts);
  if (hosts.length === 0)
    return <Empty>No fencing devices. The manager's configuration names them (docs/ha.md).</Empty>;
  return (
    <ul class="plain-list">
      {hosts.map(([host, state]) => {
        const look = powerLook(state);
        return (
          <li key={host}>
            <Status look={look} /> <strong>{host}</strong>
            {look.text === 'unknown' && <p class="muted">{state}</p>}
          </li>
        );
      })}
    </ul>
  );
}
