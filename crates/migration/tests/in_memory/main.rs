//! The state machines of source and destination against each other, with a lane, guests and memory
//! that exist only in this file. Every migration is replayed with a fault at every single step.

#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests may fail the test

mod scripted;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use godwit_migration::source::{
    Action as SourceAction, Counted, Event as SourceEvent, NotServed, Plan, Source, State, Verdict,
};
use godwit_migration::{Failure, PageIn, Policy, SentTotals, destination};
use godwit_types::{FailureCode, Incarnation, Outcome, Ownership};
use godwit_wire::{Begin, Running};

use destination::{Action as DestinationAction, Destination, Ending, Event as DestinationEvent};

const PAGES: usize = 400;
const EPOCH: u64 = 7;
const LIFE: u128 = 0xfeed;
const OWNERSHIP: Ownership = Ownership { incarnation: Incarnation::new(LIFE), epoch: EPOCH };
/// Below what any switchover costs, so the remainder decides.
const BUDGET: Duration = Duration::from_millis(1);
/// At this rate of 4 KiB pages, rounds are long enough that the policy needs several.
const STEP: Duration = Duration::from_millis(3);

#[derive(Clone, Debug, PartialEq)]
enum Word {
    Begin,
    Pages(Vec<(usize, u64)>),
    RoundEnd(u32),
    DeviceState,
    DeviceStateEnd(u64),
    Remaining(BTreeSet<usize>),
    PagesEnd(u64),
    Commit,
    Abort(Failure),
    Ready,
    RoundApplied(u32),
    Running,
    Refused(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    LaneCut,
    SourceFails,
    DestinationFails,
    LoadFails,
    Cancel,
    None,
}

struct World {
    /// On a long path some rounds are not awaited.
    round_trip: Duration,
    source: Source,
    destination: Destination,
    now: Duration,
    to_destination: VecDeque<Word>,
    to_source: VecDeque<Word>,
    lane_up: bool,
    source_events: VecDeque<SourceEvent>,
    destination_events: VecDeque<DestinationEvent>,
    source_memory: Vec<u64>,
    destination_memory: Vec<u64>,
    dirty: BTreeSet<usize>,
    tracking: bool,
    /// Pages that the guest lacks at the destination.
    missing: BTreeSet<usize>,
    source_runs: bool,
    destination_runs: bool,
    load_fails: bool,
    /// Whether the device state goes to the destination as it is written.
    overlaps: bool,
    finished: Option<Ending>,
    source_finished: bool,
    released: bool,
    seed: u64,
    writes_per_step: usize,
    pages_sent: u64,
    pages_applied: u64,
    /// Number of messages that the source has tried to send.
    messages: usize,
    /// Number of the message from which on the source's socket accepts none.
    fails_at: Option<usize>,
    log: Vec<String>,
}

/// The socket has not accepted a message.
#[derive(Debug)]
struct NotSent;

impl World {
    fn new(seed: u64, writes_per_step: usize) -> Self {
        World::with(seed, writes_per_step, PageIn::default())
    }

    fn with(seed: u64, writes_per_step: usize, page_in: PageIn) -> Self {
        let policy = Policy { page_in, switchover_budget: BUDGET, ..Policy::default() };
        World {
            round_trip: Duration::from_millis(if seed.is_multiple_of(2) { 1 } else { 40 }),
            source: Source::new(&Plan {
                policy,
                preflight: Duration::ZERO,
                resumes: false,
                // For every second guest, on a short path and on a long one.
                settles: seed % 4 < 2,
            }),
            destination: Destination::new(vec![PAGES as u64], OWNERSHIP),
            now: Duration::ZERO,
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            lane_up: true,
            source_events: VecDeque::from([SourceEvent::Connected]),
            destination_events: VecDeque::new(),
            source_memory: (0..PAGES as u64).collect(),
            destination_memory: vec![u64::MAX; PAGES],
            dirty: BTreeSet::new(),
            tracking: false,
            missing: BTreeSet::new(),
            source_runs: true,
            destination_runs: false,
            load_fails: false,
            overlaps: false,
            finished: None,
            source_finished: false,
            released: false,
            seed,
            writes_per_step,
            pages_sent: 0,
            pages_applied: 0,
            messages: 0,
            fails_at: None,
            log: Vec::new(),
        }
    }

    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.seed >> 33
    }

    fn guest_works(&mut self) {
        for _ in 0..self.writes_per_step {
            let page = usize::try_from(self.random()).unwrap() % PAGES;
            let value = self.random();
            if self.source_runs {
                self.source_memory[page] = value;
                if self.tracking {
                    self.dirty.insert(page);
                }
            }
        }
    }

