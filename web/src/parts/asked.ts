/** Data that a page loads from the manager, again when the question changes. */
import { useEffect, useState } from 'preact/hooks';
import { problemOf, type ShownProblem } from '../api/http';

export interface Asked<T> {
  value: T | undefined;
  problem: ShownProblem | null;
  isAsking: boolean;
  again: () => void;
}

/**
 * `question` identifies the request; null sends none. The last answer stays visible during a
 * reload.
 */
export function useAsked<T>(
  question: string | null,
  ask: (signal: AbortSignal) => Promise<T>,
): Asked<T> {
  const [answer, setAnswer] = useState<{
    of: string | null;
    value?: T;
    problem: ShownProblem | null;
  }>({
    of: null,
    problem: null,
  });
  const [turn, setTurn] = useState(0);
  const [asking, setAsking] = useState(question !== null);
  useEffect(() => {
    if (question === null) return;
    const ended = new AbortController();
    setAsking(true);
    ask(ended.signal)
      .then(
        (value) => !ended.signal.aborted && setAnswer({ of: question, value, problem: null }),
        (error) => !ended.signal.aborted && setAnswer({ of: question, problem: problemOf(error) }),
      )
      .finally(() => !ended.signal.aborted && setAsking(false));
    return () => ended.abort();
  }, [question, turn]);
  const isOfThis = answer.of === question;
  return {
    value: isOfThis ? answer.value : undefined,
    problem: isOfThis ? answer.problem : null,
    isAsking: asking || (question !== null && !isOfThis),
    again: () => setTurn((before) => before + 1),
  };
}
