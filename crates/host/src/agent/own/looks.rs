//! Looks at datastores, side by side: one that is slow delays only its own next look.

use std::collections::BTreeMap;
use std::path::PathBuf;

use godwit_qemu::Uuid;
use tokio::task::JoinHandle;

/// Looks in progress, at most one at each datastore.
#[derive(Debug, Default)]
pub(super) struct Looks(BTreeMap<Uuid, JoinHandle<()>>);

impl Looks {
    /// Begins a look at each datastore whose last look has ended.
    pub(super) fn begin<T: Future<Output = ()> + Send + 'static>(
        &mut self,
        directories: BTreeMap<Uuid, PathBuf>,
        look: impl Fn(Uuid, PathBuf) -> T,
    ) {
        self.0.retain(|_, begun| !begun.is_finished());
        for (datastore, directory) in directories {
            let begun = self.0.entry(datastore);
            begun.or_insert_with(|| tokio::spawn(look(datastore, directory)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use proptest::prelude::*;
    use tokio::sync::oneshot;
    use tokio::task::yield_now;

    use super::*;

    const DATASTORES: u128 = 3;

    /// Looks that end when the test says so.
    #[derive(Debug, Default)]
    struct Begun {
        number: usize,
        in_progress: Vec<oneshot::Sender<()>>,
    }

    fn directories() -> BTreeMap<Uuid, PathBuf> {
        let of = |number| (Uuid::from_u128(number), PathBuf::from(format!("/{number}")));
        (0..DATASTORES).map(of).collect()
    }

    proptest! {
        /// However long the others last: after each turn every datastore has one look in progress,
        /// a new one where the last has ended.
        #[test]
        fn a_datastore_has_one_look_at_a_time_and_delays_no_other(
            turns in prop::collection::vec(prop::collection::btree_set(0..DATASTORES, 0..4), 1..20),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let all: Arc<Mutex<BTreeMap<Uuid, Begun>>> = Arc::default();
                let look = |datastore: Uuid, _: PathBuf| {
                    let all = Arc::clone(&all);
                    async move {
                        let (end, ended) = oneshot::channel();
                        {
                            let mut all = all.lock();
                            let begun = all.entry(datastore).or_default();
                            begun.number += 1;
                            begun.in_progress.push(end);
                        }
                        let _ = ended.await;
                    }
                };
                let (mut looks, mut ends) = (Looks::default(), BTreeMap::<Uuid, usize>::new());
                for turn in turns {
                    looks.begin(directories(), look);
                    let number = |of: Uuid| all.lock().get(&of).map_or(0, |begun| begun.number);
                    for of in directories().into_keys() {
                        let ended = ends.get(&of).copied().unwrap_or_default();
                        while number(of) <= ended {
                            yield_now().await;
                        }
                        assert_eq!(number(of), ended + 1);
                    }
                    for of in turn.into_iter().map(Uuid::from_u128) {
                        let end = all.lock().get_mut(&of).and_then(|it| it.in_progress.pop());
                        end.unwrap().send(()).unwrap();
                        *ends.entry(of).or_default() += 1;
                        while !looks.0[&of].is_finished() {
                            yield_now().await;
                        }
                    }
                }
            });
        }
    }

    fn fail() {
        panic!("a look")
    }

    #[test]
    fn a_look_that_panics_is_followed_by_the_next() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut looks = Looks::default();
            for _ in 0..2 {
                looks.begin(directories(), |_, _| async { fail() });
                while !looks.0.values().all(JoinHandle::is_finished) {
                    yield_now().await;
                }
            }
            looks.begin(BTreeMap::new(), |_, _| async {});
            assert!(looks.0.is_empty(), "those that have ended are forgotten");
        });
    }
}
