//! The journal: what happened in the cluster, and why.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What happened.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum JournalKind {
    /// A VM is new.
    VmCreated,
    /// A VM no longer exists.
    VmDeleted,
    /// A VM runs that did not run before.
    VmStarted,
    /// A VM stopped.
    VmStopped,
    /// A VM was paused, suspended or resumed.
    VmPaused,
    /// A VM ended by itself: its guest panicked, or its hypervisor failed.
    VmCrashed,
    /// A VM was restarted: by its agent after a crash, or elsewhere after its host failed.
    VmRestarted,
    /// It is unknown which host may run a VM, or is known again.
    VmInDoubt,
    /// Hosts claim the name of a VM without an explanation, or no longer do.
    NameConflict,
    /// A move was requested.
    MoveRequested,
    /// A move, or a migration that an agent was asked for, ended successfully.
    MoveDone,
    /// A move, or a migration that an agent was asked for, failed.
    MoveFailed,
    /// A move, or a migration that an agent was asked for, was cancelled.
    MoveCancelled,
    /// A host joined the cluster.
    HostAdded,
    /// A host was removed from the cluster.
    HostRemoved,
    /// A host's agent became reachable.
    HostUp,
    /// A host's agent became unreachable.
    HostAway,
    /// A host reports invalid data, or no longer does.
    HostFaulty,
    /// A host entered maintenance mode or left it.
    HostMaintenance,
    /// A fencing device cut the power of a host, or could not.
    HostFenced,
    /// A term of a host ended: its protected VMs may run elsewhere.
    TermEnded,
    /// A drain of a host began.
    DrainStarted,
    /// A drain of a host ended.
    DrainEnded,
    /// The settings of a datastore changed.
    DatastoreChanged,
    /// A drain of a datastore began.
    DatastoreDrainStarted,
    /// A drain of a datastore ended.
    DatastoreDrainEnded,
    /// A rule was created.
    RuleCreated,
    /// A rule was deleted.
    RuleDeleted,
    /// A setting of the cluster changed: its CPU baseline, or its limits for moves.
    SettingChanged,
    /// Another manager leads.
    LeaderChanged,
    /// An alarm was raised, or became more urgent.
    AlarmRaised,
    /// An alarm became less urgent.
    AlarmLowered,
    /// An alarm was acknowledged.
    AlarmAcknowledged,
    /// An alarm was cleared.
    AlarmCleared,
    /// Entries were left out, because too many came at once.
    LeftOut,
}

impl JournalKind {
    /// All kinds.
    pub const ALL: [JournalKind; 35] = [
        JournalKind::VmCreated,
        JournalKind::VmDeleted,
        JournalKind::VmStarted,
        JournalKind::VmStopped,
        JournalKind::VmPaused,
        JournalKind::VmCrashed,
        JournalKind::VmRestarted,
        JournalKind::VmInDoubt,
        JournalKind::NameConflict,
        JournalKind::MoveRequested,
        JournalKind::MoveDone,
        JournalKind::MoveFailed,
        JournalKind::MoveCancelled,
        JournalKind::HostAdded,
        JournalKind::HostRemoved,
        JournalKind::HostUp,
        JournalKind::HostAway,
        JournalKind::HostFaulty,
        JournalKind::HostMaintenance,
        JournalKind::HostFenced,
        JournalKind::TermEnded,
        JournalKind::DrainStarted,
        JournalKind::DrainEnded,
        JournalKind::DatastoreChanged,
        JournalKind::DatastoreDrainStarted,
        JournalKind::DatastoreDrainEnded,
        JournalKind::RuleCreated,
        JournalKind::RuleDeleted,
        JournalKind::SettingChanged,
        JournalKind::LeaderChanged,
        JournalKind::AlarmRaised,
        JournalKind::AlarmLowered,
        JournalKind::AlarmAcknowledged,
        JournalKind::AlarmCleared,
        JournalKind::LeftOut,
    ];

    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            JournalKind::VmCreated => "vm-created",
            JournalKind::VmDeleted => "vm-deleted",
            JournalKind::VmStarted => "vm-started",
            JournalKind::VmStopped => "vm-stopped",
            JournalKind::VmPaused => "vm-paused",
            JournalKind::VmCrashed => "vm-crashed",
            JournalKind::VmRestarted => "vm-restarted",
            JournalKind::VmInDoubt => "vm-in-doubt",
            JournalKind::NameConflict => "name-conflict",
            JournalKind::MoveRequested => "move-requested",
            JournalKind::MoveDone => "move-done",
            JournalKind::MoveFailed => "move-failed",
            JournalKind::MoveCancelled => "move-cancelled",
            JournalKind::HostAdded => "host-added",
            JournalKind::HostRemoved => "host-removed",
            JournalKind::HostUp => "host-up",
            JournalKind::HostAway => "host-away",
            JournalKind::HostFaulty => "host-faulty",
            JournalKind::HostMaintenance => "host-maintenance",
            JournalKind::HostFenced => "host-fenced",
            JournalKind::TermEnded => "term-ended",
            JournalKind::DrainStarted => "drain-started",
            JournalKind::DrainEnded => "drain-ended",
            JournalKind::DatastoreChanged => "datastore-changed",
            JournalKind::DatastoreDrainStarted => "datastore-drain-started",
            JournalKind::DatastoreDrainEnded => "datastore-drain-ended",
            JournalKind::RuleCreated => "rule-created",
            JournalKind::RuleDeleted => "rule-deleted",
            JournalKind::SettingChanged => "setting-changed",
            JournalKind::LeaderChanged => "leader-changed",
            JournalKind::AlarmRaised => "alarm-raised",
            JournalKind::AlarmLowered => "alarm-lowered",
            JournalKind::AlarmAcknowledged => "alarm-acknowledged",
            JournalKind::AlarmCleared => "alarm-cleared",
            JournalKind::LeftOut => "left-out",
        }
    }
}

