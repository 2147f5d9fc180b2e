//! The driver's loop, and what it does for each input and each action of the state machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_lanes::{LaneError, StreamReceiver};
use godwit_ram::Region;
use godwit_types::{Outcome, Progress};
use godwit_wire::{Begin, CONTROL_STREAM, Message, PagesEnd, SUPPORTED};

use super::figures::{SentSoFar, progress_of, switchover_report, throttle_report, tracking_report};
use super::inputs::Inputs;
use super::job::{SourceJob, SourceResult};
use super::lanes::Lanes;
use super::memory::Memory;
use super::page_in::PageInDesk;
use super::peer::Peer;
use super::streams::{Shared, read_control, wire_number};
use super::windows::Windows;
use crate::drive::dispatch::Dispatch;
use crate::drive::handshake::{Hello, say_hello};
use crate::drive::hypervisor::SourceHypervisor;
use crate::drive::inbox::{HypervisorEvent, Input};
use crate::drive::sweep::SweepStep;
use crate::drive::tracking::Tracking;
use crate::failure::{Failure, FailureCode, lane_failure, memory_failure};
use crate::hold;
use crate::report::millis;
use crate::source::{Action, Counted, Event, Source, State};

/// Interval of pings, and of progress reports.
const PING_INTERVAL: Duration = Duration::from_millis(100);
/// Time without a ping after which this side has stalled: what arrived meanwhile was not read.
const STALLED: Duration = Duration::from_millis(300);
/// Interval at which the throttle is adjusted while the board is full.
const STEER_INTERVAL: Duration = Duration::from_millis(5);

pub(super) struct Driver<'a, H, T> {
    pub(super) job: SourceJob<'a, H, T>,
    pub(super) machine: Source,
    pub(super) peer: Peer<'a>,
    pub(super) dispatch: &'a Dispatch,
    pub(super) memory: Memory<'a>,
    pub(super) windows: Windows,
    pub(super) lanes: Lanes<'a>,
    pub(super) page_in: PageInDesk<'a>,
    pub(super) inputs: Inputs<'a>,
    /// What the driver waits for from the streams.
    pub(super) awaited: Option<Awaited>,
    /// Totals to report to the destination, once the last pages were sent.
    pub(super) pages_end: Option<PagesEnd>,
    pub(super) device_state_bytes: u64,
    pub(super) state_passage: StatePassage,
    /// When the guest was asked to stop.
    pub(super) switchover_since: Option<Instant>,
    pub(super) finished: bool,
}

impl<'a, H: SourceHypervisor, T: Tracking> Driver<'a, H, T> {
    /// Performs the control stream's handshake. Then one thread reads the destination's messages,
    /// and one thread per data stream connects it and sends: a lane that does not answer blocks no
    /// other.
    pub(super) fn connect<'scope>(
        &mut self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        mut receiver: StreamReceiver,
        regions: &'scope [Arc<Region>],
        opening: impl FnOnce(Shared<'scope>),
    ) where
        'a: 'scope,
    {
        let hello =
            Hello { migration: self.job.migration, stream: CONTROL_STREAM, versions: SUPPORTED };
        match say_hello(&mut self.peer.sender, &mut receiver, hello) {
            Ok(version) => {
                tracing::debug!(version, peer = %self.peer.control.peer(), "control stream up");
            }
            Err(failure) => return self.handle(Instant::now(), Event::PeerRefused(failure)),
        }
        let (inbox, dispatch, connect) = (self.inputs.inbox, self.dispatch, self.job.connect);
        let referring = self.memory.referring;
        scope.spawn(move || read_control(receiver, inbox, dispatch, referring));
        let compression = self.job.compression;
        opening(Shared { regions, dispatch, referring, inbox, connect, hello, compression });
        self.lanes.open(self.job.streams, self.peer.control.connected_in().unwrap_or_default());
        self.handle(Instant::now(), Event::Connected);
    }

