/** The images that a disk consists of, with the space that each takes. */

import { VmLink } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { Status } from '../parts/status';
import { type ChainLink, chainOf } from '../state/chain';
import { bytes } from '../text/units';

/** `version` changes with the disk: the chain is then looked up again. */
export function Chain(props: { host: string; image: string; vm: string; version: string }) {
  const { host, image, vm, version } = props;
  const { value: links } = useLoaded(`chain ${host} ${image} ${version}`, (signal) =>
    chainOf(host, image, signal),
  );
  if (!links) return <p class="muted chain-size">Looking up the image …</p>;
  const [top, ...bases] = links;
  return (
    <>
      {top && <p class="muted chain-size">{sizeText(top)}</p>}
      {bases.length > 0 && (
        <ol class="chain" aria-label={`Backing files of ${image}`}>
          {bases.map((link) => (
            <li key={link.path}>
              <code>{link.path}</code> <span class="muted">{sizeText(link)}</span>
              {link.problem && <Status look={{ tone: 'warn', shape: 'query', text: 'unknown' }} />}
              <Users link={link} but={vm} />
            </li>
          ))}
        </ol>
      )}
    </>
  );
}

/** Why the image is unknown, or its format and sizes. */
function sizeText({ info, problem }: ChainLink): string {
  if (!info) return problem ?? '';
  const format = info.format ?? 'unknown format';
  const used = info.path.startsWith('rbd:') ? '' : `, ${bytes(info.used_bytes)} used`;
  return `${format}, ${bytes(info.virtual_bytes)}${used}`;
}

/** The other VMs of the host that use an image. */
function Users({ link, but }: { link: ChainLink; but: string }) {
  const others = link.info?.vms?.filter((vm) => vm !== but) ?? [];
  if (others.length === 0) return null;
  return (
    <>
      {' '}
      <span class="muted">also of</span>
      {others.slice(0, MOST_NAMED).map((vm) => (
        <span key={vm}>
          {' '}
          <VmLink name={vm} />
        </span>
      ))}
      {others.length > MOST_NAMED && (
        <span class="muted"> and {others.length - MOST_NAMED} more</span>
      )}
    </>
  );
}

/** Most VMs that are named at an image; a base may have hundreds of clones. */
const MOST_NAMED = 4;
