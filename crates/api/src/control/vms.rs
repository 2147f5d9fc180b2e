//! VMs as the manager knows them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use godwit_qemu::{SpecPatch, VmSpec};
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CloneMode, NewDisk, VmInfo, VmState};

/// Desired power state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedPower {
    /// The VM should run.
    On,
    /// The VM should be stopped.
    Off,
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "memory_bytes": 4_294_967_296_u64,
    "vcpus": 2, "is_current": true,
    "move": "v6b0450ea-9781d5ce", "labels": { "tier": "front" }
}))]
pub struct VmSummary {
    pub name: String,
    /// Host that runs the VM, or has it.
    pub host: String,
    /// State of the VM.
    pub state: VmState,
    /// Known cause of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it is unknown which host may run the VM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
    /// Other hosts that run a VM with this name at the same time: two guests, one of which must be
    /// stopped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also_runs_at: Vec<String>,
    /// Other hosts that claim this name without an explanation in the actions of the manager or of
    /// the VM's host. Operations on the VM go to `host`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Whether the host's agent is reachable. If not, this is its last report.
    pub is_current: bool,
    /// ID of the move that runs or waits for this VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<String>,
    /// Labels set by an operator.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Tags in its specification.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub tags: BTreeSet<String>,
}

/// Response of `GET /api/v1/vms/{vm}`: the desired and the actual state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "memory_bytes": 4_294_967_296_u64,
    "vcpus": 2, "is_current": true,
    "labels": { "tier": "front" }, "planned": "on",
    "info": {
        "name": "web", "host": "host-a", "state": "running", "reason": null,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 3, "pid": 1201,
        "memory_bytes": 4_294_967_296_u64,
        "vcpus": 2, "accel": "kvm", "machine": "pc-q35-10.0", "migration": null,
        "addresses": ["10.64.0.7"],
        "spec": { "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2,
        "machine": "pc-q35-10.0", "accel": "kvm" }
    },
    "also_at": []
}))]
pub struct ManagedVm {
    /// Summary, as in the list.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// Desired power state; absent if the VM was discovered on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<PlannedPower>,
    /// Report of the host.
    pub info: VmInfo,
    /// Other hosts that have a VM with that name: a shadow VM or, if `in_doubt`, the other half of
    /// a hand-over.
    #[serde(default)]
    pub also_at: Vec<String>,
}

/// Request of `POST /api/v1/vms`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "spec": {
        "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2,
        "disks": [{ "path": "/srv/web.qcow2", "format": "qcow2" }], "nics": [{ "network": "prod" }]
    },
    "labels": { "tier": "front" }, "start": true
}))]
pub struct CreateManagedVm {
    /// Specification of the VM.
    pub spec: VmSpec,
    /// Host; absent: the manager chooses one.
    #[serde(default)]
    pub host: Option<String>,
    /// Labels for filtering lists of VMs.
    #[serde(default)]
    #[schema(schema_with = super::hosts::labels)]
    pub labels: BTreeMap<String, String>,
    /// Whether to start the VM immediately.
    #[serde(default = "yes")]
    pub start: bool,
    /// Disks whose images are created with the VM. They follow those of the specification.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new_disks: Vec<NewDisk>,
}

fn yes() -> bool {
    true
}

/// A VM that was created, started or stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "reason": null,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 1, "pid": 1201,
        "memory_bytes": 4_294_967_296_u64,
    "vcpus": 2, "accel": "kvm", "machine": "pc-q35-10.0", "migration": null,
    "addresses": ["10.64.0.7"],
    "spec": { "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2,
    "machine": "pc-q35-10.0", "accel": "kvm" },
    "host_reason": "56 GiB of 64 GiB of memory and 30.0 of 32 cores left"
}))]
pub struct HostedVm {
    /// Report of the host.
    #[serde(flatten)]
    pub info: VmInfo,
    /// Reason for the host, if the manager chose it at creation. Of a named host: a warning with
    /// its remedy if little memory is left there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_reason: Option<String>,
    /// Reasons for the datastores of its new disks, in their order, where the manager chose them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_reasons: Vec<String>,
    /// Warning of the admission control for failures of hosts, after a creation with a start, or a
    /// start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl From<VmInfo> for HostedVm {
    fn from(info: VmInfo) -> HostedVm {
        HostedVm { info, host_reason: None, disk_reasons: Vec::new(), warning: None }
    }
}

