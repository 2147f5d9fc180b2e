/** Sets the CPU baseline. Shows its consequences first. */
import { useEffect, useState } from 'preact/hooks';
import { put } from '../api/http';
import type { CpuBaselineChange, CpuBaselineInfo, SetCpuBaseline } from '../api/types';
import { Facts, ProblemBox, useTask, VmLink, Waiting } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { whyNot } from '../state/session';
import { counted } from '../text/units';

const COMPUTED = 'computed';
const OTHER = 'other';
/** Pause in typing after which the consequences are asked for. */
const PAUSE_MS = 400;
const MOST_VMS = 10;

/** `done` is called after a change. */
export const openSetBaseline = (info: CpuBaselineInfo, done: () => void) =>
  open((close) => <SetBaseline info={info} done={done} close={close} />);

function SetBaseline(props: { info: CpuBaselineInfo; done: () => void; close: () => void }) {
  const { info, done, close } = props;
  const asked = info.baseline?.asked ?? COMPUTED;
  const isNamed = asked === COMPUTED || info.named.some(({ name }) => name === asked);
  const [choice, setChoice] = useState(isNamed ? asked : OTHER);
  const [other, setOther] = useState(isNamed ? '' : asked);
  const [exempt, setExempt] = useState<string[]>(info.baseline?.without ?? []);
  const request: SetCpuBaseline = {
    model: choice === OTHER ? other.trim() : choice,
    without: exempt,
  };
  const settled = useSettled(JSON.stringify(request));
  const isAsked = request.model !== '' && whyNot('admin') === null;
  const loaded = useLoaded(isAsked ? settled : null, () =>
    put<CpuBaselineChange>('/cpu-baseline?plan=true', JSON.parse(settled)),
  );
  const plan = settled === JSON.stringify(request) ? loaded.value : undefined;
  const task = useTask();
  const save = () => {
    void task.run(async () => {
      await put('/cpu-baseline', request);
      done();
      close();
    });
  };
  const choices = [
    [COMPUTED, `computed: common to all hosts${common(info)}`] as const,
    ...info.named.map(({ name, cpu_model: model }) => [name, `${name} (${model})`] as const),
    [OTHER, 'another model'] as const,
  ];
  // A host that is exempted, or would have to be.
  const short = plan?.falls_short.map(({ host }) => host) ?? [];
  const hosts = [...new Set([...exempt, ...short])].sort();
  return (
    <FormDialog
      title="Set CPU baseline"
      verb="Set baseline"
      needs="admin"
      blocked={plan ? (plan.refused ?? null) : 'The consequences are not known yet.'}
      task={task}
      send={save}
      close={close}
    >
      <Select label="Model" value={choice} values={choices} onChange={setChoice} />
      {choice === OTHER && (
        <Field
          label="Other model"
          value={other}
          onInput={setOther}
          hint="A level such as x86-64-v2, or a versioned QEMU model with ,+feature or ,-feature"
        />
      )}
      {hosts.length > 0 && (
        <fieldset class="many">
          <legend>Exempted hosts: no VM moves to them</legend>
          {hosts.map((host) => (
            <Tick
              key={host}
              text={host}
              checked={exempt.includes(host)}
              onChange={(isExempt) =>
                setExempt(isExempt ? [...exempt, host] : exempt.filter((one) => one !== host))
              }
            />
          ))}
        </fieldset>
      )}
      <div aria-live="polite" aria-busy={!plan}>
        {loaded.problem && <ProblemBox problem={loaded.problem} />}
        {plan ? <Consequences plan={plan} /> : isAsked && !loaded.problem && <Waiting lines={4} />}
      </div>
    </FormDialog>
  );
}

const common = ({ common }: CpuBaselineInfo) => (common ? ` (${common.cpu_model})` : '');

/** The text after a pause in typing. */
function useSettled(text: string): string {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}

function Consequences({ plan }: { plan: CpuBaselineChange }) {
  const { baseline, falls_short: short, must_restart: restarts } = plan;
  return (
    <>
      {plan.refused && (
        <p class="notice notice-bad">
          {plan.refused}. Choose a lower model, or exempt the host above.
        </p>
      )}
      <Facts
        rows={[
          ['Model', <code key="model">{baseline.cpu_model}</code>],
          ['Level', baseline.level],
          [
            'Hosts below it',
            short.map(({ host, lacks }) => `${host}: ${lacks?.join(', ')}`).join('; ') || 'none',
          ],
          ['Hosts not known', plan.unknown.join(', ') || 'none'],
          [
            'To restart',
            plan.must_restart_count === 0 ? (
              'no VM'
            ) : (
              <span key="restart">
                {counted(plan.must_restart_count, 'VM')}:{' '}
                {restarts.slice(0, MOST_VMS).map(({ vm }, at) => (
                  <span key={vm}>
                    {at > 0 && ', '}
                    <VmLink name={vm} />
                  </span>
                ))}
                {plan.must_restart_count > MOST_VMS && ' and others'}
              </span>
            ),
          ],
        ]}
      />
    </>
  );
}
