//! The source's driver: one thread that does what the machine says, one that reads what the destination answers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, Lane, LaneReceiver, LaneSender};
use godwit_ram::{PAGE_SIZE, Region};
use godwit_wire::{Begin, MAX_DEVICE_STATE_CHUNK, MAX_PADDING, Message, MigrationId, SUPPORTED};

use super::sweep::{Scope, Sweeper, memory_failure};
use super::{Events, HypervisorEvent, Inbox, Input, SourceHypervisor, Tracking, lane_failure, say_hello};
use crate::clock::PeerClock;
use crate::failure::{Failure, FailureCode};
use crate::policy::Policy;
use crate::report::{Outcome, PhaseReport, Progress, RoundReport, SwitchoverReport, millis, nanos};
use crate::source::{Action, Event, Plan, Source, State, SwitchoverTimes, Verdict};

/// Between two pings, and between two words of progress.
const PING_INTERVAL: Duration = Duration::from_millis(100);
/// Round trips from here on need a congestion window that takes the switchover in one flight.
const LONG_ROUND_TRIP: Duration = Duration::from_millis(2);
/// The device state of a usual VM, with room: 0.2 MiB measured.
const DEVICE_STATE_ROOM: u64 = 384 * 1024;
/// The longest that the guest is kept from running for a switchover that does not come to its commit.
const STOPPED_LIMIT: Duration = Duration::from_secs(10);
/// The longest that a commit goes unanswered before the destination is asked on another way: more than it takes itself to
/// give up loading.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// The most padding sent before a switchover.
const MOST_PADDING: u64 = 8 << 20;

/// Everything that a source's migration needs.
pub struct SourceJob<'a, H, T> {
    /// The lane to the destination, connected.
    pub lane: Lane,
    /// Given out by the destination.
    pub migration: MigrationId,
    /// The epoch that the destination's ownership gets.
    pub epoch: u64,
    /// Whether the guest ran when the migration began.
    pub runs: bool,
    /// When to switch over.
    pub policy: Policy,
    /// How long the checks took, since `begun`.
    pub preflight: Duration,
    /// The guest's RAM, block by block.
    pub regions: Vec<Arc<Region>>,
    /// Its dirty tracking, attached.
    pub tracker: T,
    /// Its hypervisor.
    pub hypervisor: H,
    /// When the migration was asked for.
    pub begun: Instant,
    /// Takes progress.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Asks the destination, on another way than the lane, whether it runs the guest. May take a while.
    pub ask_verdict: &'a (dyn Fn() -> Verdict + Sync),
}

/// How it ended.
#[derive(Clone, Debug)]
pub struct SourceResult {
    /// Where the guest is.
    pub outcome: Outcome,
    /// Why it is not at the destination.
    pub failure: Option<Failure>,
    /// Every round.
    pub rounds: Vec<RoundReport>,
    /// Time per phase, the driver's phases only.
    pub phases: Vec<PhaseReport>,
    /// The pause in pieces.
    pub switchover: Option<SwitchoverReport>,
    /// How long the guest stood still for a switchover that was undone.
    pub stood_still_ms: Option<f64>,
    /// Bytes handed to the wire.
    pub wire_bytes: u64,
    /// The shortest round trip seen.
    pub round_trip: Option<Duration>,
}

/// Runs a migration at its source, to its end. On every outcome but [`Outcome::Completed`] and [`Outcome::InDoubt`] the guest
/// is as it was before.
pub fn send<H: SourceHypervisor, T: Tracking>(
    job: SourceJob<'_, H, T>,
    inbox: &Inbox,
    events: Events,
) -> SourceResult {
    let lane = job.lane.clone();
    let mut driver = Driver {
        machine: Source::new(&Plan { policy: job.policy, preflight: job.preflight }),
        sender: job.lane.sender(),
        clock: PeerClock::default(),
        inbox,
        events,
        waiting: VecDeque::new(),
        device_state_bytes: 0,
        held_device_state: Vec::new(),
        remaining_pages: 0,
        switchover_since: None,
        last_ping: Instant::now(),
        finished: false,
        job,
    };
    std::thread::scope(|scope| {
        driver.connect(scope, lane.receiver());
        driver.until_finished();
        lane.close();
        driver.result()
    })
}

struct Driver<'a, H, T> {
    job: SourceJob<'a, H, T>,
    machine: Source,
    sender: LaneSender,
    clock: PeerClock,
    inbox: &'a Inbox,
    events: Events,
    /// Taken from the inbox while something else was under way.
    waiting: VecDeque<(Instant, Input)>,
    device_state_bytes: u64,
    /// Written since the guest stopped; it follows the last page.
    held_device_state: Vec<Vec<u8>>,
    /// As last counted, for progress.
    remaining_pages: u64,
    /// When the guest was asked to stop.
    switchover_since: Option<Instant>,
    last_ping: Instant,
    finished: bool,
}

