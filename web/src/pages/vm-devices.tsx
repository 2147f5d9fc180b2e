/** Disks, CD-ROM drives and network interfaces of a VM, with what can be changed at any time. */
import { part, post, put } from '../api/http';
import type { ManagedVm, VmSpec } from '../api/types';
import { openAttachDisk } from '../dialogs/attach-disk';
import { openChangeCd } from '../dialogs/change-cd';
import { confirm } from '../dialogs/confirm';
import { Act, Panel, ProblemBox, useTask } from '../parts/basics';
import { isOff } from '../state/cluster';

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
    disk.boot_order && `boots as number ${disk.boot_order}`,
  ]);

export function Disks({ vm, changed }: Props) {
  const disks = vm.info.spec.disks ?? [];
  return (
    <Panel
      title="Disks"
      side={
        <Act kind="quiet" needs="operator" onClick={() => openAttachDisk(vm, changed)}>
          Attach disk
        </Act>
      }
    >
      {disks.length > 0 ? (
        <ul class="plain-list device-list">
          {disks.map((disk) => (
            <li key={disk.path}>
              <span>
                <code>{disk.path}</code> {diskText(disk)}
              </span>
              <Act
                kind="quiet"
                needs="operator"
                name={`Detach disk ${disk.path}`}
                onClick={() => askDetach(vm, disk.path, changed)}
              >
                Detach
              </Act>
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
            <Act
              kind="quiet"
              needs="operator"
              name={`Change CD of drive ${at}`}
              onClick={() => openChangeCd(vm.name, at, drive.image ?? null, changed)}
            >
              Change
            </Act>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

/** What differs from a new interface. */
const nicText = ({ model, address, queues, mtu, link }: Nic) =>
  listed([
    address,
    model === 'e1000e' && model,
    queues && `${queues} queues`,
    mtu && `MTU ${mtu}`,
    link === 'down' && 'link down',
  ]);

export function Nics({ vm, changed }: Props) {
  const task = useTask();
  const nics = vm.info.spec.nics ?? [];
  const isRunning = !isOff(vm);
  return (
    <Panel title="Network interfaces">
      {task.problem && <ProblemBox problem={task.problem} />}
      {nics.length > 0 ? (
        <ul class="plain-list device-list">
          {nics.map((nic, at) => {
            const link = nic.link === 'down' ? 'up' : 'down';
            return (
              <li key={at}>
                <span>
                  {nic.network} <code>{nic.mac}</code> {nicText(nic)}
                </span>
                <Act
                  kind="quiet"
                  needs="operator"
                  busy={task.busy}
                  blocked={isRunning ? null : 'The VM does not run: use Edit.'}
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
              </li>
            );
          })}
        </ul>
      ) : (
        <p class="empty">No network interfaces.</p>
      )}
    </Panel>
  );
}
