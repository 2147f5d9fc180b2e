/** The CPU baseline: the CPU model with which every VM can move to every host. */
import { get, remove } from '../api/http';
import type { CpuBaselineInfo } from '../api/types';
import { openSetBaseline } from '../dialogs/baseline';
import { confirm } from '../dialogs/confirm';
import { Act, Facts, HostLink, PageHead, Panel, ProblemBox, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { type Look, Status } from '../parts/status';
import { baselineNews } from '../state/cluster';
import { count, dateTime } from '../text/units';

const FITS: Record<string, Look> = {
  meets: { tone: 'ok', shape: 'check', text: 'meets baseline' },
  'falls-short': { tone: 'warn', shape: 'triangle', text: 'below baseline' },
  unknown: { tone: 'idle', shape: 'query', text: 'unknown' },
};

export function BaselinePage() {
  const news = baselineNews.value;
  const since = news === null ? 'none' : (news?.set_unix_ms ?? '');
  const loaded = useLoaded(`baseline ${since}`, (signal) =>
    get<CpuBaselineInfo>('/cpu-baseline', signal),
  );
  const info = loaded.value;
  return (
    <>
      <PageHead title="CPU baseline" side={info && <Actions info={info} done={loaded.reload} />}>
        <span class="muted">The CPU model of VMs that do not name one.</span>
      </PageHead>
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {!info && !loaded.problem && <Waiting lines={8} />}
      {info && (
        <>
          <div class="columns-even">
            <Panel title="Current baseline">
              {info.baseline ? (
                <Facts
                  rows={[
                    ['Model', <code key="model">{info.baseline.cpu_model}</code>],
                    ['Level', info.baseline.level],
                    ['Requested as', info.baseline.asked],
                    ['Exempted hosts', info.baseline.without?.join(', ') || 'none'],
                    ['Set by', `${info.baseline.set_by}, ${dateTime(info.baseline.set_unix_ms)}`],
                    ['VMs to restart', count(info.must_restart_count)],
                  ]}
                />
              ) : (
                <p class="empty">
                  No baseline. Each VM has the CPU of its specification, or the agent's default.
                </p>
              )}
            </Panel>
            <Panel title="Common to all hosts">
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
                <p class="empty">{info.no_common ?? 'Not known yet.'}</p>
              )}
            </Panel>
          </div>
          <Panel title="Hosts">
            <div class="scroll-x">
              <table class="plain">
                <thead>
                  <tr>
                    <th scope="col">Host</th>
                    <th scope="col">Baseline</th>
                    <th scope="col">Vendor</th>
                    <th scope="col">Accelerator</th>
                    <th scope="col">Missing features</th>
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
                      <td>{host.why ?? (host.lacks?.join(', ') || 'none')}</td>
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

function Actions({ info, done }: { info: CpuBaselineInfo; done: () => void }) {
  return (
    <>
      {info.baseline && (
        <Act kind="danger" needs="admin" onClick={() => askRemove(done)}>
          Remove baseline
        </Act>
      )}
      <Act kind="primary" needs="admin" onClick={() => openSetBaseline(info, done)}>
        {info.baseline ? 'Change baseline' : 'Set baseline'}
      </Act>
    </>
  );
}

function askRemove(done: () => void): void {
  confirm({
    title: 'Remove CPU baseline',
    text:
      'New VMs get the CPU of their specifications, and hosts that fell short take VMs again. ' +
      'Running VMs keep their CPU.',
    verb: 'Remove',
    run: async () => {
      await remove('/cpu-baseline');
      done();
    },
  });
}
