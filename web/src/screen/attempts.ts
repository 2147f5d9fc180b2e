/** When a screen connects again. Pure. */
import { Retries } from '../state/retries';

/** Close code of the manager: the screen cannot open or continue; the reason says why. */
const CANNOT_GO_ON = 4000;
/** Close code of the manager: the screen continues in another connection. */
const CONNECT_AGAIN = 4001;
/** Attempts for a screen that never opened: it was refused, or the manager has none. */
const NEVER_OPEN_TRIES = 2;

/** What follows the end of a connection: another one after a wait, or nothing, with the reason. */
export type Next = { waitMs: number; why: string } | { waitMs: null; why: string };

export class Attempts {
  private readonly retries = new Retries();
  private wasOpen = false;

  opened(): void {
    this.wasOpen = true;
    this.retries.succeeded();
  }

  /** `chance` from 0 to 1 spreads the wait. */
  closed(code: number, reason: string, chance: number): Next {
    const tries = this.retries.failed();
    if (code === CANNOT_GO_ON || (!this.wasOpen && tries >= NEVER_OPEN_TRIES))
      return {
        waitMs: null,
        why: reason || 'The manager refused the screen or does not support screens.',
      };
    if (code === CONNECT_AGAIN && tries === 1)
      return { waitMs: 0, why: 'The VM is moving to another host.' };
    return { waitMs: this.retries.waitMs(chance), why: 'Connection lost, reconnecting.' };
  }
}
