/** What the agent in a VM's guest reports. The guest is asked once for each view of the page. */
import { get, part } from '../api/http';
import type { GuestInfo, ManagedVm } from '../api/types';
import { Act, Facts, Panel, ProblemBox, Waiting } from '../parts/basics';
import { useLoaded } from '../parts/loaded';
import { clock } from '../text/units';

export function GuestPanel({ vm }: { vm: ManagedVm }) {
  const isAsked = vm.info.spec.guest_agent === true && vm.info.pid != null;
  const { value, problem, reload } = useLoaded(
    isAsked ? `guest ${vm.name} ${vm.host} ${vm.info.pid}` : null,
    (signal) => get<GuestInfo>(`/vms/${part(vm.name)}/guest`, signal),
  );
  if (!vm.info.spec.guest_agent) return null;
  const frozen: [string, string][] = vm.info.frozen_until_ms
    ? [['File systems', `frozen, thawed at ${clock(vm.info.frozen_until_ms)} at the latest`]]
    : [];
  return (
    <Panel
      title="Guest"
      side={
        <Act kind="quiet" onClick={reload} blocked={isAsked ? null : 'The VM does not run.'}>
          Ask again
        </Act>
      }
    >
      {problem && <ProblemBox problem={problem} />}
      {isAsked && !value && !problem && <Waiting lines={3} />}
      <Facts
        rows={[
          ['Agent', isAsked ? value && agentText(value) : 'not asked: the VM does not run'],
          ...frozen,
          ['Host name', value?.host_name],
          ['Operating system', value?.os],
          ['Kernel', value?.kernel],
        ]}
      />
      {value?.interfaces && value.interfaces.length > 0 && (
        <ul class="plain-list">
          {value.interfaces.map((nic) => (
            <li key={nic.name}>
              {nic.name} <code>{nic.mac}</code> {nic.addresses.join(', ')}
            </li>
          ))}
        </ul>
      )}
    </Panel>
  );
}

function agentText(info: GuestInfo): string {
  if (!info.answers) return info.problem ?? 'does not answer';
  return info.agent_version ? `answers (version ${info.agent_version})` : 'answers';
}
