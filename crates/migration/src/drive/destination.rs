//! The destination's driver: a thread that carries out the state machine's actions, one that reads
//! the control stream, and one for each data stream, which writes pages into memory
//! ([`super::intake`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_ram::{MissingPages, PageRange, Region};
use godwit_wire::{BlockRun, Kind, MAX_PAGE_IN_STREAMS, MAX_STREAMS, Message, Running};
use parking_lot::{Mutex, MutexGuard};

use super::announcing::{Announcer, Offer};
use super::contents::Contents;
use super::handshake::WelcomedStream;
use super::hypervisor::DestinationHypervisor;
use super::intake::{Input, Intake};
use super::page_in::{FIRST_SESSION, PagingIn};
use crate::destination::{Action, Destination, Ending, Event};
use crate::failure::{Failure, FailureCode, lane_failure};
use crate::hold;
use crate::report::nanos;
use godwit_types::{Incarnation, Ownership};

/// Everything that a migration needs at the destination.
pub struct DestinationJob<'a, H> {
    /// The control stream from the source.
    pub control: WelcomedStream,
    /// Waits a moment for a data stream from the source.
    pub accept: &'a (dyn Fn() -> Option<WelcomedStream> + Sync),
    /// The ownership that this host receives.
    pub ownership: Ownership,
    /// The shadow VM's RAM, block by block.
    pub regions: Vec<Arc<Region>>,
    /// Content to which the source may refer, in addition to the guest's own pages.
    pub offer: Offer,
    /// The shadow VM.
    pub hypervisor: &'a mut H,
}

/// Runs a migration at its destination until it ends or its lane is cut ([`Ending::Cut`]). After a
/// cut the shadow VM is unchanged, with all memory that has arrived. If the guest runs here and
/// lacks pages, returns the page-in that brings them as well.
pub fn receive<H: DestinationHypervisor>(
    job: DestinationJob<'_, H>,
    cancel: &Receiver<()>,
) -> (Ending, Option<Arc<PagingIn>>) {
    let DestinationJob { control, accept, ownership, regions, offer, hypervisor } = job;
    let WelcomedStream { stream: control, sender, receiver, .. } = control;
    let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
    let contents = Contents::new(&offer, &block_pages);
    let announcer = Announcer::new(offer, contents.offered());
    let (page_in, is_over) = (Mutex::<PageInPlace>::default(), AtomicBool::new(false));
    let (events, inbox) = mpsc::sync_channel(WAITING_MESSAGES);
    let sender = Arc::new(Mutex::new(sender));
    let intake = Intake::new(regions.clone(), contents, Arc::clone(&sender), events.clone());
    let begun = Instant::now();
    // The receiver of announcements is handed over once.
    let (go_on, announcers) = mpsc::sync_channel(1);
    let mut driver = DestinationDriver {
        machine: Destination::new(block_pages, ownership),
        events: events.clone(),
        sender: Arc::clone(&sender),
        announcer: Some(announcer),
        go_on: Some(go_on),
        intake: &intake,
        page_in: &page_in,
        remaining: None,
        remaining_pages: 0,
        regions,
        hypervisor,
        begun,
        running: Running { commit_ns: 0, loaded_ns: 0, running_ns: 0 },
        ending: None,
    };
    let mut reader = Reader { receiver, sender: Arc::clone(&sender), begun, events };
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.run());
        let intake = &intake;
        scope.spawn(move || {
            // It never arrives if the migration ends before it begins.
            if let Ok(rest) = announcers.recv() {
                rest.go_on(&sender, &announcers, || intake.is_over());
            }
        });
        scope.spawn(|| accept_streams(scope, accept, intake, &page_in, &is_over));
        let ending = driver.until_ended(&inbox, cancel);
        intake.end();
        is_over.store(true, Ordering::SeqCst);
        driver.go_on = None;
        close_control(&control, inbox, &reading);
        intake.until_read();
        let page_in = place_of(&page_in).page_in.take();
        let has_begun = |page_in: &Arc<PagingIn>| page_in.has_begun();
        if let (Ending::Cut(_), Some(prepared)) = (&ending, &page_in) {
            // It is prepared again if it is requested again.
            prepared.abandon();
            prepared.close();
        }
        (ending, page_in.filter(has_begun))
    })
}

