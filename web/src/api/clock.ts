/**
 * The manager's clock. Its times are compared with what it has for now, not with the browser's clock, which may be minutes off. Its answers say
 * it to the second (`Date`); each narrows down by how much the clocks differ.
 */

export class RemoteClock {
  private leastMs = Number.NEGATIVE_INFINITY;
  private mostMs = Number.POSITIVE_INFINITY;

  /** Takes what an answer says; `sentMs` and `receivedMs` are the browser's, around it. */
  learn(date: string | null, sentMs: number, receivedMs: number): void {
    const saidMs = date === null ? Number.NaN : Date.parse(date);
    // A clock that was set while it was asked says nothing.
    if (!Number.isFinite(saidMs) || receivedMs < sentMs) return;
    // It was said between the two, within that second.
    const leastMs = saidMs - receivedMs;
    const mostMs = saidMs + 1000 - sentMs;
    this.leastMs = Math.max(this.leastMs, leastMs);
    this.mostMs = Math.min(this.mostMs, mostMs);
    if (this.leastMs > this.mostMs) {
      // One of the clocks was set, or went faster: what was known before holds no more.
      this.leastMs = leastMs;
      this.mostMs = mostMs;
    }
  }

  /** What to add to the browser's time; 0 as long as nothing is known. */
  offsetMs(): number {
    return Number.isFinite(this.leastMs) ? (this.leastMs + this.mostMs) / 2 : 0;
  }
}

const manager = new RemoteClock();

/** Takes the time from an answer of the manager's. */
export function learnTime(response: Response, sentMs: number): void {
  manager.learn(response.headers.get('Date'), sentMs, Date.now());
}

/** Now, as the manager's clock has it. */
export const managerNow = () => Date.now() + manager.offsetMs();
