import { describe, expect, it } from 'vitest';
import { firstBootChange, firstBootOf, NO_FIRST_BOOT } from './first-boot';

const spec = {
  name: 'web',
  guest_agent: true,
  cloud_init: {
    user: 'deploy',
    network: [{}, { addresses: ['10.0.0.5/24'], gateways: ['10.0.0.1'], dns: ['10.0.0.2'] }],
    user_data: '(hidden)',
  },
};

describe('first boot', () => {
  it('reads what a specification has', () => {
    const draft = firstBootOf(spec);
    expect(draft.ip).toBe('dhcp\n10.0.0.5/24,gateway=10.0.0.1,dns=10.0.0.2');
    expect(firstBootChange(draft, draft)).toEqual({});
    expect(firstBootChange(NO_FIRST_BOOT, draft)).toEqual({
      guest_agent: true,
      cloud_init: spec.cloud_init,
    });
  });

  it('names each key that is gone', () => {
    const before = firstBootOf(spec);
    const change = firstBootChange(before, { ...before, user: '', hostname: 'front' });
    expect(change.cloud_init).toMatchObject({ user: null, hostname: 'front' });
    expect(firstBootChange(before, { ...before, cloudInit: false })).toEqual({ cloud_init: null });
  });
});
