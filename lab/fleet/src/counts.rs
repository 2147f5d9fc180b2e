//! What a fleet has been asked to do.

use std::collections::{BTreeMap, BTreeSet};

/// What a fleet has been asked to do, and how much of it at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Migrations begun, by VM.
    pub begun: BTreeMap<String, u64>,
    /// Migrations that came through.
    pub completed: u64,
    pub failed: u64,
    /// Migrations that were cancelled.
    pub cancelled: u64,
    /// Requests to begin one that had begun already, by its own id: answered, and nothing begun.
    pub repeated: u64,
    /// Requests to begin another one of a VM that had one: a manager that asks so has lost track.
    pub double_begins: u64,
    /// Requests to begin one of a VM that was not there, or not there any more.
    pub not_there: u64,
    /// The most that left a host at a time.
    pub most_out: BTreeMap<String, u32>,
    /// The most that arrived at a host at a time.
    pub most_in: BTreeMap<String, u32>,
    /// The most in all at a time.
    pub most_at_once: u32,
    /// VMs that were to be created with files below `vm_dirs` alone, by name.
    pub held_to_vm_dirs: BTreeSet<String>,
}

impl Counts {
    /// VMs of which a migration was begun more than so many times.
    #[must_use]
    pub fn begun_more_than(&self, times: u64) -> Vec<&str> {
        self.begun.iter().filter(|(_, begun)| **begun > times).map(|(vm, _)| vm.as_str()).collect()
    }

    /// The most that left any host at a time.
    #[must_use]
    pub fn most_out_of_one(&self) -> u32 {
        self.most_out.values().copied().max().unwrap_or(0)
    }

    /// The most that arrived at any host at a time.
    #[must_use]
    pub fn most_into_one(&self) -> u32 {
        self.most_in.values().copied().max().unwrap_or(0)
    }

    pub(crate) fn note(counts: &mut BTreeMap<String, u32>, host: &str, now: u32) {
        let most = counts.entry(host.to_owned()).or_default();
        *most = (*most).max(now);
    }
}
