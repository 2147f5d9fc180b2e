/**
 * Adoptions of guests that other programs run. The manager keeps none and reports no changes of
 * them, so the hosts are asked while a page shows their adoptions.
 */
import { get, part } from '../api/http';
import type { Adoption } from '../api/types';
import { Table } from './table';

/** An adoption with its host. IDs are of one host. */
export interface HostAdoption {
  host: string;
  adoption: Adoption;
}

export const adoptions = new Table<HostAdoption>();

const keyOf = (host: string, id: string) => `${host} ${id}`;

export const isRunning = ({ adoption }: HostAdoption) => adoption.state === 'running';
export const adoptionPath = (host: string, id: string) => `/adoptions/${part(host)}/${part(id)}`;
export const adoptionOf = (host: string, id: string) => adoptions.get(keyOf(host, id))?.adoption;

export function takeAdoption(host: string, adoption: Adoption): void {
  adoptions.put(keyOf(host, adoption.id), { host, adoption });
}

/** Takes the list of a host; a restarted agent has none from before. */
export function takeAdoptions(host: string, list: Adoption[]): void {
  const ids = new Set(list.map((adoption) => adoption.id));
  for (const { host: of, adoption } of [...adoptions.values()])
    if (of === host && !ids.has(adoption.id)) adoptions.drop(keyOf(host, adoption.id));
  for (const adoption of list) takeAdoption(host, adoption);
}

/** Interval of questions to hosts with a running adoption. */
const POLL_MS = 500;
/** Interval of questions to the others. */
const ALL_MS = 15_000;
const AT_ONCE = 4;

/** Follows the adoptions of hosts until the signal. A host without an answer is asked again. */
export async function followAdoptions(hosts: string[], signal: AbortSignal): Promise<void> {
  let askedMs = Number.NEGATIVE_INFINITY;
  while (!signal.aborted) {
    const isDue = performance.now() - askedMs >= ALL_MS;
    if (isDue) askedMs = performance.now();
    const busy = new Set([...adoptions.values()].filter(isRunning).map(({ host }) => host));
    const asked = isDue ? hosts : hosts.filter((host) => busy.has(host));
    await ofHosts(asked, async (host) => {
      const list = await get<Adoption[]>(`/hosts/${part(host)}/adoptions`, signal).catch(
        () => null,
      );
      if (list && !signal.aborted) takeAdoptions(host, list);
    });
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** Runs a request for each host, a few at once, so that a large cluster meets no rate limit. */
export async function ofHosts(hosts: string[], ask: (host: string) => Promise<void>) {
  const left = [...hosts];
  const worker = async () => {
    for (let host = left.shift(); host !== undefined; host = left.shift()) await ask(host);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}
