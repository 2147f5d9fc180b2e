//! Saved form of an alarm.

use godwit_api::control::{Acknowledgement, Alarm, AlarmKind, AlarmSeverity};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

pub(crate) const ALARMS: Table<SavedAlarm> = Table::new();

/// A raised alarm. The record ends when the alarm is cleared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedAlarm {
    kind: AlarmKind,
    severity: AlarmSeverity,
    object: String,
    text: String,
    remedy: String,
    raised_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    acknowledged: Option<SavedAcknowledgement>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedAcknowledgement {
    by: String,
    at_unix_ms: u64,
    note: String,
}

impl Record for SavedAlarm {
    const KIND: &'static str = "alarm";
    const PREFIX: &'static str = "alarms/";
    const VERSION: u32 = 1;
}

impl SavedAlarm {
    pub(crate) fn of(alarm: &Alarm) -> SavedAlarm {
        let saved = |Acknowledgement { by, at_unix_ms, note }: Acknowledgement| {
            SavedAcknowledgement { by, at_unix_ms, note }
        };
        SavedAlarm {
            kind: alarm.kind,
            severity: alarm.severity,
            object: alarm.object.clone(),
            text: alarm.text.clone(),
            remedy: alarm.remedy.clone(),
            raised_unix_ms: alarm.raised_unix_ms,
            acknowledged: alarm.acknowledged.clone().map(saved),
        }
    }

    pub(crate) fn alarm(self, id: String) -> Alarm {
        let read = |SavedAcknowledgement { by, at_unix_ms, note }: SavedAcknowledgement| {
            Acknowledgement { by, at_unix_ms, note }
        };
        Alarm {
            id,
            kind: self.kind,
            severity: self.severity,
            object: self.object,
            text: self.text,
            remedy: self.remedy,
            raised_unix_ms: self.raised_unix_ms,
            cleared_unix_ms: None,
            acknowledged: self.acknowledged.map(read),
        }
    }
}
