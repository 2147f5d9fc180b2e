//! Idempotency keys in the store, and their number for each caller. A caller with too many keys
//! evicts its own oldest keys and no other caller's.

use std::collections::BTreeMap;

use godwit_api::control::Problem;
use godwit_store::{Revision, Transaction};
use tokio::sync::Mutex;

use crate::idempotency::keys::{Keyed, KeysOfCaller, StoredRequest};
use crate::idempotency::record::{REPEATS, SavedRepeat};
use crate::storage::keeper::{Keeper, problem};

/// Keys of the callers seen during one leadership.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Mutex<BTreeMap<String, KeysOfCaller>>);

impl Repeats {
    /// Records the start of a request, replaces the key's earlier record, and removes the caller's
    /// excess keys.
    pub(crate) async fn begin(
        &self,
        keeper: &Keeper,
        keyed: &Keyed,
        was: Option<Revision>,
        begun: &StoredRequest,
    ) -> Result<Revision, Problem> {
        let mut callers = self.0.lock().await;
        if !callers.contains_key(&keyed.caller) {
            let kept = keeper.read_below(REPEATS, &format!("{}/", keyed.caller)).await?;
            let keys = kept.into_iter().map(|(id, saved)| (saved.unix_ms(), id)).collect();
            callers.insert(keyed.caller.clone(), keys);
        }
        let forgotten =
            callers.get_mut(&keyed.caller).map(|keys| keys.begin(&keyed.id, begun.unix_ms));
        drop(callers);
        let forget = |all: Transaction, id: &String| all.delete(REPEATS.key(id));
        let forgets = forgotten.unwrap_or_default().iter().fold(Transaction::new(), forget);
        write(keeper, forgets, &keyed.id, was, begun).await
    }

    /// Removes callers whose keys have all expired.
    pub(crate) async fn expire(&self, now_unix_ms: u64) {
        self.0.lock().await.retain(|_, keys| {
            keys.expire(now_unix_ms);
            !keys.is_empty()
        });
    }
}

/// Writes the record of a request over its earlier record.
pub(crate) async fn write(
    keeper: &Keeper,
    beside: Transaction,
    id: &str,
    was: Option<Revision>,
    stored: &StoredRequest,
) -> Result<Revision, Problem> {
    let saved = SavedRepeat::from(stored);
    let transaction = match was {
        Some(was) => REPEATS.replace(beside, id, was, &saved),
        None => REPEATS.insert(beside, id, &saved),
    };
    let transaction = transaction.map_err(problem)?;
    keeper.write_unknown(transaction).await
}
