//! Datastores: directories with disks that hosts have or share, and pools; and their settings.

use std::collections::BTreeSet;

use godwit_types::{DatastoreHealth, DatastoreSpeed};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A datastore: a directory with disks or a pool of Ceph, at each host that has it.
///
/// Directories of hosts are the same datastore if their marker files have the same identity, and,
/// without markers, if they have the same path. Pools are the same if cluster and name are. `GET
/// /api/v1/vms?datastore=ID` lists its VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10", "name": "fast", "path": "/srv/shared",
    "description": "all-flash NFS", "tags": ["ssd"], "maintenance": false, "kind": "nfs",
    "total_bytes": 1_099_511_627_776_u64, "free_bytes": 219_902_325_555_u64,
    "promised_bytes": 2_199_023_255_552_u64, "health": "ok",
    "hosts": [{ "host": "host-a", "path": "/srv/shared", "total_bytes": 1_099_511_627_776_u64,
    "free_bytes": 219_902_325_555_u64, "kind": "nfs", "health": "ok", "is_current": true,
    "speed": { "write_us": 700, "read_us": 350, "write_bytes_per_s": 400_000_000_u64,
    "read_bytes_per_s": 900_000_000_u64, "measured_unix_ms": 1_795_000_000_000_u64 } }],
    "vms": 12, "disks": 15
}))]
pub struct ManagedDatastore {
    /// Identity in its marker file, or made of a pool's cluster and name; without one, made of its
    /// path.
    pub id: String,
    /// Its name; its path until a name is set.
    pub name: String,
    /// Path of the directory at the first of its hosts, or the pool as `rbd:POOL` or
    /// `rbd:POOL/NAMESPACE`. Limits of moves refer to it.
    pub path: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub tags: BTreeSet<String>,
    /// Whether it takes no new disks.
    #[serde(default)]
    pub maintenance: bool,
    /// Kind of the file system, such as `nfs`, `xfs` or `lvm-thin`; `ceph-rbd` for a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Capacity in bytes; absent if no host reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Bytes still available: the lowest figure of its hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Sum of the sizes that guests see of its images. Divided by `total_bytes` it is the
    /// provisioning ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised_bytes: Option<u64>,
    /// Health at the host that sees it worst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<DatastoreHealth>,
    /// Hosts that have the datastore, by name: it is in their `vm_dirs`, or a VM has a disk in it.
    /// Empty if it has settings but no host has it any more.
    pub hosts: Vec<DatastoreAtHost>,
    /// VMs with a disk in the datastore.
    pub vms: u64,
    /// Their disks in it.
    #[serde(default)]
    pub disks: u64,
}

/// A datastore on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreAtHost {
    /// Name of the host.
    pub host: String,
    /// Path of the directory on that host, or name of the pool.
    #[serde(default)]
    pub path: String,
    /// Whether the host is reachable; if not, its figures are the last ones.
    #[serde(default)]
    pub is_current: bool,
    /// Capacity of the file system or the pool in bytes; absent if the host does not report it or
    /// has no such directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Bytes still available to unprivileged users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Kind of the file system, or `ceph-rbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Latency and throughput, measured by the host's agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<DatastoreSpeed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<DatastoreHealth>,
    /// What the agent found wrong with it, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A datastore with the disks in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10", "name": "fast", "path": "/srv/shared",
    "maintenance": false, "hosts": [], "vms": 1, "disks": 1,
    "used_by": [{ "vm": "web", "host": "host-a", "path": "/srv/shared/web.qcow2" }]
}))]
pub struct DatastoreDetails {
    /// The datastore, as in the list.
    #[serde(flatten)]
    pub datastore: ManagedDatastore,
    /// Disks of VMs in it, by VM.
    #[serde(default)]
    pub used_by: Vec<DatastoreDisk>,
}

/// A disk of a VM in a datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreDisk {
    pub vm: String,
    /// Host of the VM.
    pub host: String,
    /// Path of the image on that host.
    pub path: String,
    /// Whether it is a CD, or a disk that the guest only reads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub readonly: bool,
}

/// Request of `PATCH /api/v1/datastores/{datastore}`. Fields that are absent stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "name": "fast", "tags": ["ssd"], "maintenance": true }))]
pub struct UpdateDatastore {
    /// Name, unique in the cluster. Empty: its path is its name again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1000)]
    pub description: Option<String>,
    /// All of its tags.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<String>>)]
    pub tags: Option<BTreeSet<String>>,
    /// Whether it takes no new disks. This moves no disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<bool>,
}
