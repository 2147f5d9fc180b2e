//! What is planned of a VM, as it is saved.

use std::collections::BTreeMap;

use godwit_api::control::PlannedPower;
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::inventory::VmPlan;

pub(crate) const VMS: Table<SavedVm> = Table::new();

/// What is planned of a VM.
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
