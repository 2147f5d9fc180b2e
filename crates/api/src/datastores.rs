//! A directory with disks, as the agent of a host reports it.

use godwit_types::{DatastoreHealth, DatastoreSpeed};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kinds of file systems that several hosts may have.
const REMOTE_KINDS: [&str; 5] = ["nfs", "cifs", "ceph", "gfs2", "ocfs2"];

/// A directory with disks of a host, and the file system that contains it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreInfo {
    /// Total size in bytes.
    pub total_bytes: u64,
    /// Bytes still available to unprivileged users.
    pub free_bytes: u64,
    /// Identity in the directory's marker file: hosts that report the same one share the directory.
    /// Absent if there is no marker, such as in a read-only directory, or if the agent has an older
    /// version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// Kind of the file system: `nfs`, `cifs`, `fuse`, `ceph`, `xfs`, `btrfs`, `zfs`, `ext4`,
    /// `tmpfs`, `overlay`, `lvm-thin` for any of them on a thin volume, or `directory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Sum of the sizes that guests see of the images in the directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_bytes: Option<u64>,
    /// Latency and throughput at the last measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<DatastoreSpeed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<DatastoreHealth>,
    /// Why the directory has no identity, or is not well, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl DatastoreInfo {
    /// Returns whether other hosts may have the same file system, by its kind.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| REMOTE_KINDS.contains(&kind))
    }
}