    fn check_lanes(&mut self) {
        let now = self.job.begun.elapsed();
        let round_trip = self.peer.round_trip();
        let stopped = self.switchover_since.is_some();
        if let Err(error) = self.lanes.evaluate(now, round_trip, stopped, &mut self.peer.sender) {
            self.lane_broke(&error);
        }
    }

    /// Runs the only loop: timers, inputs, and a step of the sweep when there is no input.
    pub(super) fn until_finished(&mut self) {
        while !self.finished {
            // By the clock, and not only when idle: a peer that sends all the time changes nothing.
            let since_ping = self.peer.last_ping.elapsed();
            if since_ping >= PING_INTERVAL {
                if since_ping >= STALLED {
                    self.peer.note_message(Instant::now());
                }
                self.ping_and_report();
                self.check_limits();
                if self.machine.state() != State::PagingIn {
                    self.check_lanes();
                }
            }
            self.job.tracker.steer();
            self.warm_up();
            let next = self.inputs.next().or_else(|| {
                let limit = self.sweep();
                self.inputs.wait(limit)
            });
            if let Some((at, input)) = next {
                self.input(at, input);
            }
        }
    }

    /// Takes a step of the sweep under way. Returns how long to wait for an input after it.
    fn sweep(&mut self) -> Duration {
        let step = match self.memory.step(&mut self.job.tracker, self.dispatch) {
            None => return PING_INTERVAL,
            // Room is an input.
            Some(Ok(SweepStep::Full)) => return STEER_INTERVAL,
            Some(step) => step,
        };
        // Messages that arrived during the step have not been examined yet.
        self.peer.note_message(Instant::now());
        match step {
            Ok(SweepStep::Sampled { pages }) => {
                self.handle(Instant::now(), Event::Sampled { pages });
            }
            Ok(SweepStep::Done) => {
                let last = self.machine.state() == State::LastPages;
                self.awaited = Some(if last { Awaited::LastSent } else { Awaited::Sent });
                // The streams may have been faster.
                self.inputs.check_streams();
            }
            Ok(SweepStep::Progress | SweepStep::Full) => {}
            Err(failure) => self.inputs.first(Event::Failed(failure)),
        }
        Duration::ZERO
    }

    fn input(&mut self, at: Instant, input: Input) {
        match input {
            Input::Machine(event) => self.handle(at, event),
            Input::Hypervisor(event) => self.on_hypervisor_event(at, event),
            // What was written since the guest stopped follows the last page that its devices
            // wrote: it waits in the inbox.
            Input::DeviceState
                if self.machine.state() == State::LastPages
                    && self.state_passage != StatePassage::Open => {}
            // If the lane breaks here, a separate event reports it.
            Input::DeviceState => drop(self.send_device_state()),
            Input::Lane(message) => self.on_peer_message(at, message),
            Input::Moved => {
                self.inputs.inbox.reset_moved();
                self.check_streams(at);
            }
            Input::StreamBroke { number } => {
                let _ = self.send(&Message::CloseStream { stream: wire_number(number) });
            }
            Input::PageInStreams { open } => self.page_in_streams(at, open),
            Input::PagedIn(ended) => self.paged_in(at, ended),
        }
    }

    /// Passes the event for which the state machine waits, once it has occurred.
    pub(super) fn check_streams(&mut self, at: Instant) {
        self.pass_device_state();
        match self.awaited {
            Some(Awaited::Sent) if self.dispatch.is_sent() => {
                self.awaited = None;
                if self.dispatch.is_content_only() {
                    self.check_notes();
                }
                let sent = self.memory.sent(self.dispatch);
                self.handle(at, Event::RoundSent(sent));
            }
            Some(Awaited::Applied) if self.dispatch.is_applied() && self.windows.are_open() => {
                self.awaited = None;
                self.check_notes();
                self.memory.referring.settled();
                let round = self.machine.round();
                let padding_bytes = self.windows.padding_bytes(self.dispatch);
                self.handle(at, Event::RoundApplied { round, padding_bytes });
            }
            Some(Awaited::LastSent) => {
                self.pages_end = self.dispatch.seal();
                if self.pages_end.is_none() {
                    return;
                }
                self.awaited = None;
                let sent = self.memory.sent(self.dispatch);
                self.handle(at, Event::LastPagesSent(sent));
            }
            _ => {}
        }
    }

