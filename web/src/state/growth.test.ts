import { expect, it } from 'vitest';
import type { VmSpec } from '../api/types';
import { freeSlots, memoryBytes } from './growth';

const block = (size: string) => ({ size, backing: 'shared' as const });

it('counts the memory of all blocks, and the slots that no device has', () => {
  const spec: VmSpec = {
    name: 'web',
    memory: [block('1GiB'), block('512MiB')],
    hotplug_slots: 3,
    nics: [{ network: 'lan' }, { network: 'lan', slot: 0 }],
    disks: [{ path: '/srv/web.qcow2', format: 'qcow2', slot: 1 }],
  };
  expect([memoryBytes(spec), freeSlots(spec)]).toEqual([1.5 * 2 ** 30, 1]);
  expect(freeSlots({ name: 'web' })).toBe(0);
});
