//! A host with its guard, its clock, its watchdog and its part of the guest.

use std::time::Duration;

use godwit_ha::{Answer, Facts, Grant, Guard, Lease, Mark, Order, Renewal, Standing, Term};

use super::rules::Rule;
use super::world::Options;

/// A heartbeat on its way to a datastore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Write {
    pub(super) started_at: Duration,
    pub(super) mark: Mark,
    /// Whether readers see it.
    pub(super) landed: bool,
}

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Host {
    /// Error of its clock in millionths, positive if it is fast.
    pub(super) drift_ppm: i32,
    pub(super) clock: Duration,
    pub(super) facts: Facts,
    pub(super) is_on: bool,
    /// Whether nothing but the watchdog runs.
    pub(super) is_frozen: bool,
    pub(super) has_agent: bool,
    pub(super) guard: Guard,
    /// The term in which the guest was started here.
    pub(super) runs: Option<Term>,
    /// When the watchdog cuts the power.
    pub(super) watchdog_at: Option<Duration>,
    pub(super) writes: Vec<Option<Write>>,
    pub(super) renewed_tick: Option<u32>,
    /// Whether no message gets through to the manager, not even by a peer.
    pub(super) is_cut_off: bool,
    /// Whether no datastore is reachable.
    pub(super) lacks_storage: bool,
}

impl Host {
    pub(super) fn new(options: &Options, drift_ppm: i32, facts: Facts) -> Self {
        Host {
            drift_ppm,
            clock: Duration::ZERO,
            facts,
            is_on: true,
            is_frozen: false,
            has_agent: true,
            guard: Guard::booted(options.timing, Term(0)),
            runs: None,
            watchdog_at: None,
            writes: vec![None; facts.datastores],
            renewed_tick: None,
            is_cut_off: false,
            lacks_storage: false,
        }
    }

    /// Whether its agent does anything.
    pub(super) fn acts(&self) -> bool {
        self.is_on && !self.is_frozen && self.has_agent
    }

    /// Whether the guest writes to its disks here.
    pub(super) fn runs_guest(&self) -> bool {
        self.is_on && !self.is_frozen && self.runs.is_some()
    }

    /// Lets time pass, then the watchdog and the guard act.
    pub(super) fn tick(&mut self, options: &Options) {
        self.clock += drifted(options.tick, self.drift_ppm);
        if self.acts() && self.facts.watchdog {
            self.pet(options);
        }
        if self.is_on && self.watchdog_at.is_some_and(|at| self.clock >= at) {
            self.power_off();
        }
        if self.acts() {
            self.poll(options);
        }
    }

    /// Resets the watchdog as an agent did that has checked its guard all the time since the last
    /// tick: up to the deadline.
    fn pet(&mut self, options: &Options) {
        let until = match (self.guard.deadline(), self.guard.standing()) {
            (Some(deadline), _) => self.clock.min(deadline),
            (None, Standing::Stopping) if !options.follows(Rule::WatchdogWaits) => self.clock,
            (None, _) => return,
        };
        self.watchdog_at = Some(until + options.timing.grace);
    }

    /// Does what the guard orders, except for the end of the guest, which takes some time.
    pub(super) fn poll(&mut self, options: &Options) {
        let order = self.guard.check(self.clock);
        let pets =
            order == Order::Run || (order == Order::Stop && !options.follows(Rule::WatchdogWaits));
        if order == Order::Rest || !self.facts.watchdog {
            self.watchdog_at = None;
        } else if pets {
            self.watchdog_at = Some(self.clock + options.timing.grace);
        }
    }

    pub(super) fn power_off(&mut self) {
        (self.is_on, self.is_frozen, self.has_agent) = (false, false, false);
        (self.runs, self.watchdog_at) = (None, None);
        // A write that has left the host may still land.
    }

    pub(super) fn power_on(&mut self, options: &Options) {
        (self.is_on, self.has_agent) = (true, true);
        self.writes.fill(None);
        self.guard = Guard::booted(options.timing, self.guard.term());
    }

    /// Starts the agent again, with what the former one saved.
    pub(super) fn start_agent(&mut self, options: &Options) {
        self.has_agent = true;
        let (term, standing) = (self.guard.term(), self.guard.standing().clone());
        self.guard = Guard::resumed(options.timing, term, standing);
        self.poll(options);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.acts() && *self.guard.standing() == Standing::Stopping
    }

    pub(super) fn end_guest(&mut self, options: &Options) {
        self.runs = None;
        self.guard.vms_ended();
        self.poll(options);
    }

    pub(super) fn renewal(&mut self, options: &Options) -> Renewal {
        let renewal = self.guard.renewal(self.clock);
        let is_lost = !matches!(self.guard.standing(), Standing::Held(_));
        let over = if options.follows(Rule::OverAfterVms) { renewal.over } else { is_lost };
        Renewal { over, ..renewal }
    }

    pub(super) fn answered(&mut self, options: &Options, sent_at: Duration, answer: Answer) {
        let counted = if options.follows(Rule::CountsFromSending) { sent_at } else { self.clock };
        self.guard.answered(self.clock, counted, answer);
        if let Answer::Granted(Grant { term, .. }) = answer {
            self.confirmed_late(options, counted, term);
        }
        self.poll(options);
    }

    pub(super) fn confirm(&mut self, options: &Options, datastore: usize) {
        let Some(Write { started_at, mark, .. }) = self.writes[datastore].take() else { return };
        let all = 0..self.facts.datastores;
        let confirmed =
            if options.follows(Rule::Majority) { datastore..datastore + 1 } else { all };
        for datastore in confirmed {
            self.guard.written(self.clock, started_at, mark.term, datastore);
        }
        self.confirmed_late(options, started_at, mark.term);
        self.poll(options);
    }

    /// Breaks [`Rule::DeadlineIsFinal`], if it is left out.
    fn confirmed_late(&mut self, options: &Options, from: Duration, term: Term) {
        let is_lost = !matches!(self.guard.standing(), Standing::Held(_));
        if !options.follows(Rule::DeadlineIsFinal) && is_lost && term == self.guard.term() {
            let lease = Lease::new(term, self.facts.datastores, from);
            self.guard = Guard::resumed(options.timing, term, Standing::Held(lease));
        }
    }

    /// Takes a request to start the guest.
    pub(super) fn start(&mut self, options: &Options, term: Term) {
        let term = if options.follows(Rule::StartsInTerm) { term } else { self.guard.term() };
        if self.acts() && self.guard.may_start(self.clock, term) {
            self.runs = Some(term);
        }
        self.poll(options);
    }
}

/// Returns what a clock counts of a duration.
pub(super) fn drifted(passed: Duration, drift_ppm: i32) -> Duration {
    let nanos = passed.as_nanos() as i128 * (1_000_000 + i128::from(drift_ppm)) / 1_000_000;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}
