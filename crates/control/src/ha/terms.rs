//! What the judges know about the terms of hosts and about the VMs in them, for the restarts.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::MOST_HERE;
use godwit_api::control::HaPhase;
use godwit_qemu::Uuid;
use parking_lot::Mutex;

/// The newest term of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostTerm {
    /// Its number; 0 before the first one, whose phase is [`HaPhase::Over`].
    pub(crate) term: u64,
    pub(crate) phase: HaPhase,
}

/// Protected VMs that a host may have in its newest term.
#[derive(Debug, Default)]
struct HostVms {
    /// What its last renewal named; none: it may have any.
    named: Option<BTreeSet<Uuid>>,
    /// Starts that were requested there, with their terms.
    requested: BTreeMap<Uuid, u64>,
}

/// The newest term of each host. Judges set it, before they answer a renewal.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    newest: Mutex<BTreeMap<String, HostTerm>>,
    vms: Mutex<BTreeMap<String, HostVms>>,
}

impl Terms {
    pub(crate) fn set(&self, host: &str, term: HostTerm) {
        let has_ended =
            |of: u64| of < term.term || (of == term.term && term.phase == HaPhase::Over);
        if let Some(vms) = self.vms.lock().get_mut(host) {
            // What was started in an ended term has ended.
            vms.requested.retain(|_, of| !has_ended(*of));
        }
        self.newest.lock().insert(host.to_owned(), term);
    }

    /// Takes what a renewal names, before it is answered: a host starts no other protected VM by
    /// itself until the next answer. `None`: it may have any, or the host may get its answers from
    /// somebody else.
    pub(crate) fn name(&self, host: &str, vms: Option<&[Uuid]>) {
        let vms = vms.filter(|vms| vms.len() <= MOST_HERE);
        let named = vms.map(|vms| vms.iter().copied().collect());
        self.vms.lock().entry(host.to_owned()).or_default().named = named;
    }

    /// Notes that the start of a VM is about to be requested from a host, in this term.
    pub(crate) fn request(&self, host: &str, vm: Uuid, term: u64) {
        self.vms.lock().entry(host.to_owned()).or_default().requested.insert(vm, term);
    }

    /// Returns whether a host may have a protected VM in its newest term, by all that its renewals
    /// have named and that this manager has requested.
    pub(crate) fn may_have(&self, host: &str, vm: Uuid) -> bool {
        let all = self.vms.lock();
        all.get(host).is_none_or(|vms| {
            vms.requested.contains_key(&vm)
                || vms.named.as_ref().is_none_or(|own| own.contains(&vm))
        })
    }

    /// Returns whether the last renewal of a host has named a VM.
    pub(crate) fn names(&self, host: &str, vm: Uuid) -> bool {
        let all = self.vms.lock();
        let named = all.get(host).and_then(|vms| vms.named.as_ref());
        named.is_some_and(|own| own.contains(&vm))
    }

    /// Removes a host that left the cluster.
    pub(crate) fn forget(&self, host: &str) {
        self.newest.lock().remove(host);
        self.vms.lock().remove(host);
    }

    /// Returns the newest term of each host.
    pub(crate) fn all(&self) -> BTreeMap<String, HostTerm> {
        self.newest.lock().clone()
    }

    /// Forgets everything: this manager no longer leads.
    pub(crate) fn clear(&self) {
        self.newest.lock().clear();
        self.vms.lock().clear();
    }

    /// Returns the term of a host in which VMs may be started.
    pub(crate) fn open(&self, host: &str) -> Option<u64> {
        let term = self.newest.lock().get(host).copied()?;
        (term.phase == HaPhase::Watching && term.term > 0).then_some(term.term)
    }

    /// Returns whether no protected VM runs on a host, and none can start there. A host without a
    /// judge is not known to be so.
    pub(crate) fn is_over(&self, host: &str) -> bool {
        self.newest.lock().get(host).is_some_and(|term| term.phase == HaPhase::Over)
    }

    /// Returns whether a term has ended. It never begins again.
    pub(crate) fn has_ended(&self, host: &str, term: u64) -> bool {
        let known = self.newest.lock().get(host).copied();
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

    #[test]
    fn a_host_may_have_what_its_last_renewal_named_and_what_was_requested() {
        let terms = Terms::default();
        let [web, db] = [1, 2].map(Uuid::from_u128);
        assert!(terms.may_have("a", web), "it has named nothing yet");
        terms.name("a", Some(&[web]));
        assert!(terms.may_have("a", web) && !terms.may_have("a", db) && terms.may_have("b", db));
        assert!(terms.names("a", web) && !terms.names("a", db) && !terms.names("b", db));
        terms.request("a", db, 1);
        terms.name("a", Some(&[]));
        assert!(!terms.may_have("a", web) && terms.may_have("a", db) && !terms.names("a", db));
        terms.set("a", HostTerm { term: 0, phase: HaPhase::Over });
        assert!(terms.may_have("a", db), "an earlier term is over");
        terms.set("a", HostTerm { term: 1, phase: HaPhase::Over });
        assert!(!terms.may_have("a", db), "its term is over");
        terms.name("a", None);
        assert!(terms.may_have("a", db));
        let many: Vec<Uuid> = (0..=MOST_HERE).map(|_| Uuid::new_v4()).collect();
        terms.name("a", Some(&many));
        assert!(terms.may_have("a", db), "too many");
        terms.name("a", Some(&[]));
        terms.forget("a");
        assert!(terms.may_have("a", db));
    }
}
