/**
 * Lists that only the hosts have, such as adoptions. The manager keeps none and reports no changes
 * of them, so the hosts are asked while a page shows the list.
 */
import { get, part } from '../api/http';

/** Interval of questions to hosts with work that runs. */
const POLL_MS = 500;
/** Interval of questions to the others. */
const ALL_MS = 15_000;
const AT_ONCE = 4;

export interface HostList<T> {
  /** Last part of its path. */
  name: string;
  /** Whether a host has work that runs. */
  isBusy: (host: string) => boolean;
  take: (host: string, list: T[]) => void;
}

/** Takes the list of a host. One that does not answer keeps the last one. */
export async function askHost<T>(list: HostList<T>, host: string, signal?: AbortSignal) {
  const found = await get<T[]>(`/hosts/${part(host)}/${list.name}`, signal).catch(() => null);
  if (found && !signal?.aborted) list.take(host, found);
}

/** Follows a list at hosts until the signal. */
export async function followList<T>(list: HostList<T>, hosts: string[], signal: AbortSignal) {
  let askedMs = Number.NEGATIVE_INFINITY;
  while (!signal.aborted) {
    const isDue = performance.now() - askedMs >= ALL_MS;
    if (isDue) askedMs = performance.now();
    await ofHosts(isDue ? hosts : hosts.filter(list.isBusy), (host) => askHost(list, host, signal));
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
