/** Placement rules, and whether they are kept. */
import { part, remove } from '../api/http';
import type { RuleInfo } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { openCreateRule, openEditRule } from '../dialogs/rule';
import { Act, Empty, PageHead, Panel, VmLink } from '../parts/basics';
import { Status } from '../parts/status';
import { rules } from '../state/cluster';
import { counted } from '../text/units';

const ASKS: Record<string, string> = {
  together: 'run on one host',
  apart: 'run on different hosts',
  on: 'run only on these hosts',
  'not-on': 'run on none of these hosts',
};

export function RulesPage() {
  const all = rules.sorted();
  return (
    <>
      <PageHead
        title="Rules"
        side={
          <Act kind="primary" needs="admin" onClick={openCreateRule}>
            Create rule
          </Act>
        }
      >
        <span class="muted">
          {counted(all.length, 'rule')}. A rule applies from the next placement on. It does not move
          VMs by itself.
        </span>
      </PageHead>
      {all.length === 0 && (
        <Panel title="No rules">
          <Empty>
            A rule keeps VMs together or apart, or on some hosts only. For example, two replicas of
            a database must run on different hosts.
          </Empty>
        </Panel>
      )}
      {all.map((rule) => (
        <Rule key={rule.name} rule={rule} />
      ))}
    </>
  );
}

function Rule({ rule }: { rule: RuleInfo }) {
  const isKept = rule.state === 'kept';
  const look = isKept
    ? ({ tone: 'ok', shape: 'check', text: 'kept' } as const)
    : ({
        tone: rule.strength === 'must' ? 'bad' : 'warn',
        shape: 'triangle',
        text: 'broken',
      } as const);
  const labels = Object.entries(rule.hosts?.labels ?? {}).map(
    ([name, value]) => `${name}=${value}`,
  );
  const where = [...(rule.hosts?.names ?? []), ...labels].join(', ');
  return (
    <Panel
      title={rule.name}
      side={
        <span class="panel-acts">
          <Act
            needs="admin"
            kind="quiet"
            name={`Edit rule ${rule.name}`}
            onClick={() => openEditRule(rule)}
          >
            Edit
          </Act>
          <Act
            needs="admin"
            kind="quiet"
            name={`Delete rule ${rule.name}`}
            onClick={() => askDelete(rule.name)}
          >
            Delete
          </Act>
        </span>
      }
    >
      <p class="rule-line">
        <Status look={look} /> <strong>{rule.strength}</strong> {ASKS[rule.kind] ?? rule.kind}
        {where && `: ${where}`}
      </p>
      <p class="rule-vms">
        {rule.vms.map((vm) => (
          <VmLink key={vm} name={vm} />
        ))}
      </p>
      {(rule.broken_by ?? []).map((breaker) => (
        <p key={breaker.vm} class="muted">
          <VmLink name={breaker.vm} /> on {breaker.host}: {breaker.why}
        </p>
      ))}
      {(rule.absent?.length ?? 0) > 0 && (
        <p class="muted">VMs that do not exist: {rule.absent?.join(', ')}</p>
      )}
    </Panel>
  );
}

function askDelete(name: string): void {
  confirm({
    title: `Delete rule ${name}`,
    text: 'The rule no longer applies from the next placement on. No VM is moved.',
    verb: 'Delete',
    run: () => remove(`/rules/${part(name)}`),
  });
}
