import { describe, expect, it } from 'vitest';
import { Refusal } from '../api/http';
import type { Move } from '../api/types';
import { lackingText, reportsOf } from './reports';

const ended = (count: number) =>
  Array.from({ length: count }, (_, at) => ({ id: `m${at}`, ended_unix_ms: at }) as Move);
const refusal = (status: number, retryAfterMs?: number) =>
  new Refusal({ status, code: 'x', title: 'x', detail: 'x' }, retryAfterMs);

describe('reports of many moves', () => {
  it('wait as long as the manager says', async () => {
    const waits: number[] = [];
    let left = 20;
    const asking = async (id: string) => {
      if (left === 0) throw refusal(429, 2000);
      left -= 1;
      return { id } as Move;
    };
    const waiting = async (ms: number) => {
      waits.push(ms);
      left = 20;
    };
    const reports = await reportsOf(ended(100), asking, waiting);
    expect(reports.moves.map((move) => move.id)).toEqual(
      ended(100)
        .reverse()
        .map((move) => move.id),
    );
    expect(new Set(waits)).toEqual(new Set([2000]));
    expect(lackingText(reports)).toBe(null);
  });

  it('are the newest ones that the manager still has', async () => {
    const asking = async (id: string) => {
      if (id === 'm511') throw refusal(404);
      return { id } as Move;
    };
    const reports = await reportsOf(ended(512), asking);
    expect(reports).toMatchObject({ older: 12, forgotten: 1 });
    expect(reports.moves.length).toBe(499);
    expect(reports.moves[0]?.id).toBe('m510');
    expect(lackingText(reports)).toMatch(
      /newest 500 of 512 moves.*no longer has 1 of them. The file contains 499/,
    );
  });

  it('fail with any other refusal, and with a repeated one', async () => {
    await expect(reportsOf(ended(1), () => Promise.reject(refusal(403)))).rejects.toThrow(Refusal);
    const never = () => Promise.reject(refusal(429));
    await expect(reportsOf(ended(1), never, () => Promise.resolve())).rejects.toThrow(Refusal);
  });
});
