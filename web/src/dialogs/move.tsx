/**
 * Moves a VM. Shows first: hosts in order with reasons, checks and prediction for the chosen one.
 */
import { useState } from 'preact/hooks';
import { get, part, post } from '../api/http';
import type {
  CreateMove,
  Move,
  MovePriority,
  Preflight,
  PreflightRanking,
  PreflightReport,
} from '../api/types';
import { Act, Figure, ProblemBox, sentence, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Choice } from '../parts/filter';
import { useLoaded } from '../parts/loaded';
import { Mark, Status, verdictLook } from '../parts/status';
import { go } from '../state/route';
import { bytes, bytesPerSecond, duration } from '../text/units';
import { type DisksDraft, disksQuery, disksRequest, MoveDisks, NO_DISKS } from './move-disks';
import { PRIORITIES } from './priorities';

type Ranking = Omit<PreflightRanking, 'best'>;

const POLICIES = [
  ['auto', 'auto'],
  ['minimal-pause', 'minimal pause'],
  ['minimal-impact', 'minimal impact'],
  ['fast-evacuation', 'fast evacuation'],
] as const;
const PAGE_IN = [
  ['allowed', 'allowed'],
  ['never', 'never'],
  ['now', 'as soon as possible'],
] as const;

export const openMove = (vm: string) => open((close) => <MoveDialog vm={vm} close={close} />);

