//! What the manager knows, behind its locks, and whom it tells of changes.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use godwit_api::HostEvent;
use godwit_api::control::Change;
use godwit_planner::queue::Limits;

use crate::clock::now_unix_ms;
use crate::cluster::bounds::Misreport;
use crate::cluster::inventory::Inventory;
use crate::journal::events::Events;

/// The cluster as this manager knows it.
#[derive(Debug, Default)]
pub struct State {
    inventory: RwLock<Inventory>,
    events: Arc<Events>,
    planning: tokio::sync::Mutex<()>,
}

impl State {
    /// Nothing known yet, with the limits of the configuration.
    #[must_use]
    pub fn with_limits(limits: Limits) -> State {
        let mut inventory = Inventory::default();
        inventory.configure_limits(limits);
        State { inventory: RwLock::new(inventory), ..State::default() }
    }

    pub fn inventory(&self) -> RwLockReadGuard<'_, Inventory> {
        // A panic while it was held can't leave it half changed: each change is an insertion or a removal.
        self.inventory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the inventory, and tells it. Events come in the order of the changes: they are told under the same lock.
    pub fn change<C: IntoIterator<Item = Change>>(&self, change: impl FnOnce(&mut Inventory) -> C) {
        let mut inventory = self.inventory.write().unwrap_or_else(PoisonError::into_inner);
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
                "hosts claim the name of a VM without a move that explains it"
            );
        }
        self.events.tell(changes, now_unix_ms());
    }

    /// Whoever changes what is planned of hosts or of the cluster has this from before it looks until the change is known: what is written
    /// and what is known come in one order.
    pub(crate) async fn planning(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.planning.lock().await
    }

    /// Changes, as they come.
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

    /// Takes what a host's agent tells.
    ///
    /// # Errors
    /// [`Misreport`]: it is not what agents tell. Nothing of it is kept.
    pub(crate) fn take(&self, host: &str, event: HostEvent) -> Result<(), Misreport> {
        let mut fault = None;
        self.change(|inventory| {
            inventory.take(host, event, now_unix_ms()).unwrap_or_else(|refused| {
                fault = Some(refused);
                Vec::new()
            })
        });
        fault.map_or(Ok(()), Err)
    }

    /// Takes what a host's agent tells that tells what agents do.
    #[cfg(test)]
    pub(crate) fn heard(&self, host: &str, event: HostEvent) {
        self.take(host, event).unwrap();
    }

    /// Shows a host as faulty.
    pub(crate) fn blame(&self, host: &str, fault: &Misreport) {
        self.change(|inventory| {
            let blamed = inventory.blame(host, fault);
            // One that says the same all the time fills no log.
            if blamed.is_some() {
                tracing::warn!(host, %fault, "a host reports what no agent reports");
            }
            blamed
        });
    }

    pub(crate) fn lost(&self, host: &str, reason: &str) {
        self.change(|inventory| inventory.lost(host, reason));
    }
}
