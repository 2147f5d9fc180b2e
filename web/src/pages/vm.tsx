/** One VM: what it is, how it is, what can be done with it. */
import { get, part, post, remove } from '../api/http';
import type { ManagedVm, Move, VmSummary } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openMove } from '../dialogs/move';
import { useAsked } from '../parts/asked';
import { Act, Facts, HostLink, Labels, Link, PageHead, Panel, ProblemBox, useTask, Waiting } from '../parts/basics';
import { lazy } from '../parts/lazy';
import { moveLook, Status, vmLook } from '../parts/status';
import { isOver, moves, vms } from '../state/cluster';
import { go, route, setQuery } from '../state/route';
import { bytes, dateTime, duration } from '../text/units';
import { VmLog } from './vm-log';

const TextConsole = lazy(() => import('../terminal/console'));

const TABS = [
  ['summary', 'Summary'],
  ['console', 'Text console'],
  ['log', 'Log'],
  ['moves', 'Moves'],
] as const;

export function VmPage({ name }: { name: string }) {
  const vm = vms.get(name);
  const asked = useAsked(`vm ${name} ${vm?.host} ${vm?.state}`, (signal) =>
    get<ManagedVm>(`/vms/${part(name)}`, signal),
  );
  const task = useTask();
  const tab = route.value.query.get('tab') ?? 'summary';
  if (!vm) return asked.problem ? <ProblemBox problem={asked.problem} /> : <Waiting lines={6} />;
  return (
    <div class={tab === 'console' || tab === 'log' ? 'page-fill' : ''}>
      <PageHead title={name} above={<Link to="/vms">VMs</Link>} side={<Actions vm={vm} task={task} />}>
        <Status look={vmLook(vm)} />
        <span>
          on <HostLink name={vm.host} />
        </span>
        <span class="muted">
          {vm.vcpus} vCPUs, {bytes(vm.memory_bytes)}
        </span>
        {vm.move && <Link to={`/moves/${part(vm.move)}`}>its move</Link>}
        <Labels labels={vm.labels} />
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      {vm.reason && <p class="notice">{vm.reason}</p>}
      <nav class="tabs" aria-label={`Of ${name}`}>
        {TABS.map(([id, text]) => (
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
      {tab === 'console' ? (
        <TextConsole vm={name} isRunning={vm.state !== 'stopped' && vm.state !== 'failed'} />
      ) : tab === 'log' ? (
        <VmLog vm={name} />
      ) : tab === 'moves' ? (
        <MovesOf vm={name} />
      ) : asked.value ? (
        <Summary vm={asked.value} />
      ) : asked.problem ? (
        <ProblemBox problem={asked.problem} />
      ) : (
        <Waiting lines={8} />
      )}
    </div>
  );
}

function Actions({ vm, task }: { vm: VmSummary; task: ReturnType<typeof useTask> }) {
  const path = `/vms/${part(vm.name)}`;
  const isStopped = vm.state === 'stopped' || vm.state === 'failed';
  const isPaused = vm.state === 'paused';
  const moving = vm.move ? 'A move has it, or waits for it.' : null;
  return (
    <>
      {(isStopped || isPaused) && (
        <Act needs="operator" busy={task.busy} onClick={() => task.run(() => post(`${path}/start`))}>
          {isPaused ? 'Let it go on' : 'Start'}
        </Act>
      )}
      {!isStopped && (
        <Act needs="operator" blocked={moving} onClick={() => askStop(vm, path)}>
          Stop
        </Act>
      )}
      <Act needs="operator" kind="danger" blocked={moving} onClick={() => askDelete(vm, path)}>
        Delete
      </Act>
      <Act
        kind="primary"
        needs="operator"
        blocked={vm.state === 'running' ? moving : 'Only a VM that runs can be moved.'}
        onClick={() => openMove(vm.name)}
      >
        Move
      </Act>
    </>
  );
}

function askStop(vm: VmSummary, path: string): void {
  confirm({
    title: `Stop ${vm.name}`,
    ...stopText(vm),
    verb: 'Stop',
    run: (force) => post(`${path}/stop`, { force }),
  });
}

/** What a stop does to it: vCPUs that stand still hear no power button. */
function stopText(vm: VmSummary): { text: string; tick?: string } {
  if (vm.in_doubt)
    return {
      text: 'It is not known which host runs it. What is here may be all that there is of its guest, and the doubt stays.',
      tick: 'End what is here all the same',
    };
  if (vm.state === 'paused') return { text: "The guest stands still and can't be asked: it is ended at once." };
  return {
    text: 'The guest is asked by its power button and gets time to shut down.',
    tick: 'End it at once, without asking the guest',
  };
}

function askDelete(vm: VmSummary, path: string): void {
  const isRunning = vm.state !== 'stopped' && vm.state !== 'failed';
  confirm({
    title: `Delete ${vm.name}`,
    text: 'The VM is forgotten. Its disks are left alone.',
    ...(isRunning ? { tick: `It is ${vm.state}: end it first, without asking the guest` } : {}),
    verb: 'Delete',
    run: async (force) => {
      await remove(`${path}${force ? '?force=true' : ''}`);
      go('/vms');
    },
  });
}

function Summary({ vm }: { vm: ManagedVm }) {
  const { info } = vm;
  const { spec } = info;
  return (
    <div class="columns-even">
      <Panel title="State">
        <Facts
          rows={[
            ['Planned', vm.planned ?? 'not by this manager'],
            ['Host', <HostLink key="host" name={vm.host} />],
            ['Also at', vm.also_at?.join(', ') || 'no other host'],
            ['Addresses', info.addresses?.join(', ') || 'none known'],
            ['Epoch', info.epoch],
            ['Process', info.pid],
          ]}
        />
        <Placement vm={vm.name} host={vm.host} />
      </Panel>
      <Panel title="Specification">
        <Facts
          rows={[
            ['vCPUs', spec.vcpus ?? vm.vcpus],
            [
              'Memory',
              spec.memory?.map((block) => `${block.size}${block.backing ? `, ${block.backing}` : ''}`).join('; '),
            ],
            ['CPU model', spec.cpu_model],
            ['Machine', info.machine ?? spec.machine],
            ['Accelerator', info.accel ?? spec.accel],
            ['Kernel', spec.kernel],
            ['Command line', spec.cmdline],
            ['Page-in', spec.refuses_page_in ? 'refused' : 'allowed'],
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
                {disk.readonly ? ', read only' : ''}
              </li>
            ))}
          </ul>
        ) : (
          <p class="empty">It has none.</p>
        )}
      </Panel>
      <Panel title="Network interfaces">
        {spec.nics?.length ? (
          <ul class="plain-list">
            {spec.nics.map((nic, at) => (
              <li key={at}>
                {nic.network} <code>{nic.mac}</code> {nic.address}
              </li>
            ))}
          </ul>
        ) : (
          <p class="empty">It has none.</p>
        )}
      </Panel>
    </div>
  );
}

/** Why it is where it is, as far as a move of the manager's says so. */
function Placement({ vm, host }: { vm: string; host: string }) {
  const last = movesOf(vm).find((move) => move.state === 'done');
  if (!last || last.to !== host) return null;
  return (
    <p class="reason">
      <strong>Why here</strong> {last.to_reason ?? `${last.asked_by} named ${host} for its move`}
    </p>
  );
}

const movesOf = (vm: string) =>
  [...moves.values()].filter((move) => move.vm === vm).sort((a, b) => b.asked_unix_ms - a.asked_unix_ms);

function MovesOf({ vm }: { vm: string }) {
  const all = movesOf(vm);
  if (all.length === 0) return <p class="empty">No move of it is known.</p>;
  return (
    <div class="scroll-x panel">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Asked for</th>
            <th scope="col">State</th>
            <th scope="col">From</th>
            <th scope="col">To</th>
            <th scope="col" class="number">
              Took
            </th>
            <th scope="col">By</th>
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
