//! The source's driver: a thread that carries out the state machine's actions and finds dirty
//! pages, one that reads the destination's answers, and one for each data stream
//! ([`super::dispatch`]).

mod figures;
mod joined;
mod lanes;
mod narrow;
mod page_in;
mod streams;
mod sweeps;
mod waiting;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use godwit_lanes::pacing::MigrationPace;
use godwit_lanes::{Carries, Interrupt, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_ram::Region;
use godwit_types::BitRate;
use godwit_wire::{
    Begin, CONTROL_STREAM, MAX_DEVICE_STATE_CHUNK, MAX_STREAMS, Message, MigrationId, PagesEnd,
    SUPPORTED,
};

use super::dispatch::{Dispatch, Ending, LaneFigures};
use super::heat::Heat;
use super::page_in::{AskAgain, KeptPages};
use super::referring::{Deltas, References, Referring};
use super::sweep::memory_failure;
use super::{
    Events, Hello, HypervisorEvent, Inbox, Input, SourceHypervisor, Tracking, lane_failure,
    say_hello,
};
use crate::clock::PeerClock;
use crate::encoding::Experience;
use crate::failure::{Failure, FailureCode};
use crate::hold;
use crate::ledger::Sweep;
use crate::policy::{MOST_SWITCHOVER_BUDGET, Policy};
use crate::reference::PageBits;
use crate::report::{millis, nanos};
use crate::source::{Action, Event, Plan, Source, State, Verdict};
use figures::{SentSoFar, progress_of, switchover_report, throttle_report};
use godwit_types::{
    Compression, EncodingReport, Outcome, Ownership, PageInReport, PhaseReport, Progress,
    RoundReport, SwitchoverReport, ThrottleReport,
};
use lanes::Lanes;
pub(crate) use narrow::FullSize;
use page_in::{MOST_ORDERS, PageInDesk, Server};
use streams::{Shared, open_streams, read_control, wire_number};
use sweeps::overdue_failure;
pub(crate) use sweeps::{LEAST_LAST_PAGES, LONG_ROUND_TRIP, MOST_LAST_PAGES};
use waiting::Waiting;

/// Interval of pings, and of progress reports.
const PING_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time that the guest is paused for a switchover that does not reach its commit.
const STOPPED_LIMIT: Duration = Duration::from_secs(10);
const _: () = assert!(MOST_SWITCHOVER_BUDGET.as_secs() < STOPPED_LIMIT.as_secs());
/// Longest silence of the destination meanwhile, in addition to round trips: it answers pings every
/// [`PING_INTERVAL`].
const HEARD_LIMIT: Duration = Duration::from_millis(1500);
/// Longest time that a commit stays unanswered before the destination is queried on another
/// connection: more than the destination takes to give up loading.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Everything that a migration needs at the source.
pub struct SourceJob<'a, H, T> {
    /// The control stream to the destination, connected, with small segments: a path that drops
    /// large packets then breaks only data streams, and those are replaced.
    pub control: Stream,
    /// Connects a data stream of the lane with this number, from 0 on, unless it is interrupted:
    /// the end of the migration waits for it.
    pub connect: &'a Connect<'a>,
    pub lanes: usize,
    /// Streams of each lane; `None`: as many as measurement finds worthwhile.
    pub streams: Option<usize>,
    /// Limits for its data streams, which `connect` applies to them.
    pub pace: MigrationPace,
    /// ID issued by the destination.
    pub migration: MigrationId,
    /// The ownership that the destination receives.
    pub ownership: Ownership,
    /// Whether the guest ran when the migration began.
    pub runs: bool,
    /// When to switch over.
    pub policy: Policy,
    /// Compression of the pages.
    pub compression: Compression,
    /// References for pages.
    pub references: References,
    /// Deltas for pages.
    pub deltas: Deltas,
    /// Experience of streams to this host: those of this migration begin with it, and add to it.
    pub experience: Arc<Experience>,
    /// Where in the guest's memory round 0 begins, as a fraction from 0 to 1. Guests that move to
    /// one host at the same time begin at different places, so that each finds content there that
    /// others have brought.
    pub begin_at: f64,
    /// Duration of the checks, since `begun`.
    pub preflight: Duration,
    /// The guest's RAM, block by block.
    pub regions: Vec<Arc<Region>>,
    /// Its dirty tracking, attached.
    pub tracker: T,
    /// Its hypervisor.
    pub hypervisor: H,
    /// Time of the migration's request.
    pub begun: Instant,
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Queries the destination, on another path than the lane, whether it runs the guest. May take
    /// a while.
    pub ask_verdict: &'a (dyn Fn() -> Verdict + Sync),
    /// Requests another session of page-in from the destination after a cut.
    pub page_in_again: &'a AskAgain<'a>,
    /// Pages that the destination lacks if the lane of an earlier attempt was cut; `None`: it has
    /// nothing yet.
    pub resumes: Option<Unsent>,
}

