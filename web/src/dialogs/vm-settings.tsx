/**
 * What the guest does not see, in forms: description, tags, the start with the host, and restarts
 * after crashes and after the failure of the host.
 */
import type { VmSpec } from '../api/types';
import { Field, optional, Select, TextArea, Tick, words } from '../parts/fields';

export interface SettingsDraft {
  description: string;
  /** Separated by spaces. */
  tags: string;
  autostart: boolean;
  order: string;
  /** In seconds. */
  delay: string;
  /** VMs that start before it, separated by spaces. */
  after: string;
  onCrash: 'never' | 'times' | 'always';
  /** Most restarts within an hour. */
  restarts: string;
  /** Priority of the restart elsewhere, or that agents alone restart it. */
  protect: 'none' | 'agents' | NonNullable<VmSpec['protect']>;
}

export const NO_SETTINGS: SettingsDraft = {
  description: '',
  tags: '',
  autostart: false,
  order: '',
  delay: '',
  after: '',
  onCrash: 'never',
  restarts: '3',
  protect: 'none',
};

export function settingsOf(spec: VmSpec): SettingsDraft {
  const { description, tags, autostart } = spec;
  const onCrash = spec.on_crash ?? 'never';
  return {
    description: description ?? '',
    tags: (tags ?? []).join(' '),
    autostart: autostart != null,
    order: autostart?.order == null ? '' : String(autostart.order),
    delay: autostart?.delay_ms ? String(autostart.delay_ms / 1000) : '',
    after: (autostart?.after ?? []).join(' '),
    onCrash: typeof onCrash === 'string' ? onCrash : 'times',
    restarts: typeof onCrash === 'string' ? NO_SETTINGS.restarts : String(onCrash.times),
    protect: spec.protect_by_agents ? 'agents' : (spec.protect ?? 'none'),
  };
}

/** Most VMs that a VM starts after. */
const MOST_AFTER = 32;

const isNumber = (text: string) => /^[0-9]+(\.[0-9]+)?$/.test(text);
const wrongOrder = (text: string) => (/^[0-9]+$/.test(text) ? null : 'A whole number');
const wrongDelay = (text: string) =>
  isNumber(text) && Number(text) <= 3600 ? null : 'Seconds, at most 3600';

const wrongAfter = (text: string) =>
  words(text).length > MOST_AFTER ? `At most ${MOST_AFTER} VMs` : null;
const wrongRestarts = (text: string) =>
  /^[0-9]+$/.test(text) && Number(text) >= 1 && Number(text) <= 100
    ? null
    : 'A whole number from 1 to 100';

/** The first error; null where there is none. */
export function wrongSettings(draft: SettingsDraft): string | null {
  const isTag = (tag: string) => /^[A-Za-z0-9][A-Za-z0-9._:-]{0,62}$/.test(tag);
  const wrongTag = words(draft.tags).find((tag) => !isTag(tag));
  if (wrongTag) return `“${wrongTag}” is no tag: letters, digits, “-”, “_”, “.” and “:”.`;
  const wrongCrash = draft.onCrash === 'times' ? wrongRestarts(draft.restarts) : null;
  if (wrongCrash || !draft.autostart) return wrongCrash;
  return (
    optional(draft.order, wrongOrder) ??
    optional(draft.delay, wrongDelay) ??
    wrongAfter(draft.after)
  );
}

/** The keys of a specification that differ, as a merge patch. */
export function settingsChange(before: SettingsDraft, now: SettingsDraft): Record<string, unknown> {
  const spec: Record<string, unknown> = {};
  if (now.description !== before.description) spec.description = now.description || null;
  if (now.tags !== before.tags) spec.tags = words(now.tags);
  if (START_FIELDS.some((field) => now[field] !== before[field]))
    spec.autostart = startOf(before, now);
  const policy = policyOf(now);
  if (JSON.stringify(policy) !== JSON.stringify(policyOf(before))) spec.on_crash = policy;
  return { ...spec, ...protectionChange(before.protect, now.protect) };
}

