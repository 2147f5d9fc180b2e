//! The cluster as a whole.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::MoveLimits;

/// `GET /api/v1/cluster`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "version": "0.1.0", "leader": { "name": "m1", "address": "https://m1.example:7800", "is_self": true }, "hosts": 3, "hosts_up": 3,
    "vms": 42, "vms_running": 40, "moves_running": 2, "moves_waiting": 5,
    "limits": { "out_of_host": null, "into_host": null, "per_datastore": 128, "in_all": 20, "datastores": {}, "hosts": {}, "by_link": [] }
}))]
pub struct Cluster {
    pub version: String,
    /// Who leads; none: nobody does.
    pub leader: Option<Leader>,
    /// Hosts, away ones included.
    pub hosts: u64,
    /// Hosts whose agent has been heard lately.
    pub hosts_up: u64,
    pub vms: u64,
    pub vms_running: u64,
    /// VMs' names that other hosts than their own claim, without a move that explains it.
    #[serde(default)]
    pub name_conflicts: u64,
    /// Hosts that report what no agent reports, or more than the manager takes.
    #[serde(default)]
    pub hosts_faulty: u64,
    pub moves_running: u64,
    pub moves_waiting: u64,
    /// What moves are held to.
    pub limits: MoveLimits,
}

/// The manager that leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leader {
    /// Its name.
    pub name: String,
    /// Where its API is.
    pub address: String,
    /// Whether it is the one that answers.
    pub is_self: bool,
}
