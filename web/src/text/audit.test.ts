import { describe, expect, it } from 'vitest';
import { actionText } from './audit';

describe('an audit entry', () => {
  it('names the action and its object', () => {
    expect(actionText('POST /api/v1/vms', 'vm web on host a')).toBe('Create VM web on host a');
    expect(actionText('POST /api/v1/vms')).toBe('Create VM');
    expect(actionText('POST /api/v1/join-tokens', 'join token 7 for host b')).toBe(
      'Create join token 7 for host b',
    );
    expect(actionText('DELETE /api/v1/vms/a%20b?force=true')).toBe('Delete VM a b');
    expect(actionText('POST /api/v1/hosts/$1/drain', 'drain 7')).toBe('Drain host $1');
    expect(actionText('POST /api/v1/ha/hosts/a/confirm-off')).toBe('Confirm that host a is off');
    expect(actionText('PUT /api/v1/ha')).toBe('Change the high availability');
  });
  it('shows an unknown request as it is', () => {
    expect(actionText('POST /api/v1/weather')).toBe('POST /api/v1/weather');
    expect(actionText('500 more requests')).toBe('500 more requests');
  });
});
