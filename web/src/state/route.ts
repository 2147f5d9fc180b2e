/** Where the console is: the part of the address behind `#`, so that the manager serves one page. */
import { computed, signal } from '@preact/signals';

export interface Route {
  /** `['vms', 'web']`. */
  parts: string[];
  query: URLSearchParams;
}

export function parseRoute(hash: string): Route {
  const [path = '', query = ''] = hash.replace(/^#/, '').split('?', 2);
  const parts = path.split('/').filter((name) => name !== '');
  return { parts: parts.map(decoded), query: new URLSearchParams(query) };
}

function decoded(name: string): string {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

const hash = signal(typeof location === 'undefined' ? '' : location.hash);
export const route = computed(() => parseRoute(hash.value));
/** Which page is shown. Filters and tabs are in the query: with another one of them it is the same page. */
export const page = computed(() => route.value.parts.join('/'));

export function startRouting(): void {
  addEventListener('hashchange', () => {
    hash.value = location.hash;
  });
}

export const href = (path: string) => `#${path}`;

export function go(path: string): void {
  location.hash = path;
}

/** Sets a value of the query in place: a filter is no step back. */
export function setQuery(name: string, value: string): void {
  const { parts, query } = route.peek();
  const next = new URLSearchParams(query);
  if (value === '') next.delete(name);
  else next.set(name, value);
  const text = next.toString();
  const path = `#/${parts.map(encodeURIComponent).join('/')}${text ? `?${text}` : ''}`;
  history.replaceState(null, '', path);
  hash.value = path;
}
