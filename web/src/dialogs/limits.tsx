/** Changes limits of concurrent moves: of the cluster, of datastores, of one host. */
import { useState } from 'preact/hooks';
import { all, get, part, patch } from '../api/http';
import type { ManagedDatastore, MoveLimits, UpdateLimits } from '../api/types';
import { Act, useTask } from '../parts/basics';
import { open } from '../parts/dialog';
import { changed, Field, Many, optional, Select, without } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { hosts, limits } from '../state/cluster';

const wrongLimit = (text: string) =>
  /^[0-9]{1,6}$/.test(text) ? null : 'A whole number; 0 prevents new moves';

const textOf = (value: number | null | undefined) => (value == null ? '' : String(value));
const numberOf = (text: string) => (text === '' ? null : Number(text));

export interface LimitsDraft {
  inAll: string;
  outOfHost: string;
  intoHost: string;
  perDatastore: string;
  datastores: { path: string; moves: string }[];
}

export const limitsDraft = (now: MoveLimits): LimitsDraft => ({
  inAll: textOf(now.in_all),
  outOfHost: textOf(now.out_of_host),
  intoHost: textOf(now.into_host),
  perDatastore: textOf(now.per_datastore),
  datastores: Object.entries(now.datastores ?? {}).map(([path, moves]) => ({
    path,
    moves: String(moves),
  })),
});

/** The limits that differ; null restores the value of the manager's configuration. */
export function limitsChange(before: LimitsDraft, now: LimitsDraft): UpdateLimits {
  const change: UpdateLimits = {};
  if (now.inAll !== before.inAll) change.in_all = numberOf(now.inAll);
  if (now.outOfHost !== before.outOfHost) change.out_of_host = numberOf(now.outOfHost);
  if (now.intoHost !== before.intoHost) change.into_host = numberOf(now.intoHost);
  if (now.perDatastore !== before.perDatastore) change.per_datastore = numberOf(now.perDatastore);
  const datastores: Record<string, number | null> = {};
  for (const { path } of before.datastores)
    if (!now.datastores.some((one) => one.path === path)) datastores[path] = null;
  for (const { path, moves } of now.datastores)
    if (path !== '' && before.datastores.find((one) => one.path === path)?.moves !== moves)
      datastores[path] = numberOf(moves);
  if (Object.keys(datastores).length > 0) change.datastores = datastores;
  return change;
}

export const openEditLimits = (now: MoveLimits) =>
  open((close) => <EditLimits now={now} close={close} />);

function EditLimits({ now, close }: { now: MoveLimits; close: () => void }) {
  const [before] = useState(() => limitsDraft(now));
  const [draft, setDraft] = useState(before);
  const task = useTask();
  const change = (changed: Partial<LimitsDraft>) => setDraft((last) => ({ ...last, ...changed }));
  const wrong = {
    inAll: optional(draft.inAll, wrongLimit),
    outOfHost: optional(draft.outOfHost, wrongLimit),
    intoHost: optional(draft.intoHost, wrongLimit),
    perDatastore: optional(draft.perDatastore, wrongLimit),
    datastores: draft.datastores.some((one) => one.path !== '' && wrongLimit(one.moves))
      ? 'Each datastore needs a whole number of moves.'
      : null,
  };
  const save = () => {
    if (Object.values(wrong).some((why) => why !== null)) return;
    void task.run(async () => {
      limits.value = await patch<MoveLimits>('/limits', limitsChange(before, draft));
      close();
    });
  };
  return (
    <FormDialog title="Edit limits" verb="Save" needs="admin" task={task} send={save} close={close}>
      <p class="muted">
        An empty field restores the value of the manager's configuration. The limits apply at once,
        also to waiting moves; running moves continue.
      </p>
      <div class="form-row">
        <Field
          label="In the cluster"
          value={draft.inAll}
          wrong={wrong.inAll}
          onInput={(inAll) => change({ inAll })}
          inputMode="numeric"
        />
        <Field
          label="Per datastore"
          value={draft.perDatastore}
          wrong={wrong.perDatastore}
          onInput={(perDatastore) => change({ perDatastore })}
          inputMode="numeric"
        />
      </div>
      <div class="form-row">
        <Field
          label="From each host"
          value={draft.outOfHost}
          wrong={wrong.outOfHost}
          onInput={(outOfHost) => change({ outOfHost })}
          inputMode="numeric"
          hint="Empty: by link speed, unless configured"
        />
        <Field
          label="To each host"
          value={draft.intoHost}
          wrong={wrong.intoHost}
          onInput={(intoHost) => change({ intoHost })}
          inputMode="numeric"
          hint="Empty: by link speed, unless configured"
        />
      </div>
      <Datastores
        datastores={draft.datastores}
        change={(datastores) => change({ datastores })}
        wrong={wrong.datastores}
      />
    </FormDialog>
  );
}

