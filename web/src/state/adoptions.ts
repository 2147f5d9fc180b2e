/** Adoptions of guests that other programs run. */
import { part } from '../api/http';
import type { Adoption } from '../api/types';
import { followList, type HostList } from './host-lists';
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

const LIST: HostList<Adoption> = {
  name: 'adoptions',
  isBusy: (host) => [...adoptions.values()].some((one) => one.host === host && isRunning(one)),
  take: takeAdoptions,
};

/** Follows the adoptions of hosts until the signal. */
export const followAdoptions = (hosts: string[], signal: AbortSignal) =>
  followList(LIST, hosts, signal);
