import { describe, expect, it } from 'vitest';
import {
  type Draft,
  importRequest,
  kindOf,
  NEW_DRAFT,
  needsAdmin,
  readNetworks,
  verbOf,
  wrongIn,
} from './import-request';

const DRAFT: Draft = { ...NEW_DRAFT, host: 'a', from: '/srv/import/wiki.ova' };
const WARM: Draft = { ...DRAFT, disks: 'warm', sources: ' nbd://10.0.0.5/erp\n\n/srv/erp.raw\n' };

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
    expect(Object.values(wrongIn(DRAFT))).toEqual([null, null, null, null]);
    const wrong = wrongIn({
      ...WARM,
      from: 'wiki.ova',
      networks: 'lan',
      disksIn: 'disks',
      sources: 'erp',
    });
    expect(Object.values(wrong).filter((one) => one === null)).toEqual([]);
    expect(wrongIn({ ...DRAFT, source: 'text', from: ' ' }).from).not.toBeNull();
    expect(wrongIn({ ...WARM, sources: '' }).sources).not.toBeNull();
  });
  it('copies disks in passes while the guest runs', () => {
    const request = importRequest({ ...WARM, step: 'again', starts: true }, false);
    expect(request.warm).toEqual({
      sources: ['nbd://10.0.0.5/erp', '/srv/erp.raw'],
      step: 'again',
    });
    // The last pass starts the VM by itself.
    expect([request.start, request.take_disks]).toEqual([false, false]);
    expect(importRequest({ ...DRAFT, disks: 'take' }, false).take_disks).toBe(true);
    expect(wrongIn(WARM).sources).toBeNull();
    expect([kindOf(WARM), kindOf(DRAFT)]).toEqual(['warm-import', 'import']);
    expect(verbOf({ ...WARM, step: 'cut-over' })).toBe('Cut over');
  });
  it('needs an admin for libvirt and for servers', () => {
    expect(needsAdmin(WARM)).toBe(true);
    expect(needsAdmin({ ...WARM, sources: '/srv/erp.raw' })).toBe(false);
    expect(needsAdmin({ ...WARM, disks: 'copy' })).toBe(false);
    expect(needsAdmin({ ...DRAFT, source: 'libvirt' })).toBe(true);
  });
});
