/** Drains a host. Shows the plan first: targets, reasons, VMs that stay, estimated end. */
import { useState } from 'preact/hooks';
import { managerNow } from '../api/clock';
import { part, post } from '../api/http';
import type { Drain, MovePriority } from '../api/types';
import { Act, Figure, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Tick } from '../parts/fields';
import { Choice } from '../parts/filter';
import { useLoaded } from '../parts/loaded';
import { drainLook, Status } from '../parts/status';
import { go } from '../state/route';
import { clock, countdown } from '../text/units';
import { PRIORITIES } from './priorities';

export const openDrain = (host: string) =>
  open((close) => <DrainDialog host={host} close={close} />);

function DrainDialog({ host, close }: { host: string; close: () => void }) {
  const [priority, setPriority] = useState<MovePriority>('normal');
  const [hasDisks, setHasDisks] = useState(false);
  const path = `/hosts/${part(host)}/drain`;
  const request = { priority, ...(hasDisks ? { disks: {} } : {}) };
  const loaded = useLoaded(`${host} ${priority} ${hasDisks}`, () =>
    post<Drain>(path, { plan_only: true, ...request }),
  );
  const plan = loaded.value;
  const task = useTask();
  const begin = () =>
    task.run(async () => {
      const drain = await post<Drain>(path, request);
      close();
      go(`/drains/${part(drain.id)}`);
    });
  const going = plan?.vms.filter((vm) => vm.state === 'going').length ?? 0;
  return (
    <Dialog
      title={`Drain ${host}`}
      width="wide"
      onClose={close}
      foot={
        <>
          <div class="dialog-options">
            <Choice label="Priority" value={priority} values={PRIORITIES} onChange={setPriority} />
          </div>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act
            kind="primary"
            needs="operator"
            blocked={plan ? null : 'The plan is not ready yet.'}
            busy={task.busy}
            onClick={begin}
          >
            {plan ? `Drain: move ${going} ${going === 1 ? 'VM' : 'VMs'}` : 'Drain'}
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      <p class="muted">
        {host} enters maintenance, and its VMs move to other hosts. This is the plan; nothing has
        been moved yet.
      </p>
      <Tick
        text="Move the disks of VMs, too, unless the destination shares their directories"
        checked={hasDisks}
        onChange={setHasDisks}
      />
      {plan ? <Plan drain={plan} /> : !loaded.problem && <Waiting lines={10} />}
    </Dialog>
  );
}

/** The VMs of a drain. Those that stay come first: they need attention. */
export function Plan({ drain }: { drain: Drain }) {
  const stays = drain.vms.filter((vm) => vm.state === 'stays');
  const going = drain.vms.length - stays.length;
  const isPlan = drain.state === 'planned';
  const isLive = drain.state === 'running' || drain.state === 'undoing';
  const leftMs = drain.eta_unix_ms
    ? drain.eta_unix_ms - (isLive ? managerNow() : drain.asked_unix_ms)
    : null;
  return (
    <>
      <dl class="figures">
        <Figure label="To move" value={String(going)} />
        <Figure label="Stay" value={String(stays.length)} />
        <Figure
          label="Estimated time"
          value={countdown(leftMs)}
          note={drain.eta_unix_ms ? `ends about ${clock(drain.eta_unix_ms)}` : undefined}
        />
      </dl>
      <div class="scroll-x">
        <table class="plain plan">
          <thead>
            <tr>
              <th scope="col">VM</th>
              <th scope="col">State</th>
              <th scope="col">To</th>
              <th scope="col">Moved by</th>
              <th scope="col">Reason</th>
            </tr>
          </thead>
          <tbody>
            {[...stays, ...drain.vms.filter((vm) => vm.state !== 'stays')].map((vm) => (
              <tr key={vm.vm}>
                <th scope="row">{vm.vm}</th>
                <td>
                  <Status
                    look={drainLook(isPlan && vm.state === 'going' ? 'would-go' : vm.state)}
                  />
                </td>
                <td class="digits">{vm.to ?? '–'}</td>
                <td class="number">{clock(vm.gone_unix_ms)}</td>
                <td>{vm.reason}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
