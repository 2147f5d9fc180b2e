//! The destination's driver: one thread reads the lane and writes pages into memory, one does what the machine says.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, LaneReceiver, LaneSender};
use godwit_ram::{PageRange, Region};
use godwit_wire::{BlockRun, Message, Running};

use super::handshake::WelcomedLane;
use super::{DestinationHypervisor, lane_failure};
use crate::destination::{Action, Destination, Ending, Event};
use crate::failure::{Failure, FailureCode};
use crate::report::nanos;

/// Everything that a destination's migration needs.
pub struct DestinationJob<H> {
    /// The lane from the source.
    pub lane: WelcomedLane,
    /// The epoch that the guest gets here.
    pub epoch: u64,
    /// The shadow VM's RAM, block by block.
    pub regions: Vec<Arc<Region>>,
    /// The shadow VM.
    pub hypervisor: H,
}

/// Runs a migration at its destination, to its end.
pub fn receive<H: DestinationHypervisor>(job: DestinationJob<H>, cancel: &Receiver<()>) -> Ending {
    let DestinationJob { lane, epoch, regions, hypervisor } = job;
    let WelcomedLane { lane, sender, receiver } = lane;
    let block_pages = regions.iter().map(|region| region.pages()).collect();
    let (events, inbox) = mpsc::sync_channel(WAITING_MESSAGES);
    let mut driver = Driver {
        machine: Destination::new(block_pages, epoch),
        sender: Arc::new(Mutex::new(sender)),
        hypervisor,
        begun: Instant::now(),
        running: Running { commit_ns: 0, loaded_ns: 0, running_ns: 0 },
        ending: None,
    };
    let mut reader = Reader {
        receiver,
        sender: Arc::clone(&driver.sender),
        regions,
        begun: driver.begun,
        events,
        applied: 0,
        committed: false,
    };
    std::thread::scope(|scope| {
        scope.spawn(move || reader.run());
        let ending = driver.until_ended(&inbox, cancel);
        // What was said last must arrive: closing with unread bytes would reset the connection. So the source closes first.
        lane.finish_sending();
        let limit = Instant::now() + CLOSE_LIMIT;
        while Instant::now() < limit
            && inbox.recv_timeout(limit.saturating_duration_since(Instant::now())).is_ok()
        {}
        lane.close();
        // A reader that waits for room here returns as well.
        drop(inbox);
        ending
    })
}

/// What the reader tells the driver.
#[derive(Debug)]
enum Input {
    Event(Event),
    DeviceState(Vec<u8>),
}

/// Messages between reader and driver: a driver that waits for its hypervisor holds the lane back, not memory.
const WAITING_MESSAGES: usize = 64;
/// How long the source may take to close a lane that is over.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

struct Driver<H> {
    machine: Destination,
    sender: Arc<Mutex<LaneSender>>,
    hypervisor: H,
    begun: Instant,
    running: Running,
    ending: Option<Ending>,
}

/// How often a cancel is looked for while the lane is silent.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

impl<H: DestinationHypervisor> Driver<H> {
    fn until_ended(&mut self, inbox: &Receiver<(Instant, Input)>, cancel: &Receiver<()>) -> Ending {
        loop {
            if let Some(ending) = self.ending.take() {
                return ending;
            }
            if cancel.try_recv().is_ok() {
                self.take(Event::CancelRequested);
                continue;
            }
            match inbox.recv_timeout(CANCEL_INTERVAL) {
                Ok((at, input)) => self.input(at, input),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.take(Event::LaneLost(Failure::new(FailureCode::LaneLost, "the lane is gone")));
                }
            }
        }
    }

    fn input(&mut self, at: Instant, input: Input) {
        match input {
            Input::Event(event) => {
                if matches!(event, Event::Commit { .. }) {
                    self.running.commit_ns = nanos(at.saturating_duration_since(self.begun));
                }
                self.take(event);
            }
            Input::DeviceState(bytes) => {
                let event = match self.hypervisor.feed(&bytes) {
                    Ok(()) => Event::DeviceStateFed { bytes: bytes.len() as u64 },
                    Err(failure) => Event::Failed(failure),
                };
                self.take(event);
            }
        }
    }

    fn take(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machine.on(event) {
                events.extend(self.act(action));
            }
        }
    }

    /// Carries an action out; some bring an event about.
    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::SendReady => self.say(&Message::Ready),
            Action::SendRoundApplied { round, pages } => self.say(&Message::RoundApplied { round, pages }),
            Action::FinishLoad => {
                let loaded = self.hypervisor.finish_load();
                self.running.loaded_ns = self.now_ns();
                return Some(loaded.map_or_else(Event::Failed, |()| Event::Loaded));
            }
            Action::RunGuest { run } => {
                let runs = self.hypervisor.run(run);
                self.running.running_ns = self.now_ns();
                // The commit may have been read while the device state was still being loaded.
                self.running.loaded_ns = self.running.loaded_ns.max(self.running.commit_ns);
                return Some(runs.map_or_else(Event::Failed, |()| Event::GuestRuns));
            }
            Action::SendRunning => self.say(&Message::Running(self.running)),
            Action::Refuse(failure) => self.say(&Message::Refused(failure.to_reason())),
            Action::Discard(failure) => self.hypervisor.discard(&failure),
            Action::Promote => self.hypervisor.promote(),
            Action::Finish(ending) => self.ending = Some(ending),
        }
        None
    }

    /// A lane that breaks by it is noticed by the reader.
    fn say(&self, message: &Message) {
        if let Err(error) = lock(&self.sender).send(message) {
            tracing::debug!(%error, kind = ?message.kind(), "the source did not get a message");
        }
    }

    fn now_ns(&self) -> u64 {
        nanos(self.begun.elapsed())
    }
}

