/** Network interfaces of a VM in forms. */
import { all } from '../api/http';
import type { ManagedNetwork, VmSpec } from '../api/types';
import { Act } from '../parts/basics';
import {
  changed,
  Field,
  Many,
  Options,
  optional,
  Select,
  WordsField,
  without,
  wrongCount,
} from '../parts/fields';
import { useLoaded } from '../parts/loaded';
import { BootOrder, withOption } from './vm-disks';

export type NicDraft = NonNullable<VmSpec['nics']>[number];

const MODELS = [
  ['virtio', 'virtio'],
  ['e1000e', 'e1000e'],
] as const;
const LINKS = [
  ['up', 'link up'],
  ['down', 'link down'],
] as const;
const FILTERS = [
  ['', 'any address'],
  ['mac', 'its MAC address'],
  ['mac-ip', 'its MAC and IP addresses'],
] as const;
const MOST_VLAN = 4094;
const isVlan = (vlan: number) => vlan >= 1 && vlan <= MOST_VLAN;
const MTU = { least: 576, most: 9216 };
const MOST_QUEUES = 16;

const wrongMac = (mac: string) =>
  /^([0-9a-f]{2}:){5}[0-9a-f]{2}$/i.test(mac) ? null : 'An address such as 52:54:00:12:34:56';

/** The first error of the interfaces; null where there is none. */
export function wrongNics(nics: NicDraft[]): string | null {
  for (const [at, nic] of nics.entries()) {
    const name = `Interface ${at + 1}: `;
    if (!nic.network) return `${name}choose a network.`;
    if (optional(nic.mac ?? '', wrongMac)) return `${name}the MAC address is not complete.`;
    if (nic.mtu != null && (nic.mtu < MTU.least || nic.mtu > MTU.most))
      return `${name}an MTU is ${MTU.least} to ${MTU.most}.`;
    if (nic.queues != null && (nic.queues < 1 || nic.queues > MOST_QUEUES))
      return `${name}1 to ${MOST_QUEUES} queues are possible.`;
    const trunk = nic.trunk ?? [];
    if (![...(nic.vlan == null ? [] : [nic.vlan]), ...trunk].every(isVlan))
      return `${name}a VLAN is 1 to ${MOST_VLAN}.`;
    if (nic.vlan != null && trunk.includes(nic.vlan))
      return `${name}its VLAN is also in its trunk.`;
    if (nic.filter === 'mac-ip' && trunk.length > 0)
      return `${name}a filter of IP addresses and a trunk exclude each other.`;
  }
  return null;
}

/** An option of an interface, or none where the text is empty. */
function withText(nic: NicDraft, key: 'mac' | 'address', text: string): NicDraft {
  const { [key]: _, ...others } = nic;
  return text === '' ? others : { ...others, [key]: text.trim() };
}

function withNumber(nic: NicDraft, key: 'mtu' | 'queues' | 'vlan', text: string): NicDraft {
  const { [key]: _, ...others } = nic;
  return /^[0-9]+$/.test(text) ? { ...others, [key]: Number(text) } : others;
}

/** A list of an interface, or none where it is empty. */
function withList<K extends 'trunk' | 'addresses'>(
  nic: NicDraft,
  key: K,
  list: NonNullable<NicDraft[K]>,
): NicDraft {
  return withOption<NicDraft, K>(nic, key, list.length === 0 ? '' : list);
}

/** Names of the cluster's networks. */
export function useNetworks() {
  const loaded = useLoaded('networks', (signal) => all<ManagedNetwork>('/networks', signal));
  return { networks: loaded.value?.map((network) => network.name) ?? [], problem: loaded.problem };
}

export function Nics(props: { nics: NicDraft[]; change: (nics: NicDraft[]) => void }) {
  const { nics, change } = props;
  const { networks, problem } = useNetworks();
  return (
    <Many
      label="Network interfaces"
      add="Add interface"
      onAdd={() => change([...nics, { network: networks[0] ?? '' }])}
    >
      {nics.map((nic, at) => (
        <div class="many-part" key={at}>
          <NicFields
            nic={nic}
            name={`interface ${at + 1}`}
            networks={networks}
            change={(next) => change(changed(nics, at, next))}
            remove={() => change(without(nics, at))}
          />
          <NicOptions nic={nic} change={(next) => change(changed(nics, at, next))} />
        </div>
      ))}
      {problem && <small class="tone-bad">{problem.detail}</small>}
    </Many>
  );
}

