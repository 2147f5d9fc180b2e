//! VMs as the manager knows them.

use std::collections::BTreeMap;

use godwit_qemu::VmSpec;
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{VmInfo, VmState};

/// Whether a VM shall run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedPower {
    /// It shall run.
    On,
    /// It shall not.
    Off,
}

/// A VM in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "memory_bytes": 4_294_967_296_u64, "vcpus": 2, "is_current": true,
    "move": "v6b0450ea-9781d5ce", "labels": { "tier": "front" }
}))]
pub struct VmSummary {
    pub name: String,
    /// The host that runs it, or has it.
    pub host: String,
    /// What it does.
    pub state: VmState,
    /// What is known about how it came into that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it is not known which host may run it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_doubt: bool,
    /// Other hosts where a VM of this name runs at the same time: two guests, one of which is to be ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also_runs_at: Vec<String>,
    /// Other hosts that claim this name, and nothing that the manager or its host did explains it. Operations on the
    /// VM go to `host`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Whether its host's agent was heard lately: else this is what was heard last.
    pub is_current: bool,
    /// The move that has it, or waits for its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub r#move: Option<String>,
    /// What an operator named it by.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// `GET /api/v1/vms/{vm}`: what is planned, and what is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "memory_bytes": 4_294_967_296_u64, "vcpus": 2, "is_current": true,
    "labels": { "tier": "front" }, "planned": "on",
    "info": {
        "name": "web", "host": "host-a", "state": "running", "reason": null,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 3, "pid": 1201, "memory_bytes": 4_294_967_296_u64,
        "vcpus": 2, "accel": "kvm", "machine": "pc-q35-10.0", "migration": null, "addresses": ["10.64.0.7"],
        "spec": { "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2, "machine": "pc-q35-10.0", "accel": "kvm" }
    },
    "also_at": []
}))]
pub struct ManagedVm {
    /// As in the list.
    #[serde(flatten)]
    pub summary: VmSummary,
    /// What somebody asked for; none: it was found on its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<PlannedPower>,
    /// As its host tells it.
    pub info: VmInfo,
    /// Other hosts that have something of that name: a shadow, or, where `in_doubt`, a second half of it.
    #[serde(default)]
    pub also_at: Vec<String>,
}

/// `POST /api/v1/vms`.
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
    /// What to make.
    pub spec: VmSpec,
    /// Where; none: the manager's choice.
    #[serde(default)]
    pub host: Option<String>,
    /// By what VMs are listed.
    #[serde(default)]
    #[schema(schema_with = super::hosts::labels)]
    pub labels: BTreeMap<String, String>,
    /// Whether it is started at once.
    #[serde(default = "yes")]
    pub start: bool,
}

fn yes() -> bool {
    true
}

/// A VM that was made, started or stopped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "web", "host": "host-a", "state": "running", "reason": null,
        "incarnation": "6f1c0a52b7d94e0f8a3c5d7e9b1f2a40", "epoch": 1, "pid": 1201, "memory_bytes": 4_294_967_296_u64,
    "vcpus": 2, "accel": "kvm", "machine": "pc-q35-10.0", "migration": null, "addresses": ["10.64.0.7"],
    "spec": { "name": "web", "memory": [{ "size": "4GiB", "backing": "shared" }], "vcpus": 2, "machine": "pc-q35-10.0", "accel": "kvm" },
    "host_reason": "56 GiB of 64 GiB of memory and 30.0 of 32 cores left"
}))]
pub struct HostedVm {
    /// As its host tells it.
    #[serde(flatten)]
    pub info: VmInfo,
    /// Why that host, where it was made there by the manager's choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_reason: Option<String>,
}

/// `POST /api/v1/vms/{vm}/start`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "skip_preflight": false }))]
pub struct StartManagedVm {
    /// It is started although its CPU model is more than the cluster's baseline: it can't move to every host then.
    pub skip_preflight: bool,
}

/// `POST /api/v1/vms/{vm}/stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "force": false, "grace_ms": 30_000 }))]
pub struct StopManagedVm {
    /// The guest is not asked: its hypervisor is ended at once. What a VM in doubt needs.
    pub force: bool,
    /// How long the guest may take after the power button, milliseconds, an hour at most; none: the agent's default.
    #[schema(maximum = 3_600_000)]
    pub grace_ms: Option<u64>,
}

/// What a host reports of a VM's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NameClaim {
    /// The host.
    pub host: String,
    /// The guest's uuid; none: the host reports none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The guest's incarnation.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    #[schema(value_type = String)]
    pub incarnation: Incarnation,
    /// The epoch in which the host says it owns it; none: it has not been heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// What the VM does there; none: the host has not been heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<VmState>,
}

/// A VM's name that other hosts than its own claim, without a move that explains it.
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
    /// The name.
    pub vm: String,
    /// The host that holds it: operations on the VM go there.
    pub holder: NameClaim,
    /// What the others report.
    pub claims: Vec<NameClaim>,
}

/// `POST /api/v1/vms/{vm}/binding`: an operator's word on which host holds a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "host": "host-b" }))]
pub struct BindVm {
    /// The host whose VM has the name from now on.
    pub host: String,
}
