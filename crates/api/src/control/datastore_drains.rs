//! Drains of datastores: each disk in one moves to another datastore of its VM's host.

use godwit_types::RateLimit;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::moves::DrainState;

/// Request of `POST /api/v1/datastores/{datastore}/drain`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "plan_only": true, "bandwidth_limit": "2gbit" }))]
pub struct CreateDatastoreDrain {
    /// Return the plan without moving anything.
    pub plan_only: bool,
    /// Datastores that the disks may go to, by ID, name or path; empty: any other of the host that
    /// is no pool of Ceph.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
    /// Whether layers get what their backing files have, too. Otherwise they stay layers on the
    /// same bases, which stay where they are.
    pub flatten: bool,
    /// Limit of each copy while the guest runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub bandwidth_limit: Option<RateLimit>,
}

/// State of a disk in a drain of its datastore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainDiskState {
    /// Its move waits for its turn.
    Waiting,
    /// It moves.
    Moving,
    /// It has left the datastore.
    Moved,
    /// It cannot move, or its move has failed; `reason` explains why.
    Stays,
    /// It has returned.
    Back,
}

/// A disk in a drain of its datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainDisk {
    pub vm: String,
    /// Host that runs the VM, or ran it when its disk moved.
    pub host: String,
    /// Path of the image at the begin.
    pub path: String,
    pub state: DrainDiskState,
    /// Name of the target datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Path of the new image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Why it goes there, what it waits for, or why it stays.
    pub reason: String,
    /// Job of the host that moves the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Bytes of the disk, so far and of all.
    #[serde(default)]
    pub done_bytes: u64,
    #[serde(default)]
    pub total_bytes: u64,
}

/// A drain of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "id": "s6b0450ea-0000d5ce", "datastore": "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10",
    "name": "old-nfs", "state": "running", "asked_by": "ada",
    "asked_unix_ms": 1_795_444_970_253_u64,
    "disks": [
        { "vm": "web", "host": "host-a", "path": "/srv/web.qcow2", "state": "moving",
        "to": "fast", "reason": "fast: 410.0 GiB free, 0.4 ms a write",
        "job": "5b1c2a60-7d0f-4d2e-9f0e-2f5f4f7f0001", "done_bytes": 1_073_741_824_u64,
        "total_bytes": 21_474_836_480_u64 },
        { "vm": "db", "host": "host-b", "path": "/srv/db.raw", "state": "stays",
        "reason": "host host-b has no other datastore" }
    ]
}))]
pub struct DatastoreDrain {
    pub id: String,
    /// ID of the datastore.
    pub datastore: String,
    /// Its name at the begin.
    pub name: String,
    pub state: DrainState,
    /// User who requested the drain.
    pub asked_by: String,
    pub asked_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    pub disks: Vec<DrainDisk>,
}
