/** A dialogue with a form: its problem, its fields, and the button that sends it. */
import type { ComponentChildren } from 'preact';
import type { Role } from '../api/types';
import { Act, ProblemBox, type useTask } from './basics';
import { Dialog } from './dialog';

export function FormDialog(props: {
  title: string;
  /** Text of the button that sends the form. */
  verb: string;
  task: ReturnType<typeof useTask>;
  /** The role that sending needs; default: operator. */
  needs?: Role;
  /** Why the form cannot be sent yet. */
  blocked?: string | null;
  /** Sends the form, also on Enter. */
  send: () => void;
  close: () => void;
  /** Further buttons. */
  others?: ComponentChildren;
  children: ComponentChildren;
}) {
  const { title, verb, task, send, close, others, children } = props;
  return (
    <Dialog
      title={title}
      onClose={close}
      foot={
        <>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          {others}
          <Act
            kind="primary"
            needs={props.needs ?? 'operator'}
            blocked={props.blocked}
            busy={task.busy}
            onClick={send}
          >
            {verb}
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      <form
        class="form"
        onSubmit={(event) => {
          event.preventDefault();
          if (!task.busy && !props.blocked) send();
        }}
      >
        {children}
        <button type="submit" class="unseen" tabIndex={-1} aria-hidden="true">
          {verb}
        </button>
      </form>
    </Dialog>
  );
}