/// Accepts streams and starts a reader for each data stream, until the migration is over. That is
/// longer than data streams are admitted: streams for page-in may be waiting when the last page has
/// arrived.
fn accept_streams<'scope>(
    scope: &'scope Scope<'scope, '_>,
    accept: &dyn Fn() -> Option<WelcomedStream>,
    intake: &'scope Intake,
    page_in: &Mutex<PageInPlace>,
    is_over: &AtomicBool,
) {
    while !is_over.load(Ordering::SeqCst) {
        let Some(stream) = accept() else { continue };
        if stream.number > MAX_STREAMS {
            admit_page_in(page_in, stream);
        } else if let Some(reader) = intake.admit(stream) {
            let number = reader.number();
            let thread = std::thread::Builder::new().name("data-stream".to_owned());
            if let Err(error) = thread.spawn_scoped(scope, move || reader.run()) {
                intake.not_read(number, &error);
            }
        }
    }
}

/// Closes the control stream. The last message must arrive: closing with unread bytes would reset
/// the connection. So the source closes first.
fn close_control(
    control: &Stream,
    inbox: Receiver<(Instant, Input)>,
    reading: &ScopedJoinHandle<'_, ()>,
) {
    control.finish_sending();
    let limit = Instant::now() + CLOSE_LIMIT;
    while Instant::now() < limit && !reading.is_finished() {
        // Any further message of the source is too late.
        let _ = inbox.recv_timeout(CLOSE_INTERVAL);
    }
    control.close();
    // A reader that waits for room here returns as well.
    drop(inbox);
}

/// State of the page-in that brings the pages that the guest lacks.
#[derive(Default)]
struct PageInPlace {
    /// `None`: no page is known to be missing.
    page_in: Option<Arc<PagingIn>>,
    /// Streams that arrived before the message on the control stream that requests page-in.
    early: Vec<WelcomedStream>,
}

fn place_of(place: &Mutex<PageInPlace>) -> MutexGuard<'_, PageInPlace> {
    place.lock()
}

fn admit_page_in(place: &Mutex<PageInPlace>, stream: WelcomedStream) {
    let mut place = place_of(place);
    match &place.page_in {
        Some(page_in) => page_in.admit(FIRST_SESSION, stream),
        None if place.early.len() < usize::from(MAX_PAGE_IN_STREAMS) => place.early.push(stream),
        None => stream.stream.close(),
    }
}

/// Maximum messages between reader and driver: a driver that waits for its hypervisor delays the
/// lane and does not use more memory.
const WAITING_MESSAGES: usize = 64;
/// Time limit for the source to close a control stream that is over.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// Poll interval for that close.
const CLOSE_INTERVAL: Duration = Duration::from_millis(5);

struct DestinationDriver<'a, H> {
    machine: Destination,
    /// Sender of the driver's own inbox.
    events: SyncSender<(Instant, Input)>,
    sender: Arc<Mutex<StreamSender>>,
    /// Announces this host's content to the source before it begins.
    announcer: Option<Announcer>,
    /// Hands the announcer over to go on, while the receiver exists.
    go_on: Option<SyncSender<Announcer>>,
    intake: &'a Intake,
    page_in: &'a Mutex<PageInPlace>,
    /// Pages that the guest will lack, a bit each, however they are listed; `None`: page-in is not
    /// prepared.
    remaining: Option<MissingPages>,
    remaining_pages: u64,
    regions: Vec<Arc<Region>>,
    hypervisor: &'a mut H,
    begun: Instant,
    running: Running,
    ending: Option<Ending>,
}

/// Poll interval for a cancel while the lane is silent.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);

