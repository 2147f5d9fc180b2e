/** Creates a placement rule, or replaces one. */
import { useState } from 'preact/hooks';
import { part, post, problemOf, Refusal, remove } from '../api/http';
import type { CreateRule, RuleInfo } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, TextArea, words } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { hosts, vms } from '../state/cluster';
import { readLabels } from './labels';

type Kind = CreateRule['kind'];
type Strength = NonNullable<CreateRule['strength']>;

const KINDS = [
  ['together', 'run on one host'],
  ['apart', 'run on different hosts'],
  ['on', 'run only on these hosts'],
  ['not-on', 'run on none of these hosts'],
] as const;
const STRENGTHS = [
  ['must', 'must be kept'],
  ['should', 'should be kept'],
] as const;

export const openCreateRule = () => open((close) => <RuleDialog rule={null} close={close} />);
export const openEditRule = (rule: RuleInfo) =>
  open((close) => <RuleDialog rule={rule} close={close} />);

export interface RuleDraft {
  name: string;
  kind: Kind;
  strength: Strength;
  vms: string;
  hosts: string;
  labels: string;
}

export function ruleDraft(rule: RuleInfo | null): RuleDraft {
  return {
    name: rule?.name ?? '',
    kind: rule?.kind ?? 'apart',
    strength: rule?.strength ?? 'must',
    vms: rule?.vms.join(' ') ?? '',
    hosts: rule?.hosts?.names?.join(' ') ?? '',
    labels: Object.entries(rule?.hosts?.labels ?? {})
      .map(([key, value]) => `${key}=${value}`)
      .join(' '),
  };
}

const namesHosts = (kind: Kind) => kind === 'on' || kind === 'not-on';

export function ruleRequest(draft: RuleDraft): CreateRule {
  const { name, kind, strength } = draft;
  const request: CreateRule = { name, kind, strength, vms: words(draft.vms) };
  if (namesHosts(kind))
    request.hosts = { names: words(draft.hosts), labels: readLabels(draft.labels) };
  return request;
}

function RuleDialog({ rule, close }: { rule: RuleInfo | null; close: () => void }) {
  const [draft, setDraft] = useState(() => ruleDraft(rule));
  const task = useTask();
  const change = (changed: Partial<RuleDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const save = () => {
    void task.run(async () => {
      if (rule) await replaceRule(rule, ruleRequest(draft));
      else await post('/rules', ruleRequest(draft));
      close();
    });
  };
  const unknownVms = words(draft.vms).filter((name) => !vms.peek(name));
  const unknownHosts = words(draft.hosts).filter((name) => !hosts.peek(name));
  return (
    <FormDialog
      title={rule ? `Edit rule ${rule.name}` : 'Create rule'}
      verb={rule ? 'Save' : 'Create rule'}
      needs="admin"
      task={task}
      send={save}
      close={close}
    >
      {!rule && <Field label="Name" value={draft.name} onInput={(name) => change({ name })} />}
      <div class="form-row">
        <Select
          label="Constraint"
          value={draft.kind}
          values={KINDS}
          onChange={(kind) => change({ kind })}
        />
        <Select
          label="Strength"
          value={draft.strength}
          values={STRENGTHS}
          onChange={(strength) => change({ strength })}
        />
      </div>
      <TextArea
        label="VMs"
        value={draft.vms}
        onInput={(names) => change({ vms: names })}
        hint={unknownText('VM', unknownVms) ?? 'Names, separated by spaces or lines'}
      />
      {namesHosts(draft.kind) && (
        <div class="form-row">
          <Field
            label="Hosts"
            value={draft.hosts}
            onInput={(names) => change({ hosts: names })}
            hint={unknownText('host', unknownHosts) ?? 'Names, separated by spaces'}
          />
          <Field
            label="and hosts with all of these labels"
            value={draft.labels}
            onInput={(labels) => change({ labels })}
            hint="For example rack=1"
          />
        </div>
      )}
      <p class="muted">
        The rule applies from the next placement on. It moves no VM by itself.
        {rule && ' While it is replaced, it does not apply for a moment.'}
      </p>
    </FormDialog>
  );
}

/** A name that does not exist is possible, but may be a mistake. */
const unknownText = (what: string, names: string[]) =>
  names.length > 0 ? `No ${what} has this name yet: ${names.slice(0, 5).join(', ')}` : null;

/** The manager changes no rule: the old one is deleted, and created again if the new is refused. */
async function replaceRule(old: RuleInfo, request: CreateRule): Promise<void> {
  const { name, kind, strength, vms: named, hosts: where } = old;
  await remove(`/rules/${part(name)}`);
  try {
    await post('/rules', request);
  } catch (error) {
    await post('/rules', { name, kind, strength, vms: named, hosts: where ?? null }).catch(() => {
      const problem = problemOf(error);
      const detail = `${problem.detail}. Rule ${name} is deleted and could not be created again.`;
      throw new Refusal({ ...problem, detail });
    });
    throw error;
  }
}
