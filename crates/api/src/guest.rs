//! What a guest's agent reports, the freeze of a guest's file systems, and the links of its NICs.

use godwit_qemu::NicLink;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest freeze that a request may ask for, in milliseconds.
pub const MOST_FREEZE_MS: u64 = 600_000;
/// Time after which a frozen guest is thawed if the request names none, in milliseconds.
pub const DEFAULT_FREEZE_MS: u64 = 60_000;

/// Response of `GET /v1/vms/{name}/guest`: what the agent in the guest reports. The guest is not
/// trusted: texts are cleaned and cut, and may be lies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "answers": true, "agent_version": "7.2.22", "host_name": "web",
    "os": "Debian GNU/Linux 12 (bookworm)", "kernel": "6.1.0-28-amd64",
    "interfaces": [{ "name": "enp0s3", "mac": "52:54:00:12:34:56",
        "addresses": ["10.64.0.7/24", "fd00:64::7/64"] }]
}))]
pub struct GuestInfo {
    /// Whether the agent in the guest answers.
    pub answers: bool,
    /// Reason why there is no answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Version of the agent in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Host name of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    /// Operating system of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Version of its kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Network interfaces, without the loopback.
    #[serde(default)]
    pub interfaces: Vec<GuestNic>,
}

/// A network interface as the guest reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestNic {
    /// Name of the interface in the guest.
    pub name: String,
    /// Hardware address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Addresses with the lengths of their prefixes.
    pub addresses: Vec<String>,
}

/// Request of `POST /v1/vms/{name}/freeze`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "for_ms": 30_000 }))]
pub struct FreezeVm {
    /// Time after which the guest is thawed automatically, in milliseconds; absent: one minute.
    #[schema(minimum = 1, maximum = 600_000)]
    pub for_ms: Option<u64>,
}

/// Request of `PUT /v1/vms/{name}/link`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "nic": 0, "link": "down" }))]
pub struct SetNicLink {
    /// Position of the NIC in the specification, from 0.
    #[schema(maximum = 255)]
    pub nic: u8,
    /// State that its link gets.
    pub link: NicLink,
}
