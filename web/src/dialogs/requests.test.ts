import { describe, expect, it } from 'vitest';
import type { MoveLimits, RuleInfo, VmSpec, VmSummary } from '../api/types';
import { cloneRequests } from './clone-vm';
import { EMPTY, requestOf } from './create-vm';
import { forceText, stayed } from './delete-vm';
import { changeOf, draftOf } from './edit-vm';
import { limitsChange, limitsDraft } from './limits';
import { disksQuery, disksRequest, NO_DISKS } from './move-disks';
import { ruleDraft, ruleRequest } from './rule';
import { hardwareOf, wrongGrowth, wrongMaxima } from './vm-hardware';
import { wrongNics } from './vm-nics';
import { NO_SETTINGS, wrongSettings } from './vm-settings';

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

describe('clones', () => {
  const draft = { name: 'web', mode: 'linked', labels: 'tier=front', starts: true } as const;

  it('are numbered if there are several, and only one has addresses', () => {
    const common = { mode: 'linked', labels: { tier: 'front' }, start: true };
    expect(cloneRequests({ ...draft, count: '1', addresses: '10.0.0.5 fd00::5' })).toEqual([
      { ...common, name: 'web', addresses: ['10.0.0.5', 'fd00::5'] },
    ]);
    const many = cloneRequests({ ...draft, count: '2', addresses: '10.0.0.5' });
    expect(many.map(({ name, addresses }) => [name, addresses])).toEqual([
      ['web-1', []],
      ['web-2', []],
    ]);
  });
});

describe('a deletion', () => {
  const vm = { name: 'web', state: 'stopped' } as VmSummary;

  it('says what only force ends', () => {
    expect(forceText(vm, 0)).toBeNull();
    expect(forceText({ ...vm, state: 'template' }, 0)).toBeNull();
    expect(forceText({ ...vm, state: 'running' }, 2)).toMatch(/force a stop.*2 snapshots/);
  });

  it('tells which images stay though they were to go', () => {
    const kept = [{ path: '/a', why: 'another VM uses it' }];
    expect(stayed({ deleted: ['/a', '/b'], kept: [] }, { deleted: ['/b'], kept })).toEqual(kept);
    expect(stayed({ deleted: ['/b'], kept }, { deleted: ['/b'], kept })).toEqual([]);
  });
});