/// Urgency of an entry.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum JournalSeverity {
    /// Work as intended.
    Info,
    /// Something needs a look.
    Warning,
    /// Something failed.
    Error,
}

impl JournalSeverity {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            JournalSeverity::Info => "info",
            JournalSeverity::Warning => "warning",
            JournalSeverity::Error => "error",
        }
    }
}

/// An entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "fe5df7a2c9f2-ffffffffffffffbf-ffffffffffffffff",
    "at_unix_ms": 1_795_444_970_253_u64, "kind": "move-done", "severity": "info",
    "objects": ["vm:web", "host:host-a", "host:host-b", "move:v6b0450ea-9781d5ce"],
    "text": "VM web moved from host-a to host-b in 2.4 s: paused for 31 ms, 1.2 GiB sent",
    "why": "drain of host-a", "who": "ana"
}))]
pub struct JournalEntry {
    /// ID of the entry, which is also the cursor behind it. IDs sort newest first.
    pub id: String,
    /// Time, in milliseconds since 1970, by the clock of the manager that wrote the entry.
    pub at_unix_ms: u64,
    pub kind: JournalKind,
    pub severity: JournalSeverity,
    /// Objects of the entry: `vm:NAME`, `host:NAME`, `move:ID`, `drain:ID`, `datastore:NAME`,
    /// `rule:NAME`, `alarm:ID`, `manager:NAME` or `cluster`.
    pub objects: Vec<String>,
    /// What happened, in one line.
    pub text: String,
    /// Reason, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// User who requested it; absent if nobody did or it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
}

/// Filter of the journal, as the parameters of `GET /api/v1/journal`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalFilter {
    /// Object such as `vm:web`.
    pub object: Option<String>,
    pub kind: Option<JournalKind>,
    /// Entries of this severity or a higher one.
    pub severity: Option<JournalSeverity>,
    /// Part of the text, of the reason or of the user.
    pub text: Option<String>,
    /// Entries of this time or later, milliseconds since 1970.
    pub from_unix_ms: Option<u64>,
    /// Entries before this time, milliseconds since 1970.
    pub to_unix_ms: Option<u64>,
}

impl JournalFilter {
    /// Returns the parameters of the request.
    pub(super) fn parameters(&self) -> Vec<(&'static str, String)> {
        let JournalFilter { object, kind, severity, text, from_unix_ms, to_unix_ms } = self;
        let parameters = [
            ("object", object.clone()),
            ("kind", kind.map(|kind| kind.name().to_owned())),
            ("severity", severity.map(|severity| severity.name().to_owned())),
            ("text", text.clone()),
            ("from", from_unix_ms.map(|ms| ms.to_string())),
            ("to", to_unix_ms.map(|ms| ms.to_string())),
        ];
        parameters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_api() {
        for kind in JournalKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        for severity in [JournalSeverity::Info, JournalSeverity::Warning, JournalSeverity::Error] {
            assert_eq!(serde_json::to_value(severity).unwrap(), severity.name());
        }
    }
}
