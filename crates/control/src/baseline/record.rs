//! Saved form of the baseline.

use std::collections::BTreeSet;

use godwit_qemu::{Baseline, CpuFeatures};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::inventory::BaselinePlan;
use crate::cluster::state::State;
use crate::storage::planned::Planned;

pub(crate) const BASELINE: Table<SavedBaseline> = Table::new();
pub(crate) const ID: &str = "cluster";

/// Saved CPU baseline of the cluster. It includes the features: only hosts know the features of a
/// model, and hosts come and go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedBaseline {
    cpu_model: String,
    features: CpuFeatures,
    asked: String,
    without: Vec<String>,
    set_unix_ms: u64,
    set_by: String,
}

impl Record for SavedBaseline {
    const KIND: &'static str = "cpu-baseline";
    const PREFIX: &'static str = "cpu-baseline/";
    const VERSION: u32 = 1;
}

impl From<&BaselinePlan> for SavedBaseline {
    fn from(plan: &BaselinePlan) -> SavedBaseline {
        let BaselinePlan { baseline, asked, without, set_unix_ms, set_by } = plan.clone();
        let Baseline { cpu_model, features } = baseline;
        SavedBaseline { cpu_model, features, asked, without, set_unix_ms, set_by }
    }
}

impl From<SavedBaseline> for BaselinePlan {
    fn from(saved: SavedBaseline) -> BaselinePlan {
        let SavedBaseline { cpu_model, features, asked, without, set_unix_ms, set_by } = saved;
        BaselinePlan {
            baseline: Baseline { cpu_model, features },
            asked,
            without,
            set_unix_ms,
            set_by,
        }
    }
}

impl Planned<State> for SavedBaseline {
    fn known(state: &State) -> BTreeSet<String> {
        state.inventory().baseline().map(|_| ID.to_owned()).into_iter().collect()
    }

    fn set(state: &State, _: &str, record: Option<SavedBaseline>) {
        state.change(|inventory| inventory.plan_baseline(record.map(Into::into)));
    }
}
