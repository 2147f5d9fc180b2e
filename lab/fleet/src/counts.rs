//! Counts of the requests to a fleet.

use std::collections::{BTreeMap, BTreeSet};

/// Counts of the requests to a fleet, and of simultaneous migrations.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Migrations started, by VM.
    pub begun: BTreeMap<String, u64>,
    /// Completed migrations.
    pub completed: u64,
    pub failed: u64,
    /// Cancelled migrations.
    pub cancelled: u64,
    /// Requests to start a migration that had started already, with its own ID. They were answered,
    /// and nothing was started.
    pub repeated: u64,
    /// Requests to start a second migration of a VM. A manager that sends one has lost track.
    pub double_begins: u64,
    /// Requests to start a migration of a VM that was not or no longer on the host.
    pub not_there: u64,
    /// Maximum of simultaneous departures, by host.
    pub most_out: BTreeMap<String, u32>,
    /// Maximum of simultaneous arrivals, by host.
    pub most_in: BTreeMap<String, u32>,
    /// Maximum of simultaneous migrations in total.
    pub most_at_once: u32,
    /// Names of VMs that were to be created with files below `vm_dirs` only.
    pub held_to_vm_dirs: BTreeSet<String>,
}

impl Counts {
    /// Returns the VMs with more than `times` started migrations.
    #[must_use]
    pub fn begun_more_than(&self, times: u64) -> Vec<&str> {
        self.begun.iter().filter(|(_, begun)| **begun > times).map(|(vm, _)| vm.as_str()).collect()
    }

    /// Returns the maximum of simultaneous departures of any host.
    #[must_use]
    pub fn most_out_of_one(&self) -> u32 {
        self.most_out.values().copied().max().unwrap_or(0)
    }

    /// Returns the maximum of simultaneous arrivals at any host.
    #[must_use]
    pub fn most_into_one(&self) -> u32 {
        self.most_in.values().copied().max().unwrap_or(0)
    }

    pub(crate) fn note(counts: &mut BTreeMap<String, u32>, host: &str, now: u32) {
        let most = counts.entry(host.to_owned()).or_default();
        *most = (*most).max(now);
    }
}