    fn deliver(&mut self, word: Word) {
        if self.lane_up {
            match word {
                Word::Ready | Word::RoundApplied(_) | Word::Running | Word::Refused(_) => {
                    self.to_source.push_back(word);
                }
                _ => self.to_destination.push_back(word),
            }
        }
    }

    /// Sends a message of the source.
    fn send(&mut self, word: Word) -> Result<(), NotSent> {
        let number = self.messages;
        self.messages += 1;
        if self.fails_at.is_none_or(|at| number < at) {
            self.deliver(word);
            return Ok(());
        }
        if self.lane_up {
            self.cut_lane();
        }
        Err(NotSent)
    }

    fn sweep(&mut self, untouched: bool) -> SentTotals {
        let pages: Vec<usize> = if untouched {
            (0..PAGES).filter(|page| !self.dirty.contains(page)).collect()
        } else {
            std::mem::take(&mut self.dirty).into_iter().collect()
        };
        let content: Vec<_> = pages.iter().map(|&page| (page, self.source_memory[page])).collect();
        let pages = content.len() as u64;
        self.pages_sent += pages;
        self.deliver(Word::Pages(content));
        SentTotals { pages, bytes: pages * 4128 + 2_000_000, ..SentTotals::default() }
    }

    fn verdict(&self) -> Verdict {
        match &self.finished {
            Some(Ending::Runs) => Verdict::Runs,
            Some(Ending::Discarded(failure) | Ending::Cut(failure)) => {
                Verdict::Refused(failure.clone())
            }
            None => Verdict::Unknown,
        }
    }

    fn count_remaining(&self) -> SourceEvent {
        SourceEvent::RemainingCounted(Counted {
            pages: self.dirty.len() as u64,
            filled_pages: 0,
            round_trip: self.round_trip,
            limit_bytes_per_s: None,
            scan: Duration::ZERO,
            search: Duration::ZERO,
        })
    }

    fn source_acts(&mut self, action: SourceAction) -> Result<(), NotSent> {
        let event = match action {
            SourceAction::SendRound { round, .. } => SourceEvent::RoundSent(self.sweep(round == 0)),
            SourceAction::CountRemaining => self.count_remaining(),
            // On some hosts it is impossible; where it is possible, the guest writes less from then
            // on.
            SourceAction::Throttle { .. } if self.random().is_multiple_of(2) => {
                SourceEvent::CannotThrottle
            }
            SourceAction::PreparePageIn => {
                SourceEvent::PageInReady { able: !self.random().is_multiple_of(4) }
            }
            SourceAction::AnnounceRemaining => {
                let missing = std::mem::take(&mut self.dirty);
                let pages = missing.len() as u64;
                self.send(Word::Remaining(missing))?;
                SourceEvent::RemainingAnnounced { pages }
            }
            SourceAction::Settle => {
                self.guest_works();
                match self.random().is_multiple_of(3) {
                    true => SourceEvent::PutOff,
                    false => SourceEvent::Settled,
                }
            }
            SourceAction::BeginSwitchover { page_in } => {
                self.overlaps = !page_in && self.round_trip < Duration::from_millis(2);
                self.guest_works();
                self.source_runs = false;
                SourceEvent::GuestStopped
            }
            SourceAction::WriteDeviceState => {
                // The device's last write comes after the stop.
                self.source_memory[3] = 0xdead;
                self.dirty.insert(3);
                if self.overlaps {
                    SourceEvent::DevicesStopped
                } else {
                    SourceEvent::DeviceStateEnded
                }
            }
            SourceAction::PassDeviceState => {
                self.send(Word::DeviceState)?;
                // A device that writes memory with its state.
                self.source_memory[4] = 0xbeef;
                self.dirty.insert(4);
                SourceEvent::DeviceStateEnded
            }
            SourceAction::SendLastPages { .. } => SourceEvent::LastPagesSent(self.sweep(false)),
            SourceAction::ResumeGuest => {
                assert!(
                    !self.destination_runs,
                    "resumed at the source while the destination runs it"
                );
                self.source_runs = true;
                SourceEvent::GuestResumed(Ok(()))
            }
            SourceAction::AskVerdict => SourceEvent::Verdict(self.verdict()),
            SourceAction::ReleaseGuest => {
                assert!(!self.source_runs);
                self.released = true;
                SourceEvent::Released
            }
            silent => return self.source_acts_silently(silent),
        };
        self.source_events.push_back(event);
        Ok(())
    }

