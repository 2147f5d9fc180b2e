//! What the judges know about the terms of hosts, for the restarts.

use std::collections::BTreeMap;

use godwit_api::control::HaPhase;
use parking_lot::Mutex;

/// The newest term of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostTerm {
    /// Its number; 0 before the first one, whose phase is [`HaPhase::Over`].
    pub(crate) term: u64,
    pub(crate) phase: HaPhase,
}

/// The newest term of each host. Judges set it, before they answer a renewal.
#[derive(Debug, Default)]
pub(crate) struct Terms(Mutex<BTreeMap<String, HostTerm>>);

impl Terms {
    pub(crate) fn set(&self, host: &str, term: HostTerm) {
        self.0.lock().insert(host.to_owned(), term);
    }

    /// Removes a host that left the cluster.
    pub(crate) fn forget(&self, host: &str) {
        self.0.lock().remove(host);
    }

    /// Returns the newest term of each host.
    pub(crate) fn all(&self) -> BTreeMap<String, HostTerm> {
        self.0.lock().clone()
    }

    /// Forgets everything: this manager no longer leads.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Returns the term of a host in which VMs may be started.
    pub(crate) fn open(&self, host: &str) -> Option<u64> {
        let term = self.0.lock().get(host).copied()?;
        (term.phase == HaPhase::Watching && term.term > 0).then_some(term.term)
    }

    /// Returns whether no protected VM runs on a host, and none can start there. A host without a
    /// judge is not known to be so.
    pub(crate) fn is_over(&self, host: &str) -> bool {
        self.0.lock().get(host).is_some_and(|term| term.phase == HaPhase::Over)
    }

    /// Returns whether a term has ended. It never begins again.
    pub(crate) fn has_ended(&self, host: &str, term: u64) -> bool {
        let known = self.0.lock().get(host).copied();
        known.is_some_and(|known| {
            known.term > term || (known.term == term && known.phase == HaPhase::Over)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_is_open_only_while_it_is_watched_and_ends_once() {
        let terms = Terms::default();
        assert!(!terms.is_over("a") && !terms.has_ended("a", 0) && terms.open("a").is_none());
        terms.set("a", HostTerm { term: 0, phase: HaPhase::Over });
        assert!(terms.is_over("a") && terms.open("a").is_none());
        terms.set("a", HostTerm { term: 1, phase: HaPhase::Watching });
        assert_eq!(terms.open("a"), Some(1));
        assert!(terms.has_ended("a", 0) && !terms.has_ended("a", 1));
        for phase in [HaPhase::Fencing, HaPhase::Doubtful] {
            terms.set("a", HostTerm { term: 1, phase });
            assert!(terms.open("a").is_none() && !terms.is_over("a") && !terms.has_ended("a", 1));
        }
        terms.set("a", HostTerm { term: 2, phase: HaPhase::Watching });
        assert!(terms.has_ended("a", 1) && !terms.has_ended("a", 2));
        terms.forget("a");
        assert!(!terms.is_over("a"));
    }
}
