//! What hosts share, by what their agents tell: networks and datastores.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A network, by the name that hosts give it in their configurations. `GET /api/v1/vms?network=NAME` has its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "prod", "hosts": [{ "host": "host-a", "bridge": "br-prod" }, { "host": "host-b", "bridge": "br-prod" }], "vms": 41
}))]
pub struct ManagedNetwork {
    pub name: String,
    /// Hosts that have it, by name; empty: VMs name it, and no host has it any more.
    pub hosts: Vec<NetworkAtHost>,
    /// VMs with an interface in it.
    pub vms: u64,
}

/// A network at a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkAtHost {
    /// The host.
    pub host: String,
    /// The bridge that taps join there.
    pub bridge: String,
}

/// A directory of disks, by its path. Whether it is the same storage at two hosts they alone know. `GET /api/v1/vms?datastore=PATH` has its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "/srv/shared", "hosts": [{ "host": "host-a", "total_bytes": 1_099_511_627_776_u64, "free_bytes": 219_902_325_555_u64 }], "vms": 12
}))]
pub struct ManagedDatastore {
    /// Its path, by which limits name it too.
    pub name: String,
    /// Hosts that have it, by name: it is one of their `vm_dirs`, or a VM there has a disk in it.
    pub hosts: Vec<DatastoreAtHost>,
    /// VMs with a disk in it.
    pub vms: u64,
}

/// A datastore at a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreAtHost {
    /// The host.
    pub host: String,
    /// What its file system holds, bytes; none: the host does not tell, or has no such directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// What of that users may still fill, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
}
