import { describe, expect, it } from 'vitest';
import { RemoteClock } from './clock';

/**
 * An answer of a manager whose clock is ahead: sent at `sentMs`, written 20 ms later, received 20
 * ms after that.
 */
function answer(clock: RemoteClock, aheadMs: number, sentMs: number): void {
  clock.learn(new Date(sentMs + 20 + aheadMs).toUTCString(), sentMs, sentMs + 40);
}

describe("the manager's clock", () => {
  it("is the browser's as long as nothing is known", () => {
    const clock = new RemoteClock();
    clock.learn(null, 0, 40);
    clock.learn('yesterday', 0, 40);
    expect(clock.offsetMs()).toBe(0);
  });

  it('is known better with each answer', () => {
    const clock = new RemoteClock();
    const aheadMs = -600_000;
    answer(clock, aheadMs, 1_000_000_300);
    expect(Math.abs(clock.offsetMs() - aheadMs)).toBeLessThan(600);
    for (let at = 0; at < 20; at += 1) answer(clock, aheadMs, 1_000_000_300 + at * 1230);
    expect(Math.abs(clock.offsetMs() - aheadMs)).toBeLessThan(60);
  });

  it('is learned again after a clock was set', () => {
    const clock = new RemoteClock();
    for (let at = 0; at < 20; at += 1) answer(clock, 0, 1_000_000_300 + at * 1230);
    answer(clock, 3_600_000, 1_000_100_000);
    expect(Math.abs(clock.offsetMs() - 3_600_000)).toBeLessThan(600);
  });

  it("is not taken from an answer during which the browser's was set", () => {
    const clock = new RemoteClock();
    clock.learn(new Date(5_000_000).toUTCString(), 9_000_000, 1_000_000);
    expect(clock.offsetMs()).toBe(0);
  });
});
