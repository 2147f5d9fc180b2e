/** One VM: state, specification and actions. */
import type { ComponentChildren } from 'preact';
import { get, part, post, remove } from '../api/http';
import type { ManagedVm, Move, VmSpec, VmSummary } from '../api/types';
import { openChangeCd } from '../dialogs/change-cd';
import { confirm } from '../dialogs/confirm';
import { openEditVm } from '../dialogs/edit-vm';
import { openMove } from '../dialogs/move';
import { openRenameVm } from '../dialogs/rename-vm';
import {
  Act,
  Facts,
  HostLink,
  Labels,
  Link,
  PageHead,
  Panel,
  ProblemBox,
  useTask,
  Waiting,
} from '../parts/basics';
import { lazy } from '../parts/lazy';
import { useLoaded } from '../parts/loaded';
import { moveLook, Status, vmLook } from '../parts/status';
import { Thumbnail } from '../screen/thumbnail';
import { isOff, isOver, moves, vms } from '../state/cluster';
import { go, route, setQuery } from '../state/route';
import { whyNot } from '../state/session';
import { FIRMWARE_NAMES } from '../text/firmware';
import { bytes, dateTime, duration } from '../text/units';
import { VIDEO_NAMES } from '../text/video';
import { GuestPanel } from './vm-guest';
import { VmLog } from './vm-log';

const TextConsole = lazy(() => import('../terminal/console'));
const VmScreen = lazy(() => import('../screen/screen'));

const TABS = [
  ['summary', 'Summary'],
  ['screen', 'Screen'],
  ['console', 'Text console'],
  ['log', 'Log'],
  ['moves', 'Moves'],
] as const;

export function VmPage({ name }: { name: string }) {
  const vm = vms.get(name);
  const loaded = useLoaded(`vm ${name} ${vm?.host} ${vm?.state}`, (signal) =>
    get<ManagedVm>(`/vms/${part(name)}`, signal),
  );
  const task = useTask();
  const tab = route.value.query.get('tab') ?? 'summary';
  const hasScreen = (loaded.value?.info.spec.video ?? 'none') !== 'none';
  const isOn = vm !== undefined && !isOff(vm);
  if (!vm) return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  return (
    <div class={tab === 'summary' || tab === 'moves' ? '' : 'page-fill'}>
      <PageHead
        title={name}
        above={<Link to="/vms">VMs</Link>}
        side={<Actions vm={vm} task={task} changed={loaded.reload} />}
      >
        <Status look={vmLook(vm)} />
        <span>
          on <HostLink name={vm.host} />
        </span>
        <span class="muted">
          {vm.vcpus} vCPUs, {bytes(vm.memory_bytes)}
        </span>
        {vm.move && <Link to={`/moves/${part(vm.move)}`}>current move</Link>}
        <Labels labels={vm.labels} />
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      {vm.reason && <p class="notice">{vm.reason}</p>}
      <nav class="tabs" aria-label={`Views of ${name}`}>
        {TABS.filter(([id]) => id !== 'screen' || hasScreen).map(([id, text]) => (
          <a
            key={id}
            href={`#/vms/${part(name)}${id === 'summary' ? '' : `?tab=${id}`}`}
            aria-current={tab === id ? 'page' : undefined}
            onClick={(event) => {
              event.preventDefault();
              setQuery('tab', id === 'summary' ? '' : id);
            }}
          >
            {text}
          </a>
        ))}
      </nav>
      {tab === 'screen' && hasScreen ? (
        <VmScreen vm={name} isRunning={isOn} />
      ) : tab === 'console' ? (
        <TextConsole vm={name} isRunning={isOn} />
      ) : tab === 'log' ? (
        <VmLog vm={name} />
      ) : tab === 'moves' ? (
        <MovesOf vm={name} />
      ) : loaded.value ? (
        <Summary
          vm={loaded.value}
          changed={loaded.reload}
          seen={
            hasScreen && isOn && !whyNot('operator') ? (
              <Panel title="Screen">
                <Thumbnail vm={name} isCalm={vm.state === 'running' && !vm.move} />
              </Panel>
            ) : null
          }
        />
      ) : loaded.problem ? (
        <ProblemBox problem={loaded.problem} />
      ) : (
        <Waiting lines={8} />
      )}
    </div>
  );
}

