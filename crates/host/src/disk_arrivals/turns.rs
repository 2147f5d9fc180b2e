//! Turns: requests for one transfer, for one VM, or for images on one storage follow each other.
//! A request whose storage hangs keeps its turn there, and those that wait for it give up after a
//! limit. A turn at several subjects is taken as a whole: a request that waits for one of them
//! holds none of the others.
//!
//! Order: first a turn at a transfer and its VM, then one at storages. Nothing that has a turn at
//! storages waits for another.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_qemu::Uuid;
use godwit_wire::MigrationId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What one request at a time works at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    Transfer(MigrationId),
    /// A VM by its name.
    Vm(String),
    /// A VM by its UUID.
    Guest(Uuid),
    /// A directory for VMs or one of block devices, a pool of Ceph as `rbd:POOL`, or a thin pool of
    /// LVM as `lvm:GROUP/POOL`.
    Storage(PathBuf),
}

/// The subjects that have a turn.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    held: Mutex<HashSet<Subject>>,
    /// Notified when a turn ends.
    freed: Notify,
}

/// A turn; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Arc<Turns>,
    subjects: HashSet<Subject>,
}

impl Turns {
    /// Waits for a turn at all of the subjects.
    ///
    /// # Errors
    /// The first subject found in another turn, after `limit`.
    pub(crate) async fn take(
        self: &Arc<Self>,
        subjects: HashSet<Subject>,
        limit: Duration,
    ) -> Result<Turn, Subject> {
        let mut late = std::pin::pin!(tokio::time::sleep(limit));
        loop {
            // Before the look, so that no end of a turn is missed.
            let freed = self.freed.notified();
            let Err(busy) = self.hold(&subjects) else {
                return Ok(Turn { turns: Arc::clone(self), subjects });
            };
            tokio::select! {
                () = freed => {}
                () = &mut late => return Err(busy),
            }
        }
    }

    /// Holds all of the subjects, or none.
    fn hold(&self, subjects: &HashSet<Subject>) -> Result<(), Subject> {
        let mut held = self.held.lock();
        if let Some(busy) = subjects.iter().find(|subject| held.contains(*subject)) {
            return Err(busy.clone());
        }
        held.extend(subjects.iter().cloned());
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.held.lock().retain(|subject| !self.subjects.contains(subject));
        self.turns.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Far more than a turn takes that is free.
    const LONG: Duration = Duration::from_secs(600);

    fn storage(name: &str) -> Subject {
        Subject::Storage(name.into())
    }

    fn of(subjects: &[Subject]) -> HashSet<Subject> {
        subjects.iter().cloned().collect()
    }

    #[tokio::test]
    async fn a_storage_that_hangs_keeps_its_own_turn_alone() {
        let turns = Arc::<Turns>::default();
        let (hung, well) = (storage("/hung"), storage("/well"));
        let stuck = turns.take(of(std::slice::from_ref(&hung)), LONG).await.unwrap();
        for _ in 0..3 {
            drop(turns.take(of(std::slice::from_ref(&well)), LONG).await.unwrap());
            // Of both, none is kept meanwhile.
            let both = turns.take(of(&[hung.clone(), well.clone()]), Duration::ZERO).await;
            assert_eq!(both.unwrap_err(), hung);
        }
        let waits = tokio::spawn({
            let (turns, both) = (Arc::clone(&turns), of(&[hung, well.clone()]));
            async move { turns.take(both, LONG).await.map(drop) }
        });
        tokio::task::yield_now().await;
        drop(turns.take(of(&[well]), LONG).await.unwrap());
        drop(stuck);
        waits.await.unwrap().unwrap();
        assert!(turns.held.lock().is_empty());
    }

    /// A request: the storages of its turn, and whether it hangs there.
    fn request() -> impl Strategy<Value = (HashSet<usize>, bool)> {
        (prop::collection::hash_set(0_usize..4, 1..4), prop::bool::weighted(0.3))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Requests at storages, some of which never end: one that has no storage of those gets its
        /// turn, and no two have one storage at once.
        #[test]
        fn only_requests_at_storage_that_hangs_wait(
            requests in prop::collection::vec(request(), 1..24),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
            let runtime = runtime.unwrap();
            runtime.block_on(async {
                let turns = Arc::<Turns>::default();
                let (mut hung, mut stuck) = (HashSet::new(), Vec::new());
                for (storages, hangs) in requests {
                    let subjects = storages.iter().map(|number| storage(&number.to_string()));
                    let is_free = storages.is_disjoint(&hung);
                    let limit = if is_free { LONG } else { Duration::ZERO };
                    match turns.take(subjects.collect(), limit).await {
                        Ok(turn) => {
                            prop_assert!(is_free);
                            if hangs {
                                hung.extend(storages);
                                stuck.push(turn);
                            }
                        }
                        Err(busy) => {
                            let is_hung = hung.iter().any(|n| busy == storage(&n.to_string()));
                            prop_assert!(!is_free && is_hung);
                        }
                    }
                    prop_assert_eq!(turns.held.lock().len(), hung.len());
                }
                drop(stuck);
                prop_assert!(turns.held.lock().is_empty());
                Ok(())
            })?;
        }
    }
}
