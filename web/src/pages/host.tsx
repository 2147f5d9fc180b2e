/** One host: its load, its VMs, maintenance and drain. */
import { get, part, patch } from '../api/http';
import type { HostInfo, ManagedHost } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openDrain } from '../dialogs/drain';
import { useAsked } from '../parts/asked';
import { Act, Facts, Figure, Labels, Link, PageHead, Panel, ProblemBox, Waiting } from '../parts/basics';
import { Grid } from '../parts/grid';
import { drainLook, hostLook, Status } from '../parts/status';
import { drains, hosts, vms } from '../state/cluster';
import { bitsPerSecond, bytes, counted, dateTime, percent } from '../text/units';
import { loadShare, memoryShare } from './host-figures';
import { VM_COLUMNS } from './vm-columns';

const COLUMNS = VM_COLUMNS.filter((column) => column.id !== 'host');

export function HostPage({ name }: { name: string }) {
  const host = hosts.get(name);
  const asked = useAsked(`host ${name} ${host?.state} ${host?.maintenance}`, (signal) =>
    get<ManagedHost>(`/hosts/${part(name)}`, signal),
  );
  if (!host) {
    return asked.problem ? <ProblemBox problem={asked.problem} /> : <Waiting lines={6} />;
  }
  const info = asked.value?.info;
  const here = vms.sorted().filter((vm) => vm.host === name);
  const drain = [...drains.values()].find(
    (one) => one.host === name && (one.state === 'running' || one.state === 'undoing'),
  );
  return (
    <>
      <PageHead
        title={name}
        above={<Link to="/hosts">Hosts</Link>}
        side={
          <>
            <Act needs="operator" onClick={() => toggleMaintenance(name, !host.maintenance)}>
              {host.maintenance ? 'End maintenance' : 'Maintenance'}
            </Act>
            <Act
              kind="primary"
              needs="operator"
              blocked={host.state !== 'up' ? 'Its agent is not heard.' : drain ? 'It is being drained.' : null}
              onClick={() => openDrain(name)}
            >
              Drain
            </Act>
          </>
        }
      >
        <Status look={hostLook(host)} />
        {host.reason && <span>{host.reason}</span>}
        <span class="muted">{host.address}</span>
        <Labels labels={host.labels} />
      </PageHead>
      {drain && (
        <p class="notice">
          <Status look={drainLook(drain.state)} /> <Link to={`/drains/${part(drain.id)}`}>A drain</Link> empties it.
        </p>
      )}
      <dl class="figures figures-strip">
        <Figure label="VMs" value={String(host.vms)} note={`${host.moves_out} leaving, ${host.moves_in} arriving`} />
        <Figure
          label="Memory taken"
          value={percent(memoryShare(host))}
          note={`${bytes(host.memory_available_bytes)} left of ${bytes(host.memory_total_bytes || info?.memory_total_bytes)}`}
        />
        <Figure label="Promised to VMs" value={bytes(host.memory_committed_bytes)} />
        <Figure
          label="Load"
          value={host.logical_cores ? percent(loadShare(host)) : '–'}
          note={
            host.logical_cores
              ? `${(host.load_average_1min ?? 0).toFixed(1)} of ${host.logical_cores} cores`
              : undefined
          }
        />
      </dl>
      <Panel title={`VMs here, ${here.length}`}>
        <Grid
          label={`VMs on ${name}`}
          rows={here}
          columns={COLUMNS}
          rowKey={(vm) => vm.name}
          empty="No VM is here."
          mostRows={14}
        />
      </Panel>
      {asked.problem && <ProblemBox problem={asked.problem} />}
      {asked.value ? <About host={asked.value} info={info ?? {}} /> : <Waiting lines={4} />}
    </>
  );
}

function About({ host, info }: { host: ManagedHost; info: HostInfo }) {
  return (
    <div class="columns-even">
      <Panel title="Host">
        <Facts
          rows={[
            ['Agent', info.version],
            ['Kernel', info.kernel],
            ['QEMU', info.qemu_problem ?? info.qemu_version],
            ['KVM', info.kvm === undefined ? null : info.kvm ? 'yes' : `no: ${info.kvm_reason}`],
            ['Memory tracking', info.tracking_problem ?? 'works'],
            ['CPU', info.cpu ? `${info.cpu.vendor ?? ''} ${info.cpu.level ?? ''}` : null],
            ['Huge pages', info.huge_pages ? 'yes' : 'no'],
            ['Lacks of the baseline', host.lacks_of_baseline?.join(', ') || 'nothing'],
            ['Heard last', dateTime(host.heard_unix_ms)],
          ]}
        />
      </Panel>
      <Panel title="Migration and network">
        <Facts
          rows={[
            ['Migration addresses', info.migration_addresses?.join(', ') || 'none'],
            ['Link', bitsPerSecond(host.link_bits_per_s)],
            ['Moves at once', host.most_moves ?? "by its link's speed"],
            [
              'Networks',
              Object.entries(info.networks ?? {})
                .map(([network, { bridge }]) => `${network} (${bridge})`)
                .join(', ') || 'none',
            ],
            ['VM directories', info.vm_dirs?.join(', ') || 'none'],
            [
              'Datastores',
              Object.entries(info.datastores ?? {})
                .map(([path, room]) => `${path}: ${bytes(room.free_bytes)} free of ${bytes(room.total_bytes)}`)
                .join(', ') || 'none',
            ],
          ]}
        />
      </Panel>
    </div>
  );
}

function toggleMaintenance(name: string, maintenance: boolean): void {
  const here = hosts.peek(name)?.vms ?? 0;
  confirm({
    title: maintenance ? `Set ${name} into maintenance` : `End maintenance of ${name}`,
    text: maintenance
      ? `No VM comes to ${name} from now on. ${counted(here, 'VM')} there ${here === 1 ? 'stays' : 'stay'} and ${here === 1 ? 'runs' : 'run'} on. To empty the host, drain it instead.`
      : `${name} takes VMs again.`,
    verb: maintenance ? 'Set into maintenance' : 'End maintenance',
    kind: 'primary',
    run: () => patch(`/hosts/${part(name)}`, { maintenance }),
  });
}