function Actions(props: { vm: VmSummary; task: ReturnType<typeof useTask>; changed: () => void }) {
  const { vm, task, changed } = props;
  const path = `/vms/${part(vm.name)}`;
  const isStopped = isOff(vm);
  const resumes = vm.state === 'paused' || vm.state === 'suspended';
  const moving = vm.move ? 'The VM has a running or waiting move.' : null;
  return (
    <>
      {(isStopped || resumes) && (
        <Act
          needs="operator"
          busy={task.busy}
          onClick={() => task.run(() => post(`${path}/start`))}
        >
          {resumes ? 'Resume' : 'Start'}
        </Act>
      )}
      {vm.state === 'running' && (
        <Act needs="operator" blocked={moving} onClick={() => askSuspend(vm, path)}>
          Suspend
        </Act>
      )}
      {vm.state === 'suspended' && (
        <Act needs="operator" kind="danger" onClick={() => askDiscard(vm, path)}>
          Discard memory
        </Act>
      )}
      {!isStopped && (
        <>
          <Act
            needs="operator"
            blocked={vm.in_doubt ? 'The host that runs the VM is unknown.' : moving}
            onClick={() => askRestart(vm, path)}
          >
            Restart
          </Act>
          <Act needs="operator" blocked={moving} onClick={() => askStop(vm, path)}>
            Stop
          </Act>
        </>
      )}
      <Act
        needs="operator"
        busy={task.busy}
        onClick={() => task.run(async () => openEditVm(await get<ManagedVm>(path), changed))}
      >
        Edit
      </Act>
      {(vm.state === 'stopped' || vm.state === 'failed') && (
        <Act needs="operator" blocked={moving} onClick={() => openRenameVm(vm.name)}>
          Rename
        </Act>
      )}
      <Act needs="operator" kind="danger" blocked={moving} onClick={() => askDelete(vm, path)}>
        Delete
      </Act>
      <Act
        kind="primary"
        needs="operator"
        blocked={vm.state === 'running' ? moving : 'Only a running VM can be moved.'}
        onClick={() => openMove(vm.name)}
      >
        Move
      </Act>
    </>
  );
}

function askSuspend(vm: VmSummary, path: string): void {
  confirm({
    title: `Suspend ${vm.name}`,
    text:
      'The memory of the guest goes to a file of its host, and its process ends. Resume ' +
      'continues the guest where it was.',
    verb: 'Suspend',
    run: () => post(`${path}/suspend`),
  });
}

function askDiscard(vm: VmSummary, path: string): void {
  confirm({
    title: `Discard the memory of ${vm.name}`,
    text: 'The VM is then stopped. The guest loses what it had not written to its disks.',
    verb: 'Discard',
    run: () => post(`${path}/stop`, { force: true }),
  });
}

function askStop(vm: VmSummary, path: string): void {
  confirm({
    title: `Stop ${vm.name}`,
    ...stopText(vm),
    verb: 'Stop',
    run: (force) => post(`${path}/stop`, { force }),
  });
}

function askRestart(vm: VmSummary, path: string): void {
  confirm({
    title: `Restart ${vm.name}`,
    ...stopText(vm),
    tick: 'Reset it instead, without a shutdown: the guest loses what it has not written',
    verb: 'Restart',
    run: (resets) => post(`${path}/${resets ? 'reset' : 'restart'}`),
  });
}

/** What a stop does to the guest. A paused guest cannot react to the power button. */
function stopText(vm: VmSummary): { text: string; tick?: string } {
  if (vm.in_doubt)
    return {
      text:
        'The host that runs the VM is unknown. The copy on this host may be the only one of the ' +
        'guest, and the VM stays in doubt.',
      tick: 'End the copy on this host anyway',
    };
  if (vm.state === 'paused')
    return {
      text: 'The guest is paused and cannot react to the power button. It is ended at once.',
    };
  return {
    text: 'The power button is pressed, and the guest gets time to shut down.',
    tick: 'Force stop: end it at once, without a shutdown',
  };
}

function askDelete(vm: VmSummary, path: string): void {
  const isRunning = !isOff(vm);
  const tick = isRunning
    ? `The VM is ${vm.state}: force a stop first, without a shutdown`
    : vm.state === 'suspended'
      ? 'The VM is suspended: discard the memory of its guest'
      : null;
  confirm({
    title: `Delete ${vm.name}`,
    text: 'The VM is removed. Its disks are kept.',
    ...(tick ? { tick } : {}),
    verb: 'Delete',
    run: async (force) => {
      await remove(`${path}${force ? '?force=true' : ''}`);
      go('/vms');
    },
  });
}

