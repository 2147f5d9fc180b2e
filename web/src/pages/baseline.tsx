/** The CPU that guests get, so that each of them can go to each host. */
import { get } from '../api/http';
import type { CpuBaselineInfo } from '../api/types';
import { useAsked } from '../parts/asked';
import { Facts, HostLink, PageHead, Panel, ProblemBox, Waiting } from '../parts/basics';
import { type Look, Status } from '../parts/status';
import { baselineNews } from '../state/cluster';
import { counted, dateTime } from '../text/units';

const FITS: Record<string, Look> = {
  meets: { tone: 'ok', shape: 'check', text: 'meets it' },
  'falls-short': { tone: 'warn', shape: 'triangle', text: 'falls short' },
  unknown: { tone: 'idle', shape: 'query', text: 'unknown' },
};

export function BaselinePage() {
  const news = baselineNews.value;
  const asked = useAsked(`baseline ${news?.set_unix_ms ?? ''}`, (signal) =>
    get<CpuBaselineInfo>('/cpu-baseline', signal),
  );
  const info = asked.value;
  return (
    <>
      <PageHead title="CPU baseline">
        <span class="muted">What guests get unless they name a model of their own.</span>
      </PageHead>
      {asked.problem && <ProblemBox problem={asked.problem} />}
      {!info && !asked.problem && <Waiting lines={8} />}
      {info && (
        <>
          <div class="columns-even">
            <Panel title="Set">
              {info.baseline ? (
                <Facts
                  rows={[
                    ['Model', <code key="model">{info.baseline.cpu_model}</code>],
                    ['Level', info.baseline.level],
                    ['Asked for as', info.baseline.asked],
                    ['Without', info.baseline.without?.join(', ') || 'nothing'],
                    ['Set', `by ${info.baseline.set_by}, ${dateTime(info.baseline.set_unix_ms)}`],
                    ['Have to be restarted', counted(info.must_restart_count, 'VM')],
                  ]}
                />
              ) : (
                <p class="empty">
                  None is set. An admin sets it with <code>godwit control cpu-baseline set</code>.
                </p>
              )}
            </Panel>
            <Panel title="What all hosts have in common">
              {info.common ? (
                <Facts
                  rows={[
                    ['Model', <code key="model">{info.common.cpu_model}</code>],
                    ['Level', info.common.level],
                    ['Vendors', info.common.vendors.join(', ')],
                    [
                      'Features',
                      <span key="features" class="features">
                        {info.common.features.join(' ')}
                      </span>,
                    ],
                  ]}
                />
              ) : (
                <p class="empty">{info.no_common ?? 'It is not known yet.'}</p>
              )}
            </Panel>
          </div>
          <Panel title="Hosts">
            <div class="scroll-x">
              <table class="plain">
                <thead>
                  <tr>
                    <th scope="col">Host</th>
                    <th scope="col">Against the baseline</th>
                    <th scope="col">Vendor</th>
                    <th scope="col">Accelerator</th>
                    <th scope="col">Lacks</th>
                  </tr>
                </thead>
                <tbody>
                  {info.hosts.map((host) => (
                    <tr key={host.host}>
                      <th scope="row">
                        <HostLink name={host.host} />
                      </th>
                      <td>
                        {host.fit ? (
                          <Status look={FITS[host.fit] ?? (FITS.unknown as Look)} />
                        ) : (
                          <span class="muted">no baseline</span>
                        )}
                      </td>
                      <td>{host.vendor ?? '–'}</td>
                      <td>{host.accel ?? '–'}</td>
                      <td>{host.why ?? (host.lacks?.join(', ') || 'nothing')}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          </Panel>
        </>
      )}
    </>
  );
}
