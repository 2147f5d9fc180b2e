/** Requests to the manager. Every failure is a `Refusal` with a problem document to show. */
import { learnTime } from './clock';
import type { Page, Problem } from './types';

export const API = '/api/v1';

/** Fields of a problem document that the console shows. */
export type ShownProblem = Pick<Problem, 'title' | 'detail' | 'remedy' | 'checks'> & {
  status: number;
  code: string;
};

/** Wait before a retry where the answer has no `Retry-After`. */
const RETRY_AFTER_MS = 1000;
const MOST_RETRY_AFTER_MS = 60_000;

export class Refusal extends Error {
  /** `retryAfterMs`: wait before a retry. */
  constructor(
    readonly problem: ShownProblem,
    readonly retryAfterMs = RETRY_AFTER_MS,
  ) {
    super(`${problem.title}: ${problem.detail}`);
  }
}

export type Method = 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE';

/** The session's token; `refused` is called when the manager no longer accepts it. */
export interface Caller {
  token: string;
  refused(problem: ShownProblem): void;
}

let caller: Caller | null = null;

export function setCaller(next: Caller | null): void {
  caller = next;
}

export function authorization(): Record<string, string> {
  return caller ? { Authorization: `Bearer ${caller.token}` } : {};
}

export function bearer(): string | null {
  return caller?.token ?? null;
}

/**
 * Sends a request. Changes carry an idempotency key, so the manager executes a repeated one once.
 */
export async function ask<T>(
  method: Method,
  path: string,
  body?: unknown,
  signal?: AbortSignal,
): Promise<T> {
  const headers: Record<string, string> = authorization();
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  if (method !== 'GET') headers['Idempotency-Key'] = newKey();
  const sent = JSON.stringify(body);
  const init: RequestInit = { method, headers, signal: signal ?? null, cache: 'no-store' };
  if (sent !== undefined) init.body = sent;
  const response = await reach(API + path, init);
  if (!response.ok) throw await refusal(response);
  if (response.status === 204) return undefined as T;
  const text = await response.text();
  return (text === '' ? undefined : JSON.parse(text)) as T;
}

export const get = <T>(path: string, signal?: AbortSignal) =>
  ask<T>('GET', path, undefined, signal);
export const post = <T>(path: string, body: unknown = {}) => ask<T>('POST', path, body);
export const put = <T>(path: string, body: unknown) => ask<T>('PUT', path, body);
export const patch = <T>(path: string, body: unknown) => ask<T>('PATCH', path, body);
export const remove = <T>(path: string) => ask<T>('DELETE', path);

/** Like `get`; undefined where an older manager has no such request. */
export async function getIfThere<T>(path: string, signal?: AbortSignal): Promise<T | undefined> {
  try {
    return await get<T>(path, signal);
  } catch (error) {
    if (error instanceof Refusal && (error.problem.status === 404 || error.problem.status === 405))
      return undefined;
    throw error;
  }
}

/** All items of a list, page by page. */
export async function all<T>(path: string, signal?: AbortSignal): Promise<T[]> {
  const items: T[] = [];
  let cursor: string | null | undefined;
  do {
    const joint = path.includes('?') ? '&' : '?';
    const behind = cursor ? `&cursor=${encodeURIComponent(cursor)}` : '';
    const page = await get<Page<T>>(`${path}${joint}limit=1000${behind}`, signal);
    items.push(...page.items);
    cursor = page.next && page.items.length > 0 ? page.next : null;
  } while (cursor);
  return items;
}

/**
 * Sends a request, and once more if the connection breaks before the answer. The key makes that
 * safe.
 */
async function reach(url: string, init: RequestInit): Promise<Response> {
  try {
    return await timed(url, init);
  } catch (error) {
    if (init.signal?.aborted) throw error;
    try {
      return await timed(url, init);
    } catch {
      throw new Refusal({
        status: 0,
        code: 'unreachable',
        title: 'Cannot reach the manager',
        detail: 'The connection broke or could not be opened.',
        remedy: 'Check that the manager runs and that its address is reachable. Then try again.',
      });
    }
  }
}

async function timed(url: string, init: RequestInit): Promise<Response> {
  const sentMs = Date.now();
  const response = await fetch(url, init);
  learnTime(response, sentMs);
  return response;
}

/** Reads `Retry-After` in seconds. Other values, such as a proxy's date, are ignored. */
function retryAfterMs(response: Response): number {
  const seconds = Number(response.headers.get('Retry-After') ?? '');
  return seconds > 0 ? Math.min(seconds * 1000, MOST_RETRY_AFTER_MS) : RETRY_AFTER_MS;
}

export async function refusal(response: Response): Promise<Refusal> {
  const sent = (await response.json().catch(() => ({}))) as Partial<Problem>;
  const problem: ShownProblem = {
    status: response.status,
    code: sent.code ?? 'unknown',
    title: sent.title ?? `The manager returned status ${response.status}`,
    detail: sent.detail ?? response.statusText,
  };
  if (sent.remedy) problem.remedy = sent.remedy;
  if (sent.checks) problem.checks = sent.checks;
  if (response.status === 401) caller?.refused(problem);
  return new Refusal(problem, retryAfterMs(response));
}

/** Converts any failure to a problem that can be shown. */
export function problemOf(error: unknown): ShownProblem {
  if (error instanceof Refusal) return error.problem;
  return {
    status: 0,
    code: 'console',
    title: 'Internal error of the console',
    detail: error instanceof Error ? error.message : String(error),
    remedy: 'Reload the page. If the error returns, report it with the steps that led to it.',
  };
}

/** 128 random bits. `crypto.randomUUID` exists only over HTTPS. */
function newKey(): string {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

export const part = encodeURIComponent;