    /// Carries out an action that no event follows.
    fn source_acts_silently(&mut self, action: SourceAction) -> Result<(), NotSent> {
        match action {
            SourceAction::SendBegin => self.send(Word::Begin)?,
            SourceAction::StartTracking => {
                self.tracking = true;
                self.dirty.clear();
            }
            SourceAction::Drain => self.send(Word::RoundEnd(self.source.round()))?,
            SourceAction::Throttle { .. } => {
                self.writes_per_step = self.writes_per_step.div_ceil(2);
            }
            SourceAction::LetWritersGo => self.writes_per_step *= 2,
            SourceAction::SendDeviceState => {
                if !self.overlaps {
                    self.send(Word::DeviceState)?;
                }
                self.send(Word::DeviceStateEnd(100))?;
            }
            SourceAction::EndPages => self.send(Word::PagesEnd(self.pages_sent))?,
            SourceAction::SendCommit => {
                self.send(Word::Commit)?;
                self.source_takes(SourceEvent::CommitSent);
            }
            SourceAction::AbortPeer(failure) => self.deliver(Word::Abort(failure)),
            SourceAction::StopTracking => self.tracking = false,
            SourceAction::Finish => self.source_finished = true,
            // Pages are served in World::step.
            SourceAction::ServePages => {}
            other => panic!("{other:?} is followed by an event"),
        }
        Ok(())
    }

    fn destination_acts(&mut self, action: DestinationAction) {
        match action {
            DestinationAction::SendReady => self.deliver(Word::Ready),
            DestinationAction::NoteTakeOver => {
                self.destination_events.push_back(DestinationEvent::Noted);
            }
            DestinationAction::FinishLoad => {
                self.destination_events.push_back(if self.load_fails {
                    DestinationEvent::Failed(Failure::new(
                        FailureCode::HypervisorFailed,
                        "load failed",
                    ))
                } else {
                    DestinationEvent::Loaded
                });
            }
            DestinationAction::RunGuest { run } => {
                assert!(!self.source_runs, "runs at both ends");
                for page in (0..PAGES).filter(|page| !self.missing.contains(page)) {
                    let (there, here) = (self.destination_memory[page], self.source_memory[page]);
                    assert_eq!(there, here, "runs with another page {page}");
                }
                self.destination_runs = run;
                self.destination_events.push_back(DestinationEvent::GuestRuns);
            }
            DestinationAction::SendRunning => self.deliver(Word::Running),
            DestinationAction::Refuse(failure) => self.deliver(Word::Refused(failure)),
            DestinationAction::Discard(_) => {
                assert!(!self.destination_runs, "discards a guest that runs");
            }
            DestinationAction::Promote => assert!(self.destination_runs),
            // The source does not return: the state is kept until that is known.
            DestinationAction::Finish(Ending::Cut(failure)) => {
                self.finished = Some(Ending::Discarded(failure));
            }
            DestinationAction::Finish(ending) => self.finished = Some(ending),
        }
    }

    /// Returns what a message means to the state machine; `None`: it concerns only the streams.
    fn word_at_destination(&mut self, word: Word) -> Option<DestinationEvent> {
        Some(match word {
            Word::Begin => DestinationEvent::Begin(Begin {
                epoch: EPOCH,
                incarnation: LIFE,
                run: true,
                block_pages: vec![PAGES as u64],
            }),
            Word::Pages(content) => {
                for &(page, value) in &content {
                    self.destination_memory[page] = value;
                }
                self.pages_applied += content.len() as u64;
                return None;
            }
            Word::RoundEnd(round) => {
                self.deliver(Word::RoundApplied(round));
                return None;
            }
            Word::Remaining(missing) => {
                self.missing = missing;
                return None;
            }
            Word::PagesEnd(sent) => {
                DestinationEvent::PagesComplete { sent, applied: self.pages_applied }
            }
            Word::DeviceState => {
                let is_new = self.destination_memory[3] == 0xdead;
                assert!(is_new || self.missing.contains(&3), "it loads with an old queue");
                DestinationEvent::DeviceStateFed { bytes: 100 }
            }
            Word::DeviceStateEnd(bytes) => DestinationEvent::DeviceStateEnd { bytes },
            Word::Commit => DestinationEvent::Commit { ownership: OWNERSHIP },
            Word::Abort(failure) => DestinationEvent::Aborted(failure.to_reason()),
            other => panic!("{other:?} at the destination"),
        })
    }

