//! Imports of VMs from other platforms, and exports to them. Both are jobs of an agent.

use std::collections::BTreeMap;
use std::path::PathBuf;

use godwit_qemu::VmSpec;
use godwit_types::{Fault, ImportFinding};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ApiError, VmInfo};

/// Where the definition of a VM comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImportFrom {
    /// Text of a libvirt domain, a Proxmox VE configuration, or an OVF descriptor.
    Text(String),
    /// Absolute path of such a text, or of an OVA, on the host.
    File(String),
    /// Name of a domain of the host's libvirtd.
    Libvirt(String),
}

/// A VM to import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({
    "from": { "file": "/srv/import/wiki.ova" }, "networks": { "VM Network": "lan" }
}))]
pub struct ImportVm {
    pub from: ImportFrom,
    /// Name of the VM. Default: that of the definition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Networks of the host, by the names in the definition.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub networks: BTreeMap<String, String>,
    /// Directory on the host that has the disks, by their file names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub disks_in: Option<PathBuf>,
    /// Whether the VM uses the disks where they are, instead of copies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub take_disks: bool,
    /// Copies of the disks while their guest still runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<WarmImport>,
    /// Datastore of the copies: a directory of the host, at a manager also a datastore's name or
    /// ID. Default: the best by space and latency; of a warm import, the first of the host's
    /// directories for VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Whether to find out only what would be created.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Whether to start the VM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub start: bool,
    /// Whether only files below the host's directories for VMs may be used.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_dirs_only: bool,
}

/// A pass over the disks of a guest that still runs elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmImport {
    /// For each disk of the definition, in its order: an NBD URI, or the path of a raw image on the
    /// host.
    pub sources: Vec<String>,
    pub step: WarmStep,
}

/// Pass of a warm import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WarmStep {
    /// The first pass, which copies everything.
    Copy,
    /// An incremental pass, which writes what differs.
    Again,
    /// The final pass, after the guest has shut down; then the VM is created and started.
    CutOver,
}

/// A disk to import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportDisk {
    /// Name in the definition.
    pub name: String,
    /// File on the host; absent: the disk is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub source: Option<PathBuf>,
    /// Format of that file.
    pub format: String,
    /// Size of the disk that the guest sees.
    pub bytes: u64,
}

/// What an import creates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImportPlan {
    pub spec: VmSpec,
    pub disks: Vec<ImportDisk>,
}

/// Platform that an export is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportFormat {
    /// XML of a libvirt domain, and a qcow2 image for each disk.
    Libvirt,
    /// An archive of an OVF descriptor and a VMDK image for each disk.
    Ova,
}

/// A VM to export: a stopped one into files, or a running one to its host's libvirt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "to": "/srv/export", "format": "ova" }))]
pub struct ExportVm {
    /// Directory below one of the host's directories for VMs; a running VM needs none.
    #[serde(default)]
    #[schema(value_type = String)]
    pub to: PathBuf,
    pub format: ExportFormat,
    /// Whether the running guest goes to the libvirt of its host without a stop. The VM must have
    /// been adopted, and its domain be defined there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub live: bool,
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    Running,
    Done,
    Failed,
    /// Cancelled by request; nothing of the job remains.
    Cancelled,
}

/// An import, an export, or the move of a disk, at an agent. It is remembered until the agent ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "5b1c2a60-7d0f-4d2e-9f0e-2f5f4f7f0001", "state": "running",
    "done_bytes": 1_073_741_824_u64, "total_bytes": 21_474_836_480_u64, "findings": []
}))]
pub struct JobStatus {
    pub id: String,
    pub state: JobState,
    /// Bytes of the disks, or of the memory of a guest that is given to libvirt, so far and of all.
    #[serde(default)]
    pub done_bytes: u64,
    #[serde(default)]
    pub total_bytes: u64,
    /// Bytes that a pass of a warm import has written.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub written_bytes: u64,
    /// What changes or is left out.
    #[serde(default)]
    pub findings: Vec<ImportFinding>,
    /// What an import creates, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<ImportPlan>,
    /// The VM that was imported, or whose disk has moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmInfo>,
    /// Files that were exported, or the new image of a disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub files: Vec<PathBuf>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Fault>)]
    pub error: Option<ApiError>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}