/// Pages that a destination lacks after a cut of its lane: everything that round 0 had not visited,
/// and everything that was not reported as applied. The tracking records what the guest has written
/// since.
#[derive(Clone, Debug)]
pub struct Unsent(PageBits);

impl Unsent {
    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.0.count()
    }
}

/// State that a cut leaves at the source, with which the migration continues on another lane.
#[derive(Debug)]
pub struct Kept<T> {
    /// The guest's tracking, which has continued.
    pub tracker: T,
    /// Pages that the destination lacks.
    pub unsent: Unsent,
}

/// Connects a stream of a lane, for a given purpose.
pub type Connect<'a> = dyn Fn(usize, Carries, &Interrupt) -> Result<Stream, Failure> + Sync + 'a;

/// Result of a migration at its source.
#[derive(Clone, Debug)]
pub struct SourceResult {
    /// Where the guest is.
    pub outcome: Outcome,
    /// Why it is not at the destination.
    pub failure: Option<Failure>,
    pub rounds: Vec<RoundReport>,
    /// Time per phase, only of the driver's phases.
    pub phases: Vec<PhaseReport>,
    /// Parts of the pause.
    pub switchover: Option<SwitchoverReport>,
    /// How long the guest was paused for a switchover that was undone.
    pub stood_still_ms: Option<f64>,
    /// Bytes handed to the wire.
    pub wire_bytes: u64,
    /// The limit that held its pages at the end.
    pub bandwidth_limit: Option<BitRate>,
    /// Shortest round trip seen.
    pub round_trip: Option<Duration>,
    /// Totals of each lane.
    pub lanes: Vec<LaneFigures>,
    /// How the pages were encoded.
    pub encodings: Vec<EncodingReport>,
    /// Pages that were sent by reference and had to be sent again with their content.
    pub missing_pages: u64,
    /// Effect of slowing the guest's writers; `None` if they were not slowed.
    pub throttle: Option<ThrottleReport>,
    /// How the pages arrived that the guest lacked at first; `None` if it lacked none.
    pub page_in: Option<PageInReport>,
}