    /// Takes one event from some queue. Returns false if no event is left.
    fn step(&mut self) -> bool {
        self.now += STEP;
        self.guest_works();
        if let Some(event) = self.destination_events.pop_front() {
            self.destination_takes(event);
        } else if let Some(event) = self.source_events.pop_front() {
            self.source_takes(event);
        } else if let Some(word) = self.to_destination.pop_front() {
            if let Some(event) = self.word_at_destination(word) {
                self.destination_takes(event);
            }
        } else if let Some(word) = self.to_source.pop_front() {
            let event = match word {
                Word::Ready => SourceEvent::PeerReady,
                Word::RoundApplied(round) => SourceEvent::RoundApplied { round, padding_bytes: 0 },
                Word::Running => {
                    SourceEvent::PeerRunning(Running { commit_ns: 0, loaded_ns: 0, running_ns: 0 })
                }
                Word::Refused(failure) => SourceEvent::PeerRefused(failure),
                other => panic!("{other:?} at the source"),
            };
            self.source_takes(event);
        } else if self.source.state() == State::PagingIn {
            self.serve();
        } else {
            return false;
        }
        assert!(!(self.source_runs && self.destination_runs), "two guests run");
        true
    }

    /// Delivers the source's pages, on streams of their own, as often as those break.
    fn serve(&mut self) {
        let ended = match &self.finished {
            Some(Ending::Runs) => {
                assert!(!self.released, "released while pages are missing");
                for page in std::mem::take(&mut self.missing) {
                    self.destination_memory[page] = self.source_memory[page];
                }
                assert_eq!(self.destination_memory, self.source_memory, "other memory");
                Ok(())
            }
            Some(Ending::Discarded(failure) | Ending::Cut(failure)) => {
                Err(NotServed::Refused(failure.clone()))
            }
            None => panic!("nothing can happen at the destination any more"),
        };
        self.source_takes(SourceEvent::PagedIn(ended));
    }

    fn source_takes(&mut self, event: SourceEvent) {
        self.log.push(format!("source {:?} ← {event:?}", self.source.state()));
        for action in self.source.on(self.now, event) {
            if self.source_acts(action).is_err() {
                break;
            }
        }
    }

    fn destination_takes(&mut self, event: DestinationEvent) {
        self.log.push(format!("destination ← {event:?}"));
        for action in self.destination.on(event) {
            self.destination_acts(action);
        }
    }

    /// Cuts the lane. What was in flight has arrived or has not.
    fn cut_lane(&mut self) {
        self.lane_up = false;
        if self.random().is_multiple_of(2) {
            self.to_destination.clear();
        }
        if self.random().is_multiple_of(2) {
            self.to_source.clear();
        }
        while let Some(word) = self.to_destination.pop_front() {
            if let Some(event) = self.word_at_destination(word) {
                self.destination_takes(event);
            }
        }
        let lost = Failure::new(FailureCode::LaneLost, "cut");
        self.destination_events.push_back(DestinationEvent::LaneLost(lost.clone()));
        while let Some(event) = self.destination_events.pop_front() {
            self.destination_takes(event);
        }
        self.source_events.push_back(SourceEvent::LaneLost(lost));
    }

    fn inject(&mut self, fault: Fault) {
        let failed = |what: &str| Failure::new(FailureCode::HypervisorFailed, what);
        match fault {
            Fault::LaneCut => self.cut_lane(),
            Fault::SourceFails => {
                self.source_events.push_front(SourceEvent::Failed(failed("source")));
            }
            Fault::DestinationFails => {
                // While the guest is being started, a failure is the answer to that: it does not
                // run.
                if self.destination_events.contains(&DestinationEvent::GuestRuns) {
                    self.destination_runs = false;
                    self.destination_events.clear();
                }
                self.destination_events.push_front(DestinationEvent::Failed(failed("destination")));
            }
            Fault::LoadFails => self.load_fails = true,
            Fault::Cancel => self.source_events.push_front(SourceEvent::CancelRequested),
            Fault::None => {}
        }
    }

    /// Runs to the end with a fault before step `at`. Returns the number of steps.
    fn run(&mut self, fault: Fault, at: usize) -> usize {
        let mut steps = 0;
        loop {
            if steps == at {
                self.inject(fault);
            }
            if !self.step() {
                return steps;
            }
            steps += 1;
            assert!(steps < 100_000, "it does not end");
        }
    }

    fn check(&self, fault: Fault, at: usize) {
        let context = || format!("{fault:?} at step {at}:\n{}", self.log.join("\n"));
        assert!(self.source_finished, "the source does not end: {}", context());
        assert_eq!(self.source.state(), State::Ended);
        let (outcome, failure) = self.source.ending().unwrap();
        match outcome {
            Outcome::Completed => {
                assert!(
                    self.destination_runs && !self.source_runs && self.released,
                    "{}",
                    context()
                );
            }
            Outcome::Failed | Outcome::Cancelled => {
                assert!(
                    self.source_runs && !self.destination_runs && !self.released,
                    "{}",
                    context()
                );
                assert!(!self.tracking && failure.is_some(), "{}", context());
            }
            Outcome::InDoubt => panic!("the destination could be asked: {}", context()),
        }
    }
}

