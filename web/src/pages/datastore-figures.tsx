/** Figures of a datastore: space, provisioning and latency. */
import type { ManagedDatastore } from '../api/types';
import { Meter } from '../parts/basics';
import { bytes, duration, percent } from '../text/units';

/** Share of a datastore's space that is used, as a bar. */
export function UsedSpace({ store }: { store: ManagedDatastore }) {
  const { total_bytes: total, free_bytes: free } = store;
  if (total == null || free == null || total === 0) return <>not reported</>;
  return (
    <Meter
      label="Used"
      share={(total - free) / total}
      text={`${bytes(free)} free of ${bytes(total)}`}
    />
  );
}

/** What the images promise to guests, and its share of the capacity. */
export function provisioned(store: ManagedDatastore): string {
  const { total_bytes: total, promised_bytes: promised } = store;
  if (promised == null || total == null || total === 0) return '–';
  return `${bytes(promised)} (${percent(promised / total)})`;
}

/** The write latency at the host that sees the slowest writes. */
export function writeLatency(store: ManagedDatastore): string {
  const times = store.hosts.map((at) => at.speed?.write_us ?? 0);
  const slowest = Math.max(0, ...times);
  return slowest > 0 ? duration(slowest / 1000) : '–';
}
