//! The judge of a host, in the manager: it grants and ends the host's terms.

use std::cmp::Ordering;
use std::time::Duration;

use crate::lease::blocking;
use crate::term::{Answer, Grant, Mark, Renewal, Term};
use crate::timing::Timing;

/// Facts of a host that are fixed for a term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Facts {
    /// Number of heartbeat datastores.
    pub datastores: usize,
    /// Whether the host has a watchdog in its kernel or hardware.
    pub watchdog: bool,
    /// Whether a fencing device can cut the host's power.
    pub fencing: bool,
}

/// What the manager's store has of a judge. A change is saved under the leadership before its
/// answer is sent or its action is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The newest term.
    pub term: Term,
    /// Whether it has ended.
    pub over: bool,
    /// The term's facts.
    pub facts: Facts,
}

impl Record {
    /// Record of a host that never had a term.
    pub const NEW: Record = Record {
        term: Term(0),
        over: true,
        facts: Facts { datastores: 0, watchdog: false, fencing: false },
    };
}

/// State of the newest term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The host may hold it.
    Watching,
    /// The host was silent long enough; its power is being cut.
    Fencing,
    /// The host was silent long enough, but nothing guarantees that its VMs have ended. An
    /// operator has to confirm that it is off.
    Doubtful,
    /// It has ended: its VMs may run elsewhere.
    Over,
}

/// What a manager has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Cut the host's power, verify that it is off, and report the result for this term.
    Fence(Term),
    /// Raise an alarm: an operator has to confirm that the host is off.
    AskOperator(Term),
    /// Save the record, then start the VMs of this term elsewhere.
    Release(Term),
}

/// Result of a fencing device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fencing {
    Off,
    /// The device does not respond, refuses, or reports that the host is on.
    Failed,
}

/// Readings of a heartbeat block that did not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Sighting {
    mark: Option<Mark>,
    /// When the first of them was there.
    since: Duration,
    /// When the last of them began.
    until: Duration,
}

/// Judge of one host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Judge {
    timing: Timing,
    record: Record,
    phase: Phase,
    heard_at: Duration,
    sightings: Vec<Option<Sighting>>,
}

impl Judge {
    /// Creates the judge of a new leader, or of a new host ([`Record::NEW`]). It counts from `now`,
    /// a moment at which no former leader can grant anything any more.
    #[must_use]
    pub fn new(timing: Timing, record: Record, now: Duration) -> Self {
        let phase = if record.over { Phase::Over } else { Phase::Watching };
        let sightings = vec![None; record.facts.datastores];
        Judge { timing, record, phase, heard_at: now, sightings }
    }

    #[must_use]
    pub fn record(&self) -> Record {
        self.record
    }

    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the term in which a VM may be started on the host.
    #[must_use]
    pub fn open_term(&self) -> Option<Term> {
        (self.phase == Phase::Watching).then_some(self.record.term)
    }

    /// Whether a VM that was started in a term of the host may be started elsewhere.
    #[must_use]
    pub fn is_over(&self, term: Term) -> bool {
        term < self.record.term || (term == self.record.term && self.phase == Phase::Over)
    }

    /// Takes a renewal, sent by the host itself or forwarded by a peer, and returns the answer.
    /// `next` has the facts for a term that it may open.
    pub fn renewal(&mut self, now: Duration, renewal: Renewal, next: Facts) -> Answer {
        let Renewal { term, over } = renewal;
        match term.cmp(&self.record.term) {
            Ordering::Greater => return Answer::Unknown,
            Ordering::Less if !over => return Answer::Ended(term),
            // The host's own report that the term is over.
            Ordering::Equal if over => self.open(now, next),
            // "Over" of an older term says nothing about this one: it was opened, and the host may
            // have accepted it since.
            Ordering::Less | Ordering::Equal => match self.phase {
                Phase::Over if over => self.open(now, next),
                Phase::Over => return Answer::Ended(term),
                Phase::Watching | Phase::Fencing | Phase::Doubtful => self.hear(now),
            },
        }
        let Record { term, facts, .. } = self.record;
        Answer::Granted(Grant { term, datastores: facts.datastores })
    }

    /// A host that is heard before its term has ended keeps it: nothing was started elsewhere.
    fn hear(&mut self, now: Duration) {
        self.heard_at = self.heard_at.max(now);
        self.phase = Phase::Watching;
    }

    fn open(&mut self, now: Duration, next: Facts) {
        let term = self.record.term.next();
        *self = Judge::new(self.timing, Record { term, over: false, facts: next }, now);
    }

    /// Takes a successful reading of the host's heartbeat block; `None` is an empty block. It began
    /// at `began` and was there at `now`. Failed readings are not reported here.
    pub fn read(&mut self, began: Duration, now: Duration, datastore: usize, mark: Option<Mark>) {
        let Some(sighting) = self.sightings.get_mut(datastore) else { return };
        match sighting {
            Some(same) if same.mark == mark => same.until = same.until.max(began),
            _ => *sighting = Some(Sighting { mark, since: now, until: now }),
        }
    }

    /// Returns what has to be done now.
    pub fn check(&mut self, now: Duration) -> Option<Action> {
        if self.phase != Phase::Watching || !self.is_silent(now) {
            return None;
        }
        if self.record.facts.fencing {
            self.phase = Phase::Fencing;
            return Some(Action::Fence(self.record.term));
        }
        Some(self.conclude())
    }

    /// Takes the result of a fencing device for a term. A device that does not respond in time has
    /// failed.
    pub fn fenced(&mut self, term: Term, result: Fencing) -> Option<Action> {
        if self.phase != Phase::Fencing || term != self.record.term {
            return None;
        }
        Some(if result == Fencing::Off { self.release() } else { self.conclude() })
    }

    /// Takes an operator's confirmation that the host is off, for a doubtful term.
    pub fn confirmed_off(&mut self, term: Term) -> Option<Action> {
        let is_asked = self.phase == Phase::Doubtful && term == self.record.term;
        is_asked.then(|| self.release())
    }

    fn conclude(&mut self) -> Action {
        if self.record.facts.watchdog {
            return self.release();
        }
        self.phase = Phase::Doubtful;
        Action::AskOperator(self.record.term)
    }

    fn release(&mut self) -> Action {
        self.phase = Phase::Over;
        self.record.over = true;
        Action::Release(self.record.term)
    }

    /// Whether one span of the silence is common to the renewals and to as many datastores as
    /// prevent a majority.
    fn is_silent(&self, now: Duration) -> bool {
        let (silence, heard_at) = (self.timing.silence(), self.heard_at);
        let needed = blocking(self.sightings.len());
        if needed == 0 {
            return now.saturating_sub(heard_at) >= silence;
        }
        let sightings = || self.sightings.iter().flatten();
        sightings().any(|last| {
            let spans = |other: &&Sighting| {
                other.until >= last.until
                    && last.until.saturating_sub(other.since.max(heard_at)) >= silence
            };
            sightings().filter(spans).count() >= needed
        })
    }
}

#[cfg(test)]
mod tests;
