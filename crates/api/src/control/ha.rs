//! High availability as the manager's API shows it. docs/ha.md explains it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::OwnStanding;

/// What happens to a start that would leave too little free for failures of hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AdmissionPolicy {
    /// It is not checked.
    Off,
    /// It is carried out, and the answer and the journal have a warning.
    #[default]
    Warn,
    /// It is refused.
    Refuse,
}

/// Settings of the cluster. Request of `PUT /api/v1/ha`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "enabled": true, "failures": 1, "admission": "warn" }))]
pub struct HaSettings {
    /// Whether hosts get terms, in which protected VMs run.
    pub enabled: bool,
    /// Number of hosts that may fail at once, for the admission control.
    #[schema(minimum = 1, maximum = 8)]
    pub failures: u32,
    pub admission: AdmissionPolicy,
}

impl Default for HaSettings {
    fn default() -> HaSettings {
        HaSettings { enabled: false, failures: 1, admission: AdmissionPolicy::Warn }
    }
}

/// Response of `GET /api/v1/ha`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "settings": { "enabled": true, "failures": 1, "admission": "warn" },
    "hosts": [{ "host": "host-a", "term": 3, "phase": "watching", "watchdog": true,
        "fencing": true, "datastores": ["fast"], "heard_ms_ago": 420 }],
    "vms": [{ "vm": "web", "host": "host-a", "priority": "high" }],
    "own": [{ "vm": "manager", "uuid": "0a1f3c52-6f0e-4c55-9d27-0d1f2f5a7f11",
        "datastore": "fast", "term": 7, "standing": "held", "host": "host-a",
        "watched_by": ["host-b"] }],
    "shortfall": { "hosts": ["host-a"], "vms": ["web"], "memory_bytes": 4_294_967_296_u64 }
}))]
pub struct HaStatus {
    pub settings: HaSettings,
    /// Hosts, by name; none while HA is off.
    pub hosts: Vec<HaHostStatus>,
    /// Protected VMs, in the order of their restart.
    pub vms: Vec<HaVmStatus>,
    /// VMs that agents restart among themselves (`protect_by_agents`), as the hosts last showed
    /// them, doubtful ones first. HA may be off.
    #[serde(default)]
    pub own: Vec<HaOwnVmStatus>,
    /// Why hosts cannot look for such VMs on a datastore, or not for all of them.
    #[serde(default)]
    pub own_problems: Vec<String>,
    /// Hosts whose failure leaves protected VMs without a place; absent if all fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortfall: Option<HaShortfall>,
}

/// State of a host's newest term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HaPhase {
    /// The host may hold it.
    Watching,
    /// The host is silent; its power is being cut.
    Fencing,
    /// The host is silent, and an operator must confirm that it is off.
    Doubtful,
    /// It has ended.
    Over,
}

/// A host as its judge sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaHostStatus {
    pub host: String,
    /// The newest term; 0 before the first one.
    pub term: u64,
    pub phase: HaPhase,
    /// Whether a watchdog of the kernel or the hardware guards the term.
    pub watchdog: bool,
    /// Whether a fencing device is configured.
    pub fencing: bool,
    /// Heartbeat datastores, by name, or by identity if the name is unknown.
    pub datastores: Vec<String>,
    /// Milliseconds since the last renewal that this manager received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms_ago: Option<u64>,
    /// Whether the host has no term because it is in maintenance: it may be switched off.
    #[serde(default)]
    pub rests: bool,
    /// Why the host's VMs would not restart without an operator, or what is wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A protected VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaVmStatus {
    pub vm: String,
    /// Host that runs it, or ran it last.
    pub host: String,
    /// Priority of its restart.
    pub priority: godwit_qemu::RestartPriority,
    /// Why it cannot restart elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// State of its restart, in words; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<String>,
}

/// A VM that agents restart among themselves, as its hosts show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaOwnVmStatus {
    pub vm: String,
    #[schema(value_type = String)]
    pub uuid: godwit_qemu::Uuid,
    /// Datastore with its disks and terms, by name, or by identity if the name is unknown.
    pub datastore: String,
    /// Its newest term.
    pub term: u64,
    /// How the host that holds its term stands to it, or else another one that lists it.
    pub standing: OwnStanding,
    /// Host that holds its term, or claimed it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Other hosts that list it, the first ones by name: they start it if its host fails.
    #[serde(default)]
    pub watched_by: Vec<String>,
    /// Host at which an operator can confirm that the host of a doubtful VM is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirm_at: Option<String>,
    /// What prevents its protection, or why it does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Hosts whose failure leaves protected VMs without a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaShortfall {
    /// Hosts that fail at once.
    pub hosts: Vec<String>,
    /// VMs that do not fit elsewhere then.
    pub vms: Vec<String>,
    /// Memory of these VMs in bytes.
    pub memory_bytes: u64,
}

/// Request of `POST /api/v1/ha/hosts/{host}/confirm-off`: an operator confirms that a host has no
/// power, so that its protected VMs start elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "term": 3 }))]
pub struct ConfirmOff {
    /// The doubtful term, as `GET /api/v1/ha` shows it.
    pub term: u64,
}

/// Results of a test of all fencing devices, `POST /api/v1/ha/fencing/test`: state of each host's
/// power, or why it is unknown. Nothing is switched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({ "hosts": { "host-a": "on", "host-b": "off" } }))]
pub struct FencingTest {
    pub hosts: BTreeMap<String, String>,
}
