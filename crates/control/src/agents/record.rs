//! Stored form of a host's plan. Later versions must read it, so it is separate from the types that
//! the manager works with.

use std::collections::{BTreeMap, BTreeSet};

use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::agents::fleet::Fleet;
use crate::cluster::inventory::HostPlan;
use crate::storage::planned::Planned;

pub(crate) const HOSTS: Table<SavedHost> = Table::new();

/// Plan of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedHost {
    address: String,
    labels: BTreeMap<String, String>,
    link_bits_per_s: Option<u64>,
    most_moves: Option<u32>,
    maintenance: bool,
}

impl Record for SavedHost {
    const KIND: &'static str = "host";
    const PREFIX: &'static str = "hosts/";
    const VERSION: u32 = 1;
}

impl From<&HostPlan> for SavedHost {
    fn from(plan: &HostPlan) -> SavedHost {
        let HostPlan { address, labels, link_bits_per_s, most_moves, maintenance } = plan.clone();
        SavedHost { address, labels, link_bits_per_s, most_moves, maintenance }
    }
}

impl From<SavedHost> for HostPlan {
    fn from(saved: SavedHost) -> HostPlan {
        let SavedHost { address, labels, link_bits_per_s, most_moves, maintenance } = saved;
        HostPlan { address, labels, link_bits_per_s, most_moves, maintenance }
    }
}

impl Planned<Fleet> for SavedHost {
    fn known(fleet: &Fleet) -> BTreeSet<String> {
        fleet.names()
    }

    fn set(fleet: &Fleet, id: &str, record: Option<SavedHost>) {
        match record {
            Some(saved) => fleet.plan_host(id, saved.into()),
            None => fleet.leave_host(id),
        }
    }
}
