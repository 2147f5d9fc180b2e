//! Standby of a manager that does not lead. It follows the store's records of hosts, VMs, rules,
//! the baseline, limits, datastores, tokens and moves, and through them every agent, so it can take
//! over.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use godwit_store::Store;
use godwit_store::records::{RecordError, Table};
use tokio::task::JoinSet;

use crate::access::certificates::SavedRevocations;
use crate::access::record::SavedToken;
use crate::agents::record::SavedHost;
use crate::baseline::SavedBaseline;
use crate::datastores::record::SavedDatastore;
use crate::manager::Manager;
use crate::moves::SavedMove;
use crate::moves::limits::SavedLimits;
use crate::rules::SavedRule;
use crate::storage::planned::Planned;
use crate::vms::bindings::SavedBinding;
use crate::vms::record::SavedVm;

/// Pause before a failed store is read again.
const PAUSE: Duration = Duration::from_secs(1);

/// Tasks that follow the store.
pub(crate) struct Standby(JoinSet<()>);

impl Standby {
    /// Starts to follow the store for this manager.
    pub(crate) fn begin(manager: &Arc<Manager>, store: &Arc<dyn Store>) -> Standby {
        let mut tasks = JoinSet::new();
        tasks.spawn(follow::<_, SavedToken>(Arc::clone(&manager.tokens), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedBaseline>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedRule>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedLimits>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedDatastore>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedRevocations>(
            Arc::new(manager.certificates.clone()),
            Arc::clone(store),
        ));
        tasks.spawn(follow::<_, SavedVm>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedBinding>(Arc::clone(&manager.state), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedHost>(Arc::clone(&manager.fleet), Arc::clone(store)));
        tasks.spawn(follow::<_, SavedMove>(Arc::clone(&manager.elsewhere), Arc::clone(store)));
        Standby(tasks)
    }

    /// Stops following. Nothing that was read is applied after this.
    pub(crate) async fn end(mut self) {
        self.0.shutdown().await;
    }
}

async fn follow<K, T: Planned<K> + 'static>(knows: Arc<K>, store: Arc<dyn Store>) {
    let mut is_reported = false;
    loop {
        let Err(error) = follow_once::<K, T>(&knows, &*store, &mut is_reported).await;
        if !std::mem::replace(&mut is_reported, true) {
            tracing::warn!(kind = T::KIND, %error, "cannot follow the store; retrying");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Reads all records and then each change until an error. After an error everything is read again.
async fn follow_once<K, T: Planned<K>>(
    knows: &K,
    store: &dyn Store,
    is_reported: &mut bool,
) -> Result<Infallible, RecordError> {
    let table = Table::<T>::new();
    let all = table.read_all(store).await?;
    T::set_all(knows, all.records.into_iter().map(|kept| (kept.id, kept.record)));
    *is_reported = false;
    let mut watch = store.watch(T::PREFIX, all.revision).await?;
    loop {
        for change in watch.next().await?.changes {
            let id = change.key.strip_prefix(T::PREFIX).unwrap_or(&change.key);
            let record =
                change.value.map(|text| table.decode_text(&change.key, &text)).transpose()?;
            T::set(knows, id, record);
        }
    }
}
