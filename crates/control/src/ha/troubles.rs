//! What is wrong with the high availability, for the alarms.

use std::collections::BTreeMap;

use godwit_planner::alarms::HaFacts;
use parking_lot::Mutex;

/// Part that reports troubles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Judges,
    Fencing,
    Restarts,
    Own,
}

/// The present troubles of each part.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<BTreeMap<Source, Vec<HaFacts>>>);

impl Troubles {
    /// Replaces the troubles of a part.
    pub(crate) fn set(&self, source: Source, troubles: Vec<HaFacts>) {
        self.0.lock().insert(source, troubles);
    }

    pub(crate) fn all(&self) -> Vec<HaFacts> {
        self.0.lock().values().flatten().cloned().collect()
    }

    /// Removes all troubles: this manager no longer leads.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}
