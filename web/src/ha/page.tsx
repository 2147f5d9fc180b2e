/** High availability: terms of hosts, protected VMs, and hosts that do not respond. */
import { useEffect } from 'preact/hooks';
import { get } from '../api/http';
import type { HaHostStatus, HaOwnVmStatus, HaStatus, HaVmStatus } from '../api/types';
import {
  Act,
  Empty,
  Facts,
  HostLink,
  PageHead,
  Panel,
  ProblemBox,
  sentence,
  VmLink,
  Waiting,
} from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { Status } from '../parts/status';
import { count } from '../text/units';
import { openConfirmOff } from './confirm-off';
import { openTestFencing } from './fencing';
import {
  confirmCommand,
  doubtful,
  guardsText,
  phaseLook,
  renewedText,
  shortfallText,
  standingLook,
} from './look';
import { ADMISSIONS, openEditHa } from './settings';

/** Interval at which the page asks again. */
const POLL_MS = 2000;

export function HaPage() {
  const loaded = useLoaded('ha', (signal) => get<HaStatus>('/ha', signal));
  useEffect(() => {
    const timer = setInterval(loaded.reload, POLL_MS);
    return () => clearInterval(timer);
  }, []);
  const now = loaded.value;
  return (
    <>
      <PageHead title="High availability" side={now && <Actions now={now} done={loaded.reload} />}>
        <span class="muted">Protected VMs start elsewhere when their host fails.</span>
      </PageHead>
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {!now && !loaded.problem && <Waiting lines={8} />}
      {now && <Body now={now} done={loaded.reload} />}
    </>
  );
}

function Actions({ now, done }: { now: HaStatus; done: () => void }) {
  return (
    <>
      <Act needs="operator" onClick={openTestFencing}>
        Test fencing devices
      </Act>
      <Act kind="primary" needs="admin" onClick={() => openEditHa(now.settings, done)}>
        Edit settings
      </Act>
    </>
  );
}

function Body({ now, done }: { now: HaStatus; done: () => void }) {
  const { settings, shortfall } = now;
  const admission = settings.admission ?? 'warn';
  const [own, ownProblems] = [now.own ?? [], now.own_problems ?? []];
  return (
    <>
      {doubtful(now.hosts).map((host) => (
        <Doubtful key={host.host} host={host} done={done} />
      ))}
      {own.map((vm) => (
        <DoubtfulOwn key={`${vm.datastore} ${vm.uuid}`} own={vm} />
      ))}
      {shortfall && <p class="notice">{shortfallText(shortfall)}</p>}
      <Panel title="Settings">
        <Facts
          rows={[
            ['High availability', settings.enabled ? 'on' : 'off'],
            ['Hosts that may fail at once', count(settings.failures ?? 1)],
            ['A start that would not fit then', ADMISSION_NAMES[admission] ?? admission],
          ]}
        />
      </Panel>
      <Panel title="Hosts">
        {now.hosts.length === 0 ? (
          <Empty>
            {settings.enabled
              ? 'No host has a term.'
              : 'High availability is off: no host has a term, the manager restarts no VM.'}
          </Empty>
        ) : (
          <Hosts hosts={now.hosts} />
        )}
      </Panel>
      <Panel title="Protected VMs">
        {now.vms.length === 0 ? (
          <Empty>No VM is protected. Edit a VM to protect it.</Empty>
        ) : (
          <Vms vms={now.vms} />
        )}
      </Panel>
      {(own.length > 0 || ownProblems.length > 0) && (
        <Panel title="VMs that agents protect">
          {ownProblems.map((why) => (
            <p key={why} class="notice">
              {sentence(why)}
            </p>
          ))}
          {own.length > 0 && <OwnVms own={own} />}
        </Panel>
      )}
    </>
  );
}

const ADMISSION_NAMES: Record<string, string> = Object.fromEntries(ADMISSIONS);

function Doubtful({ host, done }: { host: HaHostStatus; done: () => void }) {
  return (
    <div class="notice notice-bad" role="alert">
      <p>
        <strong>{host.host} does not respond.</strong> Its protected VMs wait: they start elsewhere
        when somebody has made sure that the host has no power.
      </p>
      <Act
        needs="operator"
        kind="danger"
        name={`Confirm that it is off: host ${host.host}`}
        onClick={() => openConfirmOff(host, done)}
      >
        Confirm that it is off
      </Act>
    </div>
  );
}

/** The confirmation is a request to an agent, which the console does not reach. */
function DoubtfulOwn({ own }: { own: HaOwnVmStatus }) {
  const command = confirmCommand(own);
  if (!command) return null;
  return (
    <div class="notice notice-bad" role="alert">
      <p>
        <strong>
          The host{own.host ? ` ${own.host}` : ''} of VM {own.vm} does not respond.
        </strong>{' '}
        The VM waits: it starts elsewhere when somebody has made sure that the host has no power,
        and has run
      </p>
      <p>
        <code>{command}</code>
      </p>
    </div>
  );
}

function Hosts({ hosts }: { hosts: HaHostStatus[] }) {
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Host</th>
            <th scope="col">State</th>
            <th scope="col" class="number">
              Term
            </th>
            <th scope="col">Last renewal</th>
            <th scope="col">Guarded by</th>
            <th scope="col">Heartbeat datastores</th>
            <th scope="col">Problem</th>
          </tr>
        </thead>
        <tbody>
          {hosts.map((host) => (
            <tr key={host.host}>
              <th scope="row">
                <HostLink name={host.host} />
              </th>
              <td>
                <Status look={phaseLook(host)} />
              </td>
              <td class="number">{host.term === 0 ? '–' : host.term}</td>
              <td class="digits">{renewedText(host)}</td>
              <td>{guardsText(host)}</td>
              <td>{host.datastores.join(', ') || 'none'}</td>
              <td>{host.problem ? sentence(host.problem) : '–'}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Vms({ vms }: { vms: HaVmStatus[] }) {
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">VM</th>
            <th scope="col">Host</th>
            <th scope="col">Priority</th>
            <th scope="col">Restart</th>
            <th scope="col">Problem</th>
          </tr>
        </thead>
        <tbody>
          {vms.map((vm) => (
            <tr key={vm.vm}>
              <th scope="row">
                <VmLink name={vm.vm} />
              </th>
              <td>
                <HostLink name={vm.host} />
              </td>
              <td>{vm.priority}</td>
              <td>{vm.restart ? sentence(vm.restart) : '–'}</td>
              <td>{vm.problem ? sentence(vm.problem) : '–'}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function OwnVms({ own }: { own: HaOwnVmStatus[] }) {
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">VM</th>
            <th scope="col">Standing</th>
            <th scope="col" class="number">
              Term
            </th>
            <th scope="col">Host</th>
            <th scope="col">Watched by</th>
            <th scope="col">Datastore</th>
            <th scope="col">Problem</th>
          </tr>
        </thead>
        <tbody>
          {own.map((vm) => (
            <tr key={`${vm.datastore} ${vm.uuid}`}>
              <th scope="row">
                <VmLink name={vm.vm} />
              </th>
              <td>
                <Status look={standingLook(vm)} />
              </td>
              <td class="number">{vm.term}</td>
              <td>{vm.host ? <HostLink name={vm.host} /> : '–'}</td>
              <td>{(vm.watched_by ?? []).join(', ') || 'none'}</td>
              <td>{vm.datastore}</td>
              <td>{vm.problem ? sentence(vm.problem) : '–'}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
