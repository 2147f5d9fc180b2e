/** Components that are loaded when they are first shown. */
import type { ComponentType } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { problemOf, type ShownProblem } from '../api/http';
import { ProblemBox, Waiting } from './basics';

export function lazy<P extends object>(
  load: () => Promise<{ default: ComponentType<P> }>,
): ComponentType<P> {
  let known: ComponentType<P> | null = null;
  return function Lazy(props: P) {
    const [Loaded, setLoaded] = useState<ComponentType<P> | null>(() => known);
    const [problem, setProblem] = useState<ShownProblem | null>(null);
    useEffect(() => {
      if (Loaded) return;
      load().then(
        (module) => {
          known = module.default;
          setLoaded(() => module.default);
        },
        (error) => setProblem({ ...problemOf(error), title: 'Cannot load a part of the console' }),
      );
    }, [Loaded]);
    if (problem) return <ProblemBox problem={problem} />;
    return Loaded ? <Loaded {...props} /> : <Waiting lines={8} />;
  };
}
