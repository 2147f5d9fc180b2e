/** One host: load, VMs, maintenance and drain. */
import { FoundGuests } from '../adoption/found';
import { get, part, patch } from '../api/http';
import type { HostInfo, ManagedHost } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openDrain } from '../dialogs/drain';
import { JobsOfHost } from '../jobs/rows';
import { LoadCharts } from '../load/charts';
import {
  Act,
  Facts,
  Figure,
  Labels,
  Link,
  PageHead,
  Panel,
  ProblemBox,
  Waiting,
} from '../parts/basics';
import { Grid } from '../parts/grid';
import { useLoaded } from '../parts/loaded';
import { drainLook, hostLook, Status } from '../parts/status';
import { drains, hosts, vms } from '../state/cluster';
import { bitsPerSecond, bytes, dateTime, percent } from '../text/units';
import { loadShare, memoryShare } from './host-figures';
import { VM_COLUMNS } from './vm-columns';

const COLUMNS = VM_COLUMNS.filter((column) => column.id !== 'host');

export function HostPage({ name }: { name: string }) {
  const host = hosts.get(name);
  const loaded = useLoaded(`host ${name} ${host?.state} ${host?.maintenance}`, (signal) =>
    get<ManagedHost>(`/hosts/${part(name)}`, signal),
  );
  if (!host) {
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  }
  const info = loaded.value?.info;
  const total = host.memory_total_bytes || info?.memory_total_bytes;
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
              {host.maintenance ? 'Exit maintenance' : 'Enter maintenance'}
            </Act>
            <Act
              kind="primary"
              needs="operator"
              blocked={
                host.state !== 'up'
                  ? 'The host does not respond.'
                  : drain
                    ? 'The host is being drained.'
                    : null
              }
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
        <Link to={`/journal?object=${part(`host:${name}`)}`}>journal</Link>
      </PageHead>
      {drain && (
        <p class="notice">
          <Status look={drainLook(drain.state)} />{' '}
          <Link to={`/drains/${part(drain.id)}`}>A drain</Link> is moving all VMs off this host.
        </p>
      )}
      <dl class="figures figures-strip">
        <Figure
          label="VMs"
          value={String(host.vms)}
          note={`${host.moves_out} moving out, ${host.moves_in} moving in`}
        />
        <Figure
          label="Memory used"
          value={percent(memoryShare(host))}
          note={`${bytes(host.memory_available_bytes)} free of ${bytes(total)}`}
        />
        <Figure label="Memory of VMs" value={bytes(host.memory_committed_bytes)} />
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
      <LoadCharts object={`host:${name}`} />
      <Panel title={`VMs on this host: ${here.length}`}>
        <Grid
          label={`VMs on ${name}`}
          rows={here}
          columns={COLUMNS}
          rowKey={(vm) => vm.name}
          empty="No VMs on this host."
          mostRows={14}
        />
      </Panel>
      {host.state === 'up' && <JobsOfHost host={name} />}
      {host.state === 'up' && <FoundGuests hosts={[name]} ofHost={name} />}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {loaded.value ? <About host={loaded.value} info={info ?? {}} /> : <Waiting lines={4} />}
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
            ['Memory tracking', info.tracking_problem ?? 'available'],
            ['CPU', info.cpu ? `${info.cpu.vendor ?? ''} ${info.cpu.level ?? ''}` : null],
            ['Huge pages', info.huge_pages ? 'yes' : 'no'],
            ['Missing baseline features', host.lacks_of_baseline?.join(', ') || 'none'],
            ['Last contact', dateTime(host.heard_unix_ms)],
          ]}
        />
      </Panel>
      <Panel title="Migration and network">
        <Facts
          rows={[
            ['Migration addresses', info.migration_addresses?.join(', ') || 'none'],
            ['Link', bitsPerSecond(host.link_bits_per_s)],
            ['Concurrent moves', host.most_moves ?? 'by link speed'],
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
                .map(([path, room]) =>
                  room.total_bytes > 0
                    ? `${path}: ${bytes(room.free_bytes)} free of ${bytes(room.total_bytes)}`
                    : `${path}: size unknown`,
                )
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
    title: maintenance ? `Enter maintenance: ${name}` : `Exit maintenance: ${name}`,
    text: maintenance
      ? `The manager places no more VMs on ${name}. Its VMs (${here}) keep running. ` +
        'To move them away, drain the host instead.'
      : `The manager places VMs on ${name} again.`,
    verb: maintenance ? 'Enter maintenance' : 'Exit maintenance',
    kind: 'primary',
    run: () => patch(`/hosts/${part(name)}`, { maintenance }),
  });
}
