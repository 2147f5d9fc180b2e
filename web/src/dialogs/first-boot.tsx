/** Fields of a VM's helpers and of its first boot: guest agent, devices, cloud-init. */
import type { VmSpec, Watchdog } from '../api/types';
import { Field, Select, TextArea, Tick } from '../parts/fields';

/** The mark that the API has in place of a secret. As a new value it keeps the secret. */
const HIDDEN = '(hidden)';

export interface FirstBootDraft {
  guestAgent: boolean;
  rng: boolean;
  watchdog: Watchdog | '';
  cloudInit: boolean;
  user: string;
  /** One key a line. */
  sshKeys: string;
  passwordHash: string;
  hostname: string;
  /** The settings of one interface a line. */
  ip: string;
  userData: string;
}

export const NO_FIRST_BOOT: FirstBootDraft = {
  guestAgent: false,
  rng: false,
  watchdog: '',
  cloudInit: false,
  user: '',
  sshKeys: '',
  passwordHash: '',
  hostname: '',
  ip: '',
  userData: '',
};

type CloudInit = NonNullable<VmSpec['cloud_init']>;
type GuestNetwork = NonNullable<CloudInit['network']>[number];

const lines = (text: string) =>
  text
    .split('\n')
    .map((line) => line.trim())
    .filter((line) => line !== '');

function networkText({ addresses, gateways, dns }: GuestNetwork): string {
  if (!addresses?.length && !dns?.length) return 'dhcp';
  return [
    ...(addresses ?? []),
    ...(gateways ?? []).map((ip) => `gateway=${ip}`),
    ...(dns ?? []).map((ip) => `dns=${ip}`),
  ].join(',');
}

/** What is no address here is refused by the host. */
function readNetwork(text: string): GuestNetwork {
  const network = { addresses: [] as string[], gateways: [] as string[], dns: [] as string[] };
  if (text === 'dhcp') return {};
  for (const item of text.split(',').map((part) => part.trim())) {
    if (item.startsWith('gateway=')) network.gateways.push(item.slice('gateway='.length));
    else if (item.startsWith('dns=')) network.dns.push(item.slice('dns='.length));
    else network.addresses.push(item);
  }
  return network;
}

export function firstBootOf(spec: VmSpec): FirstBootDraft {
  const settings = spec.cloud_init;
  return {
    guestAgent: spec.guest_agent ?? false,
    rng: spec.rng ?? false,
    watchdog: spec.watchdog ?? '',
    cloudInit: settings != null,
    user: settings?.user ?? '',
    sshKeys: (settings?.ssh_keys ?? []).join('\n'),
    passwordHash: settings?.password_hash ?? '',
    hostname: settings?.hostname ?? '',
    ip: (settings?.network ?? []).map(networkText).join('\n'),
    userData: settings?.user_data ?? '',
  };
}

function cloudInitOf(draft: FirstBootDraft): CloudInit | null {
  if (!draft.cloudInit) return null;
  const settings: CloudInit = {};
  if (draft.user) settings.user = draft.user;
  if (lines(draft.sshKeys).length > 0) settings.ssh_keys = lines(draft.sshKeys);
  if (draft.passwordHash) settings.password_hash = draft.passwordHash.trim();
  if (draft.hostname) settings.hostname = draft.hostname;
  if (lines(draft.ip).length > 0) settings.network = lines(draft.ip).map(readNetwork);
  if (draft.userData) settings.user_data = draft.userData;
  return settings;
}

/** Keys of `cloud_init` with their new values; null for one that is gone. */
function cloudInitChange(before: FirstBootDraft, now: FirstBootDraft): unknown {
  const [old, next] = [cloudInitOf(before), cloudInitOf(now)];
  if (old === null || next === null) return next;
  const gone = Object.keys(old).filter((key) => !(key in next));
  return { ...Object.fromEntries(gone.map((key) => [key, null])), ...next };
}

/** The keys of a specification that differ, as a merge patch. */
export function firstBootChange(
  before: FirstBootDraft,
  now: FirstBootDraft,
): Record<string, unknown> {
  const spec: Record<string, unknown> = {};
  if (now.guestAgent !== before.guestAgent) spec.guest_agent = now.guestAgent;
  if (now.rng !== before.rng) spec.rng = now.rng;
  if (now.watchdog !== before.watchdog) spec.watchdog = now.watchdog || null;
  if (JSON.stringify(cloudInitOf(now)) !== JSON.stringify(cloudInitOf(before)))
    spec.cloud_init = cloudInitChange(before, now);
  return spec;
}

interface Props {
  draft: FirstBootDraft;
  change: (changed: Partial<FirstBootDraft>) => void;
}

const WATCHDOGS = [
  ['', 'none'],
  ['reset', 'resets the guest'],
  ['poweroff', 'terminates the VM'],
  ['pause', 'pauses the VM'],
  ['none', 'only logs'],
] as const;

export function GuestOptions({ draft, change }: Props) {
  return (
    <details>
      <summary>Guest agent, watchdog</summary>
      <Tick
        text="Guest agent (qemu-guest-agent in the guest)"
        checked={draft.guestAgent}
        onChange={(guestAgent) => change({ guestAgent })}
      />
      <Tick
        text="Source of random numbers (virtio-rng)"
        checked={draft.rng}
        onChange={(rng) => change({ rng })}
      />
      <Select
        label="Watchdog"
        value={draft.watchdog}
        values={WATCHDOGS}
        onChange={(watchdog) => change({ watchdog })}
      />
    </details>
  );
}

/** `isOpen`: shown from the start, for a VM from an image. */
export function FirstBoot({ draft, change, isOpen }: Props & { isOpen?: boolean }) {
  return (
    <details open={isOpen}>
      <summary>First boot (cloud-init)</summary>
      <Tick
        text="Settings for cloud-init in the guest"
        checked={draft.cloudInit}
        onChange={(cloudInit) => change({ cloudInit })}
      />
      {draft.cloudInit && <CloudInitFields draft={draft} change={change} />}
    </details>
  );
}

function CloudInitFields({ draft, change }: Props) {
  return (
    <>
      <div class="form-row">
        <Field
          label="User"
          value={draft.user}
          onInput={(user) => change({ user })}
          hint="Empty: that of the image"
        />
        <Field
          label="Host name"
          value={draft.hostname}
          onInput={(hostname) => change({ hostname })}
          hint="Empty: the VM's name"
        />
      </div>
      <TextArea
        label="SSH public keys"
        hint="One a line"
        value={draft.sshKeys}
        onInput={(sshKeys) => change({ sshKeys })}
      />
      <TextArea
        label="Network of the guest"
        hint="One interface a line: dhcp, or 10.0.0.5/24,gateway=10.0.0.1,dns=10.0.0.1"
        value={draft.ip}
        onInput={(ip) => change({ ip })}
      />
      <details open={draft.passwordHash !== '' || draft.userData !== ''}>
        <summary>Password, user data</summary>
        <Field
          label="Password hash"
          value={draft.passwordHash}
          onInput={(passwordHash) => change({ passwordHash })}
          hint="As “openssl passwd -6” prints it"
        />
        <TextArea
          label="User data"
          hint={
            draft.userData === HIDDEN
              ? 'The user data is not shown; leave this as it is to keep it'
              : 'A #cloud-config or a script, at most 64 KiB'
          }
          value={draft.userData}
          onInput={(userData) => change({ userData })}
        />
      </details>
    </>
  );
}
