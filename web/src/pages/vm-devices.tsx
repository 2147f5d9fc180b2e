/** Disks, CD-ROM drives and network interfaces of a VM, with what can be changed at any time. */
import { part, post, put } from '../api/http';
import type { ManagedVm, VmSpec } from '../api/types';
import { openAttachDisk } from '../dialogs/attach-disk';
import { openAttachNic } from '../dialogs/attach-nic';
import { openChangeCd } from '../dialogs/change-cd';
import { confirm } from '../dialogs/confirm';
import { Act, Panel, ProblemBox, useTask } from '../parts/basics';
import { isOff, isStopped } from '../state/cluster';
import { freeSlots, isInSlot, NEEDS_STOP } from '../state/growth';
import { Chain } from './vm-chain';

interface Props {
  vm: ManagedVm;
  changed: () => void;
}

type Disk = NonNullable<VmSpec['disks']>[number];
type Nic = NonNullable<VmSpec['nics']>[number];

const listed = (parts: (string | 0 | false | null | undefined)[]) =>
  parts.filter(Boolean).join(', ');

const diskText = (disk: Disk) =>
  listed([
    disk.format,
    disk.bus,
    disk.readonly && 'read only',
    disk.cache === 'writethrough' && disk.cache,
    disk.iops && `${disk.iops} requests/s`,
    disk.bytes_per_second && `${disk.bytes_per_second}/s`,
    disk.iothread && 'a thread of its own',
    isInSlot(disk) && `slot ${disk.slot}`,
    disk.boot_order && `boots as number ${disk.boot_order}`,
  ]);

/** Why the VM gets or loses no device now; null where it may. */
function underWay(vm: ManagedVm): string | null {
  if (vm.move) return 'The VM has a running or waiting move.';
  const takes = isStopped(vm) || vm.state === 'running' || vm.state === 'paused';
  return takes ? null : `The VM is ${vm.state}.`;
}

/** Why a running VM keeps the device; null where it does not. */
const keeps = (vm: ManagedVm, device: { slot?: number | null }) =>
  isOff(vm) || isInSlot(device) ? null : `${NEEDS_STOP}: the VM has it from its start.`;

export function Disks({ vm, changed }: Props) {
  const disks = vm.info.spec.disks ?? [];
  const isTemplate = vm.state === 'template';
  return (
    <Panel
      title="Disks"
      side={
        isTemplate ? null : (
          <Act
            kind="quiet"
            needs="operator"
            blocked={underWay(vm)}
            onClick={() => openAttachDisk(vm, changed)}
          >
            Attach disk
          </Act>
        )
      }
    >
      {disks.length > 0 ? (
        <ul class="plain-list device-list">
          {disks.map((disk) => (
            <li key={disk.path}>
              <div>
                <code>{disk.path}</code> {diskText(disk)}
                {vm.is_current && (
                  <Chain host={vm.host} image={disk.path} vm={vm.name} version={vm.state} />
                )}
              </div>
              {!isTemplate && (
                <Act
                  kind="quiet"
                  needs="operator"
                  blocked={underWay(vm) ?? (disk.bus === 'scsi' ? null : keeps(vm, disk))}
                  name={`Detach disk ${disk.path}`}
                  onClick={() => askDetach(vm, disk.path, changed)}
                >
                  Detach
                </Act>
              )}
            </li>
          ))}
        </ul>
      ) : (
        <p class="empty">No disks.</p>
      )}
    </Panel>
  );
}

function askDetach(vm: ManagedVm, path: string, changed: () => void): void {
  confirm({
    title: `Detach disk of ${vm.name}`,
    text: (
      <>
        The VM loses <code>{path}</code>. The image is kept. A running guest must have unmounted it.
      </>
    ),
    verb: 'Detach',
    run: async () => {
      await post(`/vms/${part(vm.name)}/drives`, { action: 'detach', path });
      changed();
    },
  });
}

