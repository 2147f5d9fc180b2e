//! Turns of tracking a guest's writes. Only one tracker can be active; a dry run gives way to a
//! migration.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, watch};

/// The turns of one VM.
#[derive(Debug, Default)]
pub(crate) struct TrackingTurn {
    turn: Arc<Mutex<()>>,
    /// Number of waiting migrations: one, except for those that fail at once.
    waiting: watch::Sender<u32>,
}

impl TrackingTurn {
    /// Waits until no one tracks the VM; a dry run gives way at once. From then on, the VM's
    /// condition keeps dry runs away.
    pub(crate) async fn take(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        drop(self.turn.lock().await);
        self.waiting.send_modify(|waiting| *waiting -= 1);
    }

    /// Takes the turn for a dry run; `None` if another dry run has it. The caller must then check
    /// whether a migration may begin.
    pub(crate) fn try_take(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.turn).try_lock_owned().ok()
    }

    /// Waits until a migration is waiting for the turn.
    pub(crate) async fn wanted(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dry_run_gives_way_to_a_migration_but_not_to_another_dry_run() {
        let turns = TrackingTurn::default();
        let turn = turns.try_take().unwrap();
        assert!(turns.try_take().is_none());
        let gives_way = async {
            turns.wanted().await;
            drop(turn);
        };
        tokio::join!(turns.take(), gives_way);
        assert!(turns.try_take().is_some());
        assert_eq!(*turns.waiting.borrow(), 0);
    }
}
