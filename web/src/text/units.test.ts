import { describe, expect, it } from 'vitest';
import {
  apart,
  bitsPerSecond,
  bytes,
  countdown,
  counted,
  dateTime,
  duration,
  percent,
} from './units';

describe('figures', () => {
  it('has bytes in the units of the command line', () => {
    expect([17, 2 ** 20, 1.5 * 2 ** 30, 241.5 * 2 ** 30, 2 ** 40].map(bytes)).toEqual([
      '17 B',
      '1 MiB',
      '1.5 GiB',
      '242 GiB',
      '1 TiB',
    ]);
    expect(bytes(undefined)).toBe('–');
  });
  it('has links in bits', () => {
    expect([1e10, 2.5e9, 5e8, 64e3].map(bitsPerSecond)).toEqual([
      '10 Gbit/s',
      '2.5 Gbit/s',
      '500 Mbit/s',
      '64 kbit/s',
    ]);
  });
  it('has times in their two largest units', () => {
    expect([0, 9, 250.4, 2450, 12_340, 125_000, 11_400_000, 187_200_000].map(duration)).toEqual([
      '0 ms',
      '9.0 ms',
      '250 ms',
      '2.45 s',
      '12.3 s',
      '2 min 5 s',
      '3 h 10 min',
      '2 d 4 h',
    ]);
    expect([-5, 1, 59_001, 61_000].map(countdown)).toEqual(['0 s', '1 s', '1 min', '1 min 1 s']);
  });
  it('takes a figure apart', () => {
    expect(apart('9.0 ms')).toEqual(['9.0', 'ms']);
    expect(apart('2 min 5 s')).toEqual(['2 min 5 s', '']);
  });
  it('counts', () => {
    expect([counted(1, 'VM'), counted(1204, 'VM')]).toEqual(['1 VM', '1,204 VMs']);
    expect(percent(0.256)).toBe('26 %');
    expect(dateTime(0)).toBe('–');
  });
});