impl<H: DestinationHypervisor> DestinationDriver<'_, H> {
    fn until_ended(&mut self, inbox: &Receiver<(Instant, Input)>, cancel: &Receiver<()>) -> Ending {
        loop {
            if let Some(ending) = self.ending.take() {
                return ending;
            }
            if cancel.try_recv().is_ok() {
                self.handle(Event::CancelRequested);
                continue;
            }
            match inbox.recv_timeout(CANCEL_INTERVAL) {
                Ok((at, input)) => self.input(at, input),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.handle(Event::LaneLost(Failure::new(
                        FailureCode::LaneLost,
                        "the lane is gone",
                    )));
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
                self.handle(event);
            }
            Input::CloseStream { stream } => self.intake.close(stream),
            Input::PagesEnd(end) => {
                let complete = self.intake.complete(&end).and_then(|applied| {
                    self.lack_the_rest()?;
                    Ok(applied)
                });
                let event = match complete {
                    Ok(applied) => Event::PagesComplete { sent: end.pages, applied },
                    Err(failure) => Event::Failed(failure),
                };
                self.handle(event);
            }
            Input::PreparePageIn => self.prepare_page_in(),
            Input::LaterRound => self.hypervisor.expect_switchover(),
            Input::Remaining(runs) => {
                if let Err(failure) = self.check_remaining(&runs) {
                    return self.handle(Event::Failed(failure));
                }
                for run in &runs {
                    // Pages whose references failed need not be sent again: they will be requested.
                    self.intake.lacks_no_more(run);
                }
                if let Some(remaining) = &self.remaining {
                    let pages = |run: &BlockRun| PageRange::new(run.first, run.count);
                    runs.iter().for_each(|run| remaining.insert(run.block.into(), pages(run)));
                }
            }
            Input::DeviceState(bytes) => {
                let event = match self.hypervisor.feed(&bytes) {
                    Ok(()) => Event::DeviceStateFed { bytes: bytes.len() as u64 },
                    Err(failure) => Event::Failed(failure),
                };
                self.handle(event);
            }
        }
    }

    /// Checks that the list was requested, is within the guest's memory, and is not longer than
    /// that: an endless list is invalid.
    fn check_remaining(&mut self, runs: &[BlockRun]) -> Result<(), Failure> {
        let broken = |detail: &str| Err(Failure::new(FailureCode::ProtocolBroken, detail));
        if place_of(self.page_in).page_in.is_none() {
            return broken("the source withholds pages, and this host is not prepared for page-in");
        }
        let pages_of = |run: &BlockRun| {
            self.regions.get(usize::from(run.block)).map_or(0, |region| region.pages())
        };
        if runs
            .iter()
            .any(|run| run.first.checked_add(run.count).is_none_or(|end| end > pages_of(run)))
        {
            return broken("the source keeps pages back that the guest does not have");
        }
        self.remaining_pages += runs.iter().map(|run| run.count).sum::<u64>();
        if self.remaining_pages > self.regions.iter().map(|region| region.pages()).sum() {
            return broken("the source keeps back more pages than the guest has");
        }
        Ok(())
    }

    /// Prepares page-in. If that is impossible here, both ends continue without it.
    fn prepare_page_in(&mut self) {
        if place_of(self.page_in).page_in.is_some() {
            let failure =
                Failure::new(FailureCode::ProtocolBroken, "the source asks for page-in twice");
            return self.handle(Event::Failed(failure));
        }
        let prepared = self
            .hypervisor
            .prepare_page_in()
            .and_then(|(faults, path)| PagingIn::prepare(faults, self.regions.clone(), &path));
        if let Err(failure) = &prepared {
            tracing::warn!(%failure, "the guest cannot run here before all of its memory has \
                arrived");
        }
        let able = prepared.is_ok();
        let block_pages: Vec<u64> = self.regions.iter().map(|region| region.pages()).collect();
        self.remaining = able.then(|| MissingPages::in_memory(&block_pages));
        let mut place = place_of(self.page_in);
        place.page_in = prepared.ok();
        for stream in std::mem::take(&mut place.early) {
            match &place.page_in {
                Some(page_in) => page_in.admit(FIRST_SESSION, stream),
                None => stream.stream.close(),
            }
        }
        drop(place);
        self.send(&Message::PageInReady { able });
    }

    /// Makes accesses to missing pages wait from now on.
    fn lack_the_rest(&mut self) -> Result<(), Failure> {
        let page_in = place_of(self.page_in).page_in.clone();
        match (page_in, self.remaining.take()) {
            (Some(page_in), Some(remaining)) => page_in.begin(&remaining),
            // No page is missing: without preparation [`Self::check_remaining`] has refused the
            // list.
            _ => Ok(()),
        }
    }

    fn handle(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.machine.on(event) {
                events.extend(self.act(action));
            }
        }
    }

    /// Carries out an action. Some actions cause an event.
    fn act(&mut self, action: Action) -> Option<Event> {
        hold::at("destination", action.name());
        match action {
            Action::SendReady => {
                let announcer = self.announcer.take();
                let announcer = announcer.map(|mut announcer| {
                    announcer.begin(&self.sender);
                    announcer
                });
                self.send(&Message::Ready);
                if let Some((go_on, announcer)) = self.go_on.as_ref().zip(announcer) {
                    // The receiver exists as long as this sender.
                    let _ = go_on.send(announcer);
                }
            }
            Action::NoteTakeOver => {
                let (events, at) = (self.events.clone(), Instant::now());
                self.hypervisor.note_take_over(Box::new(move |noted| {
                    let event = noted.map_or_else(Event::Failed, |()| Event::Noted);
                    // A driver that has ended needs no answer.
                    let _ = events.send((at, Input::Event(event)));
                }));
            }
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
            Action::SendRunning => self.send(&Message::Running(self.running)),
            Action::Refuse(failure) => self.send(&Message::Refused(failure.to_reason())),
            Action::Discard(failure) => {
                // The memory goes with the shadow: nothing may touch it any more.
                self.intake.end();
                self.intake.until_read();
                let page_in = place_of(self.page_in).page_in.take();
                if let Some(page_in) = page_in {
                    page_in.abandon();
                    page_in.close();
                }
                self.hypervisor.discard(&failure);
            }
            Action::Promote => self.hypervisor.promote(),
            Action::Finish(ending) => self.ending = Some(ending),
        }
        None
    }

    /// Sends a message. If the lane breaks here, the reader notices.
    fn send(&self, message: &Message) {
        if let Err(error) = self.sender.lock().send(message) {
            tracing::debug!(%error, kind = ?message.kind(), "the source did not get a message");
        }
    }

    fn now_ns(&self) -> u64 {
        nanos(self.begun.elapsed())
    }
}