function Summary(props: { vm: ManagedVm; changed: () => void; seen: ComponentChildren }) {
  const { vm, changed, seen } = props;
  const { info } = vm;
  const { spec } = info;
  const also: [string, string][] = vm.also_at?.length ? [['Also on', vm.also_at.join(', ')]] : [];
  return (
    <div class="columns-even">
      {seen}
      <Panel title="State">
        <Facts
          rows={[
            [
              'Should be',
              vm.planned ? (vm.planned === 'on' ? 'running' : 'stopped') : 'not managed here',
            ],
            ['Host', <HostLink key="host" name={vm.host} />],
            ...also,
            ['Addresses', info.addresses?.join(', ') || 'unknown'],
            ['Epoch', info.epoch],
            ['Process', info.pid],
          ]}
        />
        <Placement vm={vm.name} host={vm.host} />
      </Panel>
      <GuestPanel vm={vm} />
      <Panel title="Specification">
        <Facts
          rows={[
            ['vCPUs', spec.vcpus ?? vm.vcpus],
            [
              'Memory',
              spec.memory
                ?.map((block) => `${block.size}${block.backing ? `, ${block.backing}` : ''}`)
                .join('; '),
            ],
            ['CPU model', spec.cpu_model],
            ['Machine', info.machine ?? spec.machine],
            ['Firmware', FIRMWARE_NAMES[spec.firmware ?? 'bios']],
            ['Screen', VIDEO_NAMES[spec.video ?? 'none']],
            ['Accelerator', info.accel ?? spec.accel],
            ['Kernel', spec.kernel],
            ['Command line', spec.cmdline],
            ['Page-in', spec.refuses_page_in ? 'not allowed' : 'allowed'],
            ['Random numbers', spec.rng ? 'virtio' : 'none'],
            ['Watchdog', spec.watchdog ?? 'none'],
            ['cloud-init', spec.cloud_init ? 'has a disk' : 'none'],
            ['UUID', spec.uuid],
          ]}
        />
      </Panel>
      <Panel title="Disks">
        {spec.disks?.length ? (
          <ul class="plain-list">
            {spec.disks.map((disk) => (
              <li key={disk.path}>
                <code>{disk.path}</code> {disk.format}
                {disk.bus ? `, ${disk.bus}` : ''}
                {disk.readonly ? ', read only' : ''}
              </li>
            ))}
          </ul>
        ) : (
          <p class="empty">No disks.</p>
        )}
      </Panel>
      {spec.cdroms?.length ? (
        <Panel title="CD-ROM drives">
          <ul class="plain-list">
            {spec.cdroms.map((drive, at) => (
              <li key={at}>
                {drive.image ? <code>{drive.image}</code> : 'empty'}{' '}
                <Act
                  kind="quiet"
                  needs="operator"
                  name={`Change CD of drive ${at}`}
                  onClick={() => openChangeCd(vm.name, at, drive.image ?? null, changed)}
                >
                  Change
                </Act>
              </li>
            ))}
          </ul>
        </Panel>
      ) : null}
      <Panel title="Network interfaces">
        {spec.nics?.length ? (
          <ul class="plain-list">
            {spec.nics.map((nic, at) => (
              <li key={at}>
                {nic.network} <code>{nic.mac}</code> {nic.address} {nicText(nic)}
              </li>
            ))}
          </ul>
        ) : (
          <p class="empty">No network interfaces.</p>
        )}
      </Panel>
    </div>
  );
}

type Nic = NonNullable<VmSpec['nics']>[number];

/** What differs from a new interface. */
const nicText = ({ model, queues, mtu, link }: Nic) =>
  [
    model === 'e1000e' ? model : null,
    queues ? `${queues} queues` : null,
    mtu ? `MTU ${mtu}` : null,
    link === 'down' ? 'link down' : null,
  ]
    .filter(Boolean)
    .join(', ');

/** The reason for the VM's host, where a move by the manager gives one. */
function Placement({ vm, host }: { vm: string; host: string }) {
  const last = movesOf(vm).find((move) => move.state === 'done');
  if (!last || last.to !== host) return null;
  return (
    <p class="reason">
      <strong>Placement</strong>{' '}
      {last.to_reason ?? `${last.asked_by} chose ${host} for the last move`}
    </p>
  );
}

const movesOf = (vm: string) =>
  [...moves.values()]
    .filter((move) => move.vm === vm)
    .sort((a, b) => b.asked_unix_ms - a.asked_unix_ms);

function MovesOf({ vm }: { vm: string }) {
  const all = movesOf(vm);
  if (all.length === 0) return <p class="empty">No moves of this VM.</p>;
  return (
    <div class="scroll-x panel">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Requested</th>
            <th scope="col">State</th>
            <th scope="col">From</th>
            <th scope="col">To</th>
            <th scope="col" class="number">
              Duration
            </th>
            <th scope="col">User</th>
          </tr>
        </thead>
        <tbody>
          {all.map((move: Move) => (
            <tr key={move.id}>
              <th scope="row">
                <Link to={`/moves/${part(move.id)}`}>{dateTime(move.asked_unix_ms)}</Link>
              </th>
              <td>
                <Status look={moveLook(move)} title={move.failure?.message} />
              </td>
              <td>{move.from}</td>
              <td>{move.to ?? '–'}</td>
              <td class="number">
                {isOver(move) && move.started_unix_ms && move.ended_unix_ms
                  ? duration(move.ended_unix_ms - move.started_unix_ms)
                  : '–'}
              </td>
              <td>{move.asked_by}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
