/** A dialogue that carries out a test when it opens, and shows the result. */
import type { ComponentChildren } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { post } from '../api/http';
import { Act, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog } from '../parts/dialog';

/** `path`: the request, which needs the role operator. */
export function TestDialog<T>(props: {
  title: string;
  path: string;
  result: (done: T) => ComponentChildren;
  close: () => void;
}) {
  const { title, path, result, close } = props;
  const task = useTask();
  const [done, setDone] = useState<T | null>(null);
  const send = () => task.run(async () => setDone(await post<T>(path)));
  useEffect(() => void send(), []);
  return (
    <Dialog
      title={title}
      onClose={close}
      foot={
        <>
          <Act kind="quiet" onClick={close}>
            Close
          </Act>
          <Act needs="operator" busy={task.busy} onClick={send}>
            Test again
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {task.busy && <Waiting lines={2} />}
      {done && !task.busy && result(done)}
    </Dialog>
  );
}
