/** Asks the fencing devices for the power state of their hosts. Nothing is switched. */
import type { FencingTest } from '../api/types';
import { TestDialog } from '../dialogs/test';
import { Empty } from '../parts/basics';
import { open } from '../parts/dialog';
import { type Look, Status } from '../parts/status';

export const openTestFencing = () =>
  open((close) => (
    <TestDialog<FencingTest>
      title="Test fencing devices"
      path="/ha/fencing/test"
      result={(test) => <Devices test={test} />}
      close={close}
    />
  ));

/** State of a host's power; anything else is why it is unknown. */
export function powerLook(state: string): Look {
  if (state === 'on') return { tone: 'ok', shape: 'disc', text: 'on' };
  if (state === 'off') return { tone: 'idle', shape: 'ring', text: 'off' };
  return { tone: 'bad', shape: 'cross', text: 'unknown' };
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
