/** Moves of one VM. */
import { part } from '../api/http';
import type { Move } from '../api/types';
import { Link } from '../parts/basics';
import { moveLook, Status } from '../parts/status';
import { isOver, moves } from '../state/cluster';
import { dateTime, duration } from '../text/units';

export const movesOf = (vm: string) =>
  [...moves.values()]
    .filter((move) => move.vm === vm)
    .sort((a, b) => b.asked_unix_ms - a.asked_unix_ms);

export function MovesOf({ vm }: { vm: string }) {
  const all = movesOf(vm);
  if (all.length === 0) return <p class="empty">No moves of this VM.</p>;
  return (
    <div class="scroll-x panel">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Requested</th>
            <th scope="col">State</th>
            <th scope="col">From</th>
            <th scope="col">To</th>
            <th scope="col" class="number">
              Duration
            </th>
            <th scope="col">User</th>
          </tr>
        </thead>
        <tbody>
          {all.map((move: Move) => (
            <tr key={move.id}>
              <th scope="row">
                <Link to={`/moves/${part(move.id)}`}>{dateTime(move.asked_unix_ms)}</Link>
              </th>
              <td>
                <Status look={moveLook(move)} title={move.failure?.message} />
              </td>
              <td>{move.from}</td>
              <td>{move.to ?? '–'}</td>
              <td class="number">
                {isOver(move) && move.started_unix_ms && move.ended_unix_ms
                  ? duration(move.ended_unix_ms - move.started_unix_ms)
                  : '–'}
              </td>
              <td>{move.asked_by}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
