//! Turns: each operation that must not run twice at a time has one, by its id.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// What is being carried out, by its id.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Mutex<BTreeSet<String>>>);

/// A place among what is being carried out; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Turns,
    id: String,
}

impl Turns {
    /// A turn for this; none: it is being carried out.
    pub(crate) fn take(&self, id: &str) -> Option<Turn> {
        let is_new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        is_new.then(|| Turn { turns: self.clone(), id: id.to_owned() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
