//! Networks and datastores that hosts share, as their agents report them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A network, by its name in the configurations of the hosts. `GET /api/v1/vms?network=NAME` lists
/// its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "prod", "hosts": [{ "host": "host-a", "bridge": "br-prod" }, { "host": "host-b",
    "bridge": "br-prod" }], "vms": 41
}))]
pub struct ManagedNetwork {
    pub name: String,
    /// Hosts that have the network, by name; empty if VMs refer to it but no host has it any more.
    pub hosts: Vec<NetworkAtHost>,
    /// VMs with a NIC in the network.
    pub vms: u64,
}

/// A network on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkAtHost {
    /// Name of the host.
    pub host: String,
    /// Bridge that the tap devices join on that host.
    pub bridge: String,
}

/// A directory with disks, by its path. Only the hosts know whether two of them share the storage.
/// `GET /api/v1/vms?datastore=PATH` lists its VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "name": "/srv/shared", "hosts": [{ "host": "host-a", "total_bytes": 1_099_511_627_776_u64,
    "free_bytes": 219_902_325_555_u64 }], "vms": 12
}))]
pub struct ManagedDatastore {
    /// Path of the directory; limits refer to the datastore by the same path.
    pub name: String,
    /// Hosts that have the datastore, by name: it is in their `vm_dirs`, or a VM has a disk in it.
    pub hosts: Vec<DatastoreAtHost>,
    /// VMs with a disk in the datastore.
    pub vms: u64,
}

/// A datastore on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreAtHost {
    /// Name of the host.
    pub host: String,
    /// Capacity of the file system in bytes; absent if the host does not report it or has no such
    /// directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Bytes still available to unprivileged users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
}
