//! The guard of a host: it holds a term while its lease lasts, and stops the term's VMs when it
//! has run out.

use std::time::Duration;

use crate::lease::Lease;
use crate::term::{Answer, Grant, Renewal, Term};
use crate::timing::Timing;

/// What a host does with its protected VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They may run. The watchdog's timer is reset.
    Run,
    /// They must end now. The watchdog's timer is not reset until they have.
    Stop,
    /// None may start. The watchdog's timer is reset.
    Rest,
}

/// How the guard stands to its newest term. An agent saves it when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    Held(Lease),
    /// The term is lost, and its VMs may still run.
    Stopping,
    /// None of the term's VMs runs, and none ever will.
    Over,
}

/// Guard of one host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    timing: Timing,
    term: Term,
    standing: Standing,
}

impl Guard {
    /// Creates the guard of a host that has booted. `last` is the newest term that it recorded.
    #[must_use]
    pub fn booted(timing: Timing, last: Term) -> Self {
        Guard { timing, term: last, standing: Standing::Over }
    }

    /// Creates the guard of an agent that was started again without a boot, from what the former
    /// one saved.
    #[must_use]
    pub fn resumed(timing: Timing, last: Term, standing: Standing) -> Self {
        Guard { timing, term: last, standing }
    }

    /// Returns the newest term. It must be recorded durably before a VM is started in it.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    #[must_use]
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Returns when the lease runs out; `None` without one.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match &self.standing {
            Standing::Held(lease) => Some(lease.counts_from().saturating_add(self.timing.lease)),
            Standing::Stopping | Standing::Over => None,
        }
    }

    /// Returns what to do now. From the deadline on, no confirmation brings the term back.
    pub fn check(&mut self, now: Duration) -> Order {
        if self.deadline().is_some_and(|deadline| now >= deadline) {
            self.standing = Standing::Stopping;
        }
        match self.standing {
            Standing::Held(_) => Order::Run,
            Standing::Stopping => Order::Stop,
            Standing::Over => Order::Rest,
        }
    }

    /// Returns the message to the judge.
    pub fn renewal(&mut self, now: Duration) -> Renewal {
        self.check(now);
        Renewal { term: self.term, over: self.standing == Standing::Over }
    }

    /// Takes the answer to a renewal that was sent at `sent_at`.
    pub fn answered(&mut self, now: Duration, sent_at: Duration, answer: Answer) {
        self.check(now);
        match answer {
            Answer::Granted(grant) if sent_at <= now => self.granted(now, sent_at, grant),
            Answer::Ended(term) if term == self.term => self.lose(),
            Answer::Granted(_) | Answer::Ended(_) | Answer::Unknown => {}
        }
    }

    fn granted(&mut self, now: Duration, sent_at: Duration, grant: Grant) {
        match &mut self.standing {
            Standing::Held(lease) if grant.term == self.term => lease.renewed(sent_at),
            Standing::Over if grant.term > self.term => {
                if now < sent_at.saturating_add(self.timing.lease) {
                    self.term = grant.term;
                    let lease = Lease::new(grant.term, grant.datastores, sent_at);
                    self.standing = Standing::Held(lease);
                }
            }
            // The judge opens a term only after the former one.
            Standing::Held(_) if grant.term > self.term => self.lose(),
            Standing::Held(_) | Standing::Stopping | Standing::Over => {}
        }
    }

    /// Takes the confirmation of a heartbeat of a term, whose write began at `started_at`.
    pub fn written(&mut self, now: Duration, started_at: Duration, term: Term, datastore: usize) {
        self.check(now);
        if let Standing::Held(lease) = &mut self.standing
            && term == self.term
            && started_at <= now
        {
            lease.written(datastore, started_at);
        }
    }

    /// Takes the report that no protected VM runs any more.
    pub fn vms_ended(&mut self) {
        if self.standing == Standing::Stopping {
            self.standing = Standing::Over;
        }
    }

    /// Whether a request to start a VM in a term is accepted now.
    #[must_use]
    pub fn may_start(&mut self, now: Duration, term: Term) -> bool {
        self.check(now) == Order::Run && term == self.term
    }

    fn lose(&mut self) {
        if matches!(self.standing, Standing::Held(_)) {
            self.standing = Standing::Stopping;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn grant(term: u64) -> Answer {
        Answer::Granted(Grant { term: Term(term), datastores: 1 })
    }

    /// Returns a guard that holds term 1 from second 0 on.
    fn holding() -> Guard {
        let mut guard = Guard::booted(Timing::default(), Term(0));
        assert_eq!(guard.renewal(at(0)), Renewal { term: Term(0), over: true });
        guard.answered(at(2), at(0), grant(1));
        assert_eq!(guard.deadline(), Some(at(8)));
        guard
    }

    #[test]
    fn a_lease_counts_from_the_request_and_not_from_the_answer() {
        let mut guard = holding();
        guard.answered(at(7), at(3), grant(1));
        assert_eq!(guard.check(at(10)), Order::Run);
        guard.answered(at(10), at(1), grant(1));
        assert_eq!(guard.check(at(11)), Order::Stop);
    }

    #[test]
    fn a_confirmation_at_the_deadline_brings_nothing_back() {
        let mut guard = holding();
        guard.answered(at(8), at(7), grant(1));
        guard.written(at(8), at(7), Term(1), 0);
        assert_eq!(guard.check(at(8)), Order::Stop);
        assert!(!guard.renewal(at(8)).over, "its VMs may still run");
        guard.answered(at(8), at(8), grant(2));
        assert_eq!(guard.check(at(8)), Order::Stop, "no new term before they have ended");
        guard.vms_ended();
        assert_eq!(guard.check(at(8)), Order::Rest);
        assert_eq!(guard.renewal(at(8)), Renewal { term: Term(1), over: true });
        guard.answered(at(9), at(8), grant(1));
        assert_eq!(guard.check(at(9)), Order::Rest, "a term is held once");
        guard.answered(at(9), at(8), grant(2));
        assert!(guard.may_start(at(9), Term(2)) && !guard.may_start(at(9), Term(1)));
    }

    #[test]
    fn heartbeats_of_the_term_prolong_the_lease() {
        let mut guard = holding();
        guard.written(at(5), at(4), Term(1), 0);
        assert_eq!(guard.deadline(), Some(at(12)));
        guard.written(at(6), at(6), Term(0), 0);
        guard.written(at(6), at(7), Term(1), 0);
        guard.written(at(6), at(6), Term(1), 9);
        assert_eq!(guard.deadline(), Some(at(12)), "another term, the future, no such datastore");
    }

    #[test]
    fn a_judge_that_ended_the_term_stops_the_vms() {
        for answer in [Answer::Ended(Term(1)), grant(2)] {
            let mut guard = holding();
            guard.answered(at(1), at(1), Answer::Ended(Term(0)));
            guard.answered(at(1), at(1), Answer::Unknown);
            assert_eq!(guard.check(at(1)), Order::Run);
            guard.answered(at(1), at(1), answer);
            assert_eq!(guard.check(at(1)), Order::Stop);
        }
    }

    #[test]
    fn a_grant_that_is_older_than_a_lease_opens_no_term() {
        let mut guard = Guard::booted(Timing::default(), Term(4));
        guard.answered(at(20), at(12), grant(5));
        assert_eq!((guard.check(at(20)), guard.term()), (Order::Rest, Term(4)));
        guard.answered(at(20), at(21), grant(5));
        assert_eq!(guard.check(at(21)), Order::Rest, "the answer to a renewal of the future");
    }

    #[test]
    fn an_agent_started_again_holds_what_it_saved_and_a_booted_host_nothing() {
        let guard = holding();
        let (term, standing) = (guard.term(), guard.standing().clone());
        let mut resumed = Guard::resumed(Timing::default(), term, standing);
        assert_eq!(resumed, guard);
        assert_eq!(resumed.check(at(7)), Order::Run);
        assert_eq!(resumed.check(at(8)), Order::Stop);
        let mut booted = Guard::booted(Timing::default(), term);
        assert_eq!(booted.check(at(0)), Order::Rest);
        booted.answered(at(0), at(0), grant(1));
        assert_eq!(booted.check(at(0)), Order::Rest);
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Answered { back: u64, answer: Answer },
        Written { back: u64, term: u64 },
        Ended,
        Booted,
        Passed(u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        let answer = prop_oneof![
            4 => (0_u64..4).prop_map(grant),
            1 => (0_u64..4).prop_map(|term| Answer::Ended(Term(term))),
            1 => Just(Answer::Unknown),
        ];
        prop_oneof![
            4 => (0_u64..12, answer).prop_map(|(back, answer)| Event::Answered { back, answer }),
            3 => (0_u64..12, 0_u64..4).prop_map(|(back, term)| Event::Written { back, term }),
            2 => Just(Event::Ended),
            1 => Just(Event::Booted),
            4 => (0_u64..6).prop_map(Event::Passed),
        ]
    }

    proptest! {
        /// In any order of events, a term that was lost is never held again, and a held term had a
        /// confirmation within the length of a lease.
        #[test]
        fn a_term_is_held_once_and_within_its_lease(
            events in prop::collection::vec(event(), 1..60),
        ) {
            let mut guard = Guard::booted(Timing::default(), Term(0));
            let (mut now, mut newest, mut lost) = (at(20), Duration::ZERO, Term(0));
            for event in events {
                match event {
                    Event::Answered { back, answer } => {
                        let sent_at = now.saturating_sub(at(back));
                        newest = newest.max(sent_at);
                        guard.answered(now, sent_at, answer);
                    }
                    Event::Written { back, term } => {
                        let started_at = now.saturating_sub(at(back));
                        newest = newest.max(started_at);
                        guard.written(now, started_at, Term(term), 0);
                    }
                    Event::Ended => guard.vms_ended(),
                    Event::Booted => guard = Guard::booted(Timing::default(), guard.term()),
                    Event::Passed(seconds) => now += at(seconds),
                }
                match guard.check(now) {
                    Order::Run => {
                        prop_assert!(guard.term() > lost);
                        prop_assert!(now < newest + at(8));
                    }
                    Order::Stop | Order::Rest => lost = guard.term(),
                }
            }
        }
    }
}
