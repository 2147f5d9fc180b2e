//! The inventory behind its lock, and the events of its changes.

use std::sync::Arc;

use godwit_api::HostEvent;
use godwit_api::control::Change;
use godwit_planner::queue::Limits;
use parking_lot::{RwLock, RwLockReadGuard};

use crate::clock::now_unix_ms;
use crate::cluster::bounds::Misreport;
use crate::cluster::inventory::Inventory;
use crate::journal::events::Events;

/// State of the cluster, as this manager knows it.
#[derive(Debug, Default)]
pub struct State {
    inventory: RwLock<Inventory>,
    events: Arc<Events>,
    planning: tokio::sync::Mutex<()>,
}

impl State {
    /// Returns an empty state with the limits of the configuration.
    #[must_use]
    pub fn with_limits(limits: Limits) -> State {
        let mut inventory = Inventory::default();
        inventory.configure_limits(limits);
        State { inventory: RwLock::new(inventory), ..State::default() }
    }

    pub fn inventory(&self) -> RwLockReadGuard<'_, Inventory> {
        self.inventory.read()
    }

    /// Changes the inventory and publishes the changes. Events have the order of the changes,
    /// because they are published under the same lock.
    pub fn change<C: IntoIterator<Item = Change>>(&self, change: impl FnOnce(&mut Inventory) -> C) {
        let mut inventory = self.inventory.write();
        let changes: Vec<Change> = change(&mut inventory).into_iter().collect();
        for conflict in changes.iter().filter_map(|change| match change {
            Change::NameConflict(conflict) => Some(conflict),
            _ => None,
        }) {
            let claims: Vec<&str> =
                conflict.claims.iter().map(|claim| claim.host.as_str()).collect();
            let (vm, holder) = (&conflict.vm, &conflict.holder.host);
            tracing::warn!(
                vm,
                holder,
                ?claims,
                "several hosts claim the name of a VM, and no move explains it"
            );
        }
        self.events.publish(changes, now_unix_ms());
    }

    /// Locks the plans of hosts and of the cluster. A change holds this lock from its first read
    /// until the inventory has the change, so that the store and the inventory have the same order.
    pub(crate) async fn planning(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.planning.lock().await
    }

    /// Returns the events of all changes.
    #[must_use]
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(crate) fn reached(&self, host: &str) {
        self.change(|inventory| {
            inventory.reached(host);
            None
        });
    }

    /// Applies an event from a host's agent.
    ///
    /// # Errors
    /// [`Misreport`]: the event is invalid. Nothing of it is kept.
    pub(crate) fn try_apply(&self, host: &str, event: HostEvent) -> Result<(), Misreport> {
        let mut fault = None;
        self.change(|inventory| {
            inventory.try_apply(host, event, now_unix_ms()).unwrap_or_else(|refused| {
                fault = Some(refused);
                Vec::new()
            })
        });
        fault.map_or(Ok(()), Err)
    }

    /// Applies a valid event from a host's agent.
    #[cfg(test)]
    pub(crate) fn apply(&self, host: &str, event: HostEvent) {
        self.try_apply(host, event).unwrap();
    }

    /// Marks a host as faulty.
    pub(crate) fn blame(&self, host: &str, fault: &Misreport) {
        self.change(|inventory| {
            let blamed = inventory.blame(host, fault);
            // A host that repeats one invalid report must not fill the log.
            if blamed.is_some() {
                tracing::warn!(host, %fault, "a host reports invalid data");
            }
            blamed
        });
    }

    pub(crate) fn lost(&self, host: &str, reason: &str) {
        self.change(|inventory| inventory.lost(host, reason));
    }
}
