/** Networks and datastores, as the agents report them. */
import { all } from '../api/http';
import type { ManagedDatastore, ManagedNetwork } from '../api/types';
import { Empty, PageHead, Panel, ProblemBox, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { bytes } from '../text/units';

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
          ? datastores.value.length > 0 && (
              <div class="scroll-x">
                <table class="plain">
                  <thead>
                    <tr>
                      <th scope="col">Directory</th>
                      <th scope="col" class="number">
                        VMs
                      </th>
                      <th scope="col">Hosts (free space)</th>
                    </tr>
                  </thead>
                  <tbody>
                    {datastores.value.map((store) => (
                      <tr key={store.name}>
                        <th scope="row">
                          <code>{store.name}</code>
                        </th>
                        <td class="number">{store.vms}</td>
                        <td>
                          {store.hosts
                            .map(
                              (at) =>
                                `${at.host} (${bytes(at.free_bytes)} of ${bytes(at.total_bytes)})`,
                            )
                            .join(', ')}
                        </td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            )
          : !datastores.problem && <Waiting />}
      </Panel>
    </>
  );
}
