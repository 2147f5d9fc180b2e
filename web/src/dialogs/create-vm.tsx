/** Makes a VM: what it is, where it runs, whether it starts. */
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { all, part, post } from '../api/http';
import type { CreateManagedVm, ManagedNetwork, VmSpec } from '../api/types';
import { useAsked } from '../parts/asked';
import { Act, ProblemBox, useTask } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { useName } from '../parts/id';
import { hosts } from '../state/cluster';
import { go } from '../state/route';
import { readLabels } from './labels';

export const openCreateVm = () => open((close) => <CreateVm close={close} />);

interface DiskDraft {
  path: string;
  format: 'qcow2' | 'raw';
  readonly: boolean;
}

function CreateVm({ close }: { close: () => void }) {
  const [name, setName] = useState('');
  const [vcpus, setVcpus] = useState('2');
  const [memory, setMemory] = useState('2GiB');
  const [cpuModel, setCpuModel] = useState('');
  const [host, setHost] = useState('');
  const [labels, setLabels] = useState('');
  const [starts, setStarts] = useState(true);
  const [disks, setDisks] = useState<DiskDraft[]>([]);
  const [nics, setNics] = useState<string[]>([]);
  const [kernel, setKernel] = useState('');
  const [initrd, setInitrd] = useState('');
  const [cmdline, setCmdline] = useState('');
  const [isTried, setTried] = useState(false);
  const networks = useAsked('networks', (signal) => all<ManagedNetwork>('/networks', signal));
  const task = useTask();
  const wrong = {
    name: /^[A-Za-z0-9][A-Za-z0-9._-]*$/.test(name) ? null : 'Letters, digits, “-”, “_” and “.”',
    vcpus: /^[1-9][0-9]*$/.test(vcpus) ? null : 'A number from 1 on',
    boot: kernel || disks.some((disk) => disk.path !== '') ? null : 'It has nothing to boot: add a disk, or a kernel.',
    memory: /^[0-9]+(\.[0-9]+)? ?([KMGT]i?B?)?$/i.test(memory) ? null : 'A size, such as 512MiB or 4GiB',
  };
  const isWrong = Object.values(wrong).some((why) => why !== null);
  const make = () => {
    setTried(true);
    if (isWrong) return;
    const spec: VmSpec = { name, vcpus: Number(vcpus), memory: [{ size: memory.replace(' ', ''), backing: 'shared' }] };
    if (cpuModel) spec.cpu_model = cpuModel;
    const named = disks.filter((disk) => disk.path !== '');
    if (named.length > 0) spec.disks = named;
    if (nics.length > 0) spec.nics = nics.map((network) => ({ network }));
    if (kernel) spec.kernel = kernel;
    if (initrd) spec.initrd = initrd;
    if (cmdline) spec.cmdline = cmdline;
    const request: CreateManagedVm = { spec, host: host || null, labels: readLabels(labels), start: starts };
    void task.run(async () => {
      await post('/vms', request);
      close();
      go(`/vms/${part(name)}`);
    });
  };
  return (
    <Dialog
      title="Create a VM"
      onClose={close}
      foot={
        <>
          <Act onClick={close} kind="quiet">
            Close
          </Act>
          <Act kind="primary" needs="operator" busy={task.busy} onClick={make}>
            Create VM
          </Act>
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      <form
        class="form"
        onSubmit={(event) => {
          event.preventDefault();
          make();
        }}
      >
        <Field label="Name" wrong={isTried ? wrong.name : null} value={name} onInput={setName} />
        <div class="form-row">
          <Field
            label="vCPUs"
            wrong={isTried ? wrong.vcpus : null}
            value={vcpus}
            onInput={setVcpus}
            inputMode="numeric"
          />
          <Field label="Memory" wrong={isTried ? wrong.memory : null} value={memory} onInput={setMemory} />
        </div>
        <div class="form-row">
          <Field
            label="CPU model"
            value={cpuModel}
            onInput={setCpuModel}
            hint="Empty: the CPU baseline, or the agent's default"
          />
          <label class="field">
            <span>Host</span>
            <select value={host} onChange={(event) => setHost(event.currentTarget.value)}>
              <option value="">the best one</option>
              {hosts.sorted().map((one) => (
                <option key={one.name} value={one.name} disabled={one.state !== 'up' || one.maintenance}>
                  {one.name}
                  {one.maintenance ? ' (maintenance)' : one.state !== 'up' ? ` (${one.state})` : ''}
                </option>
              ))}
            </select>
          </label>
        </div>
        <Many
          label="Disks"
          add="Add a disk"
          onAdd={() => setDisks([...disks, { path: '', format: 'qcow2', readonly: false }])}
        >
          {disks.map((disk, at) => (
            <DiskRow
              key={at}
              disk={disk}
              at={at}
              onChange={(next) => setDisks(disks.map((one, index) => (index === at ? next : one)))}
              onRemove={() => setDisks(disks.filter((_, index) => index !== at))}
            />
          ))}
        </Many>
        <Many label="Networks" add="Add an interface" onAdd={() => setNics([...nics, networks.value?.[0]?.name ?? ''])}>
          {nics.map((nic, at) => (
            <div class="many-row" key={at}>
              <select
                aria-label={`Network of interface ${at + 1}`}
                value={nic}
                onChange={(event) =>
                  setNics(nics.map((one, index) => (index === at ? event.currentTarget.value : one)))
                }
              >
                {networks.value?.map((network) => (
                  <option key={network.name} value={network.name}>
                    {network.name}
                  </option>
                ))}
              </select>
              <Act
                kind="quiet"
                name={`Remove interface ${at + 1}`}
                onClick={() => setNics(nics.filter((_, index) => index !== at))}
              >
                Remove
              </Act>
            </div>
          ))}
        </Many>
        {isTried && wrong.boot && (
          <small class="tone-bad" role="alert">
            {wrong.boot}
          </small>
        )}
        <details>
          <summary>Boot a kernel directly</summary>
          <Field label="Kernel" value={kernel} onInput={setKernel} hint="A path at the host, below its vm_dirs" />
          <Field label="Initial RAM disk" value={initrd} onInput={setInitrd} />
          <Field label="Command line" value={cmdline} onInput={setCmdline} />
        </details>
        <Field label="Labels" value={labels} onInput={setLabels} hint="For rules, such as tier=front rack=1" />
        <label class="tick">
          <input type="checkbox" checked={starts} onChange={(event) => setStarts(event.currentTarget.checked)} />
          <span>Start it at once</span>
        </label>
        <button type="submit" class="unseen" tabIndex={-1} aria-hidden="true">
          Create VM
        </button>
      </form>
    </Dialog>
  );
}

export function Field(props: {
  label: string;
  value: string;
  onInput: (value: string) => void;
  wrong?: string | null;
  hint?: string;
  inputMode?: 'numeric';
}) {
  const id = useName();
  const note = props.wrong ?? props.hint;
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="text"
        value={props.value}
        inputMode={props.inputMode}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={props.wrong ? true : undefined}
        aria-describedby={note ? `${id}-note` : undefined}
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
      {note && (
        <small id={`${id}-note`} class={props.wrong ? 'tone-bad' : 'muted'}>
          {note}
        </small>
      )}
    </div>
  );
}

