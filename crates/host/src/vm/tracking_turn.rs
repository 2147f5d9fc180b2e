//! Whose turn it is to track a guest's writes: one at a time can. A dry run gives way to a migration.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, watch};

/// The turns of one VM.
#[derive(Debug, Default)]
pub(crate) struct TrackingTurn {
    turn: Arc<Mutex<()>>,
    /// How many migrations wait: one, but for what fails at once.
    waiting: watch::Sender<u32>,
}

impl TrackingTurn {
    /// Waits until nobody tracks it any more: whoever does ends at once. From then on the VM's condition keeps dry runs away.
    pub(crate) async fn take(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        drop(self.turn.lock().await);
        self.waiting.send_modify(|waiting| *waiting -= 1);
    }

    /// For a dry run; none: another has it. Whether a migration may begin is to be asked after this.
    pub(crate) fn try_take(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.turn).try_lock_owned().ok()
    }

    /// Returns when a migration waits.
    pub(crate) async fn wanted(&self) {
        // The sender is this turn's own.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting > 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dry_run_gives_way_to_a_migration_and_not_to_another() {
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
