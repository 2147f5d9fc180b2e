//! Locks for operations that must not run twice at a time, by ID.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// Operations in progress, by ID.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Mutex<BTreeSet<String>>>);

/// Lock of one operation, released on drop.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    id: String,
}

impl Turns {
    /// Takes the lock of an operation. Returns `None` if the operation is in progress.
    pub(crate) fn take(&self, id: &str) -> Option<Turn> {
        let is_new = self.0.lock().insert(id.to_owned());
        is_new.then(|| Turn { turns: self.clone(), id: id.to_owned() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().remove(&self.id);
    }
}
