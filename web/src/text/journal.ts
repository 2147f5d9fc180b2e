/** Kinds of entries of the journal, in words. */
import type { JournalEntry } from '../api/types';

type Kind = JournalEntry['kind'];

/** In the order of the list to choose from. */
export const KIND_NAMES: Record<Kind, string> = {
  'vm-created': 'VM created',
  'vm-deleted': 'VM deleted',
  'vm-started': 'VM started',
  'vm-stopped': 'VM stopped',
  'vm-paused': 'VM paused or resumed',
  'vm-crashed': 'VM crashed',
  'vm-restarted': 'VM restarted',
  'vm-in-doubt': 'VM in doubt',
  'name-conflict': 'Name conflict',
  'move-requested': 'Move requested',
  'move-done': 'Move done',
  'move-failed': 'Move failed',
  'move-cancelled': 'Move cancelled',
  'host-added': 'Host added',
  'host-removed': 'Host removed',
  'host-up': 'Host up',
  'host-away': 'Host away',
  'host-faulty': 'Host faulty',
  'host-maintenance': 'Host maintenance',
  'host-fenced': 'Host fenced',
  'term-ended': 'Term ended',
  'drain-started': 'Drain started',
  'drain-ended': 'Drain ended',
  'datastore-changed': 'Datastore changed',
  'datastore-drain-started': 'Datastore drain started',
  'datastore-drain-ended': 'Datastore drain ended',
  'rule-created': 'Rule created',
  'rule-deleted': 'Rule deleted',
  'setting-changed': 'Setting changed',
  'leader-changed': 'Active manager changed',
  'alarm-raised': 'Alarm raised',
  'alarm-lowered': 'Alarm less urgent',
  'alarm-acknowledged': 'Alarm acknowledged',
  'alarm-cleared': 'Alarm cleared',
  'left-out': 'Entries left out',
};

/** A kind of a newer manager stays as it is. */
export const kindName = (kind: Kind): string => KIND_NAMES[kind] ?? kind;
