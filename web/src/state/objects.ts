/** Objects of the cluster as the manager names them in alarms and in the journal: `vm:web`. */

export interface ClusterObject {
  kind: string;
  name: string;
  /** The page that shows it; null if there is none. */
  path: string | null;
}

/** The page of an object of a kind. */
const PAGES: Record<string, (name: string) => string> = {
  host: (name) => `/hosts/${encodeURIComponent(name)}`,
  vm: (name) => `/vms/${encodeURIComponent(name)}`,
  move: (id) => `/moves/${encodeURIComponent(id)}`,
  drain: (id) => `/drains/${encodeURIComponent(id)}`,
  datastore: (name) => `/storage/${encodeURIComponent(name)}`,
  rule: () => '/rules',
  // The admission control: `cluster:ha`.
  cluster: () => '/ha',
};

/** Splits `vm:web`. A text without a colon names the cluster or something in it. */
export function objectOf(text: string): ClusterObject {
  const colon = text.indexOf(':');
  if (colon <= 0) return { kind: '', name: text, path: null };
  const [kind, name] = [text.slice(0, colon), text.slice(colon + 1)];
  const path = Object.hasOwn(PAGES, kind) ? (PAGES[kind]?.(name) ?? null) : null;
  return { kind, name, path };
}
