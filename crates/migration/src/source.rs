//! The source of a migration as a state machine: (state, event) → (state, actions). It does no
//! I/O and reads no clock. `drive::source` carries out its decisions, and the tests do so against
//! an in-memory peer.
//!
//! Who may run the guest, by state:
//! - up to and including [`State::HandingOver`]: the source, whatever fails;
//! - [`State::RollingBack`]: the source, because nothing was committed or because the destination
//!   has refused explicitly and has not reported that it runs the guest;
//! - [`State::Committed`]: the destination. The commit point is [`Event::CommitSent`]: the kernel
//!   has taken the last byte of the commit. A send that fails has not handed all of its frame over,
//!   and nothing follows on a stream after a failed send. So the destination cannot have a commit
//!   whose send failed;
//! - [`State::InDoubt`]: the destination, if it has the commit. It is queried; the guest stays
//!   paused here meanwhile;
//! - [`State::PagingIn`]: the destination, which cannot continue without the pages that are here;
//! - [`State::Releasing`]: the destination, which has reported that it does.

mod events;

use std::time::Duration;

use godwit_wire::Running;

use crate::failure::{Failure, FailureCode};
use crate::ledger::{Ledger, Rates, SentTotals};
use crate::policy::{Convergence, Decision, Measured, Policy};
use godwit_types::{Outcome, Phase, PhaseReport, RoundReport};

pub use events::{Action, Counted, Event, NotServed, Verdict};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing was sent.
    Connecting,
    /// Waiting for the shadow VM.
    Preparing,
    /// Counting the pages written during that wait.
    Sampling,
    Sending,
    /// Waiting for the destination to apply the round.
    Draining,
    /// Counting what remains, while the round is on its way.
    Looking,
    /// Counting what remains, with everything sent being applied.
    Counting,
    /// The destination prepares for a guest that lacks pages, while it applies what was sent.
    PreparingPageIn,
    /// What moves with the guest besides its memory is brought up to date, while the guest runs.
    Settling,
    /// The guest is being stopped.
    Stopping,
    /// The guest is paused; last pages and device state are being sent.
    LastPages,
    /// The end of the pages, the rest of the device state and the commit are being written.
    HandingOver,
    /// The destination owns the guest.
    Committed,
    /// The lane broke after the commit.
    InDoubt,
    /// The guest runs at the destination, or may, and pages of it are still here.
    PagingIn,
    /// The guest is being resumed here.
    RollingBack,
    /// The destination runs the guest; the source lets go.
    Releasing,
    Ended,
}

impl State {
    /// Returns whether the guest is paused, or about to be, and belongs to the source.
    pub(crate) fn holds_guest(self) -> bool {
        matches!(self, State::Stopping | State::LastPages | State::HandingOver)
    }

    /// Returns whether a sweep may be under way.
    pub(crate) fn sweeps(self) -> bool {
        matches!(self, State::Sending | State::LastPages)
    }

    /// Returns whether the destination's answers must come in order; in later states one may come
    /// late.
    fn expects_order(self) -> bool {
        !matches!(
            self,
            State::InDoubt | State::PagingIn | State::RollingBack | State::Releasing | State::Ended
        )
    }
}

/// Parameters of the source, fixed at the start.
#[derive(Clone, Debug)]
pub struct Plan {
    /// When to switch over.
    pub policy: Policy,
    /// Duration of the checks before it: the clock of events runs since their start.
    pub preflight: Duration,
    /// Whether the lane of an earlier attempt was cut: the destination has most of the memory, and
    /// the guest's writes are tracked.
    pub resumes: bool,
    /// Whether anything besides the memory moves with the guest, which must be up to date before
    /// the guest is stopped.
    pub settles: bool,
}

