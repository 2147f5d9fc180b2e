/**
 * The manager's clock. The manager's times are compared with its own clock, because the browser's
 * may be minutes off. Answers carry that clock to the second (`Date`); each narrows the offset.
 */

export class RemoteClock {
  private leastMs = Number.NEGATIVE_INFINITY;
  private mostMs = Number.POSITIVE_INFINITY;

  /**
   * Learns from an answer's `Date`. `sentMs` and `receivedMs` are the browser's times around it.
   */
  learn(date: string | null, sentMs: number, receivedMs: number): void {
    const dateMs = date === null ? Number.NaN : Date.parse(date);
    // Without a date, or if the browser's clock was set meanwhile, the answer says nothing.
    if (!Number.isFinite(dateMs) || receivedMs < sentMs) return;
    // The answer was written between the two times, within that second.
    const leastMs = dateMs - receivedMs;
    const mostMs = dateMs + 1000 - sentMs;
    this.leastMs = Math.max(this.leastMs, leastMs);
    this.mostMs = Math.min(this.mostMs, mostMs);
    if (this.leastMs > this.mostMs) {
      // One of the clocks was set or drifted: earlier bounds no longer hold.
      this.leastMs = leastMs;
      this.mostMs = mostMs;
    }
  }

  /** Offset to add to the browser's time; 0 while it is unknown. */
  offsetMs(): number {
    return Number.isFinite(this.leastMs) ? (this.leastMs + this.mostMs) / 2 : 0;
  }
}

const manager = new RemoteClock();

/** Learns the manager's time from an answer. */
export function learnTime(response: Response, sentMs: number): void {
  manager.learn(response.headers.get('Date'), sentMs, Date.now());
}

/** Current time of the manager's clock. */
export const managerNow = () => Date.now() + manager.offsetMs();
