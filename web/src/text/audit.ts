/** Requests of the audit log as phrases. */

/** Method, path below `/api/v1` and phrase; `*` is one segment of the path, and `$` its text. */
const ACTIONS: [string, string, string][] = [
  ['POST', 'vms', 'Create VM'],
  ['DELETE', 'vms/*', 'Delete VM $'],
  ['POST', 'vms/*/binding', 'Bind VM $ to a host'],
  ['POST', 'vms/*/clone', 'Clone VM $'],
  ['GET', 'vms/*/console', 'Open console of VM $'],
  ['POST', 'vms/*/export', 'Export VM $'],
  ['POST', 'vms/*/freeze', 'Freeze VM $'],
  ['PUT', 'vms/*/link', 'Set link of a NIC of VM $'],
  ['POST', 'vms/*/moves', 'Move VM $'],
  ['GET', 'vms/*/preflight', 'Predict move of VM $'],
  ['PATCH', 'vms/*', 'Change VM $'],
  ['POST', 'vms/*/rename', 'Rename VM $'],
  ['POST', 'vms/*/drives', 'Change disks of VM $'],
  ['POST', 'vms/*/drives/move', 'Move disk of VM $'],
  ['POST', 'vms/*/nics', 'Change NICs of VM $'],
  ['POST', 'vms/*/reset', 'Reset VM $'],
  ['POST', 'vms/*/restart', 'Restart VM $'],
  ['GET', 'vms/*/screen', 'Open screen of VM $'],
  ['POST', 'vms/*/snapshots', 'Take snapshot of VM $'],
  ['DELETE', 'vms/*/snapshots/*', 'Delete snapshot of VM $'],
  ['POST', 'vms/*/snapshots/*/revert', 'Revert VM $ to a snapshot'],
  ['POST', 'vms/*/start', 'Start VM $'],
  ['POST', 'vms/*/stop', 'Stop VM $'],
  ['POST', 'vms/*/suspend', 'Suspend VM $'],
  ['PUT', 'vms/*/template', 'Make VM $ a template or an ordinary VM'],
  ['POST', 'vms/*/thaw', 'Thaw VM $'],
  ['POST', 'hosts', 'Add host'],
  ['PATCH', 'hosts/*', 'Change host $'],
  ['DELETE', 'hosts/*', 'Remove host $'],
  ['POST', 'hosts/*/adoptions', 'Adopt guest on host $'],
  ['POST', 'hosts/*/adoptions/checks', 'Check adoption on host $'],
  ['DELETE', 'hosts/*/adoptions/*', 'Cancel adoption on host $'],
  ['POST', 'hosts/*/disks', 'Create disk on host $'],
  ['DELETE', 'hosts/*/disks', 'Delete disk on host $'],
  ['PUT', 'hosts/*/disks/kept', 'Keep disk on host $'],
  ['DELETE', 'hosts/*/disks/kept', 'Remove kept disk on host $'],
  ['POST', 'hosts/*/disks/resize', 'Resize disk on host $'],
  ['POST', 'hosts/*/imports', 'Import VM on host $'],
  ['DELETE', 'hosts/*/jobs/*', 'Cancel import, export or move of a disk on host $'],
  ['POST', 'hosts/*/drain', 'Drain host $'],
  ['PATCH', 'datastores/*', 'Change datastore $'],
  ['POST', 'datastores/*/drain', 'Drain datastore $'],
  ['DELETE', 'datastore-drains/*', 'Cancel drain $'],
  ['POST', 'datastore-drains/*/undo', 'Undo drain $'],
  ['DELETE', 'drains/*', 'Cancel drain $'],
  ['POST', 'drains/*/undo', 'Undo drain $'],
  ['DELETE', 'moves/*', 'Cancel move $'],
  ['POST', 'join', 'Join the cluster'],
  ['POST', 'join-tokens', 'Create join token'],
  ['DELETE', 'join-tokens/*', 'Revoke join token $'],
  ['PUT', 'cpu-baseline', 'Set CPU baseline'],
  ['DELETE', 'cpu-baseline', 'Remove CPU baseline'],
  ['PATCH', 'limits', 'Change limits'],
  ['PUT', 'revocations/*', 'Revoke certificate $'],
  ['PUT', 'ha', 'Change the high availability'],
  ['POST', 'ha/fencing/test', 'Test the fencing devices'],
  ['POST', 'ha/hosts/*/confirm-off', 'Confirm that host $ is off'],
  ['POST', 'alarms/test', 'Test the receivers of alarms'],
  ['POST', 'alarms/*/acknowledge', 'Acknowledge alarm $'],
  ['POST', 'rules', 'Create rule'],
  ['DELETE', 'rules/*', 'Delete rule $'],
  ['POST', 'tokens', 'Create token'],
  ['DELETE', 'tokens/*', 'Revoke token $'],
];

interface Action {
  /** With `$` in place of the object. */
  phrase: string;
  /** Text of the first `*`, decoded. */
  object: string;
}

function actionOf(what: string): Action | null {
  const [method, path = ''] = what.split(' ', 2);
  const parts = (path.split('?')[0] ?? '').replace('/api/v1/', '').split('/');
  for (const [wantedMethod, wantedPath, phrase] of ACTIONS) {
    const wanted = wantedPath.split('/');
    const isSame =
      wanted.length === parts.length &&
      wanted.every((part, at) => part === '*' || part === parts[at]);
    if (method === wantedMethod && isSame)
      return { phrase, object: decoded(parts[wanted.indexOf('*')] ?? '') };
  }
  return null;
}

/**
 * `POST /api/v1/vms` that made `vm web on host a` is `Create VM web on host a`. A request without a
 * phrase stays as it is.
 */
export function actionText(what: string, made?: string | null): string {
  const action = actionOf(what);
  if (!action) return what;
  const { phrase, object } = action;
  if (phrase.includes('$')) return phrase.replace('$', () => object);
  const kind = phrase.replace('Create ', '').toLowerCase();
  return made?.startsWith(`${kind} `) ? phrase + made.slice(kind.length) : phrase;
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