type Protection = SettingsDraft['protect'];

function protectionChange(before: Protection, now: Protection): Record<string, unknown> {
  const priority = (of: Protection) => (of === 'none' || of === 'agents' ? null : of);
  const byAgents = (of: Protection) => (of === 'agents' ? true : null);
  return {
    ...(priority(now) === priority(before) ? {} : { protect: priority(now) }),
    ...(byAgents(now) === byAgents(before) ? {} : { protect_by_agents: byAgents(now) }),
  };
}

const START_FIELDS = ['autostart', 'order', 'delay', 'after'] as const;

/** Without the VMs before it if they stay the same: agents of earlier releases know no such key. */
function startOf(before: SettingsDraft, now: SettingsDraft) {
  if (!now.autostart) return null;
  const { order, delay, after } = now;
  return {
    order: order === '' ? null : Number(order),
    delay_ms: Math.round(Number(delay) * 1000),
    ...(after === before.after ? {} : { after: words(after) }),
  };
}

const policyOf = ({ onCrash, restarts }: SettingsDraft): VmSpec['on_crash'] =>
  onCrash === 'times' ? { times: Number(restarts) } : onCrash;

const POLICIES = [
  ['never', 'Stay down'],
  ['times', 'Restart some times within an hour'],
  ['always', 'Restart every time'],
] as const;

const PROTECTIONS = [
  ['none', 'Stay down'],
  ['high', 'Start elsewhere before others'],
  ['normal', 'Start elsewhere'],
  ['low', 'Start elsewhere after others'],
  ['agents', 'Start elsewhere without a manager'],
] as const;

const PROTECTION_HINTS = {
  manager: 'Start elsewhere needs high availability, and disks that other hosts have',
  agents: 'For the VM of a single manager: all its files on one shared datastore',
};

export function Settings(props: {
  draft: SettingsDraft;
  change: (changed: Partial<SettingsDraft>) => void;
}) {
  const { draft, change } = props;
  return (
    <>
      <TextArea
        label="Description"
        rows={2}
        value={draft.description}
        onInput={(description) => change({ description })}
      />
      <Field
        label="Tags"
        value={draft.tags}
        onInput={(tags) => change({ tags })}
        hint="Words to filter by, for example prod shop"
      />
      <Tick
        text="Start with its host"
        checked={draft.autostart}
        onChange={(autostart) => change({ autostart })}
      />
      {draft.autostart && (
        <div class="form-row">
          <Field
            label="Place in the order"
            value={draft.order}
            wrong={optional(draft.order, wrongOrder)}
            onInput={(order) => change({ order })}
            inputMode="numeric"
            hint="Lowest first; empty: after those with a place"
          />
          <Field
            label="Seconds until the next VM"
            value={draft.delay}
            wrong={optional(draft.delay, wrongDelay)}
            onInput={(delay) => change({ delay })}
            inputMode="numeric"
            hint="Empty: none"
          />
          <Field
            label="After the VMs"
            value={draft.after}
            wrong={wrongAfter(draft.after)}
            onInput={(after) => change({ after })}
            hint="VMs of its host that start before it, whatever the order, for example db"
          />
        </div>
      )}
      <div class="form-row">
        <Select
          label="After a crash"
          value={draft.onCrash}
          values={POLICIES}
          onChange={(onCrash) => change({ onCrash })}
          hint="Its QEMU ended by itself, or its guest panicked"
        />
        {draft.onCrash === 'times' && (
          <Field
            label="Restarts within an hour"
            value={draft.restarts}
            wrong={wrongRestarts(draft.restarts)}
            onInput={(restarts) => change({ restarts })}
            inputMode="numeric"
          />
        )}
        <Select
          label="When its host fails"
          value={draft.protect}
          values={PROTECTIONS}
          onChange={(protect) => change({ protect })}
          hint={PROTECTION_HINTS[draft.protect === 'agents' ? 'agents' : 'manager']}
        />
      </div>
    </>
  );
}
