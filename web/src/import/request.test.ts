import { describe, expect, it } from 'vitest';
import { type Draft, importRequest, readNetworks, wrongIn } from './request';

const DRAFT: Draft = {
  host: 'a',
  source: 'file',
  from: '/srv/import/wiki.ova',
  name: '',
  networks: '',
  disksIn: '',
  takesDisks: false,
  starts: false,
};

describe('an import', () => {
  it('reads a line for each network', () => {
    expect(readNetworks('VM Network = lan\n\nbr=0 = dmz\n')).toEqual({
      'VM Network': 'lan',
      'br=0': 'dmz',
    });
    expect(readNetworks('')).toEqual({});
    for (const wrong of ['lan', '= lan', 'VM Network =']) expect(readNetworks(wrong)).toBeNull();
  });
  it('asks for what is filled in', () => {
    expect(importRequest(DRAFT, true)).toEqual({
      from: { file: '/srv/import/wiki.ova' },
      networks: {},
      take_disks: false,
      start: false,
      dry_run: true,
    });
    const named = importRequest(
      { ...DRAFT, source: 'libvirt', from: 'web ', name: 'shop', disksIn: '/srv' },
      false,
    );
    expect(named.from).toEqual({ libvirt: 'web' });
    expect([named.name, named.disks_in, named.dry_run]).toEqual(['shop', '/srv', false]);
  });
  it('names the error of each field', () => {
    expect(Object.values(wrongIn(DRAFT))).toEqual([null, null, null]);
    const wrong = wrongIn({ ...DRAFT, from: 'wiki.ova', networks: 'lan', disksIn: 'disks' });
    expect(Object.values(wrong).filter((one) => one === null)).toEqual([]);
    expect(wrongIn({ ...DRAFT, source: 'text', from: ' ' }).from).not.toBeNull();
  });
});
