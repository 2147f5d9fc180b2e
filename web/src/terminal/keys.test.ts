import { expect, it } from 'vitest';
import { keyText } from './keys';

const press = (key: string, more = {}) => ({
  key,
  ctrlKey: false,
  altKey: false,
  metaKey: false,
  ...more,
});

it('sends what a serial console expects', () => {
  expect(keyText(press('a'), false)).toBe('a');
  expect(keyText(press('Enter'), false)).toBe('\r');
  expect(keyText(press('c', { ctrlKey: true }), false)).toBe('\x03');
  expect(keyText(press('ArrowUp'), false)).toBe('\x1b[A');
  expect(keyText(press('ArrowUp'), true)).toBe('\x1bOA');
  expect(keyText(press('x', { altKey: true }), false)).toBe('\x1bx');
});

it('leaves to the browser what is the browser’s', () => {
  expect(keyText(press('Shift'), false)).toBe(null);
  expect(keyText(press('c', { metaKey: true }), false)).toBe(null);
});
