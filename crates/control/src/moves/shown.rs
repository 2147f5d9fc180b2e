//! Moves as the API shows them, with indices, so that requests and drains find the moves that they
//! need without a walk over the finished ones.

use std::collections::{BTreeMap, BTreeSet};
#[cfg(test)]
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_api::control::Move;

/// Moves by ID. IDs sort by the time of the request.
#[derive(Debug, Default)]
pub(crate) struct ShownMoves {
    all: BTreeMap<String, Move>,
    open: BTreeSet<String>,
    of_drain: BTreeMap<String, BTreeSet<String>>,
    of_vm: BTreeMap<String, BTreeSet<String>>,
    /// Number of moves that were visited through the iterators.
    #[cfg(test)]
    visited: AtomicU64,
}

impl ShownMoves {
    /// Adds a move, or replaces it.
    pub(super) fn put(&mut self, shown: Move) {
        let id = shown.id.clone();
        if shown.state.is_over() {
            self.open.remove(&id);
        } else {
            self.open.insert(id.clone());
        }
        if !self.all.contains_key(&id) {
            if let Some(drain) = &shown.drain {
                self.of_drain.entry(drain.clone()).or_default().insert(id.clone());
            }
            self.of_vm.entry(shown.vm.clone()).or_default().insert(id.clone());
        }
        self.all.insert(id, shown);
    }

    pub(super) fn remove(&mut self, id: &str) {
        let Some(gone) = self.all.remove(id) else { return };
        self.open.remove(id);
        if let Some(drain) = &gone.drain {
            take_out(&mut self.of_drain, drain, id);
        }
        take_out(&mut self.of_vm, &gone.vm, id);
    }

    pub(crate) fn get(&self, id: &str) -> Option<&Move> {
        self.all.get(id)
    }

    /// Returns all moves, by ID.
    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &Move> {
        self.all.values().inspect(|_| self.visit())
    }

    /// Returns the unfinished moves, by ID.
    pub(crate) fn open(&self) -> impl DoubleEndedIterator<Item = &Move> {
        self.named(Some(&self.open))
    }

    /// Returns the moves of a drain, by ID.
    pub(crate) fn of_drain(&self, drain: &str) -> impl DoubleEndedIterator<Item = &Move> {
        self.named(self.of_drain.get(drain))
    }

    /// Returns the moves of a VM, by ID.
    pub(crate) fn of_vm(&self, vm: &str) -> impl DoubleEndedIterator<Item = &Move> {
        self.named(self.of_vm.get(vm))
    }

    fn named<'a>(
        &'a self,
        ids: Option<&'a BTreeSet<String>>,
    ) -> impl DoubleEndedIterator<Item = &'a Move> {
        let ids = ids.into_iter().flatten();
        ids.filter_map(|id| self.all.get(id)).inspect(|_| self.visit())
    }

    fn visit(&self) {
        #[cfg(test)]
        self.visited.fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn visited(&self) -> u64 {
        self.visited.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }
}

fn take_out(index: &mut BTreeMap<String, BTreeSet<String>>, key: &str, id: &str) {
    if let Some(ids) = index.get_mut(key) {
        ids.remove(id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}
