/** One VM: its head, its actions and its views. A view is an entry of `VIEWS`. */
import type { ComponentChildren } from 'preact';
import { useRef } from 'preact/hooks';
import { get, part } from '../api/http';
import type { ManagedVm, VmSummary } from '../api/types';
import { JournalOf } from '../journal/page';
import { LoadCharts } from '../load/charts';
import {
  HostLink,
  Labels,
  Link,
  PageHead,
  Panel,
  ProblemBox,
  Tags,
  useTask,
  Waiting,
} from '../parts/basics';
import { lazy } from '../parts/lazy';
import { type Loaded, useLoaded } from '../parts/loaded';
import { Status, vmLook } from '../parts/status';
import { Thumbnail } from '../screen/thumbnail';
import { isOff, vms } from '../state/cluster';
import { route, setQuery } from '../state/route';
import { whyNot } from '../state/session';
import { bytes } from '../text/units';
import { VmActions } from './vm-actions';
import { VmLog } from './vm-log';
import { MovesOf } from './vm-moves';
import { Snapshots } from './vm-snapshots';
import { VmSummaryView } from './vm-summary';

const TextConsole = lazy(() => import('../terminal/console'));
const VmScreen = lazy(() => import('../screen/screen'));

/** What a view shows. */
interface Shown {
  vm: VmSummary;
  loaded: Loaded<ManagedVm>;
  /** The last answer, also while the next one loads. */
  last: ManagedVm | undefined;
  isOn: boolean;
  hasScreen: boolean;
  /** Number of its serial ports. */
  ports: number;
}

interface View {
  id: string;
  title: string;
  /** Whether it takes the height of the window. */
  fills?: boolean;
  isShown?: (shown: Shown) => boolean;
  render: (shown: Shown) => ComponentChildren;
}

const SUMMARY: View = {
  id: 'summary',
  title: 'Summary',
  render: (shown) => <SummaryOf {...shown} />,
};

const VIEWS: View[] = [
  SUMMARY,
  {
    id: 'screen',
    title: 'Screen',
    fills: true,
    isShown: ({ hasScreen, vm }) => hasScreen && vm.state !== 'template',
    render: ({ vm, isOn }) => <VmScreen vm={vm.name} isRunning={isOn} />,
  },
  {
    id: 'console',
    title: 'Text console',
    fills: true,
    isShown: ({ vm }) => vm.state !== 'template',
    render: ({ vm, isOn, ports }) => <TextConsole vm={vm.name} ports={ports} isRunning={isOn} />,
  },
  {
    id: 'log',
    title: 'Log',
    fills: true,
    render: ({ vm, ports }) => <VmLog vm={vm.name} ports={ports} />,
  },
  {
    id: 'snapshots',
    title: 'Snapshots',
    isShown: ({ vm }) => vm.state !== 'template',
    render: ({ vm, loaded }) => <Snapshots vm={vm} changed={loaded.reload} />,
  },
  {
    id: 'load',
    title: 'Load',
    isShown: ({ vm }) => vm.state !== 'template',
    render: ({ vm }) => <LoadCharts object={`vm:${vm.name}`} />,
  },
  { id: 'moves', title: 'Moves', render: ({ vm }) => <MovesOf vm={vm.name} /> },
  {
    id: 'journal',
    title: 'Journal',
    fills: true,
    render: ({ vm }) => <JournalOf object={`vm:${vm.name}`} />,
  },
];

export function VmPage({ name }: { name: string }) {
  const vm = vms.get(name);
  const loaded = useLoaded(`vm ${name} ${vm?.host} ${vm?.state}`, (signal) =>
    get<ManagedVm>(`/vms/${part(name)}`, signal),
  );
  const last = useRef<ManagedVm | undefined>(undefined);
  if (loaded.value) last.current = loaded.value;
  const task = useTask();
  if (!vm) return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  const spec = last.current?.info.spec;
  const hasScreen = (spec?.video ?? 'none') !== 'none';
  const ports = spec?.serial_ports ?? 1;
  const isProtected = spec?.name === name && (spec.protect || spec.protect_by_agents);
  const shown: Shown = { vm, loaded, last: last.current, isOn: !isOff(vm), hasScreen, ports };
  const views = VIEWS.filter((view) => view.isShown?.(shown) ?? true);
  const tab = route.value.query.get('tab');
  const view = views.find(({ id }) => id === tab) ?? SUMMARY;
  return (
    <div class={view.fills ? 'page-fill' : ''}>
      <PageHead
        title={name}
        above={<Link to="/vms">VMs</Link>}
        side={
          <VmActions
            vm={vm}
            task={task}
            changed={loaded.reload}
            snapshots={last.current?.name === name ? (last.current.info.snapshots ?? 0) : 0}
          />
        }
      >
        <Status look={vmLook(vm)} />
        <span>
          on <HostLink name={vm.host} />
        </span>
        <span class="muted">
          {vm.vcpus} vCPUs, {bytes(vm.memory_bytes)}
        </span>
        {vm.move && <Link to={`/moves/${part(vm.move)}`}>current move</Link>}
        {isProtected && <span class="label">protected</span>}
        <Labels labels={vm.labels} />
        <Tags tags={vm.tags} />
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      {vm.reason && <p class="notice">{vm.reason}</p>}
      <Tabs name={name} views={views} here={view} />
      {view.render(shown)}
    </div>
  );
}

function Tabs({ name, views, here }: { name: string; views: View[]; here: View }) {
  return (
    <nav class="tabs" aria-label={`Views of ${name}`}>
      {views.map((view) => {
        const tab = view === SUMMARY ? '' : view.id;
        return (
          <a
            key={view.id}
            href={`#/vms/${part(name)}${tab && `?tab=${tab}`}`}
            aria-current={view === here ? 'page' : undefined}
            onClick={(event) => {
              event.preventDefault();
              setQuery('tab', tab);
            }}
          >
            {view.title}
          </a>
        );
      })}
    </nav>
  );
}

function SummaryOf({ vm, loaded, last, isOn, hasScreen }: Shown) {
  if (!last || loaded.problem)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={8} />;
  return (
    <VmSummaryView
      vm={last}
      changed={loaded.reload}
      seen={
        hasScreen && isOn && !whyNot('operator') ? (
          <Panel title="Screen">
            <Thumbnail vm={vm.name} isCalm={vm.state === 'running' && !vm.move} />
          </Panel>
        ) : null
      }
    />
  );
}
