/** Building blocks of all pages. */
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { problemOf, type ShownProblem } from '../api/http';
import type { Role } from '../api/types';
import { href } from '../state/route';
import { whyNot } from '../state/session';
import { apart } from '../text/units';
import { useName } from './id';
import { Mark } from './status';

export function PageHead(props: {
  title: string;
  above?: ComponentChildren;
  children?: ComponentChildren;
  side?: ComponentChildren;
}) {
  return (
    <header class="page-head">
      <div class="page-title">
        {props.above && <div class="above">{props.above}</div>}
        <h1 tabIndex={-1}>{props.title}</h1>
        {props.children && <div class="page-facts">{props.children}</div>}
      </div>
      {props.side && <div class="actions">{props.side}</div>}
    </header>
  );
}

export function Panel(props: {
  title: string;
  side?: ComponentChildren;
  children: ComponentChildren;
  class?: string;
}) {
  const id = useName();
  return (
    <section class={`panel ${props.class ?? ''}`} aria-labelledby={id}>
      <header class="panel-head">
        <h2 id={id}>{props.title}</h2>
        {props.side}
      </header>
      {props.children}
    </section>
  );
}

/** A figure with its unit in a smaller size, so that digits align. */
export function Figure(props: {
  label: string;
  value: string;
  note?: ComponentChildren;
  size?: 'big' | 'small';
}) {
  const [number, unit] = apart(props.value);
  return (
    <div class={`figure ${props.size ?? ''}`}>
      <dt>{props.label}</dt>
      <dd>
        <span class="number">{number}</span>
        {unit && <span class="unit"> {unit}</span>}
        {props.note !== undefined && <span class="figure-note">{props.note}</span>}
      </dd>
    </div>
  );
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value ?? '–'}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A share, as a bar and as text. */
export function Meter(props: {
  share: number;
  text: string;
  label: string;
  warnAt?: number;
  badAt?: number;
}) {
  const share = Number.isFinite(props.share) ? Math.min(1, Math.max(0, props.share)) : 0;
  const tone =
    share >= (props.badAt ?? 0.95) ? 'bad' : share >= (props.warnAt ?? 0.85) ? 'warn' : 'plain';
  return (
    <span class="meter" role="img" aria-label={`${props.label}: ${props.text}`}>
      <span class="meter-track">
        <span
          class={`meter-fill meter-${tone}`}
          style={{ width: `${(share * 100).toFixed(1)}%` }}
        />
      </span>
      <span class="meter-text" aria-hidden="true">
        {props.text}
      </span>
    </span>
  );
}

export const Link = (props: { to: string; children: ComponentChildren; class?: string }) => (
  <a href={href(props.to)} class={props.class}>
    {props.children}
  </a>
);
export const HostLink = ({ name }: { name: string }) => (
  <Link to={`/hosts/${encodeURIComponent(name)}`}>{name}</Link>
);
export const VmLink = ({ name }: { name: string }) => (
  <Link to={`/vms/${encodeURIComponent(name)}`}>{name}</Link>
);

export function Labels({ labels }: { labels: Record<string, string> | undefined }) {
  const all = Object.entries(labels ?? {});
  return (
    <>
      {all.map(([name, value]) => (
        <span class="label" key={name}>
          {name}={value}
        </span>
      ))}
    </>
  );
}

export const Tags = ({ tags }: { tags: string[] | undefined }) => (
  <>
    {tags?.map((tag) => (
      <span class="label" key={tag}>
        {tag}
      </span>
    ))}
  </>
);

/** A button. If the role or the state forbids the action, it stays visible with the reason. */
export function Act(props: {
  children: ComponentChildren;
  onClick: () => void;
  needs?: Role;
  blocked?: string | null | undefined;
  kind?: 'primary' | 'danger' | 'quiet';
  busy?: boolean;
  name?: string;
}) {
  const id = useName();
  const why = (props.needs ? whyNot(props.needs) : null) ?? props.blocked ?? null;
  const isOff = why !== null || props.busy === true;
  return (
    <>
      <button
        type="button"
        class={`act ${props.kind ?? ''}`}
        aria-disabled={isOff}
        aria-busy={props.busy}
        aria-label={props.name}
        aria-describedby={why ? id : undefined}
        title={why ?? undefined}
        onClick={() => {
          if (!isOff) props.onClick();
        }}
      >
        {props.children}
      </button>
      {why && (
        <span id={id} class="unseen">
          {why}
        </span>
      )}
    </>
  );
}

/** A problem document (RFC 9457): what failed, why, and the remedy. */
export function ProblemBox({ problem }: { problem: ShownProblem }) {
  return (
    <div class="problem" role="alert">
      <Mark tone="bad" shape="cross" />
      <div>
        <strong>{problem.title}</strong>
        <p>{problem.detail}</p>
        {problem.remedy && <p class="remedy">{sentence(problem.remedy)}</p>}
        {problem.checks?.map((check) => (
          <p key={check.name}>
            <code>{check.name}</code> {check.evidence}
            {check.remedy ? `: ${check.remedy}` : ''}
          </p>
        ))}
      </div>
    </div>
  );
}

export function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Runs a task that may fail; reports whether it is running and the problem. */
export function useTask(): {
  busy: boolean;
  problem: ShownProblem | null;
  run: (task: () => Promise<unknown>) => Promise<boolean>;
  clear: () => void;
} {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<ShownProblem | null>(null);
  const run = async (task: () => Promise<unknown>) => {
    setBusy(true);
    setProblem(null);
    try {
      await task();
      return true;
    } catch (error) {
      setProblem(problemOf(error));
      return false;
    } finally {
      setBusy(false);
    }
  };
  return { busy, problem, run, clear: () => setProblem(null) };
}

export const Empty = ({ children }: { children: ComponentChildren }) => (
  <p class="empty">{children}</p>
);

/** A placeholder while data loads. */
export const Waiting = ({ lines = 3 }: { lines?: number }) => (
  <div class="waiting" role="status" aria-label="Loading">
    {Array.from({ length: lines }, (_, line) => (
      <span key={line} class="waiting-line" />
    ))}
  </div>
);
