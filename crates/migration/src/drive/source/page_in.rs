//! Page-in at the source, beside the driver: a thread that opens the streams, and then serves the
//! destination until all pages are there.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use godwit_lanes::{Carries, Interrupt};
use godwit_ram::PageRange;
use godwit_ram::pages::normalise;
use godwit_wire::{BlockRun, Message, PagedIn};

use super::driver::{CannotSend, Driver};
use crate::drive::handshake::{Connect, Hello};
use crate::drive::hypervisor::SourceHypervisor;
use crate::drive::inbox::{Inbox, Input};
use crate::drive::page_in::{AskAgain, KeptPages, SessionStream, open_session, serve};
use crate::drive::tracking::Tracking;
use crate::failure::{Failure, FailureCode, memory_failure};
use crate::report::{millis, page_in_report};
use crate::source::{Event, NotServed};
use godwit_types::PageInReport;

/// Interval of keep-alives on streams that wait for the switchover.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Maximum orders of a migration: prepare and begin once each, and forget once for each end that is
/// unable. The policy requests page-in once.
pub(super) const MOST_ORDERS: usize = 4;

pub(super) enum Order {
    /// Open the streams, with the given purpose for those of unrequested pages.
    Prepare(Carries),
    /// The guest will lack these pages.
    Begin(Vec<BlockRun>),
    /// The streams are not needed after all.
    Forget,
}

/// The driver's state of page-in.
pub(super) struct PageInDesk<'a> {
    pub(super) orders: SyncSender<Order>,
    pub(super) kept: &'a KeptPages,
    /// Whether the destination is ready.
    pub(super) peer_ready: bool,
    /// Whether the streams are ready.
    pub(super) streams_ready: bool,
    /// Pages that were dirty right before the guest was stopped, per block.
    pub(super) dirty_before: Vec<Vec<PageRange>>,
    /// Number of pages that the guest lacked when it was handed over.
    pub(super) pages: u64,
    pub(super) since: Option<Instant>,
    pub(super) took: Option<Duration>,
    pub(super) figures: Option<PagedIn>,
}

impl<'a> PageInDesk<'a> {
    pub(super) fn new(orders: SyncSender<Order>, kept: &'a KeptPages) -> PageInDesk<'a> {
        PageInDesk {
            orders,
            kept,
            peer_ready: false,
            streams_ready: false,
            dirty_before: Vec::new(),
            pages: 0,
            since: None,
            took: None,
            figures: None,
        }
    }

    pub(super) fn report(&self) -> Option<PageInReport> {
        let figures = self.figures.unwrap_or(PagedIn { pages: self.pages, ..PagedIn::default() });
        self.since
            .map(|since| page_in_report(&figures, millis(self.took.unwrap_or(since.elapsed()))))
    }
}

/// State of the thread.
pub(super) struct Server<'a> {
    pub(super) kept: &'a KeptPages,
    pub(super) connect: &'a Connect<'a>,
    pub(super) lanes: usize,
    pub(super) interrupt: &'a Interrupt,
    pub(super) hello: Hello,
    pub(super) again: &'a AskAgain<'a>,
    pub(super) inbox: &'a Inbox,
}

