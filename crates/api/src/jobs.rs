//! The list of a host's long work: imports, exports, adoptions and moves of disks.

use godwit_types::Fault;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::imports::JobState;

/// Kind of long work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobKind {
    Import,
    /// A dry run of an import, which creates nothing.
    ImportCheck,
    /// A pass of a warm import.
    WarmImport,
    Export,
    /// A running VM that goes to its host's libvirt.
    LiveExport,
    /// The move of a VM's disk to another datastore or format of the host.
    DiskMove,
    Adoption,
}

/// An import, an export, an adoption or the move of a disk at a host. The host keeps the latest
/// until its agent ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "5b1c2a60-7d0f-4d2e-9f0e-2f5f4f7f0001", "kind": "import", "vm": "wiki",
    "place": "/srv/import/wiki.ova", "state": "running", "done_bytes": 1_073_741_824_u64,
    "total_bytes": 21_474_836_480_u64, "begun_unix_ms": 1_795_000_000_000_u64
}))]
pub struct JobSummary {
    pub id: String,
    pub kind: JobKind,
    /// Name of the VM; empty until it is known.
    pub vm: String,
    /// Where the VM comes from, or the directory that it is exported to or its disk moves to.
    pub place: String,
    pub state: JobState,
    /// Bytes of the disks, or of the memory of a guest that is adopted or given to libvirt, so far
    /// and of all.
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub begun_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}

impl JobKind {
    /// Returns the kind in the words of the command line.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            JobKind::Import => "import",
            JobKind::ImportCheck => "check of an import",
            JobKind::WarmImport => "warm import",
            JobKind::Export => "export",
            JobKind::LiveExport => "live export",
            JobKind::DiskMove => "move of a disk",
            JobKind::Adoption => "adoption",
        }
    }
}