/// Request of `POST /api/v1/vms/{vm}/start`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "skip_preflight": false }))]
pub struct StartManagedVm {
    /// Start the VM even if its CPU model exceeds the cluster's baseline. It then cannot move to
    /// every host.
    pub skip_preflight: bool,
}

/// Request of `POST /api/v1/vms/{vm}/stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "force": false, "grace_ms": 30_000 }))]
pub struct StopManagedVm {
    /// Terminate the hypervisor immediately, without a shutdown of the guest. Required for a VM in
    /// doubt.
    pub force: bool,
    /// Time the guest may take to shut down after the ACPI power button, in milliseconds, at most
    /// one hour; absent: the agent's default.
    #[schema(maximum = 3_600_000)]
    pub grace_ms: Option<u64>,
}

/// Request of `PATCH /api/v1/vms/{vm}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({
    "spec": { "vcpus": 4, "cmdline": null }, "labels": { "tier": "front", "test": null }
}))]
pub struct ChangeManagedVm {
    /// Keys of the specification with their new values; null restores a key's default (JSON Merge
    /// Patch, RFC 7396). A running VM takes only some of them. `name` and `uuid` cannot be changed.
    pub spec: SpecPatch,
    /// Begin with a new VM's defaults, not with the current specification.
    pub replace: bool,
    /// Labels with their new values; null removes a label.
    #[schema(schema_with = super::hosts::label_changes)]
    pub labels: BTreeMap<String, Option<String>>,
}

/// Response of `PATCH /api/v1/vms/{vm}`: the VM with its changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "memory_bytes": 4_294_967_296_u64,
    "vcpus": 2, "is_current": true, "labels": { "tier": "front" }, "planned": "on",
    "info": {
        "name": "web", "host": "host-a", "state": "running", "reason": null,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 3, "pid": 1201,
        "memory_bytes": 4_294_967_296_u64,
        "vcpus": 2, "accel": "kvm", "machine": "pc-q35-10.0", "migration": null,
        "addresses": ["10.64.0.7"],
        "spec": { "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2,
        "machine": "pc-q35-10.0", "accel": "kvm", "protect": "high" }
    },
    "also_at": [],
    "warning": "with VM \"web\", if host-a fails, web does not fit elsewhere"
}))]
pub struct ChangedVm {
    #[serde(flatten)]
    pub vm: ManagedVm,
    /// Warning of the admission control for failures of hosts, if a running VM became protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Request of `POST /api/v1/vms/{vm}/clone`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "web-1", "mode": "linked", "start": true }))]
pub struct CloneManagedVm {
    /// Name of the clone.
    pub name: String,
    /// Default: linked for a template, otherwise full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<CloneMode>,
    /// Addresses of the clone's NICs, in their order. A NIC for which cloud-init has a static
    /// address needs one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Labels of the clone.
    #[serde(default)]
    #[schema(schema_with = super::hosts::labels)]
    pub labels: BTreeMap<String, String>,
    /// Whether to start the clone.
    #[serde(default)]
    pub start: bool,
}

/// Claim of a host to a VM's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NameClaim {
    /// Name of the host.
    pub host: String,
    /// UUID of the guest; absent if the host reports none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Incarnation of the guest.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    #[schema(value_type = String)]
    pub incarnation: Incarnation,
    /// Epoch in which the host claims ownership; absent if the host has not reported yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// State of the VM on that host; absent if the host has not reported yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<VmState>,
}

/// A VM name that several hosts claim without a move that explains it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "vm": "web",
    "holder": {
        "host": "host-a", "uuid": "5b0e2c84-6a1f-4d17-9a53-0c6f7d1e2b34",
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 3, "state": "running"
    },
    "claims": [{
        "host": "host-x", "uuid": "5b0e2c84-6a1f-4d17-9a53-0c6f7d1e2b34",
        "incarnation": "00000000000000000000000000000001", "epoch": 900, "state": "running"
    }]
}))]
pub struct NameConflict {
    /// Name of the VM.
    pub vm: String,
    /// Host that holds the name: operations on the VM go there.
    pub holder: NameClaim,
    /// Claims of the other hosts.
    pub claims: Vec<NameClaim>,
}

/// Request of `POST /api/v1/vms/{vm}/binding`: an operator's decision about which host holds a
/// name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "host": "host-b" }))]
pub struct BindVm {
    /// Host whose VM has the name from now on.
    pub host: String,
}
