//! What every manager knows of what the store keeps, whether it leads or not: hosts, VMs, rules, the baseline, limits and tokens. Each is set as a whole where the store was
//! read, and one by one where it changes.

use std::collections::BTreeSet;

use crate::baseline::{ID, SavedBaseline};
use crate::inventory::Inventory;
use crate::manager::Manager;
use crate::records::{SavedHost, SavedToken, SavedVm};
use crate::rules::SavedRule;
use crate::store::records::Record;

/// A kind of records that every manager knows.
pub(crate) trait Planned: Record {
    /// The ids of those that are known.
    fn known(manager: &Manager) -> BTreeSet<String>;
    /// Knows one from now on as this; none: it is not kept any more.
    fn set(manager: &Manager, id: &str, record: Option<Self>);

    /// Knows these from now on, and no others.
    fn set_all(manager: &Manager, records: impl IntoIterator<Item = (String, Self)>) {
        let mut gone = Self::known(manager);
        for (id, record) in records {
            gone.remove(&id);
            Self::set(manager, &id, Some(record));
        }
        for id in gone {
            Self::set(manager, &id, None);
        }
    }
}

impl Planned for SavedHost {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().plans().map(|(name, _)| name.to_owned()).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedHost>) {
        match record {
            Some(saved) => manager.plan_host(id, saved.into()),
            None => manager.leave_host(id),
        }
    }
}

impl Planned for SavedVm {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().planned_vms().map(str::to_owned).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedVm>) {
        manager.state.change(|inventory: &mut Inventory| inventory.plan_vm(id, record.map(Into::into)));
    }
}

impl Planned for SavedBaseline {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().baseline().map(|_| ID.to_owned()).into_iter().collect()
    }

    fn set(manager: &Manager, _: &str, record: Option<SavedBaseline>) {
        manager.state.change(|inventory: &mut Inventory| inventory.plan_baseline(record.map(Into::into)));
    }
}

impl Planned for SavedRule {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().rules().into_iter().map(|rule| rule.name).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedRule>) {
        let rule = record.map(|saved| saved.rule(id));
        manager.state.change(|inventory: &mut Inventory| inventory.plan_rule(id, rule));
    }
}

impl Planned for SavedToken {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.tokens().into_iter().map(|token| token.id).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedToken>) {
        let mut tokens = manager.tokens_mut();
        match record {
            Some(saved) => tokens.insert(saved.record(id)),
            None => drop(tokens.remove(id)),
        }
    }
}