#[test]
fn a_guest_moves_with_every_write_it_made() {
    for seed in 0..200 {
        let mut world = World::new(seed, (seed % 7) as usize);
        world.run(Fault::None, 0);
        world.check(Fault::None, 0);
        assert_eq!(world.source.ending().unwrap().0, Outcome::Completed);
        assert_eq!(world.finished, Some(Ending::Runs));
    }
}

#[test]
fn a_fault_at_any_step_leaves_exactly_one_guest() {
    let faults = [
        Fault::LaneCut,
        Fault::SourceFails,
        Fault::DestinationFails,
        Fault::LoadFails,
        Fault::Cancel,
    ];
    for seed in 0..20 {
        let steps = World::new(seed, 3).run(Fault::None, 0);
        for fault in faults {
            for at in 0..=steps {
                let mut world = World::new(seed, 3);
                world.run(fault, at);
                world.check(fault, at);
            }
        }
    }
}

#[test]
fn a_message_that_cannot_be_sent_leaves_the_guest_at_the_source_without_a_question() {
    for (writes, page_in) in [(3, PageIn::default()), (40, PageIn::Now)] {
        for seed in 0..20 {
            let mut whole = World::with(seed, writes, page_in);
            whole.run(Fault::None, 0);
            for at in 0..whole.messages {
                let mut world = World { fails_at: Some(at), ..World::with(seed, writes, page_in) };
                world.run(Fault::None, 0);
                world.check(Fault::LaneCut, at);
                let log = world.log.join("\n");
                assert!(world.source_runs, "message {at}: {log}");
                assert!(!log.contains("Verdict"), "message {at}: {log}");
            }
        }
    }
}

#[test]
fn a_guest_that_lacks_pages_moves_with_every_write_it_made() {
    let mut paged_in = 0;
    // Half of them are on a long path, where a switchover without it is soon bearable.
    for seed in 0..400 {
        let mut world = World::with(seed, 40, PageIn::Now);
        world.run(Fault::None, 0);
        world.check(Fault::None, 0);
        // If the destination cannot do it, a guest that writes so much may stay where it is.
        let unable = world.log.iter().any(|line| line.contains("able: false"));
        assert!(
            unable || world.source.ending().unwrap().0 == Outcome::Completed,
            "{}",
            world.log.join("\n")
        );
        paged_in += usize::from(world.log.iter().any(|line| line.contains("PagingIn")));
    }
    assert!(paged_in > 100, "{paged_in}");
}

#[test]
fn a_fault_at_any_step_of_a_page_in_leaves_exactly_one_guest() {
    let faults = [
        Fault::LaneCut,
        Fault::SourceFails,
        Fault::DestinationFails,
        Fault::LoadFails,
        Fault::Cancel,
    ];
    for seed in 0..20 {
        let steps = World::with(seed, 40, PageIn::Now).run(Fault::None, 0);
        for fault in faults {
            for at in 0..=steps {
                let mut world = World::with(seed, 40, PageIn::Now);
                world.run(fault, at);
                world.check(fault, at);
            }
        }
    }
}

#[test]
fn a_guest_missing_at_its_source_is_in_doubt_and_not_resumed() {
    let mut world = World::with(3, 40, PageIn::Now);
    while world.source.state() != State::PagingIn && world.step() {}
    if world.source.state() == State::PagingIn {
        let gone = Failure::new(FailureCode::InDoubt, "it has no such VM any more");
        world.source_takes(SourceEvent::PagedIn(Err(NotServed::Refused(gone))));
        assert_eq!(world.source.ending().unwrap().0, Outcome::InDoubt);
        assert!(!world.source_runs && !world.released);
    }
}

#[test]
fn a_cancel_before_the_commit_always_keeps_the_guest_at_the_source() {
    let steps = World::new(1, 3).run(Fault::None, 0);
    let mut cancelled = 0;
    for at in 0..steps {
        let mut world = World::new(1, 3);
        world.run(Fault::Cancel, at);
        let (outcome, _) = world.source.ending().unwrap();
        cancelled += usize::from(outcome == Outcome::Cancelled);
    }
    assert!(cancelled > steps / 2, "{cancelled} of {steps}");
}
