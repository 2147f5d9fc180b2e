import { describe, expect, it } from 'vitest';
import type { HaHostStatus, HaOwnVmStatus } from '../api/types';
import { powerLook } from './fencing';
import {
  confirmCommand,
  doubtful,
  guardsText,
  phaseLook,
  renewedText,
  shortfallText,
  standingLook,
} from './look';
import { haDraft, haRequest, wrongFailures } from './settings';

const host = (changed: Partial<HaHostStatus>): HaHostStatus => ({
  host: 'a',
  term: 3,
  phase: 'watching',
  watchdog: true,
  fencing: false,
  datastores: [],
  ...changed,
});

describe('a host', () => {
  it('shows its phase once it has a term', () => {
    expect(phaseLook(host({})).text).toBe('watching');
    expect(phaseLook(host({ phase: 'fencing' })).text).toBe('cutting power');
    expect(phaseLook(host({ term: 0, phase: 'over' })).text).toBe('no term');
    expect(phaseLook(host({ phase: 'over', rests: true })).text).toBe('in maintenance');
    const newer = 'napping' as HaHostStatus['phase'];
    expect(phaseLook(host({ phase: newer })).text).toBe('napping');
  });

  it('asks for an operator only if it is doubtful', () => {
    const hosts = [host({}), host({ host: 'b', phase: 'doubtful' }), host({ phase: 'over' })];
    expect(doubtful(hosts).map((one) => one.host)).toEqual(['b']);
  });

  it('says when it renewed its lease and what guards it', () => {
    expect(renewedText(host({}))).toBe('never');
    expect(renewedText(host({ heard_ms_ago: 1400 }))).toBe('2 s ago');
    expect(guardsText(host({ fencing: true }))).toBe('watchdog, fencing device');
    expect(guardsText(host({ watchdog: false }))).toBe('none');
  });
});

describe('a VM that agents protect', () => {
  const own = (changed: Partial<HaOwnVmStatus>): HaOwnVmStatus => ({
    vm: 'manager',
    uuid: '0a1f3c52-6f0e-4c55-9d27-0d1f2f5a7f11',
    datastore: 'fast',
    term: 7,
    standing: 'held',
    host: 'a',
    watched_by: ['b'],
    ...changed,
  });

  it('shows how its hosts stand to it', () => {
    expect(standingLook(own({})).tone).toBe('ok');
    expect(standingLook(own({ standing: 'doubtful' }))).toMatchObject({ tone: 'bad' });
    const newer = 'napping' as HaOwnVmStatus['standing'];
    expect(standingLook(own({ standing: newer })).text).toBe('napping');
  });

  it('comes with the command that ends a doubt', () => {
    expect(confirmCommand(own({}))).toBeNull();
    const doubt = own({ standing: 'doubtful', confirm_at: 'b' });
    expect(confirmCommand(doubt)).toBe('godwit host ha confirm-off b manager --term 7');
  });
});

it('names hosts, memory and VMs of a shortfall', () => {
  const shortfall = { hosts: ['a', 'b'], vms: ['db', 'web'], memory_bytes: 4 * 2 ** 30 };
  expect(shortfallText(shortfall)).toMatch(/failure of a and b, 4\S* GiB .* for db, web\.$/);
});

describe('the settings', () => {
  it('are sent as a whole', () => {
    const draft = haDraft({ enabled: true, failures: 2, admission: 'refuse' });
    expect(haRequest({ ...draft, failures: '3' })).toEqual({
      enabled: true,
      failures: 3,
      admission: 'refuse',
    });
  });

  it('have defaults', () => {
    expect(haDraft({})).toEqual({ enabled: false, failures: '1', admission: 'warn' });
  });

  it('have a number of failures that the manager takes', () => {
    const all = ['1', '8', '0', '9', '', '1.5', 'two'];
    expect(all.filter((text) => wrongFailures(text) === null)).toEqual(['1', '8']);
  });
});

it('does not take an unknown state of power for on or off', () => {
  expect(['on', 'off', 'it does not respond'].map((state) => powerLook(state).text)).toEqual([
    'on',
    'off',
    'unknown',
  ]);
});
