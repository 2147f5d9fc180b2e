import { describe, expect, it } from 'vitest';
import { background, foreground, Screen, Style } from './screen';

const encoder = new TextEncoder();

function shown(screen: Screen): string[] {
  return screen.lines.map((line) =>
    line
      .map((cell) => cell.text)
      .join('')
      .trimEnd(),
  );
}

function written(text: string, columns = 10, rows = 4): Screen {
  const screen = new Screen(columns, rows);
  screen.write(encoder.encode(text));
  return screen;
}

describe('the screen', () => {
  it('writes, wraps and scrolls into its history', () => {
    const screen = written('0123456789ab\r\nc\r\nd\r\ne');
    expect(shown(screen)).toEqual(['ab', 'c', 'd', 'e']);
    expect(screen.history.map((line) => line.map((cell) => cell.text).join(''))).toEqual([
      '0123456789',
    ]);
  });

  it('moves, erases, inserts and deletes', () => {
    expect(shown(written('abcdef\x1b[3D\x1b[K'))[0]).toBe('abc');
    expect(shown(written('abcdef\x1b[1;2H\x1b[2P'))[0]).toBe('adef');
    expect(shown(written('abc\x1b[1;2H\x1b[2@'))[0]).toBe('a  bc');
    expect(shown(written('a\r\nb\r\nc\x1b[2;1H\x1b[M'))).toEqual(['a', 'c', '', '']);
    expect(shown(written('a\r\nb\x1b[1;1H\x1b[L'))).toEqual(['', 'a', 'b', '']);
    expect(shown(written('a\r\nb\x1b[2J'))).toEqual(['', '', '', '']);
  });

  it('scrolls a region and leaves the rest alone', () => {
    expect(shown(written('top\r\na\r\nb\r\nend\x1b[2;3r\x1b[3;1H\nc'))).toEqual([
      'top',
      'b',
      'c',
      'end',
    ]);
  });

  it('has colours and attributes', () => {
    const cells = written('\x1b[1;31;44mx\x1b[0my\x1b[38;5;200mz').lines[0] ?? [];
    const [x, y, z] = cells.map((cell) => cell.style);
    expect([foreground(x ?? 0), background(x ?? 0), (x ?? 0) & Style.bold]).toEqual([
      1,
      4,
      Style.bold,
    ]);
    expect(y).toBe(0);
    expect(foreground(z ?? 0)).toBe(200);
  });

  it('passes over what it does not know, whatever the pieces', () => {
    const text = '\x1b]0;title\x07a\x1bP1$r\x1b\\b\x1b(Bc\x1b[>4;2mé\x1b[?2004h✓';
    const bytes = encoder.encode(text);
    for (const size of [1, 2, 100]) {
      const screen = new Screen(10, 2);
      for (let at = 0; at < bytes.length; at += size) screen.write(bytes.slice(at, at + size));
      expect(shown(screen)[0]).toBe('abcé✓');
    }
  });

  it('answers where the cursor is', () => {
    const screen = new Screen(10, 4);
    const answers: string[] = [];
    screen.answer = (text) => answers.push(text);
    screen.write(encoder.encode('ab\r\ncd\x1b[6n'));
    expect(answers).toEqual(['\x1b[2;3R']);
  });

  it('keeps the first screen while the second is shown', () => {
    const screen = written('first\x1b[?1049h\x1b[Hsecond');
    expect(shown(screen)[0]).toBe('second');
    screen.write(encoder.encode('\x1b[?1049l'));
    expect(shown(screen)[0]).toBe('first');
  });

  it('survives any numbers', () => {
    const screen = written(
      '\x1b[99999999999B\x1b[9999999L\x1b[0;0H\x1b[9999X\x1b[9999@x\x1b[9999S\x1b[;;;;m',
    );
    expect(screen.lines.every((line) => line.length === 10)).toBe(true);
    expect(screen.lines.length).toBe(4);
  });
});
