/** Reports of many moves: one request each, at the rate that the manager allows. */
import { get, part, Refusal } from '../api/http';
import type { Move } from '../api/types';

const AT_ONCE = 8;
/** Most reports in one file; the newest are taken. */
export const MOST_REPORTS = 500;
/** Attempts for one report before the manager's refusal is shown. */
const MOST_TRIES = 30;

export interface Reports {
  moves: Move[];
  /** Number of older moves that were left out. */
  older: number;
  /** Number of moves that the manager no longer has. */
  forgotten: number;
}

const ask = (id: string) => get<Move>(`/moves/${part(id)}`);
const wait = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

/** Requests the reports of the newest moves. Tests replace `asking` and `waiting`. */
export async function reportsOf(ended: Move[], asking = ask, waiting = wait): Promise<Reports> {
  const wanted = [...ended]
    .sort((a, b) => (b.ended_unix_ms ?? 0) - (a.ended_unix_ms ?? 0))
    .slice(0, MOST_REPORTS);
  const found: (Move | null)[] = [];
  for (let at = 0; at < wanted.length; at += AT_ONCE) {
    const some = wanted
      .slice(at, at + AT_ONCE)
      .map((move) => patiently(() => asking(move.id), waiting));
    found.push(...(await Promise.all(some)));
  }
  const moves = found.filter((move) => move !== null);
  return { moves, older: ended.length - wanted.length, forgotten: found.length - moves.length };
}

/** Waits where the manager limits the rate (429); null where it has no such move (404). */
async function patiently(
  asking: () => Promise<Move>,
  waiting: (ms: number) => Promise<void>,
): Promise<Move | null> {
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

/** A note about what the file does not contain; null where it is complete. */
export function lackingText({ moves, older, forgotten }: Reports): string | null {
  const notes: string[] = [];
  if (older > 0)
    notes.push(
      `The file contains the newest ${MOST_REPORTS} of ${MOST_REPORTS + older} moves. ` +
        'To get older moves, narrow the filter.',
    );
  if (forgotten > 0)
    notes.push(
      `The manager no longer has ${forgotten} of them. The file contains ${moves.length}.`,
    );
  return notes.length > 0 ? notes.join(' ') : null;
}
