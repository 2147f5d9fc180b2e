//! Terms of a host, and what guard and judge tell each other about them.

use std::fmt;

/// Number of a term of a host. 0 is before the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(pub u64);

impl Term {
    /// Returns the term after this one.
    #[must_use]
    pub fn next(self) -> Term {
        Term(self.0.saturating_add(1))
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "term {}", self.0)
    }
}

/// Message of a guard to its judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Renewal {
    /// The newest term that the guard has accepted.
    pub term: Term,
    /// Whether that term is over: none of its VMs runs, and none ever will.
    pub over: bool,
}

/// A term that a guard may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    pub term: Term,
    /// Number of its heartbeat datastores.
    pub datastores: usize,
}

/// Answer of a judge to a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The lease of this term counts from the moment before the renewal was sent.
    Granted(Grant),
    /// The term of the renewal has ended; its VMs may run elsewhere.
    Ended(Term),
    /// The renewal has a term that the judge never opened: its records are older than the host's.
    Unknown,
}

/// Position of a host's heartbeat: what a reader found in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    pub term: Term,
    pub sequence: u64,
}
