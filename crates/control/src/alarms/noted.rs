//! Journal entries about alarms.

use godwit_api::control::{Alarm, AlarmChange, AlarmSeverity, JournalKind};

use crate::journal::entries::NewEntry;

/// Returns the entry about a change of an alarm.
pub(super) fn of(change: AlarmChange, alarm: &Alarm) -> NewEntry {
    let Alarm { id, object, text, severity, .. } = alarm;
    let level = severity.name();
    let raised = |text: String| match severity {
        AlarmSeverity::Critical => NewEntry::error(JournalKind::AlarmRaised, text),
        AlarmSeverity::Warning => NewEntry::warning(JournalKind::AlarmRaised, text),
    };
    let entry = match change {
        // There are two severities: a changed alarm that is a warning was critical.
        AlarmChange::Changed => match severity {
            AlarmSeverity::Critical => raised(format!("alarm is {level} now: {text}")),
            AlarmSeverity::Warning => {
                let text = format!("alarm is only a {level} now: {text}");
                NewEntry::warning(JournalKind::AlarmLowered, text)
            }
        },
        AlarmChange::Raised | AlarmChange::Test => raised(format!("{level} alarm: {text}")),
        AlarmChange::Acknowledged => {
            let text = format!("alarm was acknowledged: {text}");
            NewEntry::info(JournalKind::AlarmAcknowledged, text)
        }
        AlarmChange::Cleared => {
            NewEntry::info(JournalKind::AlarmCleared, format!("alarm was cleared: {text}"))
        }
    };
    let entry = entry.about_object(object.as_str()).about("alarm", id);
    match alarm.acknowledged.as_ref().filter(|_| change == AlarmChange::Acknowledged) {
        Some(by) => entry.because(Some(by.note.as_str())).by(by.by.as_str()),
        None => entry,
    }
}
