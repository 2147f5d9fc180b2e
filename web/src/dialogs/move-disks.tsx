/** Whether the disks move with their VM, where to, and what happens to the images at the source. */
import { get, part } from '../api/http';
import type { ManagedHost, TravellingDisks } from '../api/types';
import { Select, Tick } from '../parts/fields';
import { useLoaded } from '../parts/loaded';
import { bytes } from '../text/units';

export interface DisksDraft {
  areMoved: boolean;
  /** A directory of the destination; empty: that of each image. */
  to: string;
  deletesSource: boolean;
  flattens: boolean;
}

export const NO_DISKS: DisksDraft = {
  areMoved: false,
  to: '',
  deletesSource: false,
  flattens: false,
};

/** The part of the request; nothing where the disks stay. */
export function disksRequest(draft: DisksDraft): { disks?: TravellingDisks } {
  if (!draft.areMoved) return {};
  return {
    disks: {
      ...(draft.to ? { to: draft.to } : {}),
      delete_source: draft.deletesSource,
      flatten: draft.flattens,
    },
  };
}

/** The part of a preflight's query. */
export function disksQuery(draft: DisksDraft): string {
  if (!draft.areMoved) return '';
  const to = draft.to ? `&disks_to=${encodeURIComponent(draft.to)}` : '';
  return `&with_disks=true&flatten_disks=${draft.flattens}${to}`;
}

export function MoveDisks(props: {
  to: string | null;
  draft: DisksDraft;
  onChange: (draft: DisksDraft) => void;
}) {
  const { to, draft, onChange } = props;
  const change = (some: Partial<DisksDraft>) => onChange({ ...draft, ...some });
  return (
    <div class="form">
      <Tick
        text="Move its disks too"
        checked={draft.areMoved}
        onChange={(areMoved) => change({ areMoved, to: '' })}
      />
      {draft.areMoved && to && (
        <>
          <Directory host={to} value={draft.to} onChange={(dir) => change({ to: dir })} />
          <Tick
            text="Delete the images at the source afterwards"
            checked={draft.deletesSource}
            onChange={(deletesSource) => change({ deletesSource })}
          />
          <Tick
            text="Copy what the backing files have, too"
            checked={draft.flattens}
            onChange={(flattens) => change({ flattens })}
          />
        </>
      )}
    </div>
  );
}

function Directory(props: { host: string; value: string; onChange: (dir: string) => void }) {
  const { host, value, onChange } = props;
  const loaded = useLoaded(`directories of ${host}`, (signal) =>
    get<ManagedHost>(`/hosts/${part(host)}`, signal),
  );
  const info = loaded.value?.info;
  const room = (dir: string) => {
    const store = info?.datastores?.[dir];
    // 0: unknown.
    return store && store.total_bytes > 0 ? `${dir} (${bytes(store.free_bytes)} left)` : dir;
  };
  const dirs = (info?.vm_dirs ?? []).map((dir) => [dir, room(dir)] as const);
  return (
    <Select
      label="Directory"
      value={value}
      values={[['', 'as at the source'], ...dirs]}
      onChange={onChange}
      hint={
        value ? undefined : `If ${host} shares all of their directories, the disks stay in them.`
      }
    />
  );
}
