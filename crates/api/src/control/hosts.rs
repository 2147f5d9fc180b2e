//! Hosts as the manager knows them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

use super::limits::named;
use crate::HostInfo;

/// State of a host's agent.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    /// The agent has not reported since this manager became the leader.
    Unknown,
    /// The agent is reachable.
    Up,
    /// The agent has become unreachable.
    Away,
}

impl HostState {
    /// Returns the name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HostState::Unknown => "unknown",
            HostState::Up => "up",
            HostState::Away => "away",
        }
    }
}

/// Returns the schema of an agent address: a scheme, a name or an IP address, and a port.
fn any_address(kind: SchemaType) -> Object {
    const HEX: &str = "[0-9A-Fa-f]{1,4}";
    const PORT: &str =
        "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})";
    // Groups before and after the `::` of an IPv6 address: seven together.
    let cut = (1..7).map(|before| format!("({HEX}:){{1,{before}}}(:{HEX}){{1,{}}}", 7 - before));
    let whole =
        [format!("({HEX}:){{7}}{HEX}"), format!("({HEX}:){{1,7}}:"), format!(":(:{HEX}){{1,7}}")];
    let ip6: Vec<String> = whole.into_iter().chain(cut).collect();
    ObjectBuilder::new()
        .schema_type(kind)
        .max_length(Some(255))
        .pattern(Some(format!(r"^https?://([A-Za-z0-9._-]+|\[({})\]):{PORT}$", ip6.join("|"))))
        .description(Some("Address of the host's agent."))
        .build()
}

/// Returns the schema of labels of a host or a VM, which filters select as `key=value`.
pub(super) fn labels() -> Object {
    labels_with(Type::String.into())
}

/// Returns the schema of changes of labels, where null removes a label.
pub(super) fn label_changes() -> Object {
    labels_with(SchemaType::from_iter([Type::String, Type::Null]))
}

fn labels_with(value: SchemaType) -> Object {
    let value = ObjectBuilder::new().schema_type(value).max_length(Some(253));
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .max_properties(Some(64))
        .property_names(Some(
            ObjectBuilder::new()
                .schema_type(Type::String)
                .min_length(Some(1))
                .max_length(Some(63))
                .pattern(Some(r"^[^\s\x00-\x1f\x7f-\x9f]+$")),
        ))
        .additional_properties(Some(value))
        .description(Some("Labels set by an operator."))
        .build()
}

/// Returns the schema of labels or null.
fn optional_labels() -> Object {
    let mut labels = labels();
    labels.schema_type = SchemaType::from_iter([Type::Object, Type::Null]);
    labels
}

fn address() -> Object {
    any_address(Type::String.into())
}

/// Returns the schema of an agent address or null.
pub(super) fn optional_address() -> Object {
    any_address(SchemaType::from_iter([Type::String, Type::Null]))
}

/// A host in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "host-a", "address": "https://10.0.0.11:7700", "state": "up", "maintenance": false,
    "labels": { "rack": "r1" }, "vms": 12,
    "memory_available_bytes": 206_158_430_208_u64, "memory_committed_bytes": 68_719_476_736_u64,
    "memory_total_bytes": 274_877_906_944_u64, "logical_cores": 32, "load_average_1min": 4.5,
    "moves_out": 1, "moves_in": 0
}))]
pub struct HostSummary {
    pub name: String,
    pub address: String,
    /// State of the host's agent.
    pub state: HostState,
    /// Known reason why the host is unreachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Error in a report of its agent: an invalid value, or more than the manager accepts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Whether the host is in maintenance mode: draining, or drained and accepting no VMs.
    pub maintenance: bool,
    /// Labels set by an operator.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    pub vms: u64,
    /// Guest memory available, in bytes.
    pub memory_available_bytes: u64,
    /// Guest memory committed to VMs, in bytes.
    pub memory_committed_bytes: u64,
    /// Total memory in bytes; 0 until the host has reported.
    #[serde(default)]
    pub memory_total_bytes: u64,
    /// Logical cores; 0 until the host has reported.
    #[serde(default)]
    pub logical_cores: u32,
    /// Load average over the last minute, from the last report.
    #[serde(default)]
    pub load_average_1min: f64,
    /// Outgoing moves that run now.
    pub moves_out: u64,
    /// Incoming moves that run now.
    pub moves_in: u64,
    /// Features of the cluster's CPU baseline that the host is known to lack. No VM is moved to it.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks_of_baseline: BTreeSet<String>,
}

/// Response of `GET /api/v1/hosts/{host}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "host-a", "address": "https://10.0.0.11:7700", "state": "away",
    "reason": "it has been silent for 10 s", "maintenance": false,
    "labels": { "rack": "r1" }, "vms": 12, "memory_available_bytes": 206_158_430_208_u64,
    "memory_committed_bytes": 68_719_476_736_u64,
    "moves_out": 0, "moves_in": 0, "link_bits_per_s": 25_000_000_000_u64, "most_moves": 4,
    "info": null,
    "heard_unix_ms": 1_795_444_970_339_u64
}))]
pub struct ManagedHost {
    /// Summary, as in the list.
    #[serde(flatten)]
    pub summary: HostSummary,
    /// Configured speed of the host's link, in bits per second; absent: unknown, and two concurrent
    /// moves are assumed to be safe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bits_per_s: Option<u64>,
    /// Configured limit of concurrent moves out of the host and into it; absent: determined by the
    /// link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_moves: Option<u32>,
    /// Last report of the agent; absent if there is none yet.
    pub info: Option<HostInfo>,
    /// Time of the last report, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_unix_ms: Option<u64>,
    /// Reports of the agent refused since this manager started; `fault` gives the reason for the
    /// last one.
    #[serde(default)]
    pub refused_reports: u64,
}

/// Request of `POST /api/v1/hosts`: adds a host whose agent already has a certificate of the
/// cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "host-a", "address": "https://10.0.0.11:7700" }))]
pub struct AddHost {
    /// Name of the host, as in its certificate.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// Address of the host's agent.
    #[schema(schema_with = address)]
    pub address: String,
    /// Labels that rules can refer to.
    #[serde(default)]
    #[schema(schema_with = labels)]
    pub labels: BTreeMap<String, String>,
    /// Speed of the host's link, in bits per second.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub link_bits_per_s: Option<u64>,
    /// Limit of concurrent moves out of the host and into it.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    pub most_moves: Option<u32>,
}

/// Request of `PATCH /api/v1/hosts/{host}`. An absent field stays unchanged. Null resets
/// `link_bits_per_s` and `most_moves`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "labels": { "rack": "r2" }, "maintenance": true }))]
pub struct UpdateHost {
    /// Address of the host's agent.
    #[schema(schema_with = optional_address)]
    pub address: Option<String>,
    /// New set of labels, which replaces the old one.
    #[schema(schema_with = optional_labels)]
    pub labels: Option<BTreeMap<String, String>>,
    /// Speed of the host's link, in bits per second.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub link_bits_per_s: Option<Option<u64>>,
    /// Limit of concurrent moves out of the host and into it.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 1000)]
    pub most_moves: Option<Option<u32>>,
    /// Whether the host is in maintenance mode and accepts no VMs.
    pub maintenance: Option<bool>,
}
