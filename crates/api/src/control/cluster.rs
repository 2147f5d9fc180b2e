//! The cluster as a whole.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::limits::MoveLimits;

/// Response of `GET /api/v1/cluster`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "version": "0.1.0", "leader": { "name": "m1", "address": "https://m1.example:7800",
    "is_self": true }, "hosts": 3, "hosts_up": 2,
    "hosts_away": ["host-c"], "vms": 42, "vms_running": 38, "vms_unknown": 4,
    "moves_running": 2, "moves_waiting": 5,
    "limits": { "out_of_host": null, "into_host": null, "per_datastore": 128, "in_all": 20,
    "datastores": {}, "hosts": {}, "by_link": [] }
}))]
pub struct Cluster {
    pub version: String,
    /// The leading manager; absent if there is none.
    pub leader: Option<Leader>,
    /// All hosts, unreachable ones included.
    pub hosts: u64,
    /// Hosts whose agent is reachable.
    pub hosts_up: u64,
    /// Hosts whose agent is unreachable, up to 16. They need attention: their VMs are in an unknown
    /// state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts_away: Vec<String>,
    /// All VMs, also those of unreachable hosts.
    pub vms: u64,
    /// VMs that run, according to reachable hosts.
    pub vms_running: u64,
    /// VMs in an unknown state: their hosts are unreachable.
    #[serde(default)]
    pub vms_unknown: u64,
    /// VM names that several hosts claim without a move that explains it.
    #[serde(default)]
    pub name_conflicts: u64,
    /// Hosts that send invalid reports, or reports beyond the manager's limits.
    #[serde(default)]
    pub hosts_faulty: u64,
    pub moves_running: u64,
    pub moves_waiting: u64,
    /// Limits for concurrent moves.
    pub limits: MoveLimits,
}

/// The leading manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leader {
    /// Its name.
    pub name: String,
    /// Address of its API.
    pub address: String,
    /// Whether it is the manager that answered.
    pub is_self: bool,
}
