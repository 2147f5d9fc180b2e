//! Networks that hosts share, as their agents report them.

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
