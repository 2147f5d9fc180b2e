//! Datastores: their settings, and emptying one.
//!
//! This module owns the records of settings and of drains of datastores. Which directories of hosts
//! are one datastore, and what is in it, the cluster knows (`cluster::inventory::datastores`). It
//! calls the cluster, agents and storage.

pub(crate) mod drains;
pub(crate) mod http;
pub(crate) mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use godwit_api::control::{
    DrainState, JournalKind, ManagedDatastore, Problem, ProblemCode, UpdateDatastore,
};
use godwit_qemu::Uuid;

use crate::cluster::inventory::{DatastorePlan, Inventory};
use crate::cluster::names::check_name;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::storage::keeper::{Keeper, Writes};
use crate::storage::planning::Planning;
use crate::storage::term::Term;
use drains::DatastoreDrains;
use record::{DATASTORES, SavedDatastore};

/// Most datastores with settings.
const MOST_SETTINGS: usize = 4_096;
/// Longest description, characters.
const MOST_DESCRIPTION: usize = 1_000;
/// Most tags, and the longest one in bytes: as those of VMs.
const MOST_TAGS: usize = 32;
const MOST_TAG_BYTES: usize = 63;

/// Service for requests about datastores.
#[derive(Clone)]
pub(crate) struct Datastores {
    state: Arc<State>,
    planning: Planning,
    drains: Arc<Term<DatastoreDrains>>,
}

impl Datastores {
    pub(crate) fn new(
        state: Arc<State>,
        planning: Planning,
        drains: Arc<Term<DatastoreDrains>>,
    ) -> Datastores {
        Datastores { state, planning, drains }
    }

    /// Changes the settings of a datastore. This moves no disk.
    pub(crate) async fn update(
        &self,
        named: &str,
        request: UpdateDatastore,
    ) -> Result<ManagedDatastore, Problem> {
        let (named, all) = (named.to_owned(), self.clone());
        self.planning
            .change(|keeper| async move {
                let (id, plan) = {
                    let inventory = all.state.inventory();
                    let id = inventory.find_datastore(&named)?.id;
                    let plan = changed(&id, request, &inventory)?;
                    (id, plan)
                };
                if !plan.maintenance {
                    check_not_emptied(&id, &*all.drains.get()?)?;
                }
                let entry = noted(&id, &plan);
                save(&keeper, &id, &plan, keeper.noting(entry)?).await?;
                know(&all.state, &id, plan);
                // One that no host has, and without settings, is gone.
                let gone =
                    ManagedDatastore { id: id.clone(), name: id.clone(), ..Default::default() };
                Ok(all.state.inventory().find_datastore(&id).unwrap_or(gone))
            })
            .await
    }
}

/// Takes in the settings of a datastore that are in the store.
fn know(state: &State, id: &str, plan: DatastorePlan) {
    let plan = Some(plan).filter(|plan| *plan != DatastorePlan::default());
    state.change(|inventory| {
        inventory.plan_datastore(id, plan);
        None
    });
}

/// Checks that a datastore is not being drained: until the drain ends, it must stay in maintenance.
fn check_not_emptied(id: &str, drains: &DatastoreDrains) -> Result<(), Problem> {
    let open = drains.of_datastore(id).filter(|open| open.state == DrainState::Running);
    let Some(open) = open else { return Ok(()) };
    let detail = format!("datastore {} is being drained by drain {}", open.name, open.id);
    let remedy =
        format!("wait for its end, or cancel it with `godwit datastore drain {id} --cancel`");
    Err(Problem::new(ProblemCode::WrongState, detail, remedy))
}

/// Returns the entry of the journal about new settings of a datastore.
fn noted(id: &str, plan: &DatastorePlan) -> NewEntry {
    let name = plan.name.as_deref().unwrap_or(id);
    let mode = if plan.maintenance { ": it is in maintenance mode" } else { "" };
    let text = format!("the settings of datastore {name} were changed{mode}");
    NewEntry::info(JournalKind::DatastoreChanged, text).about("datastore", name)
}

