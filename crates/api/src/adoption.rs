//! Adoption of guests that run under another program's QEMU.

use std::fmt;

use godwit_qemu::Uuid;
use godwit_types::{Fault, Phase};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Place of a guest that another program runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ForeignPlace {
    /// A domain of the host's libvirt, by its name.
    Libvirt(String),
    /// A QEMU, by the absolute path of its QMP socket; Proxmox VE has one for each VM.
    Qmp(String),
}

impl fmt::Display for ForeignPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ForeignPlace::Libvirt(name) => write!(f, "libvirt's domain \"{name}\""),
            ForeignPlace::Qmp(path) => write!(f, "the QEMU at {path}"),
        }
    }
}

/// Request of `POST /v1/adoptions` and `POST /v1/adoptions/checks`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "from": { "libvirt": "web" } }))]
pub struct AdoptGuest {
    /// The guest.
    pub from: ForeignPlace,
    /// Name of the VM at Godwit. Default: the one that the guest has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Remove the definition of libvirt's domain afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub undefine: bool,
    /// Host that the guest goes to. Default: the host that it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// A guest of this host that another program runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "from": { "libvirt": "web" }, "name": "web", "state": "running", "pid": 4711,
    "memory_bytes": 1_073_741_824_u64, "vcpus": 2, "findings": []
}))]
pub struct ForeignGuest {
    pub from: ForeignPlace,
    /// Its name there.
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub uuid: Option<Uuid>,
    /// Its state in the words of that program.
    pub state: String,
    /// Process of its QEMU, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// What prevents its adoption; empty: nothing that is known without asking its QEMU.
    pub findings: Vec<Fault>,
}

/// What became of an adoption.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AdoptionState {
    /// The guest runs under the other program, or is being handed over.
    Running,
    /// Godwit has the guest.
    Completed,
    /// The guest runs on under the other program.
    Failed,
    /// The guest runs on under the other program, because the adoption was cancelled.
    Cancelled,
}

impl AdoptionState {
    #[must_use]
    pub fn is_over(self) -> bool {
        self != AdoptionState::Running
    }
}

/// An adoption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "adoption-1", "from": { "libvirt": "web" }, "vm": "web", "state": "completed",
    "phase": "report", "remaining_bytes": 0, "total_bytes": 1_073_741_824_u64,
    "elapsed_ms": 2100.0, "pause_ms": 21.4, "notes": [], "findings": []
}))]
pub struct Adoption {
    pub id: String,
    pub from: ForeignPlace,
    /// Name of the VM at Godwit.
    pub vm: String,
    pub state: AdoptionState,
    pub phase: Phase,
    /// Guest memory that is still to be sent.
    pub remaining_bytes: u64,
    pub total_bytes: u64,
    /// Time since the request.
    pub elapsed_ms: f64,
    /// Time for which the guest's vCPUs stood still, as the agent saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// What was done beside it, and what is left to do.
    pub notes: Vec<String>,
    /// What prevented it.
    pub findings: Vec<Fault>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}