/// Runs a migration at its source until it ends or its lane is cut. After a cut, returns the state
/// for continuing as well. On every outcome except [`Outcome::Completed`] and [`Outcome::InDoubt`]
/// the guest is in its former state.
pub fn send<H: SourceHypervisor, T: Tracking>(
    mut job: SourceJob<'_, H, T>,
    inbox: &Inbox,
    events: Events,
) -> (SourceResult, Option<Kept<T>>) {
    let control = job.control.clone();
    let (dispatch, regions) = (Dispatch::default(), job.regions.clone());
    let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
    let unsent = job.resumes.take().map(|unsent| unsent.0);
    let sends_all = unsent.is_none();
    let unswept = if sends_all { PageBits::all(&block_pages) } else { PageBits::new(&block_pages) };
    let referring = Referring::new(
        job.references,
        job.deltas,
        Arc::clone(&job.experience),
        &block_pages,
        unsent,
    );
    // The number of each stream comes once.
    let (opener, numbers) = mpsc::sync_channel(usize::from(MAX_STREAMS));
    let kept = KeptPages::new(regions.clone());
    let (orders, ordered) = mpsc::sync_channel(MOST_ORDERS);
    let server = Server {
        kept: &kept,
        connect: job.connect,
        lanes: job.lanes,
        interrupt: &dispatch.connecting,
        hello: Hello { migration: job.migration, stream: CONTROL_STREAM, versions: SUPPORTED },
        again: job.page_in_again,
        inbox,
    };
    let driver = Driver {
        heat: Heat::new(&regions),
        page_in: PageInDesk::new(orders, &kept),
        machine: Source::new(&Plan {
            policy: job.policy,
            preflight: job.preflight,
            resumes: !sends_all,
        }),
        sends_all,
        unswept,
        sender: job.control.sender(),
        dispatch: &dispatch,
        referring: &referring,
        lanes: Lanes::new(&dispatch, opener, job.lanes, job.streams.is_some()),
        awaited: None,
        pages_end: None,
        counted: Sweep::default(),
        clock: PeerClock::default(),
        inbox,
        events,
        waiting: Waiting::default(),
        device_state_bytes: 0,
        remaining_pages: 0,
        fullest_chunk_pages: 0,
        switchover_since: None,
        window_ping: None,
        padding_before: 0,
        control_padding: 0,
        last_ping: Instant::now(),
        last_heard: Instant::now(),
        finished: false,
        job,
    };
    let (dispatch, regions, referring) = (&dispatch, &regions, &referring);
    let (result, left) = std::thread::scope(|scope| {
        let _ending = Ending { dispatch, control: control.clone(), kept: &kept };
        scope.spawn(move || server.run(&ordered));
        // It ends before the scope does, and with it the threads that wait for streams to open.
        let mut driver = driver;
        let opening = |shared| open_streams(scope, numbers, shared);
        driver.connect(scope, control.receiver(), regions, referring, opening);
        driver.until_finished();
        let result = driver.result();
        let Driver { machine, job, unswept, .. } = driver;
        (result, machine.is_cut().then_some((job.tracker, unswept)))
    });
    // The streams' threads have ended: no more units are confirmed.
    let kept = left.map(|(tracker, mut unsent)| {
        dispatch.unconfirmed().iter().for_each(|unit| referring.owe(unit));
        unsent.add(&referring.unsent());
        Kept { tracker, unsent: Unsent(unsent) }
    });
    (result, kept)
}

struct Driver<'a, H, T> {
    job: SourceJob<'a, H, T>,
    machine: Source,
    sender: StreamSender,
    dispatch: &'a Dispatch,
    referring: &'a Referring,
    lanes: Lanes<'a>,
    page_in: PageInDesk<'a>,
    /// Memory that the guest writes again and again.
    heat: Heat,
    /// Whether the sweep is round 0, which covers all of memory.
    sends_all: bool,
    /// Memory that round 0 has not visited.
    unswept: PageBits,
    /// What the driver waits for from the streams.
    awaited: Option<Awaited>,
    /// Totals to report to the destination, once the last pages were sent.
    pages_end: Option<PagesEnd>,
    /// Totals sent before the current sweep.
    counted: Sweep,
    clock: PeerClock,
    inbox: &'a Inbox,
    events: Events,
    /// Inputs taken from the inbox during other work.
    waiting: Waiting,
    device_state_bytes: u64,
    /// Remaining pages as last counted, for progress.
    remaining_pages: u64,
    /// Most of them in one chunk.
    fullest_chunk_pages: u64,
    /// When the guest was asked to stop.
    switchover_since: Option<Instant>,
    /// The ping behind the padding, whose answer shows that the padding has arrived, and the time
    /// when it was sent.
    window_ping: Option<(u64, Instant)>,
    /// Padding of data streams before the round, and of the control stream within it.
    padding_before: u64,
    control_padding: u64,
    last_ping: Instant,
    /// Time of the destination's last message.
    last_heard: Instant,
    finished: bool,
}

