//! Hosts as the manager knows them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

use super::limits::named;
use crate::HostInfo;

/// What the manager knows of a host's agent.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    /// It has not been heard yet since this manager leads.
    Unknown,
    /// It is heard.
    Up,
    /// It was heard, and is not any more.
    Away,
}

impl HostState {
    /// The name that the API uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HostState::Unknown => "unknown",
            HostState::Up => "up",
            HostState::Away => "away",
        }
    }
}

/// What an agent's address looks like: a scheme, a name or an IP address, and a port.
fn any_address(kind: SchemaType) -> Object {
    const HEX: &str = "[0-9A-Fa-f]{1,4}";
    const PORT: &str =
        "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})";
    // Groups before and behind the `::` of an IPv6 address: seven together.
    let cut = (1..7).map(|before| format!("({HEX}:){{1,{before}}}(:{HEX}){{1,{}}}", 7 - before));
    let whole =
        [format!("({HEX}:){{7}}{HEX}"), format!("({HEX}:){{1,7}}:"), format!(":(:{HEX}){{1,7}}")];
    let ip6: Vec<String> = whole.into_iter().chain(cut).collect();
    ObjectBuilder::new()
        .schema_type(kind)
        .max_length(Some(255))
        .pattern(Some(format!(r"^https?://([A-Za-z0-9._-]+|\[({})\]):{PORT}$", ip6.join("|"))))
        .description(Some("Its agent's address."))
        .build()
}

/// What may label a host or a VM: names and what they say, as `key=value` in filters.
pub(super) fn labels() -> Object {
    let value = ObjectBuilder::new().schema_type(Type::String).max_length(Some(253));
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
        .description(Some("What an operator named it by."))
        .build()
}

/// The same, or none.
fn optional_labels() -> Object {
    let mut labels = labels();
    labels.schema_type = SchemaType::from_iter([Type::Object, Type::Null]);
    labels
}

fn address() -> Object {
    any_address(Type::String.into())
}

/// The same, or none.
pub(super) fn optional_address() -> Object {
    any_address(SchemaType::from_iter([Type::String, Type::Null]))
}

/// A host in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "host-a", "address": "https://10.0.0.11:7700", "state": "up", "maintenance": false, "labels": { "rack": "r1" }, "vms": 12,
    "memory_available_bytes": 206_158_430_208_u64, "memory_committed_bytes": 68_719_476_736_u64,
    "memory_total_bytes": 274_877_906_944_u64, "logical_cores": 32, "load_average_1min": 4.5, "moves_out": 1, "moves_in": 0
}))]
pub struct HostSummary {
    pub name: String,
    pub address: String,
    /// Whether its agent is heard.
    pub state: HostState,
    /// Why it is away, as far as is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its agent reported that no agent reports, or that is more than the manager takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// Whether it is being emptied, or empty and to stay so.
    pub maintenance: bool,
    /// What an operator named it by.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    pub vms: u64,
    /// Guest memory that it can still give, bytes.
    pub memory_available_bytes: u64,
    /// Guest memory that it has promised, bytes.
    pub memory_committed_bytes: u64,
    /// Its memory in all, bytes; 0 until it has been heard.
    #[serde(default)]
    pub memory_total_bytes: u64,
    /// Its logical cores; 0 until it has been heard.
    #[serde(default)]
    pub logical_cores: u32,
    /// Its load over the last minute, as its agent told last.
    #[serde(default)]
    pub load_average_1min: f64,
    /// Moves that leave it now.
    pub moves_out: u64,
    /// Moves that arrive there now.
    pub moves_in: u64,
    /// What it lacks of the cluster's CPU baseline, as far as it has told: no VM is moved there.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub lacks_of_baseline: BTreeSet<String>,
}

/// `GET /api/v1/hosts/{host}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "host-a", "address": "https://10.0.0.11:7700", "state": "away", "reason": "it has been silent for 10 s", "maintenance": false,
    "labels": { "rack": "r1" }, "vms": 12, "memory_available_bytes": 206_158_430_208_u64, "memory_committed_bytes": 68_719_476_736_u64,
    "moves_out": 0, "moves_in": 0, "link_bits_per_s": 25_000_000_000_u64, "most_moves": 4, "info": null,
    "heard_unix_ms": 1_795_444_970_339_u64
}))]
pub struct ManagedHost {
    /// As in the list.
    #[serde(flatten)]
    pub summary: HostSummary,
    /// What its link carries, bits per second, as somebody said; none: nobody did, and two moves at a time are taken for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bits_per_s: Option<u64>,
    /// Moves out of it and into it at a time, as somebody said; none: by the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_moves: Option<u32>,
    /// What its agent told last; none: it has not been heard.
    pub info: Option<HostInfo>,
    /// When it was heard last, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_unix_ms: Option<u64>,
    /// Reports of its agent that were refused since this manager began: `fault` says why the last one was.
    #[serde(default)]
    pub refused_reports: u64,
}

/// `POST /api/v1/hosts`: takes a host in whose agent has a certificate of the cluster's authority already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "host-a", "address": "https://10.0.0.11:7700" }))]
pub struct AddHost {
    /// Its name, as in its certificate.
    #[schema(min_length = 1, max_length = 63, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    pub name: String,
    /// Its agent's address.
    #[schema(schema_with = address)]
    pub address: String,
    /// What rules may name it by.
    #[serde(default)]
    #[schema(schema_with = labels)]
    pub labels: BTreeMap<String, String>,
    /// What its link carries, bits per second.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub link_bits_per_s: Option<u64>,
    /// Moves out of it and into it at a time.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    pub most_moves: Option<u32>,
}

/// `PATCH /api/v1/hosts/{host}`: what is absent stays; of link and most moves null takes back what was set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "labels": { "rack": "r2" }, "maintenance": true }))]
pub struct UpdateHost {
    /// Its agent's address.
    #[schema(schema_with = optional_address)]
    pub address: Option<String>,
    /// All of its labels.
    #[schema(schema_with = optional_labels)]
    pub labels: Option<BTreeMap<String, String>>,
    /// What its link carries, bits per second.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 1_000_000_000_000_000_u64)]
    pub link_bits_per_s: Option<Option<u64>>,
    /// Moves out of it and into it at a time.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 1000)]
    pub most_moves: Option<Option<u32>>,
    /// Whether it takes no VMs.
    pub maintenance: Option<bool>,
}
