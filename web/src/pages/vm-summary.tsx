/** State and specification of a VM. */
import type { ComponentChildren } from 'preact';
import type { LastCrash, ManagedVm, VmSpec } from '../api/types';
import { Facts, HostLink, Link, Panel, VmLink } from '../parts/basics';
import { freeSlots } from '../state/growth';
import { FIRMWARE_NAMES } from '../text/firmware';
import { counted, dateTime } from '../text/units';
import { VIDEO_NAMES } from '../text/video';
import { Cdroms, Disks, Nics } from './vm-devices';
import { GuestPanel } from './vm-guest';
import { movesOf } from './vm-moves';

export function VmSummaryView(props: {
  vm: ManagedVm;
  changed: () => void;
  /** The picture of the screen. */
  seen: ComponentChildren;
}) {
  const { vm, changed, seen } = props;
  const { info } = vm;
  const { spec } = info;
  const also: [string, string][] = vm.also_at?.length ? [['Also on', vm.also_at.join(', ')]] : [];
  const description: [string, ComponentChildren][] = spec.description
    ? [
        [
          'Description',
          <span key="description" class="as-written">
            {spec.description}
          </span>,
        ],
      ]
    : [];
  const crash: [string, ComponentChildren][] = info.last_crash
    ? [['Last crash on this host', crashText(info.last_crash)]]
    : [];
  const boot: [string, ComponentChildren][] = [
    ['Kernel', spec.kernel],
    ['Command line', spec.cmdline],
  ];
  return (
    <div class="columns-even">
      {seen}
      <Panel title="State">
        <Facts
          rows={[
            ...description,
            [
              'Should be',
              vm.planned ? (vm.planned === 'on' ? 'running' : 'stopped') : 'not managed here',
            ],
            ['Host', <HostLink key="host" name={vm.host} />],
            ...also,
            ['Addresses', info.addresses?.join(', ') || 'unknown'],
            ['Starts with its host', <Autostart key="autostart" autostart={spec.autostart} />],
            ['After a crash', policyText(spec.on_crash)],
            ['When its host fails', <Protection key="protect" spec={spec} />],
            ...crash,
            ['Snapshots', info.snapshots ?? 0],
            ['Epoch', info.epoch],
            ['Process', info.pid],
          ]}
        />
        <Placement vm={vm.name} host={vm.host} />
      </Panel>
      <GuestPanel vm={vm} />
      <Panel title="Specification">
        <Facts
          rows={[
            ['vCPUs', grown(spec.vcpus ?? vm.vcpus, spec.max_cpus)],
            [
              'Memory',
              grown(
                spec.memory
                  ?.map((block) => `${block.size}${block.backing ? `, ${block.backing}` : ''}`)
                  .join('; '),
                spec.max_memory,
              ),
            ],
            ['Slots', spec.hotplug_slots ? slotsText(spec) : 'none'],
            ['CPU model', spec.cpu_model],
            ['Machine', info.machine ?? spec.machine],
            ['Firmware', FIRMWARE_NAMES[spec.firmware ?? 'bios']],
            ['TPM', spec.tpm ? '2.0' : 'none'],
            ['Serial ports', spec.serial_ports ?? 1],
            ['Screen', VIDEO_NAMES[spec.video ?? 'none']],
            ['Accelerator', info.accel ?? spec.accel],
            ...(spec.kernel ? boot : []),
            ['Page-in', spec.refuses_page_in ? 'not allowed' : 'allowed'],
            ['Random numbers', spec.rng ? 'virtio' : 'none'],
            ['Watchdog', spec.watchdog ?? 'none'],
            ['Reports a panic', spec.panic_device ? 'yes (pvpanic)' : 'no'],
            ['cloud-init', spec.cloud_init ? 'has a disk' : 'none'],
            ['UUID', spec.uuid],
          ]}
        />
      </Panel>
      <Disks vm={vm} changed={changed} />
      <Cdroms vm={vm} changed={changed} />
      <Nics vm={vm} changed={changed} />
    </div>
  );
}

/** What the VM has, and what it may have while it runs. */
const grown = (now: string | number | undefined, most: string | number | null | undefined) =>
  most ? `${now}; up to ${most} while it runs` : now;

const slotsText = (spec: VmSpec) => `${spec.hotplug_slots}, ${freeSlots(spec)} free`;

function Autostart({ autostart }: { autostart: VmSpec['autostart'] }) {
  if (!autostart) return <>no</>;
  const after = autostart.after ?? [];
  return (
    <>
      {autostart.order == null ? 'yes' : `yes, place ${autostart.order}`}
      {after.length > 0 && ', after '}
      {after.map((name, at) => (
        <span key={name}>
          {at > 0 && ', '}
          <VmLink name={name} />
        </span>
      ))}
    </>
  );
}

function Protection({ spec: { protect, protect_by_agents } }: { spec: VmSpec }) {
  if (protect_by_agents) return <>starts elsewhere, by the agents of its hosts</>;
  if (!protect) return <>stays down</>;
  return (
    <>
      <Link to="/ha">starts elsewhere</Link>, priority {protect}
    </>
  );
}

export function policyText(policy: VmSpec['on_crash']): string {
  if (policy === 'always') return 'is restarted every time';
  if (!policy || policy === 'never') return 'stays down';
  return `is restarted, at most ${counted(policy.times, 'time')} within an hour`;
}

const CAUSES: Record<LastCrash['how'], string> = {
  panic: 'the guest panicked',
  watchdog: 'the watchdog ran out',
  'qemu-ended': 'QEMU ended by itself',
};

export function crashText(crash: LastCrash): string {
  const restarts =
    crash.restarts > 0 ? `; ${counted(crash.restarts, 'restart')} within an hour` : '';
  const waits = crash.restarting ? '; waits for its restart' : '';
  return `${dateTime(crash.at_unix_ms)}: ${CAUSES[crash.how] ?? crash.how}${restarts}${waits}`;
}

/** The reason for the VM's host, where a move by the manager gives one. */
function Placement({ vm, host }: { vm: string; host: string }) {
  const last = movesOf(vm).find((move) => move.state === 'done');
  if (!last || last.to !== host) return null;
  return (
    <p class="reason">
      <strong>Placement</strong>{' '}
      {last.to_reason ?? `${last.asked_by} chose ${host} for the last move`}
    </p>
  );
}
