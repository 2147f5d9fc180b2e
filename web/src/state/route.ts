/** The current page: the part of the address after `#`, so that the manager serves one file. */
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
/** The page, without the query: filters and tabs do not change the page. */
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

/** Sets a value of the query without a new entry in the browser's history. */
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
