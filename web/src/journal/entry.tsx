/** One entry of the journal: how it looks, and all of it in a dialogue. */
import type { JournalEntry } from '../api/types';
import { Act, Facts } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { ObjectLink } from '../parts/object-link';
import { type Look, Status } from '../parts/status';
import { kindName } from '../text/journal';
import { dateTime } from '../text/units';

const LOOKS: Record<JournalEntry['severity'], Look> = {
  info: { tone: 'idle', shape: 'disc', text: 'info' },
  warning: { tone: 'warn', shape: 'triangle', text: 'warning' },
  error: { tone: 'bad', shape: 'cross', text: 'error' },
};

export const severityLook = (severity: JournalEntry['severity']): Look =>
  LOOKS[severity] ?? { tone: 'idle', shape: 'query', text: severity };

export const openEntry = (entry: JournalEntry) =>
  open((close) => (
    <Dialog
      title={kindName(entry.kind)}
      onClose={close}
      foot={
        <Act kind="primary" onClick={close}>
          Close
        </Act>
      }
    >
      <p class="as-written">{entry.text}</p>
      <Facts
        rows={[
          ['Time', dateTime(entry.at_unix_ms)],
          ['Severity', <Status key="severity" look={severityLook(entry.severity)} />],
          ['Reason', entry.why],
          ['User', entry.who],
          ['Objects', <Objects key="objects" entry={entry} />],
        ]}
      />
    </Dialog>
  ));

/** The objects of an entry; `most`: those that there is room for. */
export function Objects({ entry, most }: { entry: JournalEntry; most?: number }) {
  return (
    <>
      {entry.objects.slice(0, most).map((object, at) => (
        <span key={object}>
          {at > 0 && ', '}
          <ObjectLink object={object} />
        </span>
      ))}
    </>
  );
}