impl Server<'_> {
    /// Runs until no more orders can come, or all pages are at the destination.
    pub(super) fn run(&self, orders: &Receiver<Order>) {
        let mut streams: Option<Vec<SessionStream>> = None;
        loop {
            match orders.recv_timeout(KEEP_ALIVE) {
                Ok(Order::Prepare(rest)) => {
                    let opened =
                        open_session(self.connect, self.lanes, self.interrupt, self.hello, rest);
                    if let Err(failure) = &opened {
                        tracing::warn!(%failure, "no streams for page-in");
                    }
                    self.inbox.put_now(Input::PageInStreams { open: opened.is_ok() });
                    streams = opened.ok();
                }
                Ok(Order::Begin(list)) => {
                    let first = streams.take().map(|streams| (streams, list));
                    let mut word = LastWord { inbox: self.inbox, ended: None };
                    word.ended = Some(serve(self.kept, first, self.again));
                    return;
                }
                Ok(Order::Forget) => streams = None,
                Err(RecvTimeoutError::Timeout) => {
                    for stream in streams.iter_mut().flatten() {
                        if let Err(error) = stream.keep_alive() {
                            // Once page-in has begun, a session that has lost a stream is replaced.
                            tracing::debug!(%error, "a page-in stream has broken before it was \
                                needed");
                        }
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        streams.iter().flatten().for_each(SessionStream::close);
    }
}

/// Reports how the thread ended, also after a panic, because the driver waits for it.
struct LastWord<'a> {
    inbox: &'a Inbox,
    ended: Option<Result<Option<PagedIn>, NotServed>>,
}

impl Drop for LastWord<'_> {
    fn drop(&mut self) {
        let panicked = Failure::new(FailureCode::Internal, "the pages are not served any more");
        let lost = || Err(NotServed::Lost(panicked));
        self.inbox.put_now(Input::PagedIn(self.ended.take().unwrap_or_else(lost)));
    }
}

impl<H: SourceHypervisor, T: Tracking> Driver<'_, H, T> {
    fn order(&self, order: Order) {
        // A thread that has ended has reported why.
        let _ = self.page_in.orders.send(order);
    }

    pub(super) fn prepare_page_in(&mut self) -> Result<(), CannotSend> {
        (self.page_in.peer_ready, self.page_in.streams_ready) = (false, false);
        let narrow = self.lanes.figures().iter().any(|lane| lane.vanishing_mtu.is_some());
        self.page_in.kept.set_round_trip(self.peer.round_trip());
        self.order(Order::Prepare(if narrow { Carries::PagesNarrowly } else { Carries::Pages }));
        self.send(&Message::PreparePageIn)
    }

    pub(super) fn page_in_peer(&mut self, at: Instant, able: bool) {
        self.page_in.peer_ready = true;
        self.page_in_is(at, able);
    }

    pub(super) fn page_in_streams(&mut self, at: Instant, open: bool) {
        self.page_in.streams_ready = true;
        self.page_in_is(at, open);
    }

    fn page_in_is(&mut self, at: Instant, able: bool) {
        if !able {
            self.order(Order::Forget);
            self.handle(at, Event::PageInReady { able });
        } else if self.page_in.peer_ready && self.page_in.streams_ready {
            self.handle(at, Event::PageInReady { able });
        }
    }

    /// Takes the pages that are dirty right before the guest is stopped, so that what it writes
    /// from then on shows: at the destination it accesses those pages first.
    pub(super) fn note_what_is_dirty(&mut self) -> Result<(), Failure> {
        self.page_in.dirty_before = self.take_all_dirty()?;
        Ok(())
    }

    /// Reports everything that the guest will lack: the pages that are dirty now, with guest and
    /// devices paused, and those that were dirty before.
    pub(super) fn announce_remaining(&mut self) -> Result<(), CannotSend> {
        let just_written = match self.take_all_dirty() {
            Ok(just_written) => just_written,
            Err(failure) => {
                self.inputs.first(Event::Failed(failure));
                return Ok(());
            }
        };
        self.page_in.kept.set_hot(block_runs(&just_written));
        let mut dirty = std::mem::take(&mut self.page_in.dirty_before);
        dirty.resize(just_written.len(), Vec::new());
        for (dirty, written) in dirty.iter_mut().zip(just_written) {
            dirty.extend(written);
            normalise(dirty);
        }
        for (block, dirty) in (0..).zip(&dirty) {
            self.memory.referring.forget_hashes(block, dirty);
        }
        let runs = block_runs(&dirty);
        let pages = runs.iter().map(|run| run.count).sum();
        self.send_remaining(&runs)?;
        self.pages_end = self.dispatch.seal();
        if self.pages_end.is_none() {
            let detail = "pages that were sent before the guest stopped did not arrive";
            self.inputs.first(Event::LaneLost(Failure::new(FailureCode::LaneLost, detail)));
            return Ok(());
        }
        self.page_in.pages = pages;
        self.memory.remaining_pages = pages;
        self.page_in.since = Some(Instant::now());
        self.order(Order::Begin(runs));
        self.inputs.first(Event::RemainingAnnounced { pages });
        Ok(())
    }

    /// Takes the dirty pages of each block.
    fn take_all_dirty(&mut self) -> Result<Vec<Vec<PageRange>>, Failure> {
        let mut dirty = Vec::new();
        self.job.tracker.let_change(false);
        for (number, region) in self.job.regions.iter().enumerate() {
            let all = region.all_pages();
            let block =
                u16::try_from(number).map_err(|_| memory_failure(&"too many RAM blocks"))?;
            let (mut found, mut at) = (Vec::new(), 0);
            while at < all.end() {
                let rest = PageRange::between(at, all.end());
                let taken = self.job.tracker.take_dirty(number, rest, u64::MAX, &mut found);
                at = taken.map_err(|error| memory_failure(&error))?;
            }
            self.memory.referring.take(block, all, &mut found);
            normalise(&mut found);
            dirty.push(found);
        }
        Ok(dirty)
    }

    fn send_remaining(&mut self, runs: &[BlockRun]) -> Result<(), CannotSend> {
        let mut rest = runs.to_vec();
        while !rest.is_empty() {
            let message = Message::Remaining { runs: rest };
            self.send(&message)?;
            let taken = message.encode(&mut Vec::new());
            let Message::Remaining { runs } = message else { return Ok(()) };
            rest = runs;
            rest.drain(..taken);
        }
        Ok(())
    }

    pub(super) fn paged_in(&mut self, at: Instant, ended: Result<Option<PagedIn>, NotServed>) {
        self.page_in.took = self.page_in.since.map(|since| since.elapsed());
        if let Ok(figures) = &ended {
            self.page_in.figures = *figures;
        }
        self.handle(at, Event::PagedIn(ended.map(drop)));
    }
}

/// Returns the pages of all blocks in one list.
fn block_runs(pages: &[Vec<PageRange>]) -> Vec<BlockRun> {
    let each = (0_u16..).zip(pages);
    each.flat_map(|(block, runs)| {
        runs.iter().map(move |run| BlockRun { block, first: run.first, count: run.count })
    })
    .collect()
}
