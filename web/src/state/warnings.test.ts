import { beforeEach, expect, it } from 'vitest';
import { closeWarning, warnings, warnOf } from './warnings';

beforeEach(() => {
  warnings.value = [];
});

it('an answer without a warning shows nothing', () => {
  warnOf(undefined);
  warnOf({});
  warnOf({ warning: null });
  expect(warnings.value).toEqual([]);
});

it('a warning is shown once, and the latest few stay until they are closed', () => {
  for (const warning of ['a', 'b', 'a']) warnOf({ warning });
  expect(warnings.value).toEqual(['b', 'a']);
  closeWarning('b');
  expect(warnings.value).toEqual(['a']);
  for (const warning of ['c', 'd', 'e', 'f', 'g']) warnOf({ warning });
  expect(warnings.value).toEqual(['c', 'd', 'e', 'f', 'g']);
});
