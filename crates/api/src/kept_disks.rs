//! Images that stay at a host after their disks have moved to another one with their VM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An image that a host keeps after its disk has moved to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "path": "/srv/web.qcow2", "vm": "web", "to": "b", "moved_to": "/ssd/web.qcow2",
    "used_bytes": 1_073_741_824_u64, "since_unix_ms": 1_795_443_600_000_u64,
    "until_unix_ms": 1_795_530_000_000_u64, "waits": "host b cannot be asked: it does not answer"
}))]
pub struct KeptDisk {
    /// Absolute path of the image.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// VM whose disk it was, by its name at the move.
    pub vm: String,
    /// Host that the VM moved to.
    pub to: String,
    /// Image of the disk at that host.
    #[schema(value_type = String)]
    pub moved_to: PathBuf,
    /// Space that the image took when its disk had moved.
    pub used_bytes: u64,
    /// Time of the move.
    pub since_unix_ms: u64,
    /// Time from which the image may be removed. Absent: it stays until it is removed by request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_unix_ms: Option<u64>,
    /// Why it was not removed, although its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

/// The images that a host keeps after moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "disks": [{
        "path": "/srv/web.qcow2", "vm": "web", "to": "b", "moved_to": "/ssd/web.qcow2",
        "used_bytes": 1_073_741_824_u64, "since_unix_ms": 1_795_443_600_000_u64,
        "until_unix_ms": 1_795_530_000_000_u64
    }]
}))]
pub struct KeptDisks {
    /// By path.
    pub disks: Vec<KeptDisk>,
}

/// An image that is to stay until it is removed by request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "path": "/srv/web.qcow2" }))]
pub struct KeepDisk {
    /// Absolute path of the image.
    #[schema(value_type = String)]
    pub path: PathBuf,
}
