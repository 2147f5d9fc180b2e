/** Asks for confirmation of an action that cannot be undone with a click. */
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { Act, ProblemBox, useTask } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';

interface Question {
  title: string;
  text: ComponentChildren;
  verb: string;
  kind?: 'primary' | 'danger';
  /** Label of an option that changes the action. */
  tick?: string;
  run: (isTicked: boolean) => Promise<unknown>;
}

export const confirm = (question: Question) =>
  open((close) => <Confirm {...question} close={close} />);

function Confirm(props: Question & { close: () => void }) {
  const task = useTask();
  const [isTicked, setTicked] = useState(false);
  const go = async () => {
    if (await task.run(() => props.run(isTicked))) props.close();
  };
  return (
    <Dialog
      title={props.title}
      width="narrow"
      onClose={props.close}
      foot={
        <>
          <Act onClick={props.close} kind="quiet">
            Close
          </Act>
          <Act kind={props.kind ?? 'danger'} busy={task.busy} onClick={go}>
            {props.verb}
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      <p>{props.text}</p>
      {props.tick && (
        <label class="tick">
          <input
            type="checkbox"
            checked={isTicked}
            onChange={(event) => setTicked(event.currentTarget.checked)}
          />
          <span>{props.tick}</span>
        </label>
      )}
    </Dialog>
  );
}
