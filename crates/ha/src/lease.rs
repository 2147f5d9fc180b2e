//! The lease of a term as its holder counts it.

use std::time::Duration;

use crate::term::Term;

/// Number of heartbeat datastores that prolong a lease together.
pub(crate) fn majority(datastores: usize) -> usize {
    datastores / 2 + 1
}

/// Number of heartbeat datastores without which no majority is left.
pub(crate) fn blocking(datastores: usize) -> usize {
    (datastores + 1).saturating_sub(majority(datastores))
}

/// A term with the moments from which its lease counts. Each is before the request or write that
/// was confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    term: Term,
    renewed_from: Duration,
    written_from: Vec<Option<Duration>>,
}

impl Lease {
    /// Creates the lease of a term that was requested at `sent_at`, with a number of heartbeat
    /// datastores.
    #[must_use]
    pub fn new(term: Term, datastores: usize, sent_at: Duration) -> Self {
        Lease { term, renewed_from: sent_at, written_from: vec![None; datastores] }
    }

    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the moment from which the lease counts: the last confirmed renewal, or the last
    /// moment since which a majority of the datastores confirmed a heartbeat.
    #[must_use]
    pub fn counts_from(&self) -> Duration {
        let mut written: Vec<Duration> = self.written_from.iter().flatten().copied().collect();
        written.sort_unstable_by(|one, other| other.cmp(one));
        let by_majority = written.get(majority(self.written_from.len()) - 1).copied();
        by_majority.unwrap_or_default().max(self.renewed_from)
    }

    pub(crate) fn renewed(&mut self, sent_at: Duration) {
        self.renewed_from = self.renewed_from.max(sent_at);
    }

    pub(crate) fn written(&mut self, datastore: usize, started_at: Duration) {
        if let Some(from) = self.written_from.get_mut(datastore) {
            *from = Some(from.unwrap_or_default().max(started_at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_majority_and_what_prevents_it_share_a_datastore() {
        assert_eq!([1, 2, 3, 4, 5].map(majority), [1, 2, 2, 3, 3]);
        assert_eq!([0, 1, 2, 3, 4, 5].map(blocking), [0, 1, 1, 2, 2, 3]);
        for datastores in 1..100 {
            assert!(majority(datastores) + blocking(datastores) > datastores);
        }
    }

    #[test]
    fn the_lease_counts_from_the_newest_renewal_or_majority() {
        let mut lease = Lease::new(Term(1), 3, at(5));
        lease.written(0, at(20));
        assert_eq!(lease.counts_from(), at(5), "one of three");
        lease.written(2, at(10));
        assert_eq!(lease.counts_from(), at(10), "the second newest of three");
        lease.written(2, at(8));
        lease.written(3, at(30));
        assert_eq!(lease.counts_from(), at(10), "an older write, and an unknown datastore");
        lease.renewed(at(15));
        lease.renewed(at(14));
        assert_eq!(lease.counts_from(), at(15));
        let without = Lease::new(Term(1), 0, at(3));
        assert_eq!(without.counts_from(), at(3));
    }
}