function Datastores(props: {
  datastores: LimitsDraft['datastores'];
  change: (datastores: LimitsDraft['datastores']) => void;
  wrong: string | null;
}) {
  const { datastores, change, wrong } = props;
  const loaded = useLoaded('datastores', (signal) => all<ManagedDatastore>('/datastores', signal));
  return (
    <Many
      label="Limits of single datastores"
      add="Add datastore"
      onAdd={() => change([...datastores, { path: '', moves: '2' }])}
    >
      {datastores.map((one, at) => (
        <div class="many-row" key={at}>
          <input
            type="text"
            class="grow"
            list="datastore-paths"
            aria-label={`Path of datastore ${at + 1}`}
            placeholder="/srv/vms"
            spellcheck={false}
            value={one.path}
            onInput={(event) =>
              change(changed(datastores, at, { ...one, path: event.currentTarget.value }))
            }
          />
          <input
            type="text"
            class="short"
            inputMode="numeric"
            aria-label={`Moves of datastore ${at + 1}`}
            value={one.moves}
            onInput={(event) =>
              change(changed(datastores, at, { ...one, moves: event.currentTarget.value }))
            }
          />
          <Act
            kind="quiet"
            name={`Remove datastore ${at + 1}`}
            onClick={() => change(without(datastores, at))}
          >
            Remove
          </Act>
        </div>
      ))}
      <datalist id="datastore-paths">
        {loaded.value?.map((store) => (
          <option key={store.name} value={store.name} />
        ))}
      </datalist>
      {wrong && (
        <small class="tone-bad" role="alert">
          {wrong}
        </small>
      )}
    </Many>
  );
}

/** `host`: the host to change; null: it is chosen in the form. */
export const openHostLimit = (host: string | null) =>
  open((close) => <HostLimit host={host} close={close} />);

const wrongHostLimit = (text: string) =>
  /^[1-9][0-9]{0,2}$|^1000$/.test(text) ? null : 'A whole number, 1 to 1000';

function HostLimit(props: { host: string | null; close: () => void }) {
  const { close } = props;
  const names = hosts.sorted().map((host) => host.name);
  const [host, setHost] = useState(props.host ?? names[0] ?? '');
  const now = limits.peek()?.hosts?.[host];
  const [moves, setMoves] = useState(() => textOf(now?.out ?? now?.into));
  const task = useTask();
  const wrong = optional(moves, wrongHostLimit);
  const save = () => {
    if (wrong !== null || host === '') return;
    void task.run(async () => {
      await patch(`/hosts/${part(host)}`, { most_moves: numberOf(moves) });
      limits.value = await get<MoveLimits>('/limits');
      close();
    });
  };
  return (
    <FormDialog
      title={props.host ? `Limit of ${props.host}` : 'Limit of a host'}
      verb="Save"
      needs="admin"
      task={task}
      send={save}
      close={close}
    >
      {!props.host && (
        <Select
          label="Host"
          value={host}
          values={names.map((name) => [name, name] as const)}
          onChange={setHost}
        />
      )}
      <Field
        label="Moves in each direction"
        value={moves}
        wrong={wrong}
        onInput={setMoves}
        inputMode="numeric"
        hint="Empty: the limit of each host, or of the manager's configuration"
      />
    </FormDialog>
  );
}
