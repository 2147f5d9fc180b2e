//! A directory with disks or a pool, as the agent of a host reports it.

use godwit_types::{DatastoreHealth, DatastoreSpeed};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of a pool of Ceph.
pub const CEPH_RBD: &str = "ceph-rbd";
/// Kinds that several hosts may have.
const REMOTE_KINDS: [&str; 6] = ["nfs", "cifs", "ceph", "gfs2", "ocfs2", CEPH_RBD];

/// A directory with disks of a host and the file system that contains it, a pool of Ceph or a thin
/// pool of LVM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreInfo {
    /// Total size in bytes: of a pool, what is stored in it and what still fits. 0: unknown, and so
    /// is `free_bytes`.
    pub total_bytes: u64,
    /// Bytes still available to unprivileged users.
    pub free_bytes: u64,
    /// Identity in the directory's marker file; of a pool of Ceph, made of its cluster and its
    /// name; of a thin pool of LVM, of its UUIDs. Hosts that report the same one share the
    /// datastore. Absent if there is no marker, such as in a read-only directory, or if the agent
    /// has an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// Kind of the file system: `nfs`, `cifs`, `fuse`, `ceph`, `xfs`, `btrfs`, `zfs`, `ext4`,
    /// `tmpfs`, `overlay`, `lvm-thin` for any of them on a thin volume, or `directory`; `ceph-rbd`
    /// for a pool of Ceph, `lvm-thin-pool` for a thin pool of LVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Sum of the sizes that guests see of the images in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_bytes: Option<u64>,
    /// Latency and throughput at the last measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<DatastoreSpeed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<DatastoreHealth>,
    /// Why it has no identity or no known size, or is not well, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl DatastoreInfo {
    /// Returns whether other hosts may have the same file system or pool, by its kind.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| REMOTE_KINDS.contains(&kind))
    }
}
