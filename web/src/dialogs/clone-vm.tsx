/** Clones a template or a stopped VM, once or several times. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { CloneManagedVm, HostedVm, ManagedVm } from '../api/types';
import { useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Select, Tick, words, wrongCount } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { go } from '../state/route';
import { warnOf } from '../state/warnings';
import { counted } from '../text/units';
import { readLabels } from './labels';

export const openCloneVm = (vm: ManagedVm) =>
  open((close) => <CloneVm source={vm} close={close} />);

type Mode = 'linked' | 'full';

export interface CloneDraft {
  name: string;
  count: string;
  mode: Mode;
  /** Addresses of the interfaces, separated by spaces. */
  addresses: string;
  labels: string;
  starts: boolean;
}

/** As many clones as one command makes. */
const MOST_CLONES = 1000;

const MODES = [
  ['linked', 'linked to the template'],
  ['full', 'full copy'],
] as const;

const MODE_HINTS: Record<Mode, string> = {
  linked: 'Layers on the images of the template, made at once',
  full: 'Takes as long as its disks; only a template has linked clones',
};

function wrongIn({ name, count }: CloneDraft) {
  return {
    name: /^[A-Za-z0-9][A-Za-z0-9._-]*$/.test(name) ? null : 'Letters, digits, “-”, “_” and “.”',
    count: wrongCount(count) ?? (Number(count) > MOST_CLONES ? `At most ${MOST_CLONES}` : null),
  };
}

/** One request for each clone. The names of several are numbered, as by the command line. */
export function cloneRequests(draft: CloneDraft): CloneManagedVm[] {
  const { name, mode, starts, labels } = draft;
  const count = Number(draft.count);
  return Array.from({ length: count }, (_, at) => ({
    name: count === 1 ? name : `${name}-${at + 1}`,
    mode,
    addresses: count === 1 ? words(draft.addresses) : [],
    labels: readLabels(labels),
    start: starts,
  }));
}

function CloneVm({ source, close }: { source: ManagedVm; close: () => void }) {
  const isTemplate = source.state === 'template';
  const [draft, setDraft] = useState<CloneDraft>({
    name: '',
    count: '1',
    mode: isTemplate ? 'linked' : 'full',
    addresses: '',
    labels: '',
    starts: false,
  });
  const [isTried, setTried] = useState(false);
  // Clones of an attempt that failed later are not made again.
  const [made, setMade] = useState<string[]>([]);
  const task = useTask();
  const change = (changed: Partial<CloneDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const wrong = wrongIn(draft);
  const isOne = draft.count === '1';
  const nics = source.info.spec.nics ?? [];
  const send = () => {
    setTried(true);
    if (wrong.name || wrong.count) return;
    void task.run(async () => {
      const names = new Set(made);
      for (const request of cloneRequests(draft)) {
        if (names.has(request.name)) continue;
        warnOf(await post<HostedVm>(`/vms/${part(source.name)}/clone`, request));
        names.add(request.name);
        setMade([...names]);
      }
      close();
      go(isOne ? `/vms/${part(draft.name)}` : `/vms?filter=name:${part(draft.name.toLowerCase())}`);
    });
  };
  return (
    <FormDialog title={`Clone ${source.name}`} verb="Clone" task={task} send={send} close={close}>
      {made.length > 0 && <p role="status">{counted(made.length, 'clone')} created.</p>}
      <div class="form-row">
        <Field
          label="Name"
          wrong={isTried ? wrong.name : null}
          value={draft.name}
          onInput={(name) => change({ name })}
        />
        <Field
          label="Number of clones"
          wrong={wrong.count}
          value={draft.count}
          onInput={(count) => change({ count })}
          inputMode="numeric"
          hint="Of several, the names end with -1, -2 and so on"
        />
      </div>
      <Select<Mode>
        label="Disks"
        value={draft.mode}
        values={isTemplate ? MODES : MODES.filter(([mode]) => mode === 'full')}
        onChange={(mode) => change({ mode })}
        hint={MODE_HINTS[draft.mode]}
      />
      {nics.length > 0 && (
        <Field
          label="IP addresses"
          value={isOne ? draft.addresses : ''}
          onInput={(addresses) => change({ addresses })}
          isOff={!isOne}
          hint={
            isOne
              ? 'One for each interface, in their order; needed in place of a static one'
              : 'Of one clone only'
          }
        />
      )}
      <Field
        label="Labels"
        value={draft.labels}
        onInput={(labels) => change({ labels })}
        hint="Those of the source are not copied"
      />
      <Tick
        text="Start after creation"
        checked={draft.starts}
        onChange={(starts) => change({ starts })}
      />
    </FormDialog>
  );
}