impl<'a, H: SourceHypervisor, T: Tracking> Driver<'a, H, T> {
    /// Performs the control stream's handshake. Then one thread reads the destination's messages,
    /// and one thread per data stream connects it and sends: a lane that does not answer blocks no
    /// other.
    fn connect<'scope>(
        &mut self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        mut receiver: StreamReceiver,
        regions: &'scope [Arc<Region>],
        referring: &'scope Referring,
        opening: impl FnOnce(Shared<'scope>),
    ) where
        'a: 'scope,
    {
        let hello =
            Hello { migration: self.job.migration, stream: CONTROL_STREAM, versions: SUPPORTED };
        match say_hello(&mut self.sender, &mut receiver, hello) {
            Ok(version) => {
                tracing::debug!(version, peer = %self.job.control.peer(), "control stream up");
            }
            Err(failure) => return self.take(Instant::now(), Event::PeerRefused(failure)),
        }
        let (inbox, dispatch, connect) = (self.inbox, self.dispatch, self.job.connect);
        scope.spawn(move || read_control(receiver, inbox, dispatch, referring));
        let compression = self.job.compression;
        opening(Shared { regions, dispatch, referring, inbox, connect, hello, compression });
        self.lanes.open(self.job.streams, self.job.control.connected_in().unwrap_or_default());
        self.take(Instant::now(), Event::Connected);
    }

    fn look_at_the_lanes(&mut self) {
        let now = self.job.begun.elapsed();
        let round_trip = self.round_trip();
        let stopped = self.switchover_since.is_some();
        if let Err(error) = self.lanes.look(now, round_trip, stopped, &mut self.sender) {
            self.lane_broke(&error);
        }
    }

    fn until_finished(&mut self) {
        while !self.finished {
            // By the clock, and not only when idle: a peer that sends all the time changes nothing.
            if self.last_ping.elapsed() >= PING_INTERVAL {
                self.ping_and_tell();
                self.check_limits();
                if self.machine.state() != State::PagingIn {
                    self.look_at_the_lanes();
                }
            }
            self.job.tracker.steer();
            let (at, input) = match self.waiting.pop_front() {
                Some(waited) => waited,
                None => match self.events.receiver.recv_timeout(PING_INTERVAL) {
                    Ok(input) => input,
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => continue,
                },
            };
            self.input(at, input);
        }
    }

    fn input(&mut self, at: Instant, input: Input) {
        match input {
            Input::Machine(event) => self.take(at, event),
            Input::Hypervisor(event) => self.hypervisor_says(at, event),
            // What was written since the guest stopped follows the last page: it waits in the
            // inbox.
            Input::DeviceState if self.machine.state() == State::LastPages => {}
            // If the lane breaks here, a separate event reports it.
            Input::DeviceState => drop(self.send_device_state()),
            Input::Lane(message) => self.peer_says(at, message),
            Input::Moved => {
                self.inbox.looks();
                self.look_at_the_streams(at);
            }
            Input::StreamBroke { number } => {
                let _ = self.say(&Message::CloseStream { stream: wire_number(number) });
            }
            Input::PageInStreams { open } => self.page_in_streams(at, open),
            Input::PagedIn(ended) => self.paged_in(at, ended),
        }
    }

    /// Passes the event for which the state machine waits, once it has occurred.
    fn look_at_the_streams(&mut self, at: Instant) {
        match self.awaited {
            Some(Awaited::Sent) if self.dispatch.is_sent() => {
                self.awaited = None;
                let sweep = self.swept();
                self.take(at, Event::RoundSent(sweep));
            }
            Some(Awaited::Applied) if self.dispatch.is_applied() && self.window_ping.is_none() => {
                self.awaited = None;
                self.referring.settled();
                let round = self.machine.round();
                let on_data_streams = self.dispatch.padding_bytes() - self.padding_before;
                let padding_bytes = on_data_streams + self.control_padding;
                self.take(at, Event::RoundApplied { round, padding_bytes });
            }
            Some(Awaited::LastSent) => {
                self.pages_end = self.dispatch.seal();
                if self.pages_end.is_none() {
                    return;
                }
                self.awaited = None;
                let sweep = self.swept();
                self.take(at, Event::LastPagesSent(sweep));
            }
            _ => {}
        }
    }