impl<'a, H: SourceHypervisor, T: Tracking> Driver<'a, H, T> {
    /// The lane's first words; then a thread reads whatever the destination says.
    fn connect<'scope>(&mut self, scope: &'scope std::thread::Scope<'scope, '_>, mut receiver: LaneReceiver)
    where
        'a: 'scope,
    {
        let hello = say_hello(&mut self.sender, &mut receiver, self.job.migration, SUPPORTED);
        let now = Instant::now();
        match hello {
            Ok(version) => {
                tracing::debug!(version, peer = %self.job.lane.peer(), "lane up");
                let inbox = self.inbox;
                scope.spawn(move || read_lane(receiver, inbox));
                self.take(now, Event::Connected);
            }
            Err(failure) => self.take(now, Event::PeerRefused(failure)),
        }
    }

    fn until_finished(&mut self) {
        while !self.finished {
            let (at, input) = match self.waiting.pop_front() {
                Some(waited) => waited,
                None => match self.events.receiver.recv_timeout(PING_INTERVAL) {
                    Ok(input) => input,
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        self.ping_and_tell();
                        self.check_limits();
                        continue;
                    }
                },
            };
            self.input(at, input);
        }
    }

    fn input(&mut self, at: Instant, input: Input) {
        match input {
            Input::Machine(event) => self.take(at, event),
            Input::Hypervisor(event) => self.hypervisor_says(at, event),
            Input::Lane(message) => self.peer_says(at, message),
        }
    }

    fn take(&mut self, at: Instant, event: Event) {
        let now = at.saturating_duration_since(self.job.begun);
        for action in self.machine.on(now, event) {
            self.act(action);
        }
    }

    fn hypervisor_says(&mut self, at: Instant, event: HypervisorEvent) {
        match event {
            HypervisorEvent::Stopped => self.take(at, Event::GuestStopped),
            HypervisorEvent::DeviceState(bytes) if self.machine.state() == State::LastPages => {
                self.held_device_state.push(bytes);
            }
            HypervisorEvent::DeviceState(bytes) => self.send_device_state(&bytes),
            HypervisorEvent::DeviceStateEnded => self.take(at, Event::DeviceStateEnded),
            HypervisorEvent::Failed(failure) => self.take(at, Event::Failed(failure)),
        }
    }

    fn send_device_state(&mut self, bytes: &[u8]) {
        self.device_state_bytes += bytes.len() as u64;
        for chunk in bytes.chunks(MAX_DEVICE_STATE_CHUNK as usize) {
            self.say(&Message::DeviceState(chunk.to_vec()));
        }
    }

    /// No guest stands still without end: not for a link that crawls, not for a peer that only answers pings.
    fn check_limits(&mut self) {
        let overdue = |limit| self.switchover_since.is_some_and(|since| since.elapsed() > limit);
        match self.machine.state() {
            State::Stopping | State::LastPages if overdue(STOPPED_LIMIT) => {
                self.take(Instant::now(), Event::Failed(overdue_failure()));
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
        match message {
            Message::Ready => self.take(at, Event::PeerReady),
            Message::RoundApplied { round, .. } => self.take(at, Event::RoundApplied { round }),
            Message::Running(running) => self.take(at, Event::PeerRunning(running)),
            Message::Refused(reason) => self.take(at, Event::PeerRefused(Failure::from_peer(&reason))),
            Message::Pong { sent_ns, answered_ns } => {
                self.clock.pong(sent_ns, answered_ns, self.clock_ns(at));
            }
            other => {
                let detail = format!("the destination sent a {:?} message, which it must not", other.kind());
                self.take(at, Event::LaneLost(Failure::new(FailureCode::ProtocolBroken, detail)));
            }
        }
    }

    /// Sends a message; a lane that breaks by it is an event like any other.
    fn say(&mut self, message: &Message) {
        if let Err(error) = self.sender.send(message) {
            self.waiting.push_back((Instant::now(), Input::Machine(Event::LaneLost(lane_failure(&error)))));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::SendBegin => {
                let block_pages = self.job.regions.iter().map(|region| region.pages()).collect();
                self.say(&Message::Begin(Begin { epoch: self.job.epoch, run: self.job.runs, block_pages }));
                // On a lane that is still empty the pings tell the round trip best.
                (0..3).for_each(|_| self.ping());
            }
            Action::StartTracking => {
                if let Err(error) = self.job.tracker.start() {
                    self.later(Event::Failed(memory_failure(&error)));
                }
            }
            Action::SendRound { round } => self.send_round(round),
            Action::CountRemaining => self.count_remaining(),
            Action::BeginSwitchover { expected_pages } => {
                self.switchover_since = Some(Instant::now());
                self.open_window(expected_pages);
                if let Err(failure) = self.job.hypervisor.begin_switchover(self.inbox) {
                    self.later(Event::Failed(failure));
                }
            }
            Action::WriteDeviceState => {
                if let Err(failure) = self.job.hypervisor.write_device_state() {
                    self.later(Event::Failed(failure));
                }
            }
            Action::SendLastPages { round } => self.send_last_pages(round),
            Action::SendDeviceState => {
                for bytes in std::mem::take(&mut self.held_device_state) {
                    self.send_device_state(&bytes);
                }
                self.say(&Message::DeviceStateEnd { bytes: self.device_state_bytes });
            }
            Action::SendCommit { pages } => self.say(&Message::Commit { epoch: self.job.epoch, pages }),
            Action::AbortPeer(failure) => {
                // The destination also notices by the lane's end.
                let _ = self.sender.send(&Message::Abort(failure.to_reason()));
                self.job.lane.finish_sending();
            }
            Action::ResumeGuest => {
                let resumed = self.job.hypervisor.resume();
                self.later(Event::GuestResumed(resumed));
            }
            // Dropping the tracker unregisters; nothing is written by it meanwhile.
            Action::StopTracking => {}
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
    }

    /// An event that this thread itself brings about: before anything that others brought meanwhile.
    fn later(&mut self, event: Event) {
        self.waiting.push_front((Instant::now(), Input::Machine(event)));
    }

    fn send_round(&mut self, round: u32) {
        let scope = if round == 0 { Scope::Everything } else { Scope::Dirty };
        let total: u64 = self.job.regions.iter().map(|region| region.pages()).sum();
        let Driver { job, sender, events, waiting, last_ping, machine, clock: _, .. } = self;
        let (begun, progress) = (job.begun, job.progress);
        let sweeper = Sweeper::new(&job.regions, &mut job.tracker, sender, round);
        let swept = sweeper.run(scope, |sender, looked_at| {
            waiting.extend(events.receiver.try_iter());
            if waiting.iter().any(|(_, input)| interrupts(input)) {
                return Ok(false);
            }
            if last_ping.elapsed() >= PING_INTERVAL {
                *last_ping = Instant::now();
                let sent_ns = nanos(last_ping.saturating_duration_since(begun));
                sender.send(&Message::Ping { sent_ns }).map_err(|error| lane_failure(&error))?;
                progress(progress_of(machine, total, total - looked_at, sender.sent_bytes(), begun));
            }
            Ok(true)
        });
        match swept {
            Ok(Some(sweep)) => {
                self.say(&Message::RoundEnd { round, pages: sweep.pages });
                self.later(Event::RoundSent(sweep));
            }
            // What interrupted it waits in the queue.
            Ok(None) => {}
            Err(failure) => self.sweep_failed(failure),
        }
    }

    /// A broken lane and a failure of this host are different events.
    fn sweep_failed(&mut self, failure: Failure) {
        let local = matches!(failure.code, FailureCode::MemoryFailed | FailureCode::NotConverging);
        self.later(if local { Event::Failed(failure) } else { Event::LaneLost(failure) });
    }

    /// While the guest stands still. What interrupts it is taken before the commit can be reached.
    fn send_last_pages(&mut self, round: u32) {
        let Driver { job, sender, events, waiting, switchover_since, .. } = self;
        let sweeper = Sweeper::new(&job.regions, &mut job.tracker, sender, round);
        let swept = sweeper.run(Scope::Dirty, |_, _| {
            waiting.extend(events.receiver.try_iter());
            if switchover_since.is_some_and(|since| since.elapsed() > STOPPED_LIMIT) {
                return Err(overdue_failure());
            }
            Ok(!waiting.iter().any(|(_, input)| interrupts(input)))
        });
        match swept {
            Ok(Some(sweep)) => self.later(Event::LastPagesSent(sweep)),
            Ok(None) => {}
            Err(failure) => self.sweep_failed(failure),
        }
    }

    fn count_remaining(&mut self) {
        let round_trip = self.clock.round_trip().unwrap_or_default();
        match self.job.tracker.count_dirty() {
            Ok(pages) => {
                self.remaining_pages = pages;
                self.later(Event::RemainingCounted { pages, round_trip });
            }
            Err(error) => self.later(Event::Failed(memory_failure(&error))),
        }
    }

    /// Before a switchover over a long way: padding opens TCP's congestion window and the peer's receive window, so that the
    /// last pages, the device state and the commit travel in one flight.
    fn open_window(&mut self, expected_pages: u64) {
        if self.clock.round_trip().unwrap_or_default() < LONG_ROUND_TRIP {
            return;
        }
        let mut bytes = (expected_pages * PAGE_SIZE + DEVICE_STATE_ROOM).min(MOST_PADDING);
        while bytes > 0 {
            let piece = bytes.min(u64::from(MAX_PADDING));
            self.say(&Message::Padding { bytes: u32::try_from(piece).unwrap_or(MAX_PADDING) });
            bytes -= piece;
        }
    }

    fn ping_and_tell(&mut self) {
        let remaining_pages = self.remaining_pages;
        self.ping();
        let total: u64 = self.job.regions.iter().map(|region| region.pages()).sum();
        let sent = self.sender.sent_bytes();
        (self.job.progress)(progress_of(&self.machine, total, remaining_pages, sent, self.job.begun));
    }

    fn ping(&mut self) {
        self.last_ping = Instant::now();
        self.say(&Message::Ping { sent_ns: self.clock_ns(self.last_ping) });
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
            switchover: self.machine.switchover().and_then(|times| switchover_report(&times, &self.clock)),
            stood_still_ms: self.machine.stood_still().map(millis),
            wire_bytes: self.sender.sent_bytes(),
            round_trip: self.clock.round_trip(),
        }
    }
}

/// Reads the lane until it ends. The end of a finished migration is an event that nobody takes.
fn read_lane(mut receiver: LaneReceiver, inbox: &Inbox) {
    loop {
        match receiver.receive() {
            Ok(Incoming::Message(message)) => inbox.put(Instant::now(), Input::Lane(message)),
            Ok(Incoming::Pages(_)) => {
                let failure = Failure::new(FailureCode::ProtocolBroken, "the destination sent pages");
                return inbox.put(Instant::now(), Input::Machine(Event::LaneLost(failure)));
            }
            Err(error) => {
                return inbox.put(Instant::now(), Input::Machine(Event::LaneLost(lane_failure(&error))));
            }
        }
    }
}

/// Whether a round under way is pointless once this has come.
fn interrupts(input: &Input) -> bool {
    match input {
        Input::Machine(event) => {
            matches!(
                event,
                Event::CancelRequested | Event::LaneLost(_) | Event::Failed(_) | Event::PeerRefused(_)
            )
        }
        Input::Hypervisor(event) => matches!(event, HypervisorEvent::Failed(_)),
        Input::Lane(message) => !matches!(
            message,
            Message::Pong { .. } | Message::Ready | Message::RoundApplied { .. } | Message::Running(_)
        ),
    }
}

fn progress_of(
    machine: &Source,
    total_pages: u64,
    remaining_pages: u64,
    sent_bytes: u64,
    begun: Instant,
) -> Progress {
    let (bandwidth, dirty) = machine.rates();
    let remaining_bytes = remaining_pages * PAGE_SIZE;
    let elapsed = begun.elapsed();
    // During round 0 the rate so far is the best that is known.
    let measured =
        if machine.round() == 0 { sent_bytes as f64 / elapsed.as_secs_f64().max(1e-3) } else { bandwidth };
    let net = measured - dirty;
    Progress {
        phase: machine.phase(),
        round: machine.round(),
        remaining_bytes,
        total_bytes: total_pages * PAGE_SIZE,
        sent_bytes,
        dirty_bytes_per_s: dirty,
        bandwidth_bytes_per_s: measured,
        eta_ms: (net > 0.0).then(|| remaining_bytes as f64 / net * 1e3),
        elapsed_ms: millis(elapsed),
    }
}

/// The pause in pieces; the destination's times brought to this host's clock by the pings.
fn switchover_report(times: &SwitchoverTimes, clock: &PeerClock) -> Option<SwitchoverReport> {
    let destination = &times.destination;
    let arrived = Duration::from_nanos(clock.to_local_ns(destination.commit_ns)?);
    let since_commit = |ns: u64| Duration::from_nanos(ns.saturating_sub(destination.commit_ns));
    let loaded = since_commit(destination.loaded_ns);
    Some(SwitchoverReport {
        last_pages_ms: millis(times.last_pages.saturating_sub(times.stopped)),
        device_state_ms: millis(times.committed.saturating_sub(times.last_pages)),
        flight_ms: millis(arrived.saturating_sub(times.committed)),
        load_ms: millis(loaded),
        resume_ms: millis(since_commit(destination.running_ns).saturating_sub(loaded)),
    })
}

fn overdue_failure() -> Failure {
    let detail =
        format!("the guest stood still for {} s and its last pages had not gone", STOPPED_LIMIT.as_secs());
    Failure::new(FailureCode::NotConverging, detail)
}