export function Cdroms({ vm, changed }: Props) {
  const { cdroms } = vm.info.spec;
  if (!cdroms?.length) return null;
  return (
    <Panel title="CD-ROM drives">
      <ul class="plain-list device-list">
        {cdroms.map((drive, at) => (
          <li key={at}>
            <span>
              {drive.image ? <code>{drive.image}</code> : 'empty'}{' '}
              {listed([drive.bus, drive.boot_order && `boots as number ${drive.boot_order}`])}
            </span>
            {vm.state !== 'template' && (
              <Act
                kind="quiet"
                needs="operator"
                name={`Change CD of drive ${at}`}
                onClick={() => openChangeCd(vm.name, at, drive.image ?? null, changed)}
              >
                Change
              </Act>
            )}
          </li>
        ))}
      </ul>
    </Panel>
  );
}

/** What differs from a new interface. */
const nicText = ({ address, model, queues, mtu, link, ...nic }: Nic) =>
  listed([
    address,
    nic.vlan && `VLAN ${nic.vlan}`,
    nic.trunk?.length && `trunk ${nic.trunk.join(' ')}`,
    nic.filter && `filter ${nic.filter}`,
    isInSlot(nic) && `slot ${nic.slot}`,
    nic.boot_order && `boots as number ${nic.boot_order}`,
    model === 'e1000e' && model,
    queues && `${queues} queues`,
    mtu && `MTU ${mtu}`,
    link === 'down' && 'link down',
  ]);

export function Nics({ vm, changed }: Props) {
  const task = useTask();
  const { spec } = vm.info;
  const nics = spec.nics ?? [];
  const isTemplate = vm.state === 'template';
  const full =
    isOff(vm) || freeSlots(spec) > 0 ? null : `${NEEDS_STOP}: the VM has no free slot, see Edit.`;
  return (
    <Panel
      title="Network interfaces"
      side={
        isTemplate ? null : (
          <Act
            kind="quiet"
            needs="operator"
            blocked={underWay(vm) ?? full}
            onClick={() => openAttachNic(vm, changed)}
          >
            Attach interface
          </Act>
        )
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {nics.length > 0 ? (
        <ul class="plain-list device-list">
          {nics.map((nic, at) => (
            <li key={nic.mac ?? at}>
              <span>
                {nic.network} <code>{nic.mac}</code> {nicText(nic)}
              </span>
              {!isTemplate && (
                <span class="row-actions">
                  <SetLink vm={vm} at={at} nic={nic} task={task} changed={changed} />
                  <Act
                    kind="quiet"
                    needs="operator"
                    blocked={underWay(vm) ?? keeps(vm, nic)}
                    name={`Detach interface ${at}`}
                    onClick={() => askDetachNic(vm, nic, changed)}
                  >
                    Detach
                  </Act>
                </span>
              )}
            </li>
          ))}
        </ul>
      ) : (
        <p class="empty">No network interfaces.</p>
      )}
    </Panel>
  );
}

function SetLink(props: Props & { at: number; nic: Nic; task: ReturnType<typeof useTask> }) {
  const { vm, at, nic, task, changed } = props;
  const link = nic.link === 'down' ? 'up' : 'down';
  return (
    <Act
      kind="quiet"
      needs="operator"
      busy={task.busy}
      blocked={isOff(vm) ? 'The VM does not run: use Edit.' : null}
      name={`Set link ${link} of interface ${at}`}
      onClick={() =>
        task.run(async () => {
          await put(`/vms/${part(vm.name)}/link`, { nic: at, link });
          changed();
        })
      }
    >
      {`Set link ${link}`}
    </Act>
  );
}

function askDetachNic(vm: ManagedVm, nic: Nic, changed: () => void): void {
  confirm({
    title: `Detach interface of ${vm.name}`,
    text: (
      <>
        The VM loses the interface <code>{nic.mac}</code> in network {nic.network}. Connections over
        it break. A running guest has to release it within 15 s.
      </>
    ),
    verb: 'Detach',
    run: async () => {
      await post(`/vms/${part(vm.name)}/nics`, { action: 'detach', mac: nic.mac });
      changed();
    },
  });
}
