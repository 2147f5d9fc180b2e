//! Random transactions on a store and on a model of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use godwit_store::{KeyState, Leadership, Revision, Store, StoreError, Transaction};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::rig::{Rig, lead};

/// The state that a transaction expects of a key.
#[derive(Clone, Copy, Debug)]
enum Guess {
    Right,
    Absent,
    /// Its revision before the last change, or any other revision.
    Stale,
}

#[derive(Clone, Debug)]
struct Step {
    expectations: Vec<(String, Guess)>,
    writes: BTreeMap<String, Option<String>>,
}

fn keys() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "a/1", "a/2", "a0", "b/1", "~"]).prop_map(str::to_owned)
}

fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let guess =
        prop_oneof![6 => Just(Guess::Right), 1 => Just(Guess::Absent), 1 => Just(Guess::Stale)];
    let value = prop::option::weighted(0.7, "[0-9]{1,3}");
    let step = (
        prop::collection::vec((keys(), guess), 0..4),
        prop::collection::btree_map(keys(), value, 0..4),
    )
        .prop_map(|(expectations, writes)| Step { expectations, writes });
    prop::collection::vec(step, 1..most)
}

#[derive(Debug, Default)]
struct Model {
    items: BTreeMap<String, (String, Revision)>,
    revision: Revision,
}

impl Model {
    fn state(&self, key: &str) -> KeyState {
        self.items.get(key).map_or(KeyState::Absent, |(_, revision)| KeyState::At(*revision))
    }

    fn expects(&self, key: &str, guess: Guess) -> KeyState {
        match guess {
            Guess::Right => self.state(key),
            Guess::Absent => KeyState::Absent,
            Guess::Stale => KeyState::At(Revision(self.revision.0 + 1000)),
        }
    }

    /// Whether a step changes anything.
    fn changes(&self, step: &Step) -> bool {
        step.writes.iter().any(|(key, value)| value.is_some() || self.items.contains_key(key))
    }

    fn apply(&mut self, step: &Step, revision: Revision) {
        for (key, value) in &step.writes {
            match value {
                Some(value) => self.items.insert(key.clone(), (value.clone(), revision)),
                None => self.items.remove(key),
            };
        }
        self.revision = revision;
    }
}

async fn play(
    store: &Arc<dyn Store>,
    leads: &Leadership,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut model = Model { revision: store.read("").await.unwrap().revision, ..Model::default() };
    let mut watch = store.watch("", model.revision).await.unwrap();
    for step in steps {
        let mut transaction = Transaction::new();
        let mut conflict = None;
        for (key, guess) in &step.expectations {
            let (expected, is) = (model.expects(key, *guess), model.state(key));
            transaction = transaction.expect(key.as_str(), expected);
            if expected != is {
                conflict.get_or_insert((key.clone(), expected, is));
            }
        }
        for (key, value) in &step.writes {
            transaction = match value {
                Some(value) => transaction.put(key.as_str(), value.as_str()),
                None => transaction.delete(key.as_str()),
            };
        }
        match (store.commit(leads, transaction).await, conflict) {
            (Ok(revision), None) if model.changes(step) => {
                prop_assert!(revision > model.revision);
                model.apply(step, revision);
                prop_assert_eq!(watch.next().await.unwrap().revision, revision);
            }
            (Ok(revision), None) => prop_assert!(revision >= model.revision),
            (Err(StoreError::Conflict { key, expected, found }), conflict) => {
                prop_assert_eq!(Some((key, expected, found)), conflict);
            }
            (other, conflict) => {
                return Err(TestCaseError::fail(format!(
                    "{other:?}, where the model has {conflict:?}"
                )));
            }
        }
    }
    for prefix in ["", "a", "a/", "b/", "~", "c"] {
        let snapshot = store.read(prefix).await.unwrap();
        prop_assert!(snapshot.revision >= model.revision);
        let is: Vec<_> = snapshot
            .items
            .into_iter()
            .map(|item| (item.key, (item.value, item.revision)))
            .collect();
        let should: Vec<_> =
            model.items.clone().into_iter().filter(|(key, _)| key.starts_with(prefix)).collect();
        prop_assert_eq!(is, should);
    }
    Ok(())
}

/// Plays random steps on each new store.
fn on_each(rig: impl Fn() -> Option<Rig>, cases: u32) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let played = TestRunner::new(config).run(&steps(25), |steps| {
        runtime.block_on(async {
            let Some(rig) = rig() else { return Ok(()) };
            let store = rig.open();
            let leads = lead(&store).await;
            play(&store, &leads, &steps).await
        })
    });
    played.unwrap();
}

#[test]
fn memory_behaves_like_the_model() {
    on_each(|| Some(Rig::memory()), 256);
}

#[test]
fn sqlite_behaves_like_the_model() {
    on_each(|| Some(Rig::sqlite()), 32);
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_behaves_like_the_model() {
    // Held for all cases: an unused etcd would end.
    let Some(_keep) = Rig::etcd() else { return };
    on_each(Rig::etcd, 16);
}