/// Writes the settings of a datastore beside other writes; the default ones have no record.
async fn save(
    keeper: &Keeper,
    id: &str,
    plan: &DatastorePlan,
    beside: Writes,
) -> Result<(), Problem> {
    if *plan == DatastorePlan::default() {
        return if keeper.has(DATASTORES, id) {
            keeper.remove_with(beside, DATASTORES, id).await
        } else {
            keeper.write(beside).await
        };
    }
    let saved = SavedDatastore::from(plan);
    keeper.write(keeper.put(beside, DATASTORES, id, &saved).await?).await
}

/// Returns the settings of a datastore after a change, if they are valid.
fn changed(
    id: &str,
    request: UpdateDatastore,
    inventory: &Inventory,
) -> Result<DatastorePlan, Problem> {
    let UpdateDatastore { name, description, tags, maintenance } = request;
    let before = inventory.datastore_plans().get(id);
    if before.is_none() && inventory.datastore_plans().len() >= MOST_SETTINGS {
        let detail = format!("there are already {MOST_SETTINGS} datastores with settings");
        return Err(wrong(detail, "reset those of unused ones: `godwit datastore set ID --reset`"));
    }
    let before = before.cloned().unwrap_or_default();
    let name = match name {
        Some(name) if name.is_empty() => None,
        Some(name) => Some(checked_name(id, name, inventory)?),
        None => before.name,
    };
    if let Some(text) = &description {
        check_description(text)?;
    }
    if let Some(tags) = &tags {
        check_tags(tags)?;
    }
    Ok(DatastorePlan {
        name,
        description: description.unwrap_or(before.description),
        tags: tags.unwrap_or(before.tags),
        maintenance: maintenance.unwrap_or(before.maintenance),
    })
}

/// Checks the name of a datastore, which no other one may have.
fn checked_name(id: &str, name: String, inventory: &Inventory) -> Result<String, Problem> {
    check_name(&name)?;
    if name.parse::<Uuid>().is_ok() || name == crate::cluster::inventory::disk_places::AUTO {
        return Err(wrong(
            format!("invalid name of a datastore: \"{name}\" means something else"),
            "use a name that is no ID and not \"auto\"",
        ));
    }
    let mut plans = inventory.datastore_plans().iter();
    let other = plans.find(|(other, plan)| *other != id && plan.name.as_ref() == Some(&name));
    match other {
        None => Ok(name),
        Some((other, _)) => {
            let detail = format!("datastore {other} already has the name \"{name}\"");
            Err(Problem::new(ProblemCode::AlreadyExists, detail, "choose another name"))
        }
    }
}

fn check_description(text: &str) -> Result<(), Problem> {
    let is_good = |char: char| !char.is_control() || char == '\n';
    if text.chars().count() <= MOST_DESCRIPTION && text.chars().all(is_good) {
        return Ok(());
    }
    let detail = "the description is too long or has control characters";
    Err(wrong(detail, format!("give at most {MOST_DESCRIPTION} characters of text")))
}

fn check_tags(tags: &BTreeSet<String>) -> Result<(), Problem> {
    let is_tag = |tag: &String| {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        (1..=MOST_TAG_BYTES).contains(&tag.len())
            && tag.starts_with(|c: char| c.is_ascii_alphanumeric())
            && tag.chars().all(good)
    };
    if tags.len() <= MOST_TAGS && tags.iter().all(is_tag) {
        return Ok(());
    }
    let remedy =
        "give at most 32 tags, each of 1 to 63 letters, digits, \"-\", \"_\", \".\" or \":\"";
    Err(wrong("invalid tags", remedy))
}

fn wrong(detail: impl Into<String>, remedy: impl Into<String>) -> Problem {
    Problem::new(ProblemCode::InvalidRequest, detail, remedy)
}
