/** Limits of concurrent moves. */
import { openEditLimits, openHostLimit } from '../dialogs/limits';
import { Act, Facts, HostLink, PageHead, Panel, Waiting } from '../parts/basics';
import { limits } from '../state/cluster';
import { bitsPerSecond } from '../text/units';

const orLink = (value: number | null | undefined) => value ?? 'by link speed';

export function LimitsPage() {
  const now = limits.value;
  const hosts = Object.entries(now?.hosts ?? {});
  const datastores = Object.entries(now?.datastores ?? {});
  return (
    <>
      <PageHead
        title="Limits"
        side={
          now && (
            <Act kind="primary" needs="admin" onClick={() => openEditLimits(now)}>
              Edit limits
            </Act>
          )
        }
      >
        <span class="muted">They apply to moves of every priority.</span>
      </PageHead>
      {!now ? (
        <Waiting />
      ) : (
        <div class="columns-even">
          <Panel title="Concurrent moves">
            <Facts
              rows={[
                ['Cluster', now.in_all ?? 'no limit'],
                ['From each host', orLink(now.out_of_host)],
                ['To each host', orLink(now.into_host)],
                ['Per datastore', now.per_datastore ?? 'no limit'],
                ['Per VM', 1],
              ]}
            />
          </Panel>
          <Panel title="Defaults by link speed">
            <table class="plain">
              <thead>
                <tr>
                  <th scope="col">Link speed, from</th>
                  <th scope="col" class="number">
                    Moves in each direction
                  </th>
                </tr>
              </thead>
              <tbody>
                {(now.by_link ?? []).map((link) => (
                  <tr key={String(link.bits_per_s)}>
                    <th scope="row">
                      {link.bits_per_s == null ? 'unknown' : bitsPerSecond(link.bits_per_s)}
                    </th>
                    <td class="number">{link.moves}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Panel>
          <Panel
            title="Limits of single hosts"
            side={
              <Act
                kind="quiet"
                needs="admin"
                name="Set the limit of a host"
                onClick={() => openHostLimit(null)}
              >
                Set
              </Act>
            }
          >
            {hosts.length === 0 ? (
              <p class="empty">None.</p>
            ) : (
              <ul class="plain-list device-list">
                {hosts.map(([name, moves]) => (
                  <li key={name}>
                    <span>
                      <HostLink name={name} /> from: {orLink(moves.out)}; to: {orLink(moves.into)}
                    </span>
                    <Act
                      kind="quiet"
                      needs="admin"
                      name={`Change the limit of ${name}`}
                      onClick={() => openHostLimit(name)}
                    >
                      Change
                    </Act>
                  </li>
                ))}
              </ul>
            )}
          </Panel>
          <Panel title="Limits of single datastores">
            {datastores.length === 0 ? (
              <p class="empty">None.</p>
            ) : (
              <Facts rows={datastores.map(([name, moves]) => [name, moves])} />
            )}
          </Panel>
        </div>
      )}
    </>
  );
}
