//! Saved form of the plan for a VM.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::PlannedPower;
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::inventory::VmPlan;
use crate::cluster::state::State;
use crate::storage::planned::Planned;

pub(crate) const VMS: Table<SavedVm> = Table::new();

/// Plan for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedVm {
    power: PlannedPower,
    labels: BTreeMap<String, String>,
}

impl Record for SavedVm {
    const KIND: &'static str = "vm";
    const PREFIX: &'static str = "vms/";
    const VERSION: u32 = 1;
}

impl From<&VmPlan> for SavedVm {
    fn from(plan: &VmPlan) -> SavedVm {
        SavedVm { power: plan.power, labels: plan.labels.clone() }
    }
}

impl From<SavedVm> for VmPlan {
    fn from(saved: SavedVm) -> VmPlan {
        VmPlan { power: saved.power, labels: saved.labels }
    }
}

impl Planned<State> for SavedVm {
    fn known(state: &State) -> BTreeSet<String> {
        state.inventory().planned_vms().map(str::to_owned).collect()
    }

    fn set(state: &State, id: &str, record: Option<SavedVm>) {
        state.change(|inventory| inventory.plan_vm(id, record.map(Into::into)));
    }
}
