import { describe, expect, it } from 'vitest';
import { adoptableText, placeText, programOf, whyNotUndone, wrongSocket } from './adoption';

const finding = (message: string) => ({ code: 'device', message, remedy: 'unplug it' });

describe('an adoption in words', () => {
  it('names the program and the place of a guest', () => {
    expect(programOf({ libvirt: 'web' })).toBe('libvirt');
    expect(placeText({ libvirt: 'web' })).toBe('libvirt\'s domain "web"');
    expect(programOf({ qmp: '/run/web.qmp' })).toBe('its own QEMU');
    expect(placeText({ qmp: '/run/web.qmp' })).toBe('the QEMU at /run/web.qmp');
  });
  it('says what prevents it', () => {
    expect(adoptableText([])).toBe('possible');
    expect(adoptableText([finding('it is paused')])).toBe('it is paused');
    expect(adoptableText([finding('it is paused'), finding('it has a TPM')])).toBe(
      'it is paused (and 1 more)',
    );
  });
  it('can be undone until the hand-over', () => {
    expect(whyNotUndone({ state: 'running', phase: 'pre-copy' })).toBeNull();
    expect(whyNotUndone({ state: 'running', phase: 'switchover' })).toBeNull();
    expect(whyNotUndone({ state: 'running', phase: 'announce' })).toContain('handed over');
    expect(whyNotUndone({ state: 'failed', phase: 'report' })).toContain('ended');
  });
  it('takes an absolute path of a socket', () => {
    expect(wrongSocket('/run/qemu/100.qmp')).toBeNull();
    for (const path of ['', '100.qmp', '/run/qemu/']) expect(wrongSocket(path)).not.toBeNull();
  });
});
