/** Networks and datastores, as the agents report them. */
import { all, part } from '../api/http';
import type { ManagedDatastore, ManagedNetwork } from '../api/types';
import { Empty, Link, PageHead, Panel, ProblemBox, Tags, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { healthLook, Status } from '../parts/status';
import { provisioned, UsedSpace, writeLatency } from './datastore-figures';

export function StoragePage() {
  const networks = useLoaded('networks', (signal) => all<ManagedNetwork>('/networks', signal));
  const datastores = useLoaded('datastores', (signal) =>
    all<ManagedDatastore>('/datastores', signal),
  );
  return (
    <>
      <PageHead title="Networks and datastores" />
      <Panel title="Networks">
        {networks.problem && <ProblemBox problem={networks.problem} />}
        {networks.value?.length === 0 && <Empty>No host reports a network.</Empty>}
        {networks.value
          ? networks.value.length > 0 && (
              <div class="scroll-x">
                <table class="plain">
                  <thead>
                    <tr>
                      <th scope="col">Network</th>
                      <th scope="col" class="number">
                        VMs
                      </th>
                      <th scope="col">Hosts (bridge)</th>
                    </tr>
                  </thead>
                  <tbody>
                    {networks.value.map((network) => (
                      <tr key={network.name}>
                        <th scope="row">{network.name}</th>
                        <td class="number">{network.vms}</td>
                        <td>
                          {network.hosts.map((at) => `${at.host} (${at.bridge})`).join(', ') ||
                            'no host'}
                        </td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            )
          : !networks.problem && <Waiting />}
      </Panel>
      <Panel title="Datastores">
        {datastores.problem && <ProblemBox problem={datastores.problem} />}
        {datastores.value?.length === 0 && <Empty>No host reports a datastore.</Empty>}
        {datastores.value
          ? datastores.value.length > 0 && <Datastores all={datastores.value} />
          : !datastores.problem && <Waiting />}
      </Panel>
    </>
  );
}

function Datastores({ all: datastores }: { all: ManagedDatastore[] }) {
  return (
    <div class="scroll-x">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Datastore</th>
            <th scope="col">State</th>
            <th scope="col">Kind</th>
            <th scope="col">Used</th>
            <th scope="col">Provisioned</th>
            <th scope="col" class="number">
              Write latency
            </th>
            <th scope="col" class="number">
              VMs
            </th>
            <th scope="col">Hosts</th>
            <th scope="col">Tags</th>
          </tr>
        </thead>
        <tbody>
          {datastores.map((store) => (
            <tr key={store.id}>
              <th scope="row">
                <Link to={`/storage/${part(store.id)}`}>{store.name}</Link>
              </th>
              <td>
                <Status look={healthLook(store.health, store.maintenance)} />
              </td>
              <td>{store.kind ?? '–'}</td>
              <td>
                <UsedSpace store={store} />
              </td>
              <td>{provisioned(store)}</td>
              <td class="number">{writeLatency(store)}</td>
              <td class="number">{store.vms}</td>
              <td>{store.hosts.map((at) => at.host).join(', ') || 'no host'}</td>
              <td>
                <Tags tags={store.tags} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