    /// Returns the shortest round trip seen: pings wait behind pages if the wire is full, but the
    /// connection was made while it was empty.
    fn round_trip(&self) -> Duration {
        let connected = self.job.control.connected_in();
        self.clock.round_trip().into_iter().chain(connected).min().unwrap_or_default()
    }

    /// Returns the bytes handed to all streams.
    fn wire_bytes(&self) -> u64 {
        self.sender.sent_bytes() + self.dispatch.handed_bytes() + self.page_in.kept.sent_bytes()
    }

    fn take(&mut self, at: Instant, event: Event) {
        let now = at.saturating_duration_since(self.job.begun);
        for action in self.machine.on(now, event) {
            hold::at("source", action.name());
            if self.act(action).is_err() {
                // The rest would follow what is missing, and keep the state machine from what to do
                // now.
                break;
            }
        }
    }

    fn hypervisor_says(&mut self, at: Instant, event: HypervisorEvent) {
        match event {
            HypervisorEvent::Stopped => self.take(at, Event::GuestStopped),
            HypervisorEvent::DeviceStateEnded => self.take(at, Event::DeviceStateEnded),
            HypervisorEvent::Failed(failure) => self.take(at, Event::Failed(failure)),
        }
    }

    /// Sends the device state that has arrived, while the guest may be paused for it.
    fn send_device_state(&mut self) -> Result<(), CannotSend> {
        let bytes = self.inbox.take_device_state();
        self.device_state_bytes += bytes.len() as u64;
        for chunk in bytes.chunks(MAX_DEVICE_STATE_CHUNK as usize) {
            if self.switchover_since.is_some_and(|since| since.elapsed() > STOPPED_LIMIT) {
                self.later(Event::Failed(overdue_failure()));
                return Err(CannotSend);
            }
            self.say(&Message::DeviceState(chunk.to_vec()))?;
        }
        Ok(())
    }

    /// Ends an overlong pause of the guest, whether a link crawls or a peer only answers pings.
    fn check_limits(&mut self) {
        let overdue = |limit| self.switchover_since.is_some_and(|since| since.elapsed() > limit);
        let round_trip = self.round_trip();
        match self.machine.state() {
            state
                if state.holds_guest()
                    && overdue(HEARD_LIMIT)
                    && self.last_heard.elapsed() > HEARD_LIMIT + 4 * round_trip =>
            {
                let detail = "the destination fell silent while the guest stood still";
                self.take(
                    Instant::now(),
                    Event::LaneLost(Failure::new(FailureCode::LaneLost, detail)),
                );
            }
            state if state.holds_guest() && overdue(STOPPED_LIMIT) => {
                self.take(Instant::now(), Event::Failed(overdue_failure()));
            }
            State::Draining
                if self
                    .window_ping
                    .is_some_and(|(_, sent)| sent.elapsed() > self.window_limit()) =>
            {
                tracing::debug!(
                    "the control stream's window is not known to be open: the switchover goes \
                    without"
                );
                self.window_ping = None;
                self.look_at_the_streams(Instant::now());
            }
            State::Committed if overdue(ANSWER_LIMIT) => {
                let failure = Failure::new(
                    FailureCode::LaneLost,
                    "the destination does not say whether the guest runs",
                );
                self.take(Instant::now(), Event::LaneLost(failure));
            }
            _ => {}
        }
    }

    fn peer_says(&mut self, at: Instant, message: Message) {
        self.last_heard = at;
        match message {
            Message::Ready => self.take(at, Event::PeerReady),
            Message::PageInReady { able } => self.page_in_peer(at, able),
            Message::Running(running) => self.take(at, Event::PeerRunning(running)),
            Message::Refused(reason) => {
                self.take(at, Event::PeerRefused(Failure::from_peer(&reason)));
            }
            Message::Pong { sent_ns, answered_ns } => {
                self.dispatch.took_answer();
                self.clock.pong(sent_ns, answered_ns, self.clock_ns(at));
                if self.window_ping.is_some_and(|(ping_ns, _)| sent_ns >= ping_ns) {
                    self.window_ping = None;
                    self.look_at_the_streams(at);
                }
            }
            other => {
                let detail =
                    format!("the destination sent a {:?} message, which it must not", other.kind());
                self.take(at, Event::LaneLost(Failure::new(FailureCode::ProtocolBroken, detail)));
            }
        }
    }

