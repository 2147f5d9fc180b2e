/** Changes the settings of high availability. */
import { useState } from 'preact/hooks';
import { put } from '../api/http';
import type { HaSettings } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';

type Admission = NonNullable<HaSettings['admission']>;

/** Policies of the admission control: API value and label. */
export const ADMISSIONS: readonly (readonly [Admission, string])[] = [
  ['off', 'is not checked'],
  ['warn', 'is carried out, with a warning'],
  ['refuse', 'is refused'],
];

export interface HaDraft {
  enabled: boolean;
  failures: string;
  admission: Admission;
}

export const haDraft = (now: HaSettings): HaDraft => ({
  enabled: now.enabled ?? false,
  failures: String(now.failures ?? 1),
  admission: now.admission ?? 'warn',
});

export const wrongFailures = (text: string) =>
  /^[1-8]$/.test(text) ? null : 'A whole number from 1 to 8';

export const haRequest = (draft: HaDraft): HaSettings => ({
  enabled: draft.enabled,
  failures: Number(draft.failures),
  admission: draft.admission,
});

/** `done` is called after a change. */
export const openEditHa = (now: HaSettings, done: () => void) =>
  open((close) => <EditHa now={now} done={done} close={close} />);

function EditHa(props: { now: HaSettings; done: () => void; close: () => void }) {
  const { now, done, close } = props;
  const [draft, setDraft] = useState(() => haDraft(now));
  const task = useTask();
  const change = (changed: Partial<HaDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const wrong = wrongFailures(draft.failures);
  const save = () => {
    if (wrong) return;
    void task.run(async () => {
      await put('/ha', haRequest(draft));
      done();
      close();
    });
  };
  return (
    <FormDialog
      title="Edit high availability"
      verb="Save"
      needs="admin"
      task={task}
      send={save}
      close={close}
    >
      <Tick
        text="Hosts get terms, in which protected VMs run"
        checked={draft.enabled}
        onChange={(enabled) => change({ enabled })}
      />
      <div class="form-row">
        <Field
          label="Hosts that may fail at once"
          value={draft.failures}
          wrong={wrong}
          onInput={(failures) => change({ failures })}
          inputMode="numeric"
        />
        <Select
          label="A start that would not fit then"
          value={draft.admission}
          values={ADMISSIONS}
          onChange={(admission) => change({ admission })}
          hint="Start of a protected VM"
        />
      </div>
    </FormDialog>
  );
}
