/**
 * Wait before the next attempt: longer each time, and spread so that consoles do not retry at once.
 */

const FIRST_MS = 500;
const MOST_MS = 10_000;

export class Retries {
  private failures = 0;

  /** Counts a failure; returns the failures since the last success. */
  failed(): number {
    this.failures += 1;
    return this.failures;
  }

  succeeded(): void {
    this.failures = 0;
  }

  /** `chance` from 0 to 1 spreads it over the upper half of the wait. */
  waitMs(chance: number): number {
    const most = Math.min(MOST_MS, FIRST_MS * 2 ** Math.max(0, this.failures - 1));
    return Math.round(most / 2 + (chance * most) / 2);
  }
}
