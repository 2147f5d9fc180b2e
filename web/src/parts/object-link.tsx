/** An object of the cluster (`vm:web`), with a link to its page if it has one. */
import { objectOf } from '../state/objects';
import { Link } from './basics';

export function ObjectLink({ object }: { object: string }) {
  const { kind, name, path } = objectOf(object);
  return (
    <span class="object">
      {path ? <Link to={path}>{name}</Link> : name} {kind && <span class="muted">{kind}</span>}
    </span>
  );
}
