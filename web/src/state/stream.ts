/** Follows the manager's events: the whole state first, then each change. Resumes after a cut. */
import { signal } from '@preact/signals';
import { API, authorization, problemOf, Refusal, refusal } from '../api/http';
import { EventReader, type ServerEvent } from '../api/sse';
import type { ClusterEvent } from '../api/types';
import { apply, loadAll } from './cluster';
import { loadJournal } from './journal';
import { Retries } from './retries';

export type Connection =
  | { state: 'loading' }
  | { state: 'live' }
  | { state: 'lost'; why: string; nextTryMs: number }
  | { state: 'trying'; why: string };

export const connection = signal<Connection>({ state: 'loading' });

/** Silence after which the connection counts as lost. The manager sends a heartbeat every 5 s. */
const SILENCE_MS = 16_000;

/** An answer that begins later than this is late. */
const LATE_MS = 700;

/** Whether an answer is late. */
function late(asked: Promise<Response>): Promise<boolean> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => resolve(true), LATE_MS);
    asked.then(() => resolve(false), reject).finally(() => clearTimeout(timer));
  });
}

export class Follower {
  private readonly retries = new Retries();
  private readonly ended = new AbortController();
  private lastId: string | null = null;
  private wake: (() => void) | null = null;

  start(): void {
    void this.run();
  }

  stop(): void {
    this.ended.abort();
    this.wake?.();
  }

  /** Retries at once. */
  tryNow(): void {
    this.wake?.();
  }

  private async run(): Promise<void> {
    while (!this.ended.signal.aborted) {
      const why = await this.once();
      if (this.ended.signal.aborted) return;
      if (this.retries.failed() > 1) {
        // A restarted manager numbers its events from 1 again, so the last number is useless.
        this.lastId = null;
      }
      const waitMs = this.retries.waitMs(Math.random());
      connection.value = { state: 'lost', why, nextTryMs: Date.now() + waitMs };
      await this.pause(waitMs);
      if (!this.ended.signal.aborted) connection.value = { state: 'trying', why };
    }
  }

  /** Runs one connection until it ends; returns the reason. */
  private async once(): Promise<string> {
    const cut = new AbortController();
    const end = () => cut.abort();
    this.ended.signal.addEventListener('abort', end);
    let silence = setTimeout(end, SILENCE_MS);
    try {
      const headers: Record<string, string> = { ...authorization(), Accept: 'text/event-stream' };
      const goesOn = this.lastId !== null;
      if (this.lastId !== null) headers['Last-Event-ID'] = this.lastId;
      const asked = fetch(`${API}/events`, { headers, signal: cut.signal, cache: 'no-store' });
      // A proxy may hold an answer back until it has content: show the current state meanwhile.
      const isLate = !goesOn && (await late(asked));
      if (isLate) await this.load(cut.signal);
      const response = await asked;
      if (!response.ok || !response.body) throw await refusal(response);
      // Changes during the load arrive on the stream afterwards.
      if (!goesOn) await this.load(cut.signal);
      connection.value = { state: 'live' };
      this.retries.succeeded();
      const events = new EventReader();
      const text = new TextDecoder();
      const reader = response.body.getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return 'The manager closed the connection.';
        clearTimeout(silence);
        silence = setTimeout(end, SILENCE_MS);
        for (const event of events.push(text.decode(value, { stream: true })))
          await this.take(event, cut.signal);
      }
    } catch (error) {
      if (error instanceof Refusal) return `${error.problem.title}: ${error.problem.detail}`;
      if (cut.signal.aborted) return 'The manager stopped responding.';
      return error instanceof TypeError ? 'The manager does not respond.' : problemOf(error).detail;
    } finally {
      clearTimeout(silence);
      this.ended.signal.removeEventListener('abort', end);
      cut.abort();
    }
  }

  private async take(event: ServerEvent, ended: AbortSignal): Promise<void> {
    if (event.id !== null) this.lastId = event.id;
    if (event.name === 'missed') {
      await this.load(ended);
      return;
    }
    apply(JSON.parse(event.data) as ClusterEvent);
  }

  private async load(ended: AbortSignal): Promise<void> {
    await loadAll(ended);
    // The page does not wait for what has passed.
    void loadJournal(ended);
  }

  private pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
