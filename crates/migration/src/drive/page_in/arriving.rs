//! The destination of a page-in: the guest runs, and accesses to missing pages wait here.
//!
//! One thread reads the accesses, and each stream has a thread. The thread that calls
//! [`PagingIn::until_complete`] maintains the session. A page goes from *missing* to *claimed*
//! (exactly one thread is writing its bytes), to *present* (its bit is cleared), to *shown*.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{Incoming, LaneError, Stream, StreamReceiver, StreamSender};
use godwit_ram::{Access, MissingPages, PageRange, Region};
use godwit_wire::{BlockRun, MAX_PAGE_IN_STREAMS, Message, PAGE_IN_STREAM, PagedIn};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::waits::Waits;
use super::{CHUNK_PAGES, Faults, PING_INTERVAL, SILENCE_LIMIT};
use crate::drive::handshake::WelcomedStream;
use crate::drive::sweep::by_chunk;
use crate::fail_writes;
use crate::failure::{Failure, FailureCode, lane_failure, memory_failure};
use crate::report::nanos;

/// Longest sleep of the thread that reads accesses, before it checks whether page-in is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Number of the session that is opened before the guest is handed over.
pub(crate) const FIRST_SESSION: u64 = 0;
/// Number of runs that always fits a frame.
const RUNS_A_FETCH: usize = 1024;
/// Number of pages examined at a time when the missing ones are listed: a list of at most 12 MiB.
const PAGES_LISTED: u64 = 1 << 20;
/// Time limit for pages that must be present before the guest can run.
const MAPPED_LIMIT: Duration = Duration::from_secs(5);

/// Memory of a guest that arrives while the guest runs.
pub struct PagingIn {
    faults: Box<dyn Faults>,
    regions: Vec<Arc<Region>>,
    /// Pages that are not present.
    missing: MissingPages,
    /// Missing pages that no thread is writing at the moment.
    unclaimed: MissingPages,
    /// Number of pages of each chunk that have not been shown yet, by block.
    unshown: Vec<Vec<AtomicU32>>,
    /// Number of threads that are about to show pages which count as present.
    showing: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
    begun_at: Instant,
}

struct State {
    /// Whether the missing pages are known: pages may arrive.
    begun: bool,
    over: bool,
    /// Whether it is not known yet that the guest runs here: the source's copy may be all that is
    /// left of it.
    source_held: bool,
    /// Number of pages that were missing at first.
    pages: u64,
    session: Session,
    /// Accesses to missing pages, and when they began to wait.
    waiting: BTreeMap<(usize, u64), Instant>,
    waits: Waits,
    /// Whether a thread waits for pages that must be present before the guest runs.
    early: bool,
    /// The newest session that was requested.
    asked_sessions: u64,
    /// Number of sessions that broke.
    cuts: u64,
    failure: Option<Failure>,
}

type RequestSender = Arc<Mutex<StreamSender>>;

/// Streams that carry pages.
#[derive(Default)]
struct Session {
    number: u64,
    /// Stream for requests; `None`: there is none at the moment.
    demand: Option<(RequestSender, Stream)>,
    streams: Vec<Stream>,
    /// Numbers of all admitted streams: each number is used by one stream, once per session.
    numbers: BTreeSet<u16>,
    reading: usize,
    broken: bool,
    /// Whether the missing pages are being listed: requests made meanwhile follow the list.
    opening: bool,
}

impl Session {
    /// Returns the stream for requests, or `None` if there is none at the moment.
    fn request_sender(&self) -> Option<&RequestSender> {
        let (sender, _) = self.demand.as_ref()?;
        Some(sender).filter(|_| !self.broken && !self.opening)
    }

    /// Limits the source's silence: from now on it answers pings.
    fn limit_silence(&self) {
        if let Some((_, stream)) = self.demand.as_ref()
            && let Err(error) = stream.limit_silence(SILENCE_LIMIT)
        {
            tracing::warn!(%error, "a source that is gone will be noticed late");
        }
    }
}