    /// Checks the notes of dirty pages: a switchover may be next, and finds dirty pages by them.
    fn check_notes(&mut self) {
        if let Err(error) = self.job.tracker.check_notes() {
            self.inputs.first(Event::Failed(memory_failure(&error)));
        }
    }

    /// Returns the bytes handed to all streams.
    fn wire_bytes(&self) -> u64 {
        self.peer.sender.sent_bytes()
            + self.dispatch.handed_bytes()
            + self.page_in.kept.sent_bytes()
    }

    pub(super) fn handle(&mut self, at: Instant, event: Event) {
        let now = at.saturating_duration_since(self.job.begun);
        let actions = self.machine.on(now, event);
        if !self.machine.state().sweeps() {
            self.memory.abandon_sweep();
        }
        for action in actions {
            hold::at("source", action.name());
            if self.act(action).is_err() {
                // The rest would follow what is missing, and keep the state machine from what to do
                // now.
                break;
            }
        }
    }

    fn on_hypervisor_event(&mut self, at: Instant, event: HypervisorEvent) {
        match event {
            HypervisorEvent::Stopped => self.handle(at, Event::GuestStopped),
            HypervisorEvent::DevicesStopped if self.overlap_pays() => {
                self.handle(at, Event::DevicesStopped);
            }
            HypervisorEvent::DevicesStopped => {}
            HypervisorEvent::DeviceStateEnded => self.handle(at, Event::DeviceStateEnded),
            HypervisorEvent::Failed(failure) => self.handle(at, Event::Failed(failure)),
        }
    }

    fn on_peer_message(&mut self, at: Instant, message: Message) {
        self.peer.note_message(at);
        match message {
            Message::Ready => self.handle(at, Event::PeerReady),
            Message::PageInReady { able } => self.page_in_peer(at, able),
            Message::Running(running) => self.handle(at, Event::PeerRunning(running)),
            Message::Refused(reason) => {
                self.handle(at, Event::PeerRefused(Failure::from_peer(&reason)));
            }
            Message::Pong { sent_ns, answered_ns } => {
                self.peer.pong(at, sent_ns, answered_ns);
                if self.windows.pong(sent_ns) {
                    self.check_streams(at);
                }
            }
            other => {
                let detail =
                    format!("the destination sent a {:?} message, which it must not", other.kind());
                self.handle(at, Event::LaneLost(Failure::new(FailureCode::ProtocolBroken, detail)));
            }
        }
    }

