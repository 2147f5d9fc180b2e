import { expect, it } from 'vitest';
import { ofHosts } from './host-lists';

it('asks each host once, a few at once', async () => {
  const asked: string[] = [];
  let now = 0;
  let most = 0;
  await ofHosts(['a', 'b', 'c', 'd', 'e', 'f'], async (host) => {
    asked.push(host);
    now += 1;
    most = Math.max(most, now);
    await Promise.resolve();
    now -= 1;
  });
  expect(asked.sort()).toEqual(['a', 'b', 'c', 'd', 'e', 'f']);
  expect(most).toBe(4);
});
