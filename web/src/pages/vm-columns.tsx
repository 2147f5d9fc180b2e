/** Columns of VM tables: of the cluster and of one host. */
import type { VmSummary } from '../api/types';
import { HostLink, Labels, Link, Tags, VmLink } from '../parts/basics';
import type { Column } from '../parts/grid';
import { Status, vmLook } from '../parts/status';
import { labelText } from '../state/filters';
import { bytes } from '../text/units';

const byName = new Intl.Collator('en', { numeric: true }).compare;

export const VM_COLUMNS: Column<VmSummary>[] = [
  {
    id: 'name',
    title: 'Name',
    track: 'minmax(120px, 1.4fr)',
    narrow: { track: 'minmax(80px, 1.2fr)' },
    cell: (vm) => <VmLink name={vm.name} />,
    compare: (a, b) => byName(a.name, b.name),
  },
  {
    id: 'state',
    title: 'State',
    track: '140px',
    narrow: { track: '104px' },
    cell: (vm) => <Status look={vmLook(vm)} title={vm.reason ?? undefined} />,
    compare: (a, b) => vmLook(a).text.localeCompare(vmLook(b).text) || byName(a.name, b.name),
  },
  {
    id: 'host',
    title: 'Host',
    track: 'minmax(100px, 1fr)',
    narrow: { track: 'minmax(80px, 1fr)' },
    cell: (vm) => <HostLink name={vm.host} />,
    compare: (a, b) => byName(a.host, b.host) || byName(a.name, b.name),
  },
  {
    id: 'vcpus',
    title: 'vCPUs',
    track: '64px',
    from: 560,
    isNumber: true,
    cell: (vm) => vm.vcpus,
    compare: (a, b) => a.vcpus - b.vcpus,
  },
  {
    id: 'memory',
    title: 'Memory',
    track: '88px',
    from: 560,
    isNumber: true,
    cell: (vm) => bytes(vm.memory_bytes),
    compare: (a, b) => a.memory_bytes - b.memory_bytes,
  },
  {
    id: 'move',
    title: 'Move',
    track: '96px',
    from: 720,
    cell: (vm) =>
      vm.move ? (
        <Link to={`/moves/${encodeURIComponent(vm.move)}`}>show move</Link>
      ) : (
        <span class="muted">–</span>
      ),
    compare: (a, b) => Number(Boolean(a.move)) - Number(Boolean(b.move)),
  },
  {
    id: 'labels',
    title: 'Labels',
    track: 'minmax(140px, 1.4fr)',
    from: 860,
    cell: (vm) => <Labels labels={vm.labels} />,
  },
  {
    id: 'tags',
    title: 'Tags',
    track: 'minmax(100px, 1fr)',
    from: 860,
    cell: (vm) => <Tags tags={vm.tags} />,
  },
];

export function vmFields(vm: VmSummary) {
  return {
    name: vm.name.toLowerCase(),
    // The last state of a VM that is unknown is none.
    state: vm.is_current ? `${vmLook(vm).text} ${vm.state}` : vmLook(vm).text,
    host: vm.host.toLowerCase(),
    label: labelText(vm.labels),
    tag: (vm.tags ?? []).join(' ').toLowerCase(),
    vcpus: String(vm.vcpus),
    memory: bytes(vm.memory_bytes).toLowerCase().replace(' ', ''),
  };
}
