//! Saved settings of a datastore.

use std::collections::BTreeSet;

use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::inventory::DatastorePlan;
use crate::cluster::state::State;
use crate::storage::planned::Planned;

pub(crate) const DATASTORES: Table<SavedDatastore> = Table::new();

/// Settings of a datastore, by its ID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedDatastore {
    name: Option<String>,
    description: String,
    tags: BTreeSet<String>,
    maintenance: bool,
}

impl Record for SavedDatastore {
    const KIND: &'static str = "datastore";
    const PREFIX: &'static str = "datastores/";
    const VERSION: u32 = 1;
}

impl From<&DatastorePlan> for SavedDatastore {
    fn from(plan: &DatastorePlan) -> SavedDatastore {
        let DatastorePlan { name, description, tags, maintenance } = plan.clone();
        SavedDatastore { name, description, tags, maintenance }
    }
}

impl From<SavedDatastore> for DatastorePlan {
    fn from(saved: SavedDatastore) -> DatastorePlan {
        let SavedDatastore { name, description, tags, maintenance } = saved;
        DatastorePlan { name, description, tags, maintenance }
    }
}

impl Planned<State> for SavedDatastore {
    fn known(state: &State) -> BTreeSet<String> {
        state.inventory().datastore_plans().keys().cloned().collect()
    }

    fn set(state: &State, id: &str, record: Option<SavedDatastore>) {
        state.change(|inventory| {
            inventory.plan_datastore(id, record.map(DatastorePlan::from));
            None
        });
    }
}
