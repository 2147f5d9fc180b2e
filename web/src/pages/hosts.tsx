/** All hosts. */
import { useState } from 'preact/hooks';
import type { HostSummary } from '../api/types';
import { HostLink, Labels, Meter, PageHead } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { type Column, Grid, type Sorting } from '../parts/grid';
import { hostLook, Status } from '../parts/status';
import { hosts } from '../state/cluster';
import { labelText, parseFilter, passes } from '../state/filters';
import { route } from '../state/route';
import { counted } from '../text/units';
import { loadShare, loadText, memoryShare, memoryText } from './host-figures';

const COLUMNS: Column<HostSummary>[] = [
  {
    id: 'name',
    title: 'Name',
    track: 'minmax(120px, 1.2fr)',
    cell: (host) => <HostLink name={host.name} />,
    compare: (a, b) => a.name.localeCompare(b.name, 'en', { numeric: true }),
  },
  {
    id: 'state',
    title: 'State',
    track: '130px',
    cell: (host) => <Status look={hostLook(host)} title={host.reason ?? undefined} />,
    compare: (a, b) => hostLook(a).text.localeCompare(hostLook(b).text),
  },
  {
    id: 'vms',
    title: 'VMs',
    track: '64px',
    isNumber: true,
    cell: (host) => host.vms,
    compare: (a, b) => a.vms - b.vms,
  },
  {
    id: 'memory',
    title: 'Memory',
    track: 'minmax(150px, 1.3fr)',
    from: 480,
    cell: (host) => <Meter label="Memory used" share={memoryShare(host)} text={memoryText(host)} />,
    compare: (a, b) => memoryShare(a) - memoryShare(b),
  },
  {
    id: 'load',
    title: 'Load',
    track: 'minmax(140px, 1fr)',
    from: 640,
    cell: (host) => <Meter label="Load" share={loadShare(host)} text={loadText(host)} />,
    compare: (a, b) => loadShare(a) - loadShare(b),
  },
  {
    id: 'out',
    title: 'Outgoing',
    track: '76px',
    from: 760,
    isNumber: true,
    cell: (host) => host.moves_out || '–',
    compare: (a, b) => a.moves_out - b.moves_out,
  },
  {
    id: 'in',
    title: 'Incoming',
    track: '76px',
    from: 760,
    isNumber: true,
    cell: (host) => host.moves_in || '–',
    compare: (a, b) => a.moves_in - b.moves_in,
  },
  {
    id: 'labels',
    title: 'Labels',
    track: 'minmax(120px, 1fr)',
    from: 980,
    cell: (host) => <Labels labels={host.labels} />,
  },
];

export function HostsPage() {
  const [sorting, setSorting] = useState<Sorting>();
  const all = hosts.sorted();
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((host) => passes(terms, fieldsOf(host)));
  return (
    <div class="page-fill">
      <PageHead title="Hosts">
        <span class="muted">{counted(all.length, 'host')}</span>
      </PageHead>
      <FilterField
        label="Filter hosts"
        hint="name, state:up, label:rack=1"
        shown={shown.length}
        total={all.length}
      />
      <Grid
        label="Hosts"
        rows={shown}
        columns={COLUMNS}
        rowKey={(host) => host.name}
        sorting={sorting}
        onSort={setSorting}
        empty={all.length === 0 ? 'No hosts.' : 'No hosts match the filter.'}
      />
    </div>
  );
}

function fieldsOf(host: HostSummary) {
  return {
    name: host.name.toLowerCase(),
    state: `${hostLook(host).text} ${host.state}`,
    label: labelText(host.labels),
  };
}