function Many(props: { label: string; add: string; onAdd: () => void; children: ComponentChildren }) {
  return (
    <fieldset class="many">
      <legend>{props.label}</legend>
      {props.children}
      <Act onClick={props.onAdd}>{props.add}</Act>
    </fieldset>
  );
}

function DiskRow(props: { disk: DiskDraft; at: number; onChange: (disk: DiskDraft) => void; onRemove: () => void }) {
  const { disk, at, onChange } = props;
  return (
    <div class="many-row">
      <input
        type="text"
        class="grow"
        aria-label={`Path of disk ${at + 1}`}
        placeholder="/srv/images/web.qcow2"
        spellcheck={false}
        value={disk.path}
        onInput={(event) => onChange({ ...disk, path: event.currentTarget.value })}
      />
      <select
        aria-label={`Format of disk ${at + 1}`}
        value={disk.format}
        onChange={(event) => onChange({ ...disk, format: event.currentTarget.value === 'raw' ? 'raw' : 'qcow2' })}
      >
        <option value="qcow2">qcow2</option>
        <option value="raw">raw</option>
      </select>
      <label class="tick">
        <input
          type="checkbox"
          checked={disk.readonly}
          onChange={(event) => onChange({ ...disk, readonly: event.currentTarget.checked })}
        />
        <span>read only</span>
      </label>
      <Act kind="quiet" name={`Remove disk ${at + 1}`} onClick={props.onRemove}>
        Remove
      </Act>
    </div>
  );
}
