/** Alarms: what is wrong now, what to do about it, and who attends to it. */
import type { Alarm } from '../api/types';
import { Act, Empty, PageHead, sentence } from '../parts/basics';
import { FilterField } from '../parts/filter';
import { ObjectLink } from '../parts/object-link';
import { Mark, Status } from '../parts/status';
import { alarms, openAlarms, ordered } from '../state/alarms';
import { parseFilter, passes } from '../state/filters';
import { route } from '../state/route';
import { counted, dateTime, moment } from '../text/units';
import { openAcknowledge } from './acknowledge';
import { alarmLook } from './look';
import { openTestReceivers } from './receivers';

/** Most alarms in the table; the filter finds the others. */
const MOST_ROWS = 200;

export function AlarmsPage() {
  const all = ordered(alarms.values());
  const terms = parseFilter(route.value.query.get('filter') ?? '');
  const shown = terms.length === 0 ? all : all.filter((one) => passes(terms, fieldsOf(one)));
  const { open } = openAlarms(all);
  return (
    <>
      <PageHead
        title="Alarms"
        side={
          <Act needs="operator" onClick={openTestReceivers}>
            Test receivers
          </Act>
        }
      >
        <span class="muted">
          {counted(all.length, 'alarm')}, {open} not acknowledged. An alarm ends when its cause is
          gone.
        </span>
      </PageHead>
      <FilterField
        label="Filter alarms"
        hint="object, severity:critical, kind:host-away, by:ana"
        shown={shown.length}
        total={all.length}
      />
      {all.length === 0 ? (
        <p class="calm">
          <Mark tone="ok" shape="check" /> No alarms.
        </p>
      ) : (
        <AlarmTable shown={shown} />
      )}
    </>
  );
}

function AlarmTable({ shown }: { shown: Alarm[] }) {
  return (
    <div class="scroll-x panel">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Severity</th>
            <th scope="col">Object</th>
            <th scope="col">Alarm</th>
            <th scope="col">Since</th>
            <th scope="col">Acknowledged</th>
          </tr>
        </thead>
        <tbody>
          {shown.slice(0, MOST_ROWS).map((alarm) => (
            <AlarmRow key={alarm.id} alarm={alarm} />
          ))}
        </tbody>
      </table>
      {shown.length === 0 && <Empty>No alarms match the filter.</Empty>}
      {shown.length > MOST_ROWS && (
        <p class="empty">and {shown.length - MOST_ROWS} more: use the filter</p>
      )}
    </div>
  );
}

function AlarmRow({ alarm }: { alarm: Alarm }) {
  return (
    <tr>
      <td>
        <Status look={alarmLook(alarm)} />
      </td>
      <th scope="row">
        <ObjectLink object={alarm.object} />
      </th>
      <td>
        {sentence(alarm.text)}
        {alarm.remedy && <p class="muted">{sentence(alarm.remedy)}</p>}
      </td>
      <td class="digits">
        <time title={dateTime(alarm.raised_unix_ms)}>{moment(alarm.raised_unix_ms)}</time>
      </td>
      <td>
        <Acknowledged alarm={alarm} />
      </td>
    </tr>
  );
}

function Acknowledged({ alarm }: { alarm: Alarm }) {
  const seen = alarm.acknowledged;
  if (!seen)
    return (
      <Act
        needs="operator"
        name={`Acknowledge the alarm of ${alarm.object}`}
        onClick={() => openAcknowledge(alarm)}
      >
        Acknowledge
      </Act>
    );
  return (
    <>
      by {seen.by}, <time title={dateTime(seen.at_unix_ms)}>{moment(seen.at_unix_ms)}</time>
      {seen.note && <p class="muted as-written">{seen.note}</p>}
    </>
  );
}

const fieldsOf = (alarm: Alarm) => ({
  object: alarm.object.toLowerCase(),
  severity: alarm.severity,
  kind: alarm.kind,
  text: alarm.text.toLowerCase(),
  by: (alarm.acknowledged?.by ?? '').toLowerCase(),
});
