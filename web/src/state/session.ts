/** The session. The token is in sessionStorage: it belongs to this tab and is gone with it. */
import { signal } from '@preact/signals';
import { get, getIfThere, Refusal, type ShownProblem, setCaller } from '../api/http';
import type { Cluster, Me, Role } from '../api/types';
import { adoptions } from './adoptions';
import { alarms } from './alarms';
import { isLoaded } from './cluster';
import { jobs } from './jobs';
import { forget } from './journal';
import { Follower } from './stream';
import { warnings } from './warnings';

const KEY = 'godwit.token';

export const me = signal<Me | null>(null);
/** Why the session ended without a logout by the user. */
export const loggedOut = signal<ShownProblem | null>(null);
/** False until the stored token has been checked. */
export const isKnown = signal(false);

let follower: Follower | null = null;

export async function resume(): Promise<void> {
  const token = sessionStorage.getItem(KEY);
  if (token) await logIn(token).catch(() => undefined);
  isKnown.value = true;
}

/** Logs in with a token; throws the manager's refusal. */
export async function logIn(token: string): Promise<void> {
  setCaller({ token, refused: end });
  try {
    const who = (await getIfThere<Me>('/me')) ?? (await guess());
    sessionStorage.setItem(KEY, token);
    loggedOut.value = null;
    me.value = who;
    follower = new Follower();
    follower.start();
  } catch (error) {
    setCaller(null);
    throw error;
  }
}

/** Finds the role where the manager has no `/me`: only admins may list tokens. */
async function guess(): Promise<Me> {
  await get<Cluster>('/cluster');
  try {
    await get('/tokens');
    return { name: 'admin', role: 'admin' };
  } catch (error) {
    if (error instanceof Refusal && error.problem.status === 403)
      return { name: 'operator', role: 'operator' };
    throw error;
  }
}

export function logOut(): void {
  end(null);
}

function end(why: ShownProblem | null): void {
  follower?.stop();
  follower = null;
  sessionStorage.removeItem(KEY);
  setCaller(null);
  if (me.value) loggedOut.value = why;
  me.value = null;
  isLoaded.value = false;
  adoptions.replace([]);
  jobs.replace([]);
  alarms.replace([]);
  forget();
  warnings.value = [];
}

export function tryNow(): void {
  follower?.tryNow();
}

const RANK: Record<Role, number> = { viewer: 0, operator: 1, admin: 2 };

/** Why the session may not do what needs this role; null if it may. */
export function whyNot(needs: Role): string | null {
  const role = me.value?.role ?? 'viewer';
  if (RANK[role] >= RANK[needs]) return null;
  return `This needs the role ${needs}. Your token has the role ${role}.`;
}
