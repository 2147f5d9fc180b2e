/**
 * Chains of disk images: an image, its backing file, and so on. A host describes one image in each
 * answer, and its header names the backing file.
 */
import { get, part, problemOf } from '../api/http';
import type { DiskInfo } from '../api/types';

/** A link of a chain. */
export interface ChainLink {
  path: string;
  /** Absent if the host could not describe the image. */
  info?: DiskInfo;
  /** Why the host could not describe it, or why the chain ends here. */
  problem?: string;
}

/** Most images of a chain that are looked up. */
const MOST_LINKS = 32;

/** Looks up a disk's chain at its host, the image that the guest writes first. */
export async function chainOf(
  host: string,
  image: string,
  signal: AbortSignal,
): Promise<ChainLink[]> {
  return chain(image, (path) =>
    get<DiskInfo>(`/hosts/${part(host)}/disks/info?path=${part(path)}`, signal),
  );
}

/** Follows the backing files. The first image that cannot be described ends the chain. */
export async function chain(
  image: string,
  describe: (path: string) => Promise<DiskInfo>,
): Promise<ChainLink[]> {
  const links: ChainLink[] = [];
  for (let path = image; ; ) {
    if (links.some((link) => link.path === path))
      return [...links, { path, problem: 'The chain returns to this image.' }];
    if (links.length === MOST_LINKS)
      return [...links, { path, problem: `The chain has more than ${MOST_LINKS} images.` }];
    const info = await describe(path).catch((error) => problemOf(error).detail);
    if (typeof info === 'string') return [...links, { path, problem: info }];
    links.push({ path, info });
    if (!info.backing) return links;
    path = backingPath(path, info.backing);
  }
}

/** The path of a backing file, which an image's header may name from the image's directory. */
export function backingPath(image: string, backing: string): string {
  if (backing.startsWith('/') || backing.startsWith('rbd:') || !image.startsWith('/'))
    return backing;
  const parts = image.split('/').slice(0, -1);
  for (const one of backing.split('/')) {
    if (one === '..') parts.pop();
    else if (one !== '.' && one !== '') parts.push(one);
  }
  return parts[0] === '' ? parts.join('/') : `/${parts.join('/')}`;
}
