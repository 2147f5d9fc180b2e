import { expect, it } from 'vitest';
import type { Adoption } from '../api/types';
import { adoptionOf, adoptions, takeAdoptions } from './adoptions';

const adoption = (id: string, state: Adoption['state'] = 'running'): Adoption => ({
  id,
  from: { libvirt: 'web' },
  vm: 'web',
  state,
  phase: 'pre-copy',
  remaining_bytes: 0,
  total_bytes: 0,
  elapsed_ms: 0,
  notes: [],
  findings: [],
});

it('keeps the adoptions of each host apart, and forgets what a restarted agent forgot', () => {
  takeAdoptions('a', [adoption('adoption-1'), adoption('adoption-2')]);
  takeAdoptions('b', [adoption('adoption-1')]);
  takeAdoptions('a', [adoption('adoption-1', 'completed')]);
  expect(adoptions.size).toBe(2);
  expect(adoptionOf('a', 'adoption-1')?.state).toBe('completed');
  expect(adoptionOf('a', 'adoption-2')).toBeUndefined();
  expect(adoptionOf('b', 'adoption-1')?.state).toBe('running');
});