function MoveDialog({ vm, close }: { vm: string; close: () => void }) {
  const loaded = useLoaded(`ranking ${vm}`, (signal) =>
    get<Preflight>(`/vms/${part(vm)}/preflight`, signal),
  );
  const ranking = loaded.value?.kind === 'ranking' ? loaded.value : null;
  const [picked, setPicked] = useState<string | null>(null);
  const [priority, setPriority] = useState<MovePriority>('normal');
  const [policy, setPolicy] = useState<string>('auto');
  const [pageIn, setPageIn] = useState<NonNullable<CreateMove['page_in']>>('allowed');
  const [isForced, setForced] = useState(false);
  const [disks, setDisks] = useState<DisksDraft>(NO_DISKS);
  const to = picked ?? ranking?.fits[0]?.host ?? null;
  const query = `to=${part(to ?? '')}&predict=true${disksQuery(disks)}`;
  const checked = useLoaded(to ? `report ${vm} ${query}` : null, (signal) =>
    get<Preflight>(`/vms/${part(vm)}/preflight?${query}`, signal),
  );
  // Each host has its own directories.
  const pick = (host: string) => {
    setPicked(host);
    setDisks({ ...disks, to: '' });
  };
  const report = checked.value?.kind === 'report' ? checked.value : null;
  const task = useTask();
  const blocked = !to
    ? 'No suitable host.'
    : checked.isLoading
      ? 'The checks are running.'
      : report?.verdict === 'fail' && !isForced
        ? `Preflight failed for host ${to}.`
        : null;
  const begin = () =>
    task.run(async () => {
      const request: CreateMove = {
        to,
        priority,
        policy,
        page_in: pageIn,
        skip_preflight: isForced,
        ...disksRequest(disks),
      };
      const move = await post<Move>(`/vms/${part(vm)}/moves`, request);
      close();
      go(`/moves/${part(move.id)}`);
    });
  return (
    <Dialog
      title={`Move ${vm}`}
      width="wide"
      onClose={close}
      foot={
        <>
          <div class="dialog-options">
            <Choice label="Priority" value={priority} values={PRIORITIES} onChange={setPriority} />
            <Choice label="Policy" value={policy} values={POLICIES} onChange={setPolicy} />
            <Choice label="Page-in" value={pageIn} values={PAGE_IN} onChange={setPageIn} />
          </div>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act kind="primary" needs="operator" blocked={blocked} busy={task.busy} onClick={begin}>
            {to ? `Move to ${to}` : 'Move'}
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      <div class="move-panes">
        <div class="move-hosts">
          <h3>Hosts, best first</h3>
          {ranking ? (
            <Hosts ranking={ranking} to={to} onPick={pick} />
          ) : (
            !loaded.problem && <Waiting lines={6} />
          )}
        </div>
        <div class="move-report" aria-live="polite" aria-busy={checked.isLoading}>
          {ranking && <MoveDisks to={to} draft={disks} onChange={setDisks} />}
          <h3>{to ? `Preflight to ${to}` : 'Preflight'}</h3>
          {checked.problem && <ProblemBox problem={checked.problem} />}
          {report && <Predicted report={report} />}
          {report && <Checks report={report} />}
          {report?.verdict === 'fail' && (
            <label class="tick">
              <input
                type="checkbox"
                checked={isForced}
                onChange={(event) => setForced(event.currentTarget.checked)}
              />
              <span>Move anyway. Rules are ignored; the hosts still check.</span>
            </label>
          )}
          {!report && !checked.problem && to && <Waiting lines={8} />}
        </div>
      </div>
    </Dialog>
  );
}

function Hosts(props: { ranking: Ranking; to: string | null; onPick: (host: string) => void }) {
  const { fits, ruled_out: out, immovable } = props.ranking;
  const most = Math.max(1, ...fits.map((host) => host.score.total));
  return (
    <>
      {immovable.length > 0 && (
        <div class="notice notice-bad">
          <strong>This VM cannot be moved</strong>
          {immovable.map((check) => (
            <p key={check.name}>
              <code>{check.name}</code> {check.evidence}
              {check.remedy ? `. ${sentence(check.remedy)}` : ''}
            </p>
          ))}
        </div>
      )}
      {fits.length === 0 && immovable.length === 0 && (
        <div class="notice notice-bad">
          <strong>No suitable host</strong>
          <p>
            The list below gives the reasons. End a host's maintenance, add a host, or fix what is
            named there.
          </p>
        </div>
      )}
      <div class="ranked" role="radiogroup" aria-label="Destination">
        {fits.map((host, at) => (
          <label key={host.host} class={`ranked-host ${props.to === host.host ? 'picked' : ''}`}>
            <input
              type="radio"
              name="to"
              value={host.host}
              checked={props.to === host.host}
              onChange={() => props.onPick(host.host)}
            />
            <span class="rank">{at + 1}</span>
            <span class="ranked-name">{host.host}</span>
            <span class="ranked-score" title={scoreText(host.score)}>
              <span class="meter-track">
                <span
                  class="meter-fill meter-plain"
                  style={{ width: `${(Math.max(0, host.score.total) / most) * 100}%` }}
                />
              </span>
              {host.score.total.toFixed(1)}
            </span>
            <span class="ranked-why">{host.why}</span>
            {host.breaks.length > 0 && (
              <span class="ranked-why tone-warn">violates rule {host.breaks.join(', ')}</span>
            )}
          </label>
        ))}
      </div>
      {out.length > 0 && (
        <>
          <h4>Ruled out</h4>
          <ul class="ruled-out">
            {out.map((host) => (
              <li key={host.host}>
                <button
                  type="button"
                  class="act quiet"
                  onClick={() => props.onPick(host.host)}
                  aria-label={`Show the checks of ${host.host}`}
                >
                  <Mark tone="idle" shape="slash" /> {host.host}
                </button>
                <span>{host.why}</span>
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}

function scoreText(score: { total: number; [name: string]: number }): string {
  return Object.entries(score)
    .filter(([name]) => name !== 'total')
    .map(([name, points]) => `${name} ${points.toFixed(1)}`)
    .join(', ');
}

function Predicted({ report }: { report: PreflightReport }) {
  const prediction = report.prediction;
  const predicted = prediction?.predicted;
  if (!predicted) {
    const why = prediction?.error?.message ?? prediction?.why;
    return why ? <p class="notice">No prediction: {why}</p> : null;
  }
  return (
    <>
      <dl class="figures">
        <Figure label="Migration time" value={duration(predicted.migration_time_ms)} />
        <Figure
          label="Switchover"
          value={duration(predicted.switchover_ms)}
          note={
            prediction?.switchover_budget_ms
              ? `budget ${duration(prediction.switchover_budget_ms)}`
              : undefined
          }
        />
        <Figure label="Throttle" value={throttleText(predicted)} />
        <Figure
          label="On the wire"
          value={bytes(predicted.wire_bytes)}
          note={`${predicted.rounds} rounds`}
        />
      </dl>
      {prediction?.why && <p class="muted">{sentence(prediction.why)}.</p>}
    </>
  );
}

function throttleText(predicted: {
  means: string;
  throttled_to_pages_per_s?: number | null;
}): string {
  if (predicted.means === 'none') return 'does not converge';
  if (predicted.throttled_to_pages_per_s != null)
    return `to ${bytesPerSecond(predicted.throttled_to_pages_per_s * 4096)}`;
  return predicted.means === 'page-in' ? 'none (page-in)' : 'none';
}

const ORDER = { fail: 0, warn: 1, unknown: 2, pass: 3 };

function Checks({ report }: { report: PreflightReport }) {
  const checks = [...report.checks].sort((a, b) => ORDER[a.verdict] - ORDER[b.verdict]);
  return (
    <table class="plain checks">
      <caption class="unseen">Checks, worst first</caption>
      <thead>
        <tr>
          <th scope="col">Verdict</th>
          <th scope="col">Check</th>
          <th scope="col">Result</th>
        </tr>
      </thead>
      <tbody>
        {checks.map((check) => (
          <tr key={check.name}>
            <td>
              <Status look={verdictLook(check.verdict)} />
            </td>
            <th scope="row">{check.name}</th>
            <td>
              {check.evidence}
              {check.remedy && <span class="remedy">{sentence(check.remedy)}</span>}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
