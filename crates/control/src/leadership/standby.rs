//! A manager that does not lead is ready to: it follows what the store keeps of hosts, VMs, rules, the baseline, limits, tokens and moves, and by that every agent.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use godwit_store::Store;
use godwit_store::records::{RecordError, Table};
use tokio::task::JoinSet;

use crate::access::certificates::SavedRevocations;
use crate::access::record::SavedToken;
use crate::baseline::SavedBaseline;
use crate::hosts::record::SavedHost;
use crate::leadership::plans::Planned;
use crate::manager::Manager;
use crate::moves::SavedMove;
use crate::moves::limits::SavedLimits;
use crate::rules::SavedRule;
use crate::vms::bindings::SavedBinding;
use crate::vms::record::SavedVm;

/// Before a store is asked again that did not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Follows the store as long as it is there.
pub(crate) struct Standby(JoinSet<()>);

impl Standby {
    /// Follows it for this manager.
    pub(crate) fn begin(manager: &Arc<Manager>, store: &Arc<dyn Store>) -> Standby {
        let mut tasks = JoinSet::new();
        tasks.spawn(follow::<SavedToken>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedBaseline>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedRule>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedLimits>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedRevocations>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedVm>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedBinding>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedHost>(Arc::clone(manager), Arc::clone(store)));
        tasks.spawn(follow::<SavedMove>(Arc::clone(manager), Arc::clone(store)));
        Standby(tasks)
    }

    /// Follows no more: nothing that it read is set after this.
    pub(crate) async fn end(mut self) {
        self.0.shutdown().await;
    }
}

async fn follow<T: Planned + 'static>(manager: Arc<Manager>, store: Arc<dyn Store>) {
    let mut is_told = false;
    loop {
        let Err(error) = hear::<T>(&manager, &*store, &mut is_told).await;
        if !std::mem::replace(&mut is_told, true) {
            tracing::warn!(kind = T::KIND, %error, "what the store keeps can't be followed: it is tried again");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Everything, and then each change, until something fails: then all of it is read again.
async fn hear<T: Planned>(
    manager: &Manager,
    store: &dyn Store,
    is_told: &mut bool,
) -> Result<Infallible, RecordError> {
    let table = Table::<T>::new();
    let all = table.read_all(store).await?;
    T::set_all(manager, all.records.into_iter().map(|kept| (kept.id, kept.record)));
    *is_told = false;
    let mut watch = store.watch(T::PREFIX, all.revision).await?;
    loop {
        for change in watch.next().await?.changes {
            let id = change.key.strip_prefix(T::PREFIX).unwrap_or(&change.key);
            let record = change.value.map(|text| table.decode_text(&change.key, &text)).transpose()?;
            T::set(manager, id, record);
        }
    }
}

/// Moves are carried out by the manager that leads; the others know which VMs have one.
impl Planned for SavedMove {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.on_way().keys().cloned().collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedMove>) {
        let on_way = record.and_then(SavedMove::on_way);
        let vm = on_way.as_ref().map(|one| one.vm.clone());
        let target = on_way.as_ref().and_then(|one| one.target.clone());
        let before = match on_way {
            Some(one) => manager.on_way().insert(id.to_owned(), one),
            None => manager.on_way().remove(id),
        };
        let planned = vm.as_ref().map(|_| id.to_owned());
        if let Some(vm) = vm.or(before.map(|one| one.vm)) {
            manager.state.change(|inventory| inventory.plan_move(&vm, planned, target));
        }
    }
}
