/** How many moves may run at a time. */
import { Facts, PageHead, Panel, Waiting } from '../parts/basics';
import { limits } from '../state/cluster';
import { bitsPerSecond } from '../text/units';

const orLink = (value: number | null | undefined) => value ?? "by its link's speed";

export function LimitsPage() {
  const now = limits.value;
  const hosts = Object.entries(now?.hosts ?? {});
  const datastores = Object.entries(now?.datastores ?? {});
  return (
    <>
      <PageHead title="Limits">
        <span class="muted">
          Never exceeded, whatever the priority. An admin changes them with <code>godwit control limits set</code>.
        </span>
      </PageHead>
      {!now ? (
        <Waiting />
      ) : (
        <div class="columns-even">
          <Panel title="Moves at once">
            <Facts
              rows={[
                ['In all', now.in_all ?? 'no limit'],
                ['Out of a host', orLink(now.out_of_host)],
                ['Into a host', orLink(now.into_host)],
                ['Of one datastore', now.per_datastore ?? 'no limit'],
                ['Of one VM', 1],
              ]}
            />
          </Panel>
          <Panel title="By the speed of a host's link">
            <table class="plain">
              <thead>
                <tr>
                  <th scope="col">Link, from</th>
                  <th scope="col" class="number">
                    In each direction
                  </th>
                </tr>
              </thead>
              <tbody>
                {(now.by_link ?? []).map((link) => (
                  <tr key={String(link.bits_per_s)}>
                    <th scope="row">{link.bits_per_s == null ? 'not known' : bitsPerSecond(link.bits_per_s)}</th>
                    <td class="number">{link.moves}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Panel>
          <Panel title="Hosts with limits of their own">
            {hosts.length === 0 ? (
              <p class="empty">None.</p>
            ) : (
              <Facts
                rows={hosts.map(([name, moves]) => [name, `out ${orLink(moves.out)}, into ${orLink(moves.into)}`])}
              />
            )}
          </Panel>
          <Panel title="Datastores with limits of their own">
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