/// Reader of the control stream.
struct Reader {
    receiver: StreamReceiver,
    sender: Arc<Mutex<StreamSender>>,
    begun: Instant,
    events: SyncSender<(Instant, Input)>,
}

impl Reader {
    fn run(&mut self) {
        loop {
            match self.one() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.report(Event::LaneLost(lane_failure(&error))),
            }
        }
    }

    /// Reads one frame. Returns false if nothing that could follow is needed.
    fn one(&mut self) -> Result<bool, LaneError> {
        let message = match self.receiver.receive()? {
            Incoming::Pages(_) => return Ok(self.refuse(Kind::Pages)),
            Incoming::Message(message) => message,
        };
        let at = Instant::now();
        match message {
            Message::Ping { sent_ns } => {
                let answered_ns = nanos(at.saturating_duration_since(self.begun));
                self.sender.lock().send(&Message::Pong { sent_ns, answered_ns })?;
            }
            Message::Padding { .. } => {}
            Message::CloseStream { stream } => self.put(at, Input::CloseStream { stream }),
            Message::PagesEnd(end) => self.put(at, Input::PagesEnd(end)),
            Message::PreparePageIn => self.put(at, Input::PreparePageIn),
            Message::Remaining { runs } => self.put(at, Input::Remaining(runs)),
            Message::DeviceState(bytes) => self.put(at, Input::DeviceState(bytes)),
            Message::Begin(begin) => self.report(Event::Begin(begin)),
            Message::DeviceStateEnd { bytes } => self.report(Event::DeviceStateEnd { bytes }),
            Message::Abort(reason) => self.report(Event::Aborted(reason)),
            Message::Commit { epoch, incarnation } => {
                let ownership = Ownership { incarnation: Incarnation::new(incarnation), epoch };
                self.put(at, Input::Event(Event::Commit { ownership }));
            }
            other => return Ok(self.refuse(other.kind())),
        }
        Ok(true)
    }

    fn refuse(&mut self, kind: Kind) -> bool {
        let detail =
            format!("the source sent a {kind:?} message on the control stream, which it must not");
        self.report(Event::Failed(Failure::new(FailureCode::ProtocolBroken, detail)));
        false
    }

    fn report(&mut self, event: Event) {
        self.put(Instant::now(), Input::Event(event));
    }

    fn put(&mut self, at: Instant, input: Input) {
        // A driver that has ended needs nothing any more.
        let _ = self.events.send((at, input));
    }
}
