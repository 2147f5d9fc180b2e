/** Data that a page loads from the manager, again when the question changes. */
import { useEffect, useState } from 'preact/hooks';
import { problemOf, type ShownProblem } from '../api/http';

export interface Loaded<T> {
  value: T | undefined;
  problem: ShownProblem | null;
  isLoading: boolean;
  reload: () => void;
}

/**
 * `question` identifies the request; null sends none. The last answer stays visible during a
 * reload.
 */
export function useLoaded<T>(
  question: string | null,
  load: (signal: AbortSignal) => Promise<T>,
): Loaded<T> {
  const [answer, setAnswer] = useState<{
    of: string | null;
    value?: T;
    problem: ShownProblem | null;
  }>({
    of: null,
    problem: null,
  });
  const [turn, setTurn] = useState(0);
  const [loading, setLoading] = useState(question !== null);
  useEffect(() => {
    if (question === null) return;
    const ended = new AbortController();
    setLoading(true);
    load(ended.signal)
      .then(
        (value) => !ended.signal.aborted && setAnswer({ of: question, value, problem: null }),
        (error) => !ended.signal.aborted && setAnswer({ of: question, problem: problemOf(error) }),
      )
      .finally(() => !ended.signal.aborted && setLoading(false));
    return () => ended.abort();
  }, [question, turn]);
  const isOfThis = answer.of === question;
  return {
    value: isOfThis ? answer.value : undefined,
    problem: isOfThis ? answer.problem : null,
    isLoading: loading || (question !== null && !isOfThis),
    reload: () => setTurn((before) => before + 1),
  };
}