describe('the hardware of a VM', () => {
  const block = { size: '1GiB', backing: 'shared' as const };
  const before = hardwareOf({
    name: 'web',
    vcpus: 2,
    max_cpus: 4,
    memory: [block, { ...block, address: 2 ** 32 }],
    max_memory: '4GiB',
  });
  const grown = (changed: Partial<typeof before>) => wrongGrowth(before, { ...before, ...changed });

  it('grows up to its maxima while it runs', () => {
    expect(before.memory).toBe('2GiB');
    expect(grown({ vcpus: '4', memory: '2176MiB' })).toEqual({ vcpus: null, memory: null });
    expect(grown({ vcpus: '5', memory: '5GiB' }).vcpus).toMatch(/Needs a stop.*maximum/);
    expect(grown({ vcpus: '1', memory: '5GiB' }).memory).toMatch(/Needs a stop.*maximum/);
    expect(grown({ vcpus: '1', memory: '1GiB' }).vcpus).toMatch(/keeps its vCPUs/);
    expect(grown({ memory: '1GiB' }).memory).toMatch(/keeps its memory/);
    expect(grown({ memory: '2100MiB' }).memory).toMatch(/128 MiB/);
  });

  it('has maxima that it does not exceed', () => {
    const wrong = (changed: Partial<typeof before>) => wrongMaxima({ ...before, ...changed });
    expect(wrong({})).toBeNull();
    expect(wrong({ maxCpus: '1' })).toMatch(/below the vCPUs/);
    expect(wrong({ maxMemory: '1GiB' })).toMatch(/below the memory/);
    expect(wrong({ slots: '17' })).toMatch(/16 slots/);
    expect(wrong({ serialPorts: '5' })).toMatch(/serial/);
  });

  it('has VLANs that exclude each other', () => {
    const nic = { network: 'lan' };
    expect(wrongNics([{ ...nic, vlan: 10, trunk: [20] }])).toBeNull();
    expect(wrongNics([{ ...nic, trunk: [Number.NaN] }])).toMatch(/4094/);
    expect(wrongNics([{ ...nic, vlan: 20, trunk: [20] }])).toMatch(/also in its trunk/);
    expect(wrongNics([{ ...nic, filter: 'mac-ip', trunk: [20] }])).toMatch(/exclude/);
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

describe('a description, tags and the start with the host', () => {
  const spec: VmSpec = { name: 'web', tags: ['prod'], autostart: { order: 1, delay_ms: 2000 } };
  const before = draftOf(spec);

  it('send what differs, and null for what is gone', () => {
    const settings = { ...before.settings, description: 'The shop', tags: 'prod shop', order: '' };
    expect(changeOf(before, { ...before, settings }).spec).toEqual({
      description: 'The shop',
      tags: ['prod', 'shop'],
      autostart: { order: null, delay_ms: 2000 },
    });
    const after = { ...before.settings, after: 'db, cache' };
    expect(changeOf(before, { ...before, settings: after }).spec).toEqual({
      autostart: { order: 1, delay_ms: 2000, after: ['db', 'cache'] },
    });
    const off = { ...before.settings, tags: '', autostart: false };
    expect(changeOf(before, { ...before, settings: off }).spec).toEqual({
      tags: [],
      autostart: null,
    });
  });
});

describe('the policy after a crash', () => {
  const policies: VmSpec['on_crash'][] = ['never', 'always', { times: 5 }];

  it('is sent only if it changes', () => {
    for (const on_crash of policies) {
      const before = draftOf({ name: 'web', on_crash });
      expect(changeOf(before, before).spec).toEqual({});
      const other = { ...before.settings, onCrash: 'times' as const, restarts: '7' };
      expect(changeOf(before, { ...before, settings: other }).spec).toEqual({
        on_crash: { times: 7 },
      });
    }
    const before = draftOf({ name: 'web', on_crash: { times: 5 } });
    const never = { ...before.settings, onCrash: 'never' as const };
    expect(changeOf(before, { ...before, settings: never }).spec).toEqual({ on_crash: 'never' });
  });

  it('has a number of restarts that agents take', () => {
    const times = (restarts: string) =>
      wrongSettings({ ...NO_SETTINGS, onCrash: 'times', restarts }) === null;
    expect(['1', '100', '0', '101', '', '1.5'].map(times)).toEqual([
      true,
      true,
      false,
      false,
      false,
      false,
    ]);
    expect(wrongSettings({ ...NO_SETTINGS, restarts: 'many' })).toBeNull();
  });
});

describe('the protection against a failure of the host', () => {
  it('is sent only if it changes, and null takes it away', () => {
    const before = draftOf({ name: 'web', protect: 'low' });
    const change = (protect: typeof before.settings.protect) =>
      changeOf(before, { ...before, settings: { ...before.settings, protect } }).spec;
    expect(change('low')).toEqual({});
    expect(change('high')).toEqual({ protect: 'high' });
    expect(change('none')).toEqual({ protect: null });
    const open = draftOf({ name: 'web' });
    const settings = { ...open.settings, protect: 'normal' as const };
    expect(changeOf(open, { ...open, settings }).spec).toEqual({ protect: 'normal' });
  });

  it('is by the manager or by agents, never both', () => {
    const change = (spec: VmSpec, protect: 'none' | 'agents' | 'high') => {
      const before = draftOf(spec);
      return changeOf(before, { ...before, settings: { ...before.settings, protect } }).spec;
    };
    const byManager: VmSpec = { name: 'web', protect: 'low' };
    const byAgents: VmSpec = { name: 'web', protect_by_agents: true };
    expect(change(byManager, 'agents')).toEqual({ protect: null, protect_by_agents: true });
    expect(change(byAgents, 'agents')).toEqual({});
    expect(change(byAgents, 'high')).toEqual({ protect: 'high', protect_by_agents: null });
    expect(change(byAgents, 'none')).toEqual({ protect_by_agents: null });
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

describe('the disks of a move', () => {
  it('stay without a request', () => {
    expect(disksRequest(NO_DISKS)).toEqual({});
    expect(disksQuery(NO_DISKS)).toBe('');
  });

  it('move to the chosen directory', () => {
    const draft = { ...NO_DISKS, areMoved: true, to: '/new ssd', deletesSource: true };
    expect(disksRequest(draft)).toEqual({
      disks: { to: '/new ssd', delete_source: true, flatten: false },
    });
    expect(disksQuery(draft)).toBe('&with_disks=true&flatten_disks=false&disks_to=%2Fnew%20ssd');
    expect(disksRequest({ ...draft, to: '' }).disks).not.toHaveProperty('to');
  });
});
