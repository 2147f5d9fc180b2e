/** Limits of concurrent moves. */
import { Facts, PageHead, Panel, Waiting } from '../parts/basics';
import { limits } from '../state/cluster';
import { bitsPerSecond } from '../text/units';

const orLink = (value: number | null | undefined) => value ?? 'by link speed';

export function LimitsPage() {
  const now = limits.value;
  const hosts = Object.entries(now?.hosts ?? {});
  const datastores = Object.entries(now?.datastores ?? {});
  return (
    <>
      <PageHead title="Limits">
        <span class="muted">
          They apply to moves of every priority. An admin sets them with{' '}
          <code>godwit control limits set</code>.
        </span>
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
          <Panel title="Limits of single hosts">
            {hosts.length === 0 ? (
              <p class="empty">None.</p>
            ) : (
              <Facts
                rows={hosts.map(([name, moves]) => [
                  name,
                  `from: ${orLink(moves.out)}; to: ${orLink(moves.into)}`,
                ])}
              />
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
