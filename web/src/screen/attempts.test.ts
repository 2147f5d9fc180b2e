import { expect, it } from 'vitest';
import { Attempts } from './attempts';

it('connects again at once when the VM moves', () => {
  const attempts = new Attempts();
  attempts.opened();
  expect(attempts.closed(4001, 'connect again', 1)).toMatchObject({ waitMs: 0 });
  // The next ones wait, should the new host not answer.
  expect(attempts.closed(4001, 'connect again', 1).waitMs).toBeGreaterThan(100);
  attempts.opened();
  expect(attempts.closed(4001, 'connect again', 1)).toMatchObject({ waitMs: 0 });
});

it('gives up where the manager says so', () => {
  const attempts = new Attempts();
  attempts.opened();
  const why = 'VM "web" is stopped: it has no screen';
  expect(attempts.closed(4000, why, 1)).toEqual({ waitMs: null, why });
});

it('gives up a screen that never opened', () => {
  const attempts = new Attempts();
  expect(attempts.closed(1006, '', 1).waitMs).toBeGreaterThan(0);
  expect(attempts.closed(1006, '', 1).waitMs).toBeNull();
});

it('continues to try after a lost connection', () => {
  const attempts = new Attempts();
  attempts.opened();
  for (let tries = 0; tries < 20; tries += 1)
    expect(attempts.closed(1006, '', 1).waitMs).toBeGreaterThan(0);
});