/// State machine of the source.
#[derive(Clone, Debug)]
pub struct Source {
    state: State,
    round: u32,
    convergence: Convergence,
    ledger: Ledger,
    device_state_ended: bool,
    /// Whether devices write no memory any more, except with their state.
    devices_stopped: bool,
    /// Whether the device state may go to the destination while it is written.
    passes_state: bool,
    /// The sweep of the paused guest's memory that is under way.
    last_sweep: Option<LastSweep>,
    /// Set if the guest is handed over while some of its pages are here.
    page_in: Option<PreparedPageIn>,
    /// How serving its pages ended, if that was before it was known who runs the guest.
    served: Option<Result<(), NotServed>>,
    /// Whether the destination has reported that it runs the guest.
    runs_there: bool,
    stopped_at: Option<Duration>,
    resumed_at: Option<Duration>,
    last_pages_at: Option<Duration>,
    committed_at: Option<Duration>,
    running: Option<Running>,
    /// Whether the guest's writers are limited.
    is_throttled: bool,
    /// Whether the round is short and follows an empty wire on a long path: what remains after it
    /// is decided on while it is on its way.
    is_brief: bool,
    resumes: bool,
    settles: bool,
    /// Whether it ended with a cut of the lane while only memory had been sent.
    is_cut: bool,
    ending: Option<(Outcome, Option<Failure>)>,
}

/// Sweep while the guest is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastSweep {
    /// What the guest wrote last; its devices may still write.
    First,
    /// What the devices wrote last: with it, the destination's hypervisor may load the device state
    /// while it is written.
    Still,
    /// What was written with the device state.
    Final,
}

/// Progress of the preparations for a page-in before the guest is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PreparedPageIn {
    /// Whether both ends are ready.
    ready: bool,
    /// Whether everything sent is applied.
    drained: bool,
}