    /// Sends a message. If that fails, [`Event::LaneLost`] comes next.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), CannotSend> {
        let sent = self.peer.sender.send(message);
        self.can_go_on(sent)
    }

    fn can_go_on(&mut self, sent: Result<(), LaneError>) -> Result<(), CannotSend> {
        sent.map_err(|error| {
            self.lane_broke(&error);
            CannotSend
        })
    }

    pub(super) fn lane_broke(&mut self, error: &LaneError) {
        self.inputs.first(Event::LaneLost(lane_failure(error)));
    }

    /// Carries out an action.
    ///
    /// # Errors
    /// One of its messages could not be sent: no action that the state machine gave after it may
    /// follow.
    fn act(&mut self, action: Action) -> Result<(), CannotSend> {
        match action {
            Action::SendBegin => self.send_begin()?,
            Action::StartTracking => {
                if let Err(error) = self.job.tracker.start() {
                    self.inputs.first(Event::Failed(memory_failure(&error)));
                }
            }
            Action::SendRound { round, brief } => self.send_round(round, brief),
            Action::Drain => self.drain()?,
            Action::CountRemaining => self.count_remaining(),
            Action::Throttle { pages_per_s } => self.throttle(pages_per_s),
            Action::PreparePageIn => self.prepare_page_in()?,
            Action::AnnounceRemaining => self.announce_remaining()?,
            Action::ServePages => {
                // Its purpose is over, and the destination waits for its end.
                self.peer.control.finish_sending();
                self.dispatch.end();
                self.page_in.kept.let_all_go();
                self.switchover_since = None;
            }
            Action::Settle => self.settle(),
            Action::BeginSwitchover { page_in } => self.begin_switchover(page_in),
            Action::WriteDeviceState => {
                if let Err(failure) = self.job.hypervisor.write_device_state() {
                    self.inputs.first(Event::Failed(failure));
                }
            }
            Action::SendLastPages { round } => self.send_last_pages(round),
            Action::PassDeviceState => {
                self.state_passage = StatePassage::AwaitsPages;
                self.inputs.check_streams();
            }
            Action::SendDeviceState => {
                self.send_device_state()?;
                self.send(&Message::DeviceStateEnd { bytes: self.device_state_bytes })?;
            }
            Action::EndPages => {
                if let Some(end) = self.pages_end.take() {
                    self.send(&Message::PagesEnd(end))?;
                }
            }
            Action::SendCommit => {
                let (epoch, incarnation) = self.offered();
                self.send(&Message::Commit { epoch, incarnation })?;
                // The commit point: the destination may run the guest, and this host may not.
                self.handle(Instant::now(), Event::CommitSent);
                self.page_in.kept.let_hot_go();
                hold::at("source", "committed");
            }
            Action::AbortPeer(failure) => {
                // The destination also notices from the lane's end.
                let _ = self.peer.sender.send(&Message::Abort(failure.to_reason()));
                self.peer.control.finish_sending();
            }
            Action::ResumeGuest => {
                self.page_in.kept.abandon();
                self.let_writers_go();
                let resumed = self.job.hypervisor.resume();
                self.inputs.first(Event::GuestResumed(resumed));
            }
            // Dropping the tracker unregisters.
            Action::LetWritersGo | Action::StopTracking => self.let_writers_go(),
            Action::AskVerdict => {
                let verdict = (self.job.ask_verdict)();
                self.inputs.first(Event::Verdict(verdict));
            }
            Action::ReleaseGuest => {
                self.job.hypervisor.release(self.memory.hot());
                self.inputs.first(Event::Released);
            }
            Action::Finish => self.finished = true,
        }
        Ok(())
    }

    fn send_begin(&mut self) -> Result<(), CannotSend> {
        let block_pages = self.job.regions.iter().map(|region| region.pages()).collect();
        let (epoch, incarnation) = self.offered();
        self.send(&Message::Begin(Begin { epoch, incarnation, run: self.job.runs, block_pages }))?;
        // On a lane that is still empty the pings measure the round trip best.
        (0..3).try_for_each(|_| {
            let pinged = self.peer.ping();
            self.can_go_on(pinged)
        })
    }

    fn send_round(&mut self, round: u32, brief: bool) {
        if round == 0
            && self.memory.sends_all()
            && let Err(error) = self.job.tracker.settle()
        {
            return self.inputs.first(Event::Failed(memory_failure(&error)));
        }
        // A page-in that was refused may have left it.
        self.awaited = None;
        self.dispatch.set_round(round);
        self.dispatch.set_content_only(brief);
        self.windows.round_begins(self.dispatch);
        let chunk_pages = self.dispatch.chunk_pages();
        self.memory.begin_round(round, chunk_pages, self.job.course);
    }

    fn drain(&mut self) -> Result<(), CannotSend> {
        self.job.hypervisor.expect_switchover();
        let opened = self.windows.open(
            self.memory.remaining_pages,
            self.lanes.carried_bytes_per_s(),
            &self.job.pace,
            self.dispatch,
            &mut self.peer,
        );
        self.can_go_on(opened)?;
        self.awaited = Some(Awaited::Applied);
        self.inputs.check_streams();
        Ok(())
    }

    fn count_remaining(&mut self) {
        let (round_trip, begun) = (self.peer.round_trip(), Instant::now());
        let counted = self.job.tracker.count_dirty();
        self.memory.scan = begun.elapsed();
        let counted = match counted {
            Ok(dirty) => Event::RemainingCounted(Counted {
                pages: self.memory.count(dirty),
                filled_pages: dirty.filled_pages,
                round_trip,
                limit_bytes_per_s: self.job.pace.data_bytes_per_s(),
                scan: self.memory.scan,
                search: self.memory.search,
            }),
            Err(error) => Event::Failed(memory_failure(&error)),
        };
        self.inputs.first(counted);
    }

    /// Returns the destination's ownership, in the form of messages.
    fn offered(&self) -> (u64, u128) {
        (self.job.ownership.epoch, self.job.ownership.incarnation.bits())
    }

    fn throttle(&mut self, pages_per_s: f64) {
        if let Err(error) = self.job.tracker.throttle(Some(pages_per_s)) {
            tracing::warn!(%error, "cannot slow the guest's writers");
            self.inputs.first(Event::CannotThrottle);
        }
    }

    /// Lets the guest's writers run at full speed.
    fn let_writers_go(&mut self) {
        if let Err(error) = self.job.tracker.throttle(None) {
            tracing::warn!(%error, "the guest's writers are slowed until the tracking ends");
        }
    }

    fn ping_and_report(&mut self) {
        let pages_in = self.machine.state() == State::PagingIn;
        let remaining_pages = match self.machine.state() {
            State::PagingIn => self.page_in.kept.left_pages(),
            State::Releasing | State::Ended => 0,
            _ => self.memory.left(self.machine.round(), self.dispatch),
        };
        if pages_in {
            self.peer.last_ping = Instant::now();
        } else if let Err(error) = self.peer.ping() {
            self.lane_broke(&error);
        }
        let sent = SentSoFar {
            bytes: self.wire_bytes(),
            expansion: self.dispatch.totals.encodings().expansion(),
        };
        let progress = progress_of(
            &self.machine,
            self.memory.total_pages(),
            remaining_pages,
            sent,
            self.dispatch.lanes(),
            self.job.begun,
        );
        (self.job.progress)(Progress { bandwidth_limit: self.job.pace.holding(), ..progress });
    }

    pub(super) fn result(&self) -> SourceResult {
        let (outcome, failure) = self.machine.ending().unwrap_or((Outcome::Failed, None));
        SourceResult {
            outcome,
            failure: failure.cloned(),
            rounds: self.machine.rounds(),
            phases: self.machine.phases(self.job.begun.elapsed()),
            switchover: self
                .machine
                .switchover()
                .and_then(|times| switchover_report(&times, &self.peer.clock)),
            stood_still_ms: self.machine.stood_still().map(millis),
            wire_bytes: self.wire_bytes(),
            bandwidth_limit: self.job.pace.holding(),
            round_trip: self.peer.clock.round_trip(),
            lanes: self.lanes.figures(),
            encodings: self.dispatch.totals.encodings().report(),
            referenced: self.memory.referring.referenced(),
            missing_pages: self.memory.referring.missing_pages(),
            tracking: tracking_report(&self.job.tracker),
            throttle: throttle_report(&self.job.tracker),
            page_in: self.page_in.report(),
        }
    }
}

/// A message could not be sent. Usually the lane broke: the next event gives the reason.
#[derive(Debug)]
pub(super) struct CannotSend;

/// Whether the device state of the paused guest goes to the destination as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatePassage {
    /// It waits for the last page.
    Held,
    /// It waits until what was sent is in the destination's memory.
    AwaitsPages,
    Open,
}

/// Progress of the streams for which the driver waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The round is handed to the wire.
    Sent,
    /// The destination has applied it.
    Applied,
    /// The last pages are handed to the wire.
    LastSent,
}