export function NicFields(props: {
  nic: NicDraft;
  name: string;
  networks: string[];
  change: (nic: NicDraft) => void;
  remove?: () => void;
}) {
  const { nic, name, networks, change, remove } = props;
  const known = networks.includes(nic.network) ? networks : [...networks, nic.network];
  return (
    <div class="many-row">
      <Options
        name={`Network of ${name}`}
        value={nic.network}
        values={known.map((network) => [network, network || 'choose a network'] as const)}
        onChange={(network) => change({ ...nic, network })}
      />
      <Options
        name={`Model of ${name}`}
        value={nic.model ?? 'virtio'}
        values={MODELS}
        onChange={(model) => change({ ...nic, model })}
      />
      <Options
        name={`Link of ${name}`}
        value={nic.link ?? 'up'}
        values={LINKS}
        onChange={(link) => change({ ...nic, link })}
      />
      {remove && (
        <Act kind="quiet" name={`Remove ${name}`} onClick={remove}>
          Remove
        </Act>
      )}
    </div>
  );
}

/** Options that most interfaces do not need. The firmware does not boot from one in a slot. */
export function NicOptions(props: {
  nic: NicDraft;
  change: (nic: NicDraft) => void;
  isInSlot?: boolean;
}) {
  const { nic, change } = props;
  const queues = nic.queues == null ? '' : String(nic.queues);
  const mtu = nic.mtu == null ? '' : String(nic.mtu);
  const isVirtio = (nic.model ?? 'virtio') === 'virtio';
  return (
    <details>
      <summary>Addresses, VLANs, filter, MTU</summary>
      <div class="form-row">
        <Field
          label="MAC address"
          value={nic.mac ?? ''}
          wrong={optional(nic.mac ?? '', wrongMac)}
          onInput={(mac) => change(withText(nic, 'mac', mac))}
          hint="Empty: derived from the VM's name"
        />
        <Field
          label="IP address"
          value={nic.address ?? ''}
          onInput={(address) => change(withText(nic, 'address', address))}
          hint="For monitoring only; the guest does not get it"
        />
        <NicLimits nic={nic} change={change} />
        {!props.isInSlot && (
          <BootOrder
            value={nic.boot_order}
            change={(order) => change(withOption(nic, 'boot_order', order))}
          />
        )}
        {isVirtio && (
          <>
            <Field
              label="MTU"
              value={mtu}
              onInput={(text) => change(withNumber(nic, 'mtu', text))}
              inputMode="numeric"
              hint="Empty: up to the guest"
            />
            <Field
              label="Queues"
              value={queues}
              wrong={optional(queues, wrongCount)}
              onInput={(text) => change(withNumber(nic, 'queues', text))}
              inputMode="numeric"
              hint="Empty: 1"
            />
          </>
        )}
      </div>
    </details>
  );
}

/** VLANs of an interface, and the filter of what its guest sends. */
function NicLimits({ nic, change }: { nic: NicDraft; change: (nic: NicDraft) => void }) {
  return (
    <>
      <Field
        label="VLAN"
        value={nic.vlan == null ? '' : String(nic.vlan)}
        onInput={(text) => change(withNumber(nic, 'vlan', text))}
        inputMode="numeric"
        hint="Of untagged frames, 1 to 4094; empty: the bridge's own"
      />
      <WordsField
        label="Trunk"
        words={nic.trunk ?? []}
        onChange={(vlans) => change(withList(nic, 'trunk', vlans.map(Number)))}
        hint="VLANs whose tags the guest sets, for example 10 20"
      />
      <Select
        label="May send from"
        value={nic.filter ?? ''}
        values={FILTERS}
        onChange={(filter) => change(withOption(nic, 'filter', filter))}
      />
      {nic.filter === 'mac-ip' && (
        <WordsField
          label="Further IP addresses"
          words={nic.addresses ?? []}
          onChange={(addresses) => change(withList(nic, 'addresses', addresses))}
          hint="That the filter lets pass, besides the IP address"
        />
      )}
    </>
  );
}
