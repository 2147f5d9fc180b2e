//! Alarms: what needs an operator's attention, and the notices that receivers get about it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What an alarm is about.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmKind {
    /// A host's agent is unreachable, and the host is not in maintenance mode.
    HostAway,
    /// A VM that should run does not run.
    VmDown,
    /// A VM violates a placement rule.
    RuleBroken,
    /// A datastore is almost full.
    DatastoreFilling,
    /// A certificate ends soon, or has ended.
    CertificateEnding,
    /// A move makes no progress.
    MoveStuck,
    /// A host is silent, and an operator must confirm that it is off before its protected VMs
    /// restart.
    HaDoubtful,
    /// A protected VM could not restart on another host.
    HaUnprotected,
    /// Protected VMs would not fit elsewhere if hosts fail.
    HaShortfall,
    /// Restarts of protected VMs, or what they rest on, do not work.
    HaTrouble,
    /// A notice that `POST /api/v1/alarms/test` sent. No alarm of this kind is listed.
    Test,
}

impl AlarmKind {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AlarmKind::HostAway => "host-away",
            AlarmKind::VmDown => "vm-down",
            AlarmKind::RuleBroken => "rule-broken",
            AlarmKind::DatastoreFilling => "datastore-filling",
            AlarmKind::CertificateEnding => "certificate-ending",
            AlarmKind::MoveStuck => "move-stuck",
            AlarmKind::HaDoubtful => "ha-doubtful",
            AlarmKind::HaUnprotected => "ha-unprotected",
            AlarmKind::HaShortfall => "ha-shortfall",
            AlarmKind::HaTrouble => "ha-trouble",
            AlarmKind::Test => "test",
        }
    }
}

/// Urgency of an alarm.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmSeverity {
    /// Nothing is lost yet.
    Warning,
    /// Something does not work, or soon will not.
    Critical,
}

impl AlarmSeverity {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AlarmSeverity::Warning => "warning",
            AlarmSeverity::Critical => "critical",
        }
    }
}

/// An operator's confirmation that somebody attends to an alarm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledgement {
    /// User who acknowledged the alarm.
    pub by: String,
    /// Time of the acknowledgement, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The user's note.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// An alarm. It is listed from the time at which it is raised until it is cleared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "a6b0450ea-7e6c241b", "kind": "datastore-filling", "severity": "warning",
    "object": "datastore:fast", "text": "datastore fast is 87 % full: 13 GiB of 100 GiB are free",
    "remedy": "delete images, or move disks: godwit datastore show fast",
    "raised_unix_ms": 1_795_444_970_253_u64,
    "acknowledged": { "by": "ana", "at_unix_ms": 1_795_445_030_237_u64, "note": "ordered disks" }
}))]
pub struct Alarm {
    /// ID of the alarm. The same trouble gets another ID when it returns.
    pub id: String,
    pub kind: AlarmKind,
    pub severity: AlarmSeverity,
    /// Affected object: `host:NAME`, `vm:NAME`, `rule:NAME`, `datastore:NAME`, `move:ID`,
    /// `cluster:ha` for the admission control, or `manager:NAME` for a certificate of a manager.
    pub object: String,
    /// What is wrong, in one line.
    pub text: String,
    /// What to do about it.
    pub remedy: String,
    /// Time at which it was raised, in milliseconds since 1970.
    pub raised_unix_ms: u64,
    /// Time at which it was cleared. Only events and notices contain it: lists have no cleared
    /// alarms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleared_unix_ms: Option<u64>,
    /// Acknowledgement; absent if nobody has acknowledged the alarm. An alarm that becomes
    /// critical loses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged: Option<Acknowledgement>,
}

/// Request of `POST /api/v1/alarms/{id}/acknowledge`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "note": "ordered disks" }))]
pub struct AcknowledgeAlarm {
    /// Note for the other operators, one line.
    #[schema(max_length = 500)]
    pub note: String,
}

/// What happened to an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmChange {
    Raised,
    /// Its severity changed.
    Changed,
    Acknowledged,
    Cleared,
    /// Nothing: a test of the receiver.
    Test,
}

impl AlarmChange {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AlarmChange::Raised => "raised",
            AlarmChange::Changed => "changed",
            AlarmChange::Acknowledged => "acknowledged",
            AlarmChange::Cleared => "cleared",
            AlarmChange::Test => "test",
        }
    }
}

/// Notice about an alarm: the body of a request to a webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "change": "raised", "manager": "m1", "unix_ms": 1_795_444_970_253_u64,
    "alarm": {
        "id": "a6b0450ea-7e6c241b", "kind": "host-away", "severity": "critical",
        "object": "host:host-a",
        "text": "host host-a is away: its agent has been silent for 30 s; it had 12 VMs",
        "remedy": "check its power and network: docs/operations.md",
        "raised_unix_ms": 1_795_444_970_253_u64
    }
}))]
pub struct AlarmNotice {
    pub change: AlarmChange,
    /// Name of the manager that sends it.
    pub manager: String,
    /// Time of the change, in milliseconds since 1970.
    pub unix_ms: u64,
    pub alarm: Alarm,
}

/// Response of `POST /api/v1/alarms/test`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "receivers": [
        { "name": "pager", "kind": "webhook", "delivered": true },
        { "name": "admins", "kind": "mail", "delivered": false,
        "error": "cannot connect to mail.example:587: connection refused" }
    ]
}))]
pub struct AlarmTest {
    /// Every configured receiver, in the order of the configuration.
    pub receivers: Vec<ReceiverTest>,
}

/// Kind of a receiver of notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiverKind {
    Webhook,
    Mail,
}

impl ReceiverKind {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ReceiverKind::Webhook => "webhook",
            ReceiverKind::Mail => "mail",
        }
    }
}

/// Outcome of a test of one receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReceiverTest {
    /// Name of the receiver in the configuration.
    pub name: String,
    pub kind: ReceiverKind,
    /// Whether the receiver accepted the notice.
    pub delivered: bool,
    /// Reason for which it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
