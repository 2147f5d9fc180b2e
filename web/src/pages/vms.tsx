/** All VMs of the cluster. */
import { useState } from 'preact/hooks';
import { FoundGuests } from '../adoption/found';
import { hostsUp } from '../adoption/rows';
import { openCreateVm } from '../dialogs/create-vm';
import { openImport } from '../jobs/open';
import { Act, PageHead } from '../parts/basics';
import { Tick } from '../parts/fields';
import { FilterField } from '../parts/filter';
import { Grid, type Sorting } from '../parts/grid';
import { vms } from '../state/cluster';
import { parseFilter, passes } from '../state/filters';
import { route, setQuery } from '../state/route';
import { counted } from '../text/units';
import { VM_COLUMNS, vmFields } from './vm-columns';

export function VmsPage() {
  const [sorting, setSorting] = useState<Sorting>();
  const all = vms.sorted();
  // Part of the address, so that a link shows them too.
  const withFound = route.value.query.get('found') === 'true';
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((vm) => passes(terms, vmFields(vm)));
  return (
    <div class="page-fill">
      <PageHead
        title="VMs"
        side={
          <>
            <Act needs="operator" onClick={() => openImport()}>
              Import VM
            </Act>
            <Act kind="primary" needs="operator" onClick={openCreateVm}>
              Create VM
            </Act>
          </>
        }
      >
        <span class="muted">{counted(all.length, 'VM')}</span>
        <Tick
          text="Also found guests"
          checked={withFound}
          onChange={(isOn) => setQuery('found', isOn ? 'true' : '')}
        />
      </PageHead>
      <FilterField
        label="Filter VMs"
        hint="name, state:running, host:a, label:tier=front, tag:prod, -state:stopped"
        shown={shown.length}
        total={all.length}
      />
      <Grid
        label="VMs"
        rows={shown}
        columns={VM_COLUMNS}
        rowKey={(vm) => vm.name}
        sorting={sorting}
        onSort={setSorting}
        empty={all.length === 0 ? 'No VMs.' : 'No VMs match the filter.'}
      />
      {withFound && <FoundGuests hosts={hostsUp()} terms={terms} />}
    </div>
  );
}
