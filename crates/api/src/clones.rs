//! Clones, templates and snapshots, and the images that belong to a VM alone.

use std::net::IpAddr;
use std::path::PathBuf;

use godwit_qemu::{Uuid, VmSpec};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How the images of a clone are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CloneMode {
    /// As layers on the images of a template: at once, and they take only the space of what the
    /// clone changes.
    Linked,
    /// As copies.
    Full,
}

/// Request of `POST /v1/vms/{name}/clone`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneVm {
    /// Name of the clone.
    pub name: String,
    /// Default: linked for a template, otherwise full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<CloneMode>,
    /// Addresses of the clone's NICs, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Start the clone. If the start fails, nothing of it remains.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub start: bool,
    /// UUID of the clone. Default: random.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// See [`crate::CreateVm::vm_dirs_only`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}

/// Request of `PUT /v1/vms/{name}/template`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "template": true }))]
pub struct SetTemplate {
    /// Whether the stopped VM is a template from now on, or a template an ordinary VM.
    pub template: bool,
}

/// Names a snapshot: a new one to take, or one to revert to or to delete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "name": "before-upgrade" }))]
pub struct CreateSnapshot {
    /// Name of the snapshot, in the form of a VM's name.
    pub name: String,
}

/// Request of `POST /v1/vms/{name}/snapshots/revert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RevertVm {
    /// Name of the snapshot.
    pub name: String,
    /// See [`crate::CreateVm::vm_dirs_only`]; files that the VM names already are excepted. An
    /// older agent refuses it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}

/// A snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "before-upgrade", "created_unix_ms": 1_780_000_000_000_u64, "memory": true, "disks": 1
}))]
pub struct SnapshotInfo {
    pub name: String,
    /// Time of the snapshot, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Whether it has the guest's memory: the VM ran, or was suspended.
    pub memory: bool,
    /// Number of disks in it. Disks that the VM only reads are in none.
    pub disks: usize,
    /// Specification of the VM then; absent if the agent has an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Box<VmSpec>>,
}

/// Images of a VM, by what a deletion of the VM with its disks does to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "deleted": ["/srv/web.qcow2"],
    "kept": [{ "path": "/srv/debian-12.qcow2", "why": "it is a base of another image" }]
}))]
pub struct VmImages {
    /// Images that belong to the VM alone.
    #[schema(value_type = Vec<String>)]
    pub deleted: Vec<PathBuf>,
    /// Images that stay.
    pub kept: Vec<KeptImage>,
}

/// An image that stays when its VM is deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeptImage {
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Why it stays.
    pub why: String,
}

impl VmImages {
    /// Adds images that stay, each once.
    pub fn keep(&mut self, paths: impl IntoIterator<Item = PathBuf>, why: &str) {
        for path in paths {
            if !self.kept.iter().any(|kept| kept.path == path) {
                self.kept.push(KeptImage { path, why: why.to_owned() });
            }
        }
    }
}
