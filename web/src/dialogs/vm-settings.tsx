/** What the guest does not see, in forms: description, tags, and the start with the host. */
import type { VmSpec } from '../api/types';
import { Field, optional, TextArea, Tick, words } from '../parts/fields';

export interface SettingsDraft {
  description: string;
  /** Separated by spaces. */
  tags: string;
  autostart: boolean;
  order: string;
  /** In seconds. */
  delay: string;
}

export const NO_SETTINGS: SettingsDraft = {
  description: '',
  tags: '',
  autostart: false,
  order: '',
  delay: '',
};

export function settingsOf(spec: VmSpec): SettingsDraft {
  const { description, tags, autostart } = spec;
  return {
    description: description ?? '',
    tags: (tags ?? []).join(' '),
    autostart: autostart != null,
    order: autostart?.order == null ? '' : String(autostart.order),
    delay: autostart?.delay_ms ? String(autostart.delay_ms / 1000) : '',
  };
}

const isNumber = (text: string) => /^[0-9]+(\.[0-9]+)?$/.test(text);
const wrongOrder = (text: string) => (/^[0-9]+$/.test(text) ? null : 'A whole number');
const wrongDelay = (text: string) =>
  isNumber(text) && Number(text) <= 3600 ? null : 'Seconds, at most 3600';

/** The first error; null where there is none. */
export function wrongSettings(draft: SettingsDraft): string | null {
  const isTag = (tag: string) => /^[A-Za-z0-9][A-Za-z0-9._:-]{0,62}$/.test(tag);
  const wrongTag = words(draft.tags).find((tag) => !isTag(tag));
  if (wrongTag) return `“${wrongTag}” is no tag: letters, digits, “-”, “_”, “.” and “:”.`;
  if (!draft.autostart) return null;
  return optional(draft.order, wrongOrder) ?? optional(draft.delay, wrongDelay);
}

/** The keys of a specification that differ, as a merge patch. */
export function settingsChange(before: SettingsDraft, now: SettingsDraft): Record<string, unknown> {
  const spec: Record<string, unknown> = {};
  if (now.description !== before.description) spec.description = now.description || null;
  if (now.tags !== before.tags) spec.tags = words(now.tags);
  const { autostart, order, delay } = now;
  if (autostart !== before.autostart || order !== before.order || delay !== before.delay)
    spec.autostart = autostart
      ? { order: order === '' ? null : Number(order), delay_ms: Math.round(Number(delay) * 1000) }
      : null;
  return spec;
}

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
        </div>
      )}
    </>
  );
}
