/** Acknowledges an alarm, with a note for the other operators. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { AcknowledgeAlarm, Alarm } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { alarms, takeAlarm } from '../state/alarms';

const MOST_NOTED = 500;

export const openAcknowledge = (alarm: Alarm) =>
  open((close) => <Acknowledge alarm={alarm} close={close} />);

function Acknowledge({ alarm, close }: { alarm: Alarm; close: () => void }) {
  const [note, setNote] = useState(alarm.acknowledged?.note ?? '');
  const task = useTask();
  const wrong = note.length > MOST_NOTED ? `At most ${MOST_NOTED} characters` : null;
  const send = () => {
    if (wrong) return;
    void task.run(async () => {
      const request: AcknowledgeAlarm = { note: note.trim() };
      const answer = await post<Alarm>(`/alarms/${part(alarm.id)}/acknowledge`, request);
      // Its end may have come as an event before the answer.
      if (alarms.peek(alarm.id)) takeAlarm(answer);
      close();
    });
  };
  return (
    <FormDialog title="Acknowledge alarm" verb="Acknowledge" task={task} send={send} close={close}>
      <p>{alarm.text}</p>
      <Field
        label="Note"
        value={note}
        wrong={wrong}
        onInput={setNote}
        hint="For the other operators, for example: disks are ordered"
      />
      <p class="notice">
        The alarm stays in the list until its cause is gone. The receivers of notices get your note.
      </p>
    </FormDialog>
  );
}