impl Source {
    /// Creates a source that is connecting to its destination.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let mut ledger = Ledger::new(Phase::Preflight);
        ledger.enter(plan.preflight, Phase::Prepare);
        Source {
            state: State::Connecting,
            round: 0,
            convergence: Convergence::new(plan.policy),
            ledger,
            device_state_ended: false,
            devices_stopped: false,
            passes_state: false,
            last_sweep: None,
            page_in: None,
            served: None,
            runs_there: false,
            stopped_at: None,
            resumed_at: None,
            last_pages_at: None,
            committed_at: None,
            running: None,
            is_throttled: false,
            is_brief: false,
            resumes: plan.resumes,
            settles: plan.settles,
            is_cut: false,
            ending: None,
        }
    }

    /// Takes an event that happened at `now` (since the migration's start) and returns what to do.
    pub fn on(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let special = self.on_trouble(now, &event).or_else(|| self.on_page_in(now, &event));
        if let Some(actions) = special {
            return actions;
        }
        match (self.state, event) {
            (State::Connecting, Event::Connected) => self.connected(now),
            (State::Preparing, Event::PeerReady) => {
                self.to(State::Sampling, vec![Action::CountRemaining])
            }
            (State::Sampling, Event::RemainingCounted(counted)) => {
                // What was written while the lane was cut does not indicate a rate.
                if !self.resumes {
                    self.ledger.sampled(now, counted.written_pages());
                }
                self.next_round(now, 0)
            }
            (State::Sending, Event::Sampled { pages }) => {
                self.ledger.sampled(now, pages);
                Vec::new()
            }
            (State::Sending, Event::RoundSent(sent)) => {
                self.ledger.round_sent(self.round, sent);
                self.to(State::Looking, vec![Action::CountRemaining])
            }
            (State::Looking | State::Counting, Event::RemainingCounted(counted)) => {
                self.ledger.limited(counted.limit_bytes_per_s);
                self.ledger.scanned(counted.scan, counted.search);
                self.ledger.filled(counted.filled_pages);
                self.remaining_counted(now, counted.pages, counted.round_trip)
            }
            (State::Draining, Event::RoundApplied { round, padding_bytes })
                if round == self.round =>
            {
                self.ledger.padded(padding_bytes);
                self.to(State::Counting, vec![Action::CountRemaining])
            }
            (_, Event::CannotThrottle) => {
                self.convergence.cannot_throttle();
                self.ledger.not_throttled();
                vec![]
            }
            (State::Settling, Event::Settled) => self.stop_guest(now),
            (State::Settling, Event::PutOff) => self.put_off(now),
            (State::Stopping, Event::GuestStopped) => self.guest_stopped(now),
            (State::LastPages, Event::LastPagesSent(sent)) => self.last_pages_sent(now, sent),
            (State::LastPages, Event::DevicesStopped) => {
                self.devices_stopped = true;
                self.next_last_sweep()
            }
            (State::LastPages, Event::DeviceStateEnded) => {
                self.device_state_ended = true;
                self.next_last_sweep()
            }
            (State::HandingOver, Event::CommitSent) => {
                self.committed_at = Some(now);
                self.to(State::Committed, vec![])
            }
            (State::Committed, Event::PeerRunning(running)) => self.peer_runs(now, Some(running)),
            (State::InDoubt, Event::Verdict(Verdict::Runs)) => self.peer_runs(now, None),
            (State::RollingBack, Event::GuestResumed(resumed)) => self.resumed(now, resumed),
            (State::Releasing, Event::Released) => self.finish(now),
            (state, Event::PeerReady | Event::RoundApplied { .. } | Event::PeerRunning(_))
                if state.expects_order() =>
            {
                let failure = Failure::new(
                    FailureCode::ProtocolBroken,
                    "the destination answered out of order",
                );
                self.on(now, Event::LaneLost(failure))
            }
            _ => vec![],
        }
    }

    fn connected(&mut self, now: Duration) -> Vec<Action> {
        // While the destination prepares, the guest's writes show what is hot in its memory.
        self.ledger.tracking_begins(now);
        let mut actions = Vec::from_iter((!self.resumes).then_some(Action::StartTracking));
        // Comes last: if it cannot be sent, the migration goes on over another lane, with this
        // tracking.
        actions.push(Action::SendBegin);
        self.to(State::Preparing, actions)
    }

    fn guest_stopped(&mut self, now: Duration) -> Vec<Action> {
        self.stopped_at = Some(now);
        let mut actions = vec![Action::WriteDeviceState];
        if self.page_in.is_none() {
            actions.push(self.begin_last_sweep(LastSweep::First));
        }
        self.to(State::LastPages, actions)
    }

    /// Handles events that differ if the guest is handed over while some of its pages are here.
    fn on_page_in(&mut self, now: Duration, event: &Event) -> Option<Vec<Action>> {
        Some(match (self.state, event) {
            (State::PreparingPageIn, Event::RoundApplied { round, padding_bytes })
                if *round == self.round =>
            {
                self.ledger.padded(*padding_bytes);
                self.page_in_prepared(now, |prepared| prepared.drained = true)
            }
            (State::PreparingPageIn, Event::PageInReady { able: true }) => {
                self.page_in_prepared(now, |prepared| prepared.ready = true)
            }
            (State::PreparingPageIn, Event::PageInReady { able: false }) => {
                (self.page_in, self.is_brief) = (None, false);
                self.convergence.cannot_page_in();
                self.next_round(now, self.round + 1)
            }
            (State::LastPages, Event::DeviceStateEnded) if self.page_in.is_some() => {
                vec![Action::AnnounceRemaining]
            }
            (State::LastPages, Event::RemainingAnnounced { .. }) => {
                self.last_pages_at = Some(now);
                self.ledger.last_round(
                    self.stopped_at.unwrap_or(now),
                    self.round,
                    SentTotals::default(),
                );
                self.hand_over()
            }
            (State::PagingIn, Event::PeerRunning(running)) => {
                (self.running, self.runs_there) = (Some(*running), true);
                vec![]
            }
            (
                State::LastPages | State::HandingOver | State::Committed | State::InDoubt,
                Event::PagedIn(ended),
            ) => {
                self.served = Some(ended.clone());
                vec![]
            }
            (State::PagingIn, Event::PagedIn(ended)) => self.paged_in(now, ended.clone()),
            _ => return None,
        })
    }

    /// Handles failures, which may occur in any state.
    fn on_trouble(&mut self, now: Duration, event: &Event) -> Option<Vec<Action>> {
        use State::{Committed, Ended, InDoubt, PagingIn, Releasing, RollingBack};
        let failure = match event {
            Event::LaneLost(failure) | Event::Failed(failure) | Event::PeerRefused(failure) => {
                failure.clone()
            }
            Event::CancelRequested => {
                Failure::new(FailureCode::Cancelled, "cancelled before the switchover was complete")
            }
            Event::Verdict(Verdict::Refused(failure)) => failure.clone(),
            Event::Verdict(Verdict::Unknown) => Failure::new(
                FailureCode::InDoubt,
                "the lane broke after the commit and the destination is unreachable",
            ),
            _ => return None,
        };
        Some(match (self.state, event) {
            // Its pages are sent on other streams than those of the lane that may be lost.
            (Ended | RollingBack | Releasing | PagingIn, _) => vec![],
            (Committed | InDoubt, Event::PeerRefused(_) | Event::Verdict(Verdict::Refused(_))) => {
                self.roll_back(now, Outcome::Failed, failure)
            }
            (Committed, Event::LaneLost(_)) => self.to(InDoubt, vec![Action::AskVerdict]),
            // The guest may run there, and lack what is here: the destination is queried for as
            // long as necessary.
            (InDoubt, Event::Verdict(Verdict::Unknown)) if self.page_in.is_some() => {
                self.serve_pages(now)
            }
            (InDoubt, Event::Verdict(Verdict::Unknown)) => {
                self.ending = Some((Outcome::InDoubt, Some(failure)));
                self.finish(now)
            }
            // The guest belongs to the destination: no failure or request here changes that.
            (Committed | InDoubt, _) => vec![],
            (_, Event::CancelRequested) => self.give_up(now, Outcome::Cancelled, failure, true),
            (_, Event::Failed(_)) => self.give_up(now, Outcome::Failed, failure, true),
            (state, Event::LaneLost(_)) if failure.code == FailureCode::LaneLost => {
                let began = state != State::Connecting || self.resumes;
                self.is_cut = began && !state.holds_guest();
                self.give_up(now, Outcome::Failed, failure, false)
            }
            (_, _) => self.give_up(now, Outcome::Failed, failure, false),
        })
    }

    /// Ends a migration that has not committed. The guest runs on, or is resumed.
    fn give_up(
        &mut self,
        now: Duration,
        outcome: Outcome,
        failure: Failure,
        notify: bool,
    ) -> Vec<Action> {
        // Writers come before the peer, because a message to the peer may block.
        let mut actions = vec![Action::StopTracking];
        actions.extend(notify.then(|| Action::AbortPeer(failure.clone())));
        if self.state.holds_guest() {
            // The guest comes first and the peer after: the guest is paused for every millisecond
            // spent here.
            let mut resume = self.roll_back(now, outcome, failure);
            resume.append(&mut actions);
            return resume;
        }
        self.ending = Some((outcome, Some(failure)));
        actions.extend(self.finish(now));
        actions
    }

    fn roll_back(&mut self, now: Duration, outcome: Outcome, failure: Failure) -> Vec<Action> {
        self.ledger.enter(now, Phase::Switchover);
        self.ending = Some((outcome, Some(failure)));
        self.to(State::RollingBack, vec![Action::ResumeGuest])
    }

    fn resumed(&mut self, now: Duration, resumed: Result<(), Failure>) -> Vec<Action> {
        match (resumed, &mut self.ending) {
            (Ok(()), _) => self.resumed_at = Some(now),
            (Err(failure), Some((_, Some(first)))) => {
                first.detail = format!(
                    "{}; then the guest could not be resumed here: {}",
                    first.detail, failure.detail
                );
            }
            (Err(_), _) => {}
        }
        let mut actions = vec![Action::StopTracking];
        actions.extend(self.finish(now));
        actions
    }

    fn next_round(&mut self, now: Duration, round: u32) -> Vec<Action> {
        self.round = round;
        self.ledger.enter(now, Phase::PreCopy);
        let throttle = self.convergence.throttle_pages_per_s();
        self.ledger.round_begins(now, throttle);
        let mut actions = match throttle {
            Some(pages_per_s) => vec![Action::Throttle { pages_per_s }],
            None if self.is_throttled => vec![Action::LetWritersGo],
            None => vec![],
        };
        self.is_throttled = throttle.is_some();
        actions.push(Action::SendRound { round, brief: self.is_brief });
        self.to(State::Sending, actions)
    }

    /// Decides what follows, once what remains is counted.
    fn remaining_counted(
        &mut self,
        now: Duration,
        remaining: u64,
        round_trip: Duration,
    ) -> Vec<Action> {
        if self.state == State::Looking {
            self.assess(now, remaining, round_trip)
        } else {
            self.converge(now, remaining, round_trip)
        }
    }

    /// Handles a round that is handed to the wire. If no switchover is near, the next round follows
    /// at once, without waiting for the wire to run empty.
    fn assess(&mut self, now: Duration, remaining: u64, round_trip: Duration) -> Vec<Action> {
        // Each round begins and ends with full buffers, so the bytes that it sent are those carried
        // meanwhile.
        let is_brief = std::mem::take(&mut self.is_brief);
        if is_brief {
            self.ledger.brief_round_over(now);
        } else {
            self.ledger.round_over(now, None);
        }
        let measured = self.measured(now, remaining, round_trip);
        if is_brief {
            let remaining_pages = measured.remaining_pages + self.ledger.pages_in_buffers();
            return self
                .decide(now, &Measured { remaining_pages, is_brief_over: true, ..measured });
        }
        // The next round would wait behind content that is being verified, and the wire would seem
        // slow.
        if self.convergence.is_far(&measured) && !self.ledger.is_mostly_referred() {
            return self.decide(now, &measured);
        }
        self.ledger.enter(now, Phase::Convergence);
        self.to(State::Draining, vec![Action::Drain])
    }

    fn converge(&mut self, now: Duration, remaining: u64, round_trip: Duration) -> Vec<Action> {
        self.ledger.round_over(now, Some(round_trip));
        let measured = self.measured(now, remaining, round_trip);
        self.is_brief = measured.is_brief();
        self.decide(now, &measured)
    }

    fn measured(&mut self, now: Duration, remaining_pages: u64, round_trip: Duration) -> Measured {
        self.ledger.counted(now, remaining_pages);
        Measured {
            remaining_pages,
            dirty_pages_per_s: self.ledger.dirty_pages_per_s(),
            bandwidth_bytes_per_s: self.ledger.rates().carried_bytes_per_s,
            round_trip,
            elapsed: now,
            scan: self.ledger.scan(),
            is_brief_over: false,
        }
    }

    fn decide(&mut self, now: Duration, measured: &Measured) -> Vec<Action> {
        match self.convergence.decide(measured) {
            Decision::NextRound => self.next_round(now, self.round + 1),
            Decision::Switchover => self.settle(now),
            Decision::PageIn => {
                self.page_in = Some(PreparedPageIn::default());
                self.ledger.enter(now, Phase::Convergence);
                self.to(State::PreparingPageIn, vec![Action::PreparePageIn, Action::Drain])
            }
            Decision::GiveUp => {
                let detail = format!(
                    "the guest dirties {:.0} MB/s, the wire carries {:.0} MB/s, and {} pages \
                    remain after {} rounds",
                    self.ledger.rates().dirty_bytes_per_s / 1e6,
                    self.ledger.rates().carried_bytes_per_s / 1e6,
                    measured.remaining_pages,
                    self.round + 1,
                );
                self.give_up(
                    now,
                    Outcome::Failed,
                    Failure::new(FailureCode::NotConverging, detail),
                    true,
                )
            }
        }
    }

    fn last_pages_sent(&mut self, now: Duration, sent: SentTotals) -> Vec<Action> {
        self.ledger.last_round(self.stopped_at.unwrap_or(now), self.round, sent);
        let mut actions = Vec::new();
        match self.last_sweep.take() {
            Some(LastSweep::Final) => return self.hand_over(),
            Some(LastSweep::Still) => {
                self.passes_state = true;
                actions.push(Action::PassDeviceState);
            }
            Some(LastSweep::First) | None => self.last_pages_at = Some(now),
        }
        actions.extend(self.next_last_sweep());
        actions
    }

    fn begin_last_sweep(&mut self, sweep: LastSweep) -> Action {
        self.last_sweep = Some(sweep);
        Action::SendLastPages { round: self.round }
    }

    /// Begins the next sweep of the paused guest's memory, once the one before it is over and what
    /// it is to find has been written.
    ///
    /// - Devices write memory until they have stopped. A sweep after that finds the last of it, and
    ///   the destination's hypervisor may load the state as it is written: this is the order of
    ///   QEMU's own engine, which sends its last page before the first device.
    /// - A device that writes memory with its state would lose that in QEMU's own engine. Here a
    ///   sweep after the state catches it, before the commit.
    fn next_last_sweep(&mut self) -> Vec<Action> {
        if self.last_sweep.is_some() || self.last_pages_at.is_none() {
            return vec![];
        }
        if self.device_state_ended {
            return vec![self.begin_last_sweep(LastSweep::Final)];
        }
        if self.devices_stopped && !self.passes_state {
            return vec![self.begin_last_sweep(LastSweep::Still)];
        }
        vec![]
    }

    fn hand_over(&mut self) -> Vec<Action> {
        self.to(
            State::HandingOver,
            vec![Action::EndPages, Action::SendDeviceState, Action::SendCommit],
        )
    }

    fn page_in_prepared(
        &mut self,
        now: Duration,
        done: impl FnOnce(&mut PreparedPageIn),
    ) -> Vec<Action> {
        let mut prepared = self.page_in.unwrap_or_default();
        done(&mut prepared);
        self.page_in = Some(prepared);
        if !(prepared.ready && prepared.drained) {
            return vec![];
        }
        self.settle(now)
    }

    /// Brings up to date what moves besides the memory, then stops the guest.
    fn settle(&mut self, now: Duration) -> Vec<Action> {
        if self.settles {
            return self.to(State::Settling, vec![Action::Settle]);
        }
        self.stop_guest(now)
    }

    /// Goes on without a stop, because something is not up to date. The guest writes memory
    /// meanwhile, so another round follows; a page-in needs none.
    fn put_off(&mut self, now: Duration) -> Vec<Action> {
        if self.page_in.is_some() {
            return self.settle(now);
        }
        self.is_brief = false;
        self.convergence.put_off();
        self.next_round(now, self.round + 1)
    }

    fn stop_guest(&mut self, now: Duration) -> Vec<Action> {
        self.round += 1;
        self.ledger.enter(now, Phase::Switchover);
        let page_in = self.page_in.is_some();
        self.to(State::Stopping, vec![Action::BeginSwitchover { page_in }])
    }

    fn serve_pages(&mut self, now: Duration) -> Vec<Action> {
        self.ledger.last_round_over(now);
        self.ledger.enter(now, Phase::PageIn);
        let mut actions = self.to(State::PagingIn, vec![Action::StopTracking, Action::ServePages]);
        if let Some(ended) = self.served.take() {
            actions.extend(self.paged_in(now, ended));
        }
        actions
    }

    fn paged_in(&mut self, now: Duration, ended: Result<(), NotServed>) -> Vec<Action> {
        match ended {
            Ok(()) => self.let_go(now),
            Err(NotServed::Refused(failure)) if !self.runs_there => {
                self.roll_back(now, Outcome::Failed, failure)
            }
            // The guest ran there, or may have. Its fate must not be guessed, and the pages here
            // are older than it.
            Err(NotServed::Refused(failure) | NotServed::Lost(failure)) => {
                let failure = Failure::new(FailureCode::InDoubt, failure.detail);
                self.ending = Some((Outcome::InDoubt, Some(failure)));
                self.finish(now)
            }
        }
    }

    fn peer_runs(&mut self, now: Duration, running: Option<Running>) -> Vec<Action> {
        (self.running, self.runs_there) = (running, true);
        if self.page_in.is_some() {
            return self.serve_pages(now);
        }
        self.ledger.last_round_over(now);
        self.let_go(now)
    }

    fn let_go(&mut self, now: Duration) -> Vec<Action> {
        self.ledger.enter(now, Phase::Announce);
        self.ending = Some((Outcome::Completed, None));
        self.to(State::Releasing, vec![Action::StopTracking, Action::ReleaseGuest])
    }

    fn finish(&mut self, now: Duration) -> Vec<Action> {
        self.ledger.enter(now, Phase::Report);
        self.to(State::Ended, vec![Action::Finish])
    }

    fn to(&mut self, state: State, actions: Vec<Action>) -> Vec<Action> {
        self.state = state;
        actions
    }

    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the phase, for progress.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.ledger.phase()
    }

    /// Returns the number of the current round.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Returns the measured rates of the wire and of the guest's writes.
    #[must_use]
    pub fn rates(&self) -> Rates {
        self.ledger.rates()
    }

    /// Returns the limit on the guest's writers, pages per second; `None`: no limit.
    #[must_use]
    pub fn throttled_to(&self) -> Option<f64> {
        self.convergence.throttle_pages_per_s().filter(|_| self.is_throttled)
    }

    /// Returns how the migration ended, once it has.
    #[must_use]
    pub fn ending(&self) -> Option<(Outcome, Option<&Failure>)> {
        self.ending.as_ref().map(|(outcome, failure)| (*outcome, failure.as_ref()))
    }

    /// Returns whether it has ended with a cut after which it can continue over another lane: the
    /// destination keeps what it has.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Returns the rounds so far.
    #[must_use]
    pub fn rounds(&self) -> Vec<RoundReport> {
        self.ledger.rounds()
    }

    /// Returns the time per phase.
    #[must_use]
    pub fn phases(&self, now: Duration) -> Vec<PhaseReport> {
        self.ledger.phases(now)
    }

    /// Returns how long the guest was paused for a switchover that was undone, or `None` if there
    /// was none.
    #[must_use]
    pub fn stood_still(&self) -> Option<Duration> {
        Some(self.resumed_at?.saturating_sub(self.stopped_at?))
    }

    /// Returns the switchover's times on the source's clock, and the destination's on its own.
    #[must_use]
    pub fn switchover(&self) -> Option<SwitchoverTimes> {
        Some(SwitchoverTimes {
            stopped: self.stopped_at?,
            last_pages: self.last_pages_at?,
            committed: self.committed_at?,
            destination: self.running?,
        })
    }
}

/// Times of a switchover's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchoverTimes {
    /// When the guest was paused, since the start.
    pub stopped: Duration,
    /// When its last pages were handed to the wire.
    pub last_pages: Duration,
    /// When the commit was handed to the wire.
    pub committed: Duration,
    /// The destination's own times, by its clock.
    pub destination: Running,
}
