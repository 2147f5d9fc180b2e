/** One adoption: its progress with Undo, then its result. */
import { useState } from 'preact/hooks';
import { get, part, remove } from '../api/http';
import type { Adoption, Phase } from '../api/types';
import {
  Act,
  Figure,
  HostLink,
  Link,
  PageHead,
  Panel,
  ProblemBox,
  sentence,
  useTask,
  VmLink,
  Waiting,
} from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { Rail } from '../parts/phases';
import { Status } from '../parts/status';
import { adoptionOf } from '../state/adoptions';
import { placeText, programOf, whyNotUndone } from '../text/adoption';
import { bytes, duration } from '../text/units';
import { adoptionLook, nameOf, useAdoptions } from './rows';

const PHASES: Phase[] = ['preflight', 'prepare', 'pre-copy', 'switchover', 'announce', 'report'];

export function AdoptionPage({ host, id }: { host: string; id: string }) {
  const path = `/hosts/${part(host)}/adoptions/${part(id)}`;
  const loaded = useLoaded(path, (signal) => get<Adoption>(path, signal));
  useAdoptions([host]);
  const [isUndone, setUndone] = useState(false);
  const task = useTask();
  const adoption = adoptionOf(host, id) ?? loaded.value;
  if (!adoption)
    return loaded.problem ? <ProblemBox problem={loaded.problem} /> : <Waiting lines={6} />;
  const isOver = adoption.state !== 'running';
  const undo = () =>
    task.run(async () => {
      await remove(path);
      setUndone(true);
    });
  return (
    <>
      <PageHead
        title={`Adoption of ${nameOf(adoption)}`}
        above={
          <Link to={isOver ? '/history?of=adoptions' : '/queue'}>
            {isOver ? 'Adoptions' : 'Queue'}
          </Link>
        }
        side={
          !isOver && (
            <Act
              needs="admin"
              kind="danger"
              name="Undo the adoption"
              busy={task.busy || isUndone}
              blocked={whyNotUndone(adoption)}
              onClick={undo}
            >
              Undo
            </Act>
          )
        }
      >
        <Status look={adoptionLook(adoption)} />
        <span>
          {placeText(adoption.from)} on <HostLink name={host} />
        </span>
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      <Outcome adoption={adoption} isUndone={isUndone} />
      <Rail
        phases={PHASES}
        now={isOver ? undefined : adoption.phase}
        isDone={adoption.state === 'completed'}
        isEnded={isOver}
      />
      <Figures adoption={adoption} />
      <Notes adoption={adoption} />
    </>
  );
}

function Outcome({ adoption, isUndone }: { adoption: Adoption; isUndone: boolean }) {
  const program = programOf(adoption.from);
  if (adoption.state === 'running')
    return isUndone ? (
      <p class="notice" role="status">
        The adoption is being undone.
      </p>
    ) : null;
  if (adoption.state === 'cancelled')
    return (
      <p class="notice" role="status">
        The adoption is undone. The guest runs on under {program}, and Godwit has nothing of it.
      </p>
    );
  if (adoption.state === 'completed')
    return (
      <p class="reason" role="status">
        <strong>Adopted</strong>
        {isUndone && 'The undo came too late: the guest was handed over. '}
        <VmLink name={adoption.vm} /> is a VM of Godwit and moves like any other.
      </p>
    );
  return (
    <ProblemBox
      problem={{
        status: 0,
        code: adoption.error?.code ?? 'failed',
        title: 'Adoption failed',
        detail: adoption.error?.message ?? 'The host gave no reason.',
        remedy: adoption.error?.remedy ?? '',
      }}
    />
  );
}

function Figures({ adoption }: { adoption: Adoption }) {
  const isOver = adoption.state !== 'running';
  const isCompleted = adoption.state === 'completed';
  return (
    <dl class="figures figures-big">
      <Figure
        size="big"
        label="Pause"
        value={duration(adoption.pause_ms)}
        note={adoption.pause_ms != null ? 'the vCPUs stood still' : isOver ? 'none' : 'pending'}
      />
      <Figure
        size="big"
        label={isOver ? 'Duration' : 'Elapsed'}
        value={duration(adoption.elapsed_ms)}
        note="since the request"
      />
      <Figure
        size="big"
        label={isCompleted ? 'Memory' : 'Remaining'}
        value={
          adoption.total_bytes > 0
            ? bytes(isCompleted ? adoption.total_bytes : adoption.remaining_bytes)
            : '–'
        }
        note={isCompleted ? 'of the guest' : `of ${bytes(adoption.total_bytes)} guest memory`}
      />
    </dl>
  );
}

/** What was done beside it, and what is left to do; what prevented it. */
function Notes({ adoption }: { adoption: Adoption }) {
  const { notes, findings } = adoption;
  return (
    <>
      {notes.length > 0 && (
        <Panel title={`At ${programOf(adoption.from)}`}>
          <ul class="plain-list">
            {notes.map((note) => (
              <li key={note}>{note}</li>
            ))}
          </ul>
        </Panel>
      )}
      {findings.length > 1 && (
        <Panel title="What prevented it">
          <ul class="plain-list">
            {findings.map(({ code, message, remedy }, at) => (
              <li key={`${code} ${at}`}>
                {sentence(message)}
                {remedy && <span class="remedy">{sentence(remedy)}</span>}
              </li>
            ))}
          </ul>
        </Panel>
      )}
    </>
  );
}