impl PagingIn {
    /// Prepares for a guest before it is known which pages will be missing. Pages may be requested
    /// once [`PagingIn::begin`] has set that. `path`: file for the record of missing pages.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn prepare(
        faults: Box<dyn Faults>,
        regions: Vec<Arc<Region>>,
        path: &Path,
    ) -> Result<Arc<PagingIn>, Failure> {
        let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        fail_writes::check("missing").map_err(|error| memory_failure(&error))?;
        let missing =
            MissingPages::create(path, &block_pages).map_err(|error| memory_failure(&error))?;
        Ok(Arc::new(PagingIn::new(faults, regions, missing, false)))
    }

    /// Resumes the page-in of an earlier agent: the missing pages are those recorded at `path`. The
    /// memory is still watched.
    ///
    /// # Errors
    /// The record is damaged, or no thread can be started.
    pub fn resume(
        faults: Box<dyn Faults>,
        regions: Vec<Arc<Region>>,
        path: &Path,
    ) -> Result<Arc<PagingIn>, Failure> {
        let missing = MissingPages::open(path).map_err(|error| memory_failure(&error))?;
        let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        if missing.block_pages() != block_pages {
            return Err(memory_failure(&"what is noted as missing is of another guest"));
        }
        let paging_in = Arc::new(PagingIn::new(faults, regions, missing, true));
        paging_in.count_unshown();
        {
            let mut state = paging_in.lock();
            state.pages = paging_in.missing.count();
            // The session that was lost with the agent.
            state.cuts = 1;
            state.session.broken = true;
        }
        paging_in.start()?;
        Ok(paging_in)
    }

    fn new(
        faults: Box<dyn Faults>,
        regions: Vec<Arc<Region>>,
        missing: MissingPages,
        begun: bool,
    ) -> PagingIn {
        let chunks = |region: &Arc<Region>| {
            (0..region.pages().div_ceil(CHUNK_PAGES)).map(|_| AtomicU32::new(0)).collect()
        };
        let unshown = regions.iter().map(chunks).collect();
        let unclaimed = MissingPages::in_memory(missing.block_pages());
        let state = State {
            begun,
            over: false,
            source_held: false,
            pages: 0,
            session: Session::default(),
            waiting: BTreeMap::new(),
            waits: Waits::default(),
            early: false,
            asked_sessions: FIRST_SESSION,
            cuts: 0,
            failure: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        PagingIn {
            faults,
            regions,
            missing,
            unclaimed,
            unshown,
            showing: AtomicUsize::new(0),
            state,
            changed,
            begun_at: Instant::now(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state under the lock is consistent after each assignment.
        self.state.lock()
    }

    /// Returns whether the guest has been, or is being, handed over without some of its pages.
    pub(crate) fn has_begun(&self) -> bool {
        self.lock().begun
    }

    /// Returns the number of missing pages.
    #[must_use]
    pub fn missing_pages(&self) -> u64 {
        self.missing.count()
    }

    /// Returns whether pages can arrive at the moment: not while the link is cut.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        let state = self.lock();
        state.session.demand.is_some() && !state.session.broken
    }

    /// Begins with the pages that the stopped guest will lack. From the return on they are watched,
    /// and pages whose accesses would not wait are present.
    ///
    /// # Errors
    /// The guest must not run here.
    pub(crate) fn begin(self: &Arc<Self>, remaining: &MissingPages) -> Result<(), Failure> {
        for (block, region) in self.regions.iter().enumerate() {
            // Chunk by chunk, because every other page of a large guest makes a long list.
            for chunk in region.all_pages().chunks(CHUNK_PAGES) {
                remaining
                    .runs(block, chunk)
                    .into_iter()
                    .for_each(|run| self.missing.insert(block, run));
            }
        }
        self.count_unshown();
        self.claim_nothing();
        let mut early = Vec::new();
        for (block, chunk) in self.chunks_with_missing() {
            self.faults.watch(block, chunk).map_err(|error| memory_failure(&error))?;
            let mapped =
                self.faults.mapped(block, chunk).map_err(|error| memory_failure(&error))?;
            let nobody_waits = mapped.into_iter().flat_map(|run| self.missing.runs(block, run));
            early.extend(nobody_waits.map(|run| (block, run)));
        }
        {
            let mut state = self.lock();
            (state.begun, state.pages) = (true, self.missing.count());
            state.session.limit_silence();
            self.changed.notify_all();
        }
        self.start()?;
        self.fetch_before_it_runs(&early)
    }

    fn fetch_before_it_runs(&self, early: &[(usize, PageRange)]) -> Result<(), Failure> {
        let runs: Vec<BlockRun> =
            early.iter().map(|(block, run)| block_run(*block, *run)).collect();
        let limit = Instant::now() + MAPPED_LIMIT;
        let mut requested = false;
        let mut state = self.lock();
        state.early = true;
        while early.iter().any(|(block, run)| self.missing.count_in(*block, *run) > 0) {
            // The stream for requests may still be connecting.
            if !requested && state.session.request_sender().is_some() {
                drop(state);
                self.fetch(runs.clone());
                (requested, state) = (true, self.lock());
                continue;
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() || state.over || state.session.broken {
                let why = if left.is_zero() { "in time" } else { "as the link was cut" };
                let detail =
                    format!("pages that must be there before the guest runs did not come {why}");
                return Err(state
                    .failure
                    .clone()
                    .unwrap_or(Failure::new(FailureCode::LaneLost, detail)));
            }
            self.changed.wait_for(&mut state, left);
        }
        state.early = false;
        Ok(())
    }

    fn chunks_with_missing(&self) -> Vec<(usize, PageRange)> {
        let mut chunks = Vec::new();
        for (block, unshown) in self.unshown.iter().enumerate() {
            let all = self.regions[block].all_pages();
            let each = all.chunks(CHUNK_PAGES).zip(unshown);
            chunks.extend(
                each.filter(|(_, unshown)| unshown.load(Ordering::SeqCst) > 0)
                    .map(|(chunk, _)| (block, chunk)),
            );
        }
        chunks
    }

    fn count_unshown(&self) {
        for (block, unshown) in self.unshown.iter().enumerate() {
            for (chunk, unshown) in self.regions[block].all_pages().chunks(CHUNK_PAGES).zip(unshown)
            {
                let count = u32::try_from(self.missing.count_in(block, chunk)).unwrap_or(u32::MAX);
                unshown.store(count, Ordering::SeqCst);
            }
        }
    }

    /// Makes all missing pages claimable again: no thread is writing at the moment.
    fn claim_nothing(&self) {
        for (block, region) in self.regions.iter().enumerate() {
            for chunk in region.all_pages().chunks(CHUNK_PAGES) {
                self.missing
                    .runs(block, chunk)
                    .into_iter()
                    .for_each(|run| self.unclaimed.insert(block, run));
            }
        }
    }

    /// Starts the thread that reads accesses.
    fn start(self: &Arc<Self>) -> Result<(), Failure> {
        let paging_in = Arc::clone(self);
        let body = move || {
            if let Err(failure) = paging_in.serve_accesses() {
                paging_in.fail(failure);
            }
        };
        let spawned = std::thread::Builder::new().name("page-in".to_owned()).spawn(body);
        spawned.map(drop).map_err(|error| {
            Failure::new(FailureCode::Internal, format!("no thread can be started: {error}"))
        })
    }

    fn fail(&self, failure: Failure) {
        let mut state = self.lock();
        if !state.over {
            tracing::error!(%failure, "page-in cannot continue");
            state.failure.get_or_insert(failure);
        }
        state.over = true;
        state.session.streams.iter().for_each(Stream::close);
        self.changed.notify_all();
    }

    /// Withholds the report that all pages are here from the source until
    /// [`PagingIn::let_source_go`]: the source discards the guest when it receives that report.
    pub fn hold_source(&self) {
        self.lock().source_held = true;
    }

    /// Permits the report to the source, because the guest certainly runs here.
    pub fn let_source_go(&self) {
        self.lock().source_held = false;
        self.changed.notify_all();
    }

    /// Ends page-in: the guest will not run here, or is gone.
    pub fn abandon(&self) {
        self.fail(Failure::new(FailureCode::Cancelled, "the guest is not here any more"));
    }

    /// Serves accesses until no page is missing.
    fn serve_accesses(&self) -> Result<(), Failure> {
        let mut accesses: Vec<Access> = Vec::new();
        let mut pinged = Instant::now();
        loop {
            if self.lock().over {
                return Ok(());
            }
            if pinged.elapsed() >= PING_INTERVAL {
                pinged = Instant::now();
                self.ping();
            }
            self.faults
                .accesses(LOOK_INTERVAL, &mut accesses)
                .map_err(|error| memory_failure(&error))?;
            let now = Instant::now();
            let mut wanted = Vec::new();
            for Access { block, page, .. } in accesses.drain(..) {
                if self.missing.contains(block, page) && self.note_wait(block, page, now) {
                    wanted.push(block_run(block, PageRange::new(page, 1)));
                } else if !self.missing.contains(block, page) {
                    self.show_present(block, page)?;
                }
            }
            self.fetch(wanted);
        }
    }

    /// Records an access that waits. Returns false if the page was requested already, or has
    /// arrived meanwhile.
    fn note_wait(&self, block: usize, page: u64, since: Instant) -> bool {
        let mut state = self.lock();
        let is_new = state.waiting.insert((block, page), since).map(|first| {
            state.waiting.insert((block, page), first);
        });
        if !self.missing.contains(block, page) {
            state.waiting.remove(&(block, page));
            return false;
        }
        is_new.is_none()
    }

    /// Shows all present pages of an accessed chunk at once.
    fn show_present(&self, block: usize, page: u64) -> Result<(), Failure> {
        let Some(region) = self.regions.get(block) else { return Ok(()) };
        let chunk = PageRange::new(page / CHUNK_PAGES * CHUNK_PAGES, CHUNK_PAGES)
            .intersect(region.all_pages());
        // The accessed page comes first, so that its wait ends at once.
        let there = godwit_ram::gaps(chunk, &self.missing.runs(block, chunk));
        for pages in std::iter::once(PageRange::new(page, 1)).chain(there) {
            match self.faults.show(block, pages) {
                Ok(()) => {}
                // It was the last of the chunk, which is no longer watched.
                Err(_) if self.is_released(block, page) => return Ok(()),
                Err(error) => return Err(memory_failure(&error)),
            }
        }
        Ok(())
    }

    fn is_released(&self, block: usize, page: u64) -> bool {
        self.unshown_of(block, page).is_none_or(|unshown| unshown.load(Ordering::SeqCst) == 0)
    }

    fn unshown_of(&self, block: usize, page: u64) -> Option<&AtomicU32> {
        self.unshown.get(block)?.get(usize::try_from(page / CHUNK_PAGES).ok()?)
    }

    /// Returns the stream for requests, or `None` if there is none at the moment.
    fn request_sender(&self) -> Option<RequestSender> {
        let state = self.lock();
        state.session.request_sender().map(Arc::clone)
    }

    fn ping(&self) {
        let sent_ns = nanos(self.begun_at.elapsed());
        if let Some(sender) = self.request_sender()
            && let Err(error) = sender.lock().send(&Message::Ping { sent_ns })
        {
            tracing::debug!(%error, "the source is not reached");
        }
    }

    /// Requests pages. Without a stream for requests, the next session begins with them.
    fn fetch(&self, mut runs: Vec<BlockRun>) {
        if runs.is_empty() {
            return;
        }
        let Some(sender) = self.request_sender() else { return };
        while !runs.is_empty() {
            let message = Message::Fetch { runs };
            let sent = sender.lock().send(&message);
            let taken = message.encode(&mut Vec::new());
            let Message::Fetch { runs: rest } = message else { return };
            runs = rest;
            runs.drain(..taken);
            if let Err(error) = sent {
                // Its reader will notice the same failure.
                return tracing::debug!(%error, "a missing page could not be asked for");
            }
        }
    }

    /// Ends the previous session, if necessary: its streams are closed, and no thread writes any
    /// more. Returns the number of the new session, which is never current if another one was
    /// requested meanwhile.
    pub fn new_session(&self) -> u64 {
        let mut state = self.lock();
        state.asked_sessions += 1;
        let number = state.asked_sessions;
        state.session.streams.iter().for_each(Stream::close);
        if state.session.demand.is_some() && !state.session.broken {
            state.cuts += 1;
        }
        state.session.broken = true;
        self.changed.notify_all();
        while state.session.reading > 0 && !state.over && state.asked_sessions == number {
            self.changed.wait(&mut state);
        }
        if state.over || state.asked_sessions != number {
            return number;
        }
        state.session = Session { number, ..Session::default() };
        self.claim_nothing();
        number
    }

    /// Returns whether this is still the current session, and more may arrive on it.
    #[must_use]
    pub fn is_session(&self, number: u64) -> bool {
        let state = self.lock();
        !state.over && !state.session.broken && state.session.number == number
    }

    /// Admits a stream to this session.
    pub fn admit(self: &Arc<Self>, session: u64, welcomed: WelcomedStream) {
        let WelcomedStream { number, stream, sender, receiver } = welcomed;
        let mut state = self.lock();
        let is_one = (PAGE_IN_STREAM..PAGE_IN_STREAM + MAX_PAGE_IN_STREAMS).contains(&number);
        let is_asked = number == PAGE_IN_STREAM;
        let current = &mut state.session;
        let is_taken = current.numbers.contains(&number);
        if !is_one || is_taken || current.number != session || current.broken {
            return stream.close();
        }
        current.numbers.insert(number);
        current.streams.push(stream.clone());
        let sender = Arc::new(Mutex::new(sender));
        current.demand = is_asked.then(|| (Arc::clone(&sender), stream)).or(current.demand.take());
        current.opening |= is_asked;
        current.reading += 1;
        drop(state);
        self.changed.notify_all();
        let paging_in = Arc::clone(self);
        let reader = Reader { paging_in, session, receiver, is_asked };
        let spawned = std::thread::Builder::new()
            .name("page-in-stream".to_owned())
            .spawn(move || reader.run());
        if let Err(error) = spawned {
            tracing::error!(%error, "no thread can be started for a page-in stream");
            self.stream_ended(session, false);
        }
        if is_asked && let Err(error) = self.open(session, &sender) {
            tracing::warn!(%error, "a page-in stream broke at once");
        }
    }

    /// Opens a session: sends the list of missing pages, unless the source knows it, and the
    /// requests of waiting accesses.
    fn open(&self, session: u64, sender: &Mutex<StreamSender>) -> Result<(), LaneError> {
        // Held until everything is sent: accesses that begin meanwhile send their requests
        // afterwards.
        let mut sender = sender.lock();
        if session != FIRST_SESSION {
            self.send_remaining(&mut sender)?;
        }
        let mut state = self.lock();
        if state.session.number == session {
            state.session.opening = false;
        }
        self.changed.notify_all();
        if !state.begun {
            return Ok(());
        }
        state.session.limit_silence();
        let waiting =
            state.waiting.keys().map(|(block, page)| block_run(*block, PageRange::new(*page, 1)));
        let waiting: Vec<BlockRun> = waiting.collect();
        drop(state);
        waiting
            .chunks(RUNS_A_FETCH)
            .try_for_each(|runs| sender.send(&Message::Fetch { runs: runs.to_vec() }))
    }

    fn send_remaining(&self, sender: &mut StreamSender) -> Result<(), LaneError> {
        let pieces = self.regions.iter().enumerate().flat_map(|(block, region)| {
            region.all_pages().chunks(PAGES_LISTED).map(move |piece| (block, piece))
        });
        for (block, piece) in pieces {
            let runs = self.missing.runs(block, piece).into_iter();
            let mut runs: Vec<BlockRun> = runs.map(|run| block_run(block, run)).collect();
            while !runs.is_empty() {
                let message = Message::Remaining { runs };
                sender.send(&message)?;
                let taken = message.encode(&mut Vec::new());
                let Message::Remaining { runs: rest } = message else { break };
                runs = rest;
                runs.drain(..taken);
            }
        }
        sender.send(&Message::RemainingEnd { pages: self.missing.count() })
    }

    fn stream_ended(&self, session: u64, whole: bool) {
        let mut state = self.lock();
        if state.session.number == session {
            state.session.reading -= 1;
            if !whole && !state.session.broken {
                state.session.broken = true;
                state.session.streams.iter().for_each(Stream::close);
                if !state.over && self.missing.count() > 0 {
                    state.cuts += 1;
                    tracing::warn!(
                        missing = self.missing.count(),
                        "page-in is cut: the source is waited for"
                    );
                }
            }
        }
        self.changed.notify_all();
    }

    /// Maintains the session until no page is missing, and reports that to the source, unless the
    /// report is withheld. Returns the statistics.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn until_complete(&self) -> Result<PagedIn, Failure> {
        let mut state = self.lock();
        while !state.over && (state.source_held || !self.is_whole()) {
            self.changed.wait(&mut state);
        }
        if let Some(failure) = state.failure.clone() {
            return Err(failure);
        }
        state.over = true;
        let figures = state.waits.figures(state.pages, state.cuts);
        drop(state);
        self.faults.end();
        if let Some(sender) = self.request_sender()
            && let Err(error) = sender.lock().send(&Message::PagedIn(Box::new(figures)))
        {
            // The source will query it.
            tracing::debug!(%error, "the source does not know that page-in is complete");
        }
        Ok(figures)
    }

    /// Closes the streams: the source has read the last message, or must not be waited for any
    /// longer.
    pub fn close(&self) {
        let mut state = self.lock();
        let limit = Instant::now() + SILENCE_LIMIT;
        while state.session.reading > 0 && Instant::now() < limit {
            self.changed.wait_for(&mut state, LOOK_INTERVAL);
        }
        state.session.streams.iter().for_each(Stream::close);
    }

    /// Handles pages whose bytes are in place: their accesses no longer wait.
    fn arrived(&self, block: usize, pages: PageRange) -> Result<(), Failure> {
        self.showing.fetch_add(1, Ordering::SeqCst);
        let shown = self.count_and_show(block, pages);
        self.showing.fetch_sub(1, Ordering::SeqCst);
        // Readers of the count hold the lock.
        if self.is_whole() || self.lock().early {
            drop(self.lock());
            self.changed.notify_all();
        }
        shown
    }

    /// Returns whether all pages are present and have been shown.
    fn is_whole(&self) -> bool {
        self.missing.count() == 0 && self.showing.load(Ordering::SeqCst) == 0
    }

    fn count_and_show(&self, block: usize, pages: PageRange) -> Result<(), Failure> {
        (pages.first..pages.end()).for_each(|page| {
            self.missing.remove(block, page);
        });
        self.faults.show(block, pages).map_err(|error| memory_failure(&error))?;
        let now = Instant::now();
        {
            let mut state = self.lock();
            let waited: Vec<_> = state
                .waiting
                .range((block, pages.first)..(block, pages.end()))
                .map(|(at, _)| *at)
                .collect();
            for at in waited {
                if let Some(since) = state.waiting.remove(&at) {
                    state.waits.add(now.saturating_duration_since(since));
                }
            }
        }
        for chunk in by_chunk(pages, CHUNK_PAGES) {
            self.shown(block, chunk)?;
        }
        Ok(())
    }

    /// Releases chunks that have been shown to their last page.
    fn shown(&self, block: usize, pages: PageRange) -> Result<(), Failure> {
        let Some(unshown) = self.unshown_of(block, pages.first) else { return Ok(()) };
        let count = u32::try_from(pages.count).unwrap_or(u32::MAX);
        if unshown.fetch_sub(count, Ordering::SeqCst) > count {
            return Ok(());
        }
        let chunk = PageRange::new(pages.first / CHUNK_PAGES * CHUNK_PAGES, CHUNK_PAGES);
        let chunk = chunk.intersect(self.regions[block].all_pages());
        self.faults.release(block, chunk).map_err(|error| memory_failure(&error))
    }
}

fn block_run(block: usize, pages: PageRange) -> BlockRun {
    BlockRun {
        block: u16::try_from(block).unwrap_or(u16::MAX),
        first: pages.first,
        count: pages.count,
    }
}

/// Thread of one stream.
struct Reader {
    paging_in: Arc<PagingIn>,
    session: u64,
    receiver: StreamReceiver,
    /// Whether it is the stream for requests.
    is_asked: bool,
}

impl Reader {
    fn run(mut self) {
        let whole = self.until_ended();
        if let Err(failure) = &whole {
            if failure.code == FailureCode::MemoryFailed {
                self.paging_in.fail(failure.clone());
            } else {
                tracing::info!(%failure, "a page-in stream ended");
            }
        }
        self.paging_in.stream_ended(self.session, whole.is_ok());
    }

    /// Runs until the stream has carried all its pages.
    fn until_ended(&mut self) -> Result<(), Failure> {
        loop {
            let incoming = self.receiver.receive().map_err(|error| lane_failure(&error))?;
            if !self.until_begun() {
                return Ok(());
            }
            match incoming {
                Incoming::Pages(header) => {
                    let run = header.run;
                    let pages = self.claim(run.block, run.first, u64::from(run.count))?;
                    let region = &self.paging_in.regions[usize::from(run.block)];
                    if let Err(error) = self.receiver.pages(region, header) {
                        self.give_back(run.block, pages);
                        return Err(lane_failure(&error));
                    }
                    self.paging_in.arrived(usize::from(run.block), pages)?;
                }
                Incoming::Message(Message::Zeros(zeros)) => {
                    for run in zeros.runs {
                        let pages = self.claim(run.block, run.first, run.count)?;
                        let region = &self.paging_in.regions[usize::from(run.block)];
                        region.zero(pages).map_err(|error| memory_failure(&error))?;
                        self.paging_in.arrived(usize::from(run.block), pages)?;
                    }
                }
                Incoming::Message(
                    Message::UnitEnd | Message::Padding { .. } | Message::Pong { .. },
                ) => {}
                Incoming::Message(Message::RemainingEnd { .. }) if !self.is_asked => return Ok(()),
                Incoming::Message(other) => {
                    let detail = format!(
                        "the source sent a {:?} message on a page-in stream, which it must not",
                        other.kind()
                    );
                    return Err(Failure::new(FailureCode::ProtocolBroken, detail));
                }
            }
        }
    }

    /// Waits for the list of missing pages, which may come after the first pages. Returns false if
    /// it never comes.
    fn until_begun(&self) -> bool {
        let mut state = self.paging_in.lock();
        while !state.begun && !state.over && !state.session.broken {
            self.paging_in.changed.wait(&mut state);
        }
        state.begun && !state.over
    }

    /// Claims pages. They are written by one thread, once, and only while they are missing: after
    /// that they belong to the guest.
    fn claim(&self, block: u16, first: u64, count: u64) -> Result<PageRange, Failure> {
        let pages = PageRange { first, count };
        let known =
            self.paging_in.regions.get(usize::from(block)).map_or(0, |region| region.pages());
        let claimed = first.checked_add(count).filter(|end| *end <= known).map_or(0, |end| {
            (first..end)
                .take_while(|page| self.paging_in.unclaimed.remove(usize::from(block), *page))
                .count() as u64
        });
        if claimed < count {
            self.give_back(block, PageRange { first, count: claimed });
            let detail = format!("the source sent a page of RAM block {block} that is not missing");
            return Err(Failure::new(FailureCode::ProtocolBroken, detail));
        }
        Ok(pages)
    }

    fn give_back(&self, block: u16, pages: PageRange) {
        self.paging_in.unclaimed.insert(usize::from(block), pages);
    }
}

#[cfg(test)]
mod tests;