    /// Sends a message. If that fails, [`Event::LaneLost`] comes next.
    fn say(&mut self, message: &Message) -> Result<(), CannotSend> {
        self.sender.send(message).map_err(|error| {
            self.lane_broke(&error);
            CannotSend
        })
    }

    fn lane_broke(&mut self, error: &LaneError) {
        self.later(Event::LaneLost(lane_failure(error)));
    }

    /// Carries out an action.
    ///
    /// # Errors
    /// One of its messages could not be sent: no action that the state machine gave after it may
    /// follow.
    fn act(&mut self, action: Action) -> Result<(), CannotSend> {
        match action {
            Action::SendBegin => {
                let block_pages = self.job.regions.iter().map(|region| region.pages()).collect();
                let (epoch, incarnation) = self.offered();
                self.say(&Message::Begin(Begin {
                    epoch,
                    incarnation,
                    run: self.job.runs,
                    block_pages,
                }))?;
                // On a lane that is still empty the pings measure the round trip best.
                (0..3).try_for_each(|_| self.ping())?;
            }
            Action::StartTracking => {
                if let Err(error) = self.job.tracker.start() {
                    self.later(Event::Failed(memory_failure(&error)));
                }
            }
            Action::SendRound { round } => self.send_round(round),
            Action::Drain => {
                self.open_windows()?;
                self.awaited = Some(Awaited::Applied);
                self.waiting.push_back(Instant::now(), Input::Moved);
            }
            Action::CountRemaining => self.count_remaining(),
            Action::Throttle { pages_per_s } => self.throttle(pages_per_s),
            Action::PreparePageIn => self.prepare_page_in()?,
            Action::TellRemaining => self.tell_remaining()?,
            Action::ServePages => {
                // Its purpose is over, and the destination waits for its end.
                self.job.control.finish_sending();
                self.dispatch.end();
                self.page_in.kept.let_all_go();
                self.switchover_since = None;
            }
            Action::BeginSwitchover { page_in } => self.begin_switchover(page_in),
            Action::WriteDeviceState => {
                if let Err(failure) = self.job.hypervisor.write_device_state() {
                    self.later(Event::Failed(failure));
                }
            }
            Action::SendLastPages { round } => self.send_last_pages(round),
            Action::SendDeviceState => {
                self.send_device_state()?;
                self.say(&Message::DeviceStateEnd { bytes: self.device_state_bytes })?;
            }
            Action::EndPages => {
                if let Some(end) = self.pages_end.take() {
                    self.say(&Message::PagesEnd(end))?;
                }
            }
            Action::SendCommit => {
                let (epoch, incarnation) = self.offered();
                self.say(&Message::Commit { epoch, incarnation })?;
                // The commit point: the destination may run the guest, and this host may not.
                self.take(Instant::now(), Event::CommitSent);
                self.page_in.kept.let_hot_go();
                hold::at("source", "committed");
            }
            Action::AbortPeer(failure) => {
                // The destination also notices from the lane's end.
                let _ = self.sender.send(&Message::Abort(failure.to_reason()));
                self.job.control.finish_sending();
            }
            Action::ResumeGuest => {
                self.page_in.kept.abandon();
                self.let_writers_go();
                let resumed = self.job.hypervisor.resume();
                self.later(Event::GuestResumed(resumed));
            }
            // Dropping the tracker unregisters.
            Action::LetWritersGo | Action::StopTracking => self.let_writers_go(),
            Action::AskVerdict => {
                let verdict = (self.job.ask_verdict)();
                self.later(Event::Verdict(verdict));
            }
            Action::ReleaseGuest => {
                self.job.hypervisor.release();
                self.later(Event::Released);
            }
            Action::Finish => self.finished = true,
        }
        Ok(())
    }

    /// Returns the destination's ownership, in the form of messages.
    fn offered(&self) -> (u64, u128) {
        (self.job.ownership.epoch, self.job.ownership.incarnation.bits())
    }

