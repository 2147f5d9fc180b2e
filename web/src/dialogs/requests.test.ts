import { describe, expect, it } from 'vitest';
import type { MoveLimits, RuleInfo, VmSpec } from '../api/types';
import { EMPTY, requestOf } from './create-vm';
import { changeOf, draftOf } from './edit-vm';
import { limitsChange, limitsDraft } from './limits';
import { ruleDraft, ruleRequest } from './rule';

describe('a new VM', () => {
  const named = { ...EMPTY, name: 'web', image: '/srv/debian.qcow2' };

  it('gets a disk from its image', () => {
    const request = requestOf({ ...named, newDisk: '20 GiB', copiesImage: true });
    expect(request.new_disks).toEqual([
      { size: '20GiB', base: '/srv/debian.qcow2', full_copy: true },
    ]);
    expect(request.spec).toEqual({
      name: 'web',
      vcpus: 2,
      memory: [{ size: '2GiB', backing: 'shared' }],
    });
  });

  it('gets the user, the keys, the name and the network of its first boot', () => {
    const firstBoot = {
      ...EMPTY.firstBoot,
      cloudInit: true,
      user: 'ana',
      sshKeys: 'ssh-ed25519 AAAA ana\n',
      hostname: 'front',
      ip: 'dhcp',
    };
    expect(requestOf({ ...named, firstBoot }).spec.cloud_init).toEqual({
      user: 'ana',
      ssh_keys: ['ssh-ed25519 AAAA ana'],
      hostname: 'front',
      network: [{}],
    });
  });
});

describe('a change of a VM', () => {
  const spec: VmSpec = {
    name: 'web',
    vcpus: 2,
    memory: [{ size: '1GiB', backing: 'shared' }],
    nics: [{ network: 'lan', mac: '52:54:00:00:00:01' }],
    disks: [{ path: '/srv/web.qcow2', format: 'qcow2', unit: 3 }],
  };
  const before = draftOf(spec, { tier: 'front', old: '' });

  it('is empty where nothing differs', () => {
    expect(changeOf(before, draftOf(spec, { tier: 'front', old: '' }))).toEqual({
      spec: {},
      labels: {},
    });
  });

  it('has whole lists, and null for what is gone', () => {
    const nics = [{ network: 'lan', mac: '52:54:00:00:00:01', model: 'e1000e' as const }];
    const hardware = { ...before.hardware, machine: 'pc', cpuModel: '', pageIn: false };
    expect(changeOf(before, { ...before, nics, hardware, labels: 'tier=back' })).toEqual({
      spec: { machine: 'pc', refuses_page_in: true, nics },
      labels: { tier: 'back', old: null },
    });
  });
});

describe('limits', () => {
  const now: MoveLimits = {
    in_all: 20,
    out_of_host: null,
    into_host: null,
    per_datastore: 128,
    datastores: { '/srv/slow': 2, '/srv/old': 1 },
    hosts: {},
    by_link: [],
  };

  it('send what differs', () => {
    const before = limitsDraft(now);
    expect(limitsChange(before, before)).toEqual({});
    expect(
      limitsChange(before, {
        ...before,
        inAll: '',
        outOfHost: '0',
        datastores: [
          { path: '/srv/slow', moves: '3' },
          { path: '/srv/new', moves: '4' },
        ],
      }),
    ).toEqual({
      in_all: null,
      out_of_host: 0,
      datastores: { '/srv/slow': 3, '/srv/new': 4, '/srv/old': null },
    });
  });
});

describe('a rule', () => {
  const rule: RuleInfo = {
    name: 'db-on',
    kind: 'on',
    strength: 'should',
    vms: ['db1', 'db2'],
    hosts: { names: ['a'], labels: { rack: '1' } },
    state: 'kept',
    broken_by_count: 0,
  };

  it('stays as it is where nothing differs', () => {
    expect(ruleRequest(ruleDraft(rule))).toEqual({
      name: 'db-on',
      kind: 'on',
      strength: 'should',
      vms: ['db1', 'db2'],
      hosts: { names: ['a'], labels: { rack: '1' } },
    });
  });

  it('names hosts only where its kind does', () => {
    const draft = { ...ruleDraft(rule), kind: 'apart' as const };
    expect(ruleRequest(draft).hosts).toBeUndefined();
  });
});
