/** Requests to the manager. Every failure is a `Refusal` with the problem document that people are shown. */
import { learnTime } from './clock';
import type { Page, Problem } from './types';

export const API = '/api/v1';

/** The problem's fields that the console shows, whatever sent them. */
export type ShownProblem = Pick<Problem, 'title' | 'detail' | 'remedy' | 'checks'> & { status: number; code: string };

/** Where an answer does not say when to ask again. */
const RETRY_AFTER_MS = 1000;
const MOST_RETRY_AFTER_MS = 60_000;

export class Refusal extends Error {
  /** `retryAfterMs`: how long to wait before it is asked again, where that may help. */
  constructor(
    readonly problem: ShownProblem,
    readonly retryAfterMs = RETRY_AFTER_MS,
  ) {
    super(`${problem.title}: ${problem.detail}`);
  }
}

export type Method = 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE';

/** Who asks; what is told where the manager does not know them any more. */
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

/** Asks the manager. A POST gets an idempotency key of its own: sent again by the browser it is carried out once. */
export async function ask<T>(method: Method, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
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

export const get = <T>(path: string, signal?: AbortSignal) => ask<T>('GET', path, undefined, signal);
export const post = <T>(path: string, body: unknown = {}) => ask<T>('POST', path, body);
export const patch = <T>(path: string, body: unknown) => ask<T>('PATCH', path, body);
export const remove = <T>(path: string) => ask<T>('DELETE', path);

/** As `get`; undefined where the manager has no such request, being of an older version. */
export async function getIfThere<T>(path: string, signal?: AbortSignal): Promise<T | undefined> {
  try {
    return await get<T>(path, signal);
  } catch (error) {
    if (error instanceof Refusal && (error.problem.status === 404 || error.problem.status === 405)) return undefined;
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

/** Sends it, and once more where the connection broke before the answer: the key makes that safe. */
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
        title: 'The manager does not answer',
        detail: 'The connection to it broke, or none could be made.',
        remedy: 'See whether the manager runs and whether its address can be reached from here; then try again.',
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

/** Seconds, as the manager says it; what is no number, such as a date of a proxy's, is passed over. */
function retryAfterMs(response: Response): number {
  const seconds = Number(response.headers.get('Retry-After') ?? '');
  return seconds > 0 ? Math.min(seconds * 1000, MOST_RETRY_AFTER_MS) : RETRY_AFTER_MS;
}

export async function refusal(response: Response): Promise<Refusal> {
  const told = (await response.json().catch(() => ({}))) as Partial<Problem>;
  const problem: ShownProblem = {
    status: response.status,
    code: told.code ?? 'unknown',
    title: told.title ?? `The manager answered ${response.status}`,
    detail: told.detail ?? response.statusText,
  };
  if (told.remedy) problem.remedy = told.remedy;
  if (told.checks) problem.checks = told.checks;
  if (response.status === 401) caller?.refused(problem);
  return new Refusal(problem, retryAfterMs(response));
}

/** Any failure as a problem that can be shown. */
export function problemOf(error: unknown): ShownProblem {
  if (error instanceof Refusal) return error.problem;
  return {
    status: 0,
    code: 'console',
    title: 'The console failed',
    detail: error instanceof Error ? error.message : String(error),
    remedy: 'Load the page anew. If it happens again, report it with what you did.',
  };
}

/** 128 random bits; `crypto.randomUUID` is there by HTTPS alone. */
function newKey(): string {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

export const part = encodeURIComponent;