    fn begin_switchover(&mut self, page_in: bool) {
        self.switchover_since = Some(Instant::now());
        // A peer that stops reading must not keep the guest paused.
        if let Err(error) = self.job.control.limit_sending(HEARD_LIMIT + 4 * self.round_trip()) {
            tracing::debug!(%error, "sends of the switchover have no limit of their own");
        }
        self.job.tracker.let_stop();
        let noted = if page_in { self.note_what_is_dirty() } else { Ok(()) };
        let begun = noted.and_then(|()| self.job.hypervisor.begin_switchover(self.inbox, page_in));
        if let Err(failure) = begun {
            self.later(Event::Failed(failure));
        }
    }

    fn throttle(&mut self, pages_per_s: f64) {
        if let Err(error) = self.job.tracker.throttle(Some(pages_per_s)) {
            tracing::warn!(%error, "cannot slow the guest's writers");
            self.later(Event::CannotThrottle);
        }
    }

    /// Lets the guest's writers run at full speed.
    fn let_writers_go(&mut self) {
        if let Err(error) = self.job.tracker.throttle(None) {
            tracing::warn!(%error, "the guest's writers are slowed until the tracking ends");
        }
    }

    /// Queues an event that this thread itself causes, before all events from others.
    fn later(&mut self, event: Event) {
        self.waiting.push_front(Instant::now(), Input::Machine(event));
    }

    fn ping_and_tell(&mut self) {
        let pages_in = self.machine.state() == State::PagingIn;
        let total: u64 = self.job.regions.iter().map(|region| region.pages()).sum();
        let remaining_pages = match self.machine.state() {
            State::PagingIn => self.page_in.kept.left_pages(),
            State::Releasing | State::Ended => 0,
            _ => {
                let is_all = self.machine.round() == 0 && self.sends_all;
                let of_round = if is_all { total } else { self.remaining_pages };
                of_round
                    .saturating_sub(self.dispatch.sent().pages.saturating_sub(self.counted.pages))
            }
        };
        if pages_in {
            self.last_ping = Instant::now();
        } else {
            // The next message detects a failure.
            let _ = self.ping();
        }
        let sent = SentSoFar {
            bytes: self.wire_bytes(),
            expansion: self.dispatch.encodings().expansion(),
        };
        let told = progress_of(
            &self.machine,
            total,
            remaining_pages,
            sent,
            self.dispatch.lanes(),
            self.job.begun,
        );
        (self.job.progress)(Progress { bandwidth_limit: self.job.pace.holding(), ..told });
    }

    fn ping(&mut self) -> Result<(), CannotSend> {
        self.last_ping = Instant::now();
        if !self.dispatch.asks() {
            return Ok(());
        }
        self.say(&Message::Ping { sent_ns: self.clock_ns(self.last_ping) })
    }

    fn clock_ns(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(self.job.begun))
    }

    fn result(&self) -> SourceResult {
        let (outcome, failure) = self.machine.ending().unwrap_or((Outcome::Failed, None));
        SourceResult {
            outcome,
            failure: failure.cloned(),
            rounds: self.machine.rounds(),
            phases: self.machine.phases(self.job.begun.elapsed()),
            switchover: self
                .machine
                .switchover()
                .and_then(|times| switchover_report(&times, &self.clock)),
            stood_still_ms: self.machine.stood_still().map(millis),
            wire_bytes: self.wire_bytes(),
            bandwidth_limit: self.job.pace.holding(),
            round_trip: self.clock.round_trip(),
            lanes: self.lanes.figures(),
            encodings: self.dispatch.encodings().report(),
            missing_pages: self.referring.missing_pages(),
            throttle: throttle_report(&self.job.tracker),
            page_in: self.page_in.report(),
        }
    }
}

/// A message could not be sent. Usually the lane broke: the next event gives the reason.
#[derive(Debug)]
struct CannotSend;

/// Progress of the streams for which the driver waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// The round is handed to the wire.
    Sent,
    /// The destination has applied it.
    Applied,
    /// The last pages are handed to the wire.
    LastSent,
}
