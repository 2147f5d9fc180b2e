//! Turns at datastores: one thread at a time reads or opens heartbeats of a datastore, and one
//! writes. A datastore that hangs holds up its own turn alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_qemu::Uuid;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a thread does at a datastore. A slow reading keeps no heartbeat from being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::ha) enum Work {
    /// Reading and opening, for a manager.
    Read,
    /// Writing this host's own heartbeat.
    Write,
}

/// Turn of a thread, over when it is dropped.
#[derive(Debug)]
pub(in crate::ha) struct Turn {
    _permit: OwnedSemaphorePermit,
}

#[derive(Debug, Default)]
pub(in crate::ha) struct Turns(Mutex<BTreeMap<(Uuid, Work), Arc<Semaphore>>>);

impl Turns {
    /// Begins a turn; `None` if another thread has it.
    pub(in crate::ha) fn begin(&self, datastore: Uuid, work: Work) -> Option<Turn> {
        let permit = self.of(datastore, work).try_acquire_owned().ok()?;
        Some(Turn { _permit: permit })
    }

    /// Waits for a turn; `None` if there is none any more.
    pub(in crate::ha) async fn wait(&self, datastore: Uuid, work: Work) -> Option<Turn> {
        let permit = self.of(datastore, work).acquire_owned().await.ok()?;
        Some(Turn { _permit: permit })
    }

    fn of(&self, datastore: Uuid, work: Work) -> Arc<Semaphore> {
        let mut all = self.0.lock();
        // Anyone who has a turn or waits for one has it from here.
        all.retain(|_, turn| Arc::strong_count(turn) > 1);
        Arc::clone(all.entry((datastore, work)).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datastore_has_one_turn_of_each_kind_and_none_is_kept() {
        let turns = Turns::default();
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        let first = turns.begin(one, Work::Read);
        assert!(first.is_some() && turns.begin(one, Work::Read).is_none());
        let others = (turns.begin(one, Work::Write), turns.begin(other, Work::Read));
        assert!(others.0.is_some() && others.1.is_some());
        drop(first);
        assert!(turns.begin(one, Work::Read).is_some());
        drop(others);
        assert!(turns.begin(other, Work::Write).is_some());
        assert_eq!(turns.0.lock().len(), 1);
    }
}
