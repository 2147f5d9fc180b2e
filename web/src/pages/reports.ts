/** Reports of many moves: each is asked for by itself, as fast as the manager lets them be asked for. */
import { get, part, Refusal } from '../api/http';
import type { Move } from '../api/types';

const AT_ONCE = 8;
/** So many are taken, the newest. */
export const MOST_REPORTS = 500;
/** A report is asked for so often before the manager's refusal is what is told. */
const MOST_TRIES = 30;

export interface Reports {
  moves: Move[];
  /** Older than those that were taken. */
  older: number;
  /** The manager knows them no more. */
  forgotten: number;
}

const ask = (id: string) => get<Move>(`/moves/${part(id)}`);
const wait = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

/** `asking` and `waiting` are others in tests. */
export async function reportsOf(ended: Move[], asking = ask, waiting = wait): Promise<Reports> {
  const wanted = [...ended].sort((a, b) => (b.ended_unix_ms ?? 0) - (a.ended_unix_ms ?? 0)).slice(0, MOST_REPORTS);
  const found: (Move | null)[] = [];
  for (let at = 0; at < wanted.length; at += AT_ONCE) {
    const some = wanted.slice(at, at + AT_ONCE).map((move) => patiently(() => asking(move.id), waiting));
    found.push(...(await Promise.all(some)));
  }
  const moves = found.filter((move) => move !== null);
  return { moves, older: ended.length - wanted.length, forgotten: found.length - moves.length };
}

/** Waits where the manager says that it is asked too often; null where it has no such move. */
async function patiently(asking: () => Promise<Move>, waiting: (ms: number) => Promise<void>): Promise<Move | null> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await asking();
    } catch (error) {
      const status = error instanceof Refusal ? error.problem.status : 0;
      if (status === 404) return null;
      if (!(error instanceof Refusal) || status !== 429 || tries >= MOST_TRIES) throw error;
      await waiting(error.retryAfterMs);
    }
  }
}

/** What the file lacks, in words; null where it has everything. */
export function lackingText({ moves, older, forgotten }: Reports): string | null {
  const said: string[] = [];
  if (older > 0)
    said.push(
      `The file has the newest ${MOST_REPORTS} of ${MOST_REPORTS + older} moves; for older ones narrow the filter.`,
    );
  if (forgotten > 0)
    said.push(`The manager knows ${forgotten} of them no more: the file has ${moves.length} without them.`);
  return said.length > 0 ? said.join(' ') : null;
}