struct Reader {
    receiver: LaneReceiver,
    sender: Arc<Mutex<LaneSender>>,
    regions: Vec<Arc<Region>>,
    begun: Instant,
    events: SyncSender<(Instant, Input)>,
    /// Pages in memory that the machine has not heard of.
    applied: u64,
    /// The guest is this host's: nothing from the lane touches its memory any more.
    committed: bool,
}

impl Reader {
    fn run(&mut self) {
        loop {
            match self.one() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.tell(Event::LaneLost(lane_failure(&error))),
            }
        }
    }

    /// Takes one frame. False: nothing that could follow is wanted.
    fn one(&mut self) -> Result<bool, LaneError> {
        let message = match self.receiver.receive()? {
            Incoming::Pages(_) | Incoming::Message(Message::Zeros(_)) if self.committed => return Ok(false),
            Incoming::Pages(pages) => {
                let region =
                    self.regions.get(usize::from(pages.run.block)).ok_or(LaneError::OutOfBounds {
                        block: pages.run.block,
                        first: pages.run.first,
                        count: u64::from(pages.run.count),
                    })?;
                self.receiver.pages(region, pages.run)?;
                self.applied += u64::from(pages.run.count);
                return Ok(true);
            }
            Incoming::Message(message) => message,
        };
        let at = Instant::now();
        match message {
            Message::Zeros(zeros) => {
                self.check_sum(&zeros.runs)?;
                for run in &zeros.runs {
                    self.zero(run)?;
                }
            }
            Message::Ping { sent_ns } => {
                let answered_ns = nanos(at.saturating_duration_since(self.begun));
                lock(&self.sender).send(&Message::Pong { sent_ns, answered_ns })?;
            }
            Message::Padding { .. } => {}
            Message::DeviceState(bytes) => self.put(at, Input::DeviceState(bytes)),
            Message::Begin(begin) => self.tell(Event::Begin(begin)),
            Message::RoundEnd { round, pages } => self.tell(Event::RoundEnd { round, pages }),
            Message::DeviceStateEnd { bytes } => self.tell(Event::DeviceStateEnd { bytes }),
            Message::Abort(reason) => self.tell(Event::Aborted(reason)),
            Message::Commit { epoch, pages } => {
                self.committed = true;
                self.put(at, Input::Event(Event::Commit { epoch, pages }));
            }
            other => {
                let detail = format!("the source sent a {:?} message, which it must not", other.kind());
                self.tell(Event::Failed(Failure::new(FailureCode::ProtocolBroken, detail)));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A frame may name each page once at the most: a few bytes must not keep this host busy for long.
    fn check_sum(&self, runs: &[BlockRun]) -> Result<(), LaneError> {
        let all: u64 = self.regions.iter().map(|region| region.pages()).sum();
        let named = runs.iter().fold(0u64, |sum, run| sum.saturating_add(run.count));
        match runs.first() {
            Some(run) if named > all => {
                Err(LaneError::OutOfBounds { block: run.block, first: run.first, count: named })
            }
            _ => Ok(()),
        }
    }

    fn zero(&mut self, run: &BlockRun) -> Result<(), LaneError> {
        let bad = LaneError::OutOfBounds { block: run.block, first: run.first, count: run.count };
        let Some(region) = self.regions.get(usize::from(run.block)) else {
            return Err(bad);
        };
        if run.first.checked_add(run.count).is_none_or(|end| end > region.pages()) {
            return Err(bad);
        }
        region
            .zero(PageRange { first: run.first, count: run.count })
            .map_err(|error| LaneError::Memory(error.to_string()))?;
        self.applied += run.count;
        Ok(())
    }

    fn tell(&mut self, event: Event) {
        self.put(Instant::now(), Input::Event(event));
    }

    /// The machine hears of pages before it hears of what came after them.
    fn put(&mut self, at: Instant, input: Input) {
        let pages = std::mem::take(&mut self.applied);
        if pages > 0 {
            let _ = self.events.send((at, Input::Event(Event::PagesApplied { pages })));
        }
        // A driver that has ended needs nothing any more.
        let _ = self.events.send((at, input));
    }
}

/// A thread that panicked with the sender leaves a whole frame or a broken lane: both are noticed elsewhere.
fn lock(sender: &Mutex<LaneSender>) -> std::sync::MutexGuard<'_, LaneSender> {
    sender.lock().unwrap_or_else(PoisonError::into_inner)
}
