//! The board of work with a lock around it, and the threads that do the work: one a data stream.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_lanes::{Carries, Interrupt, LaneError, Stream, StreamSender, UnitPages};
use godwit_ram::{CHUNK_PAGES, PAGE_SIZE, PageRange, Region, pages::page_count, push_merged};
use godwit_wire::{Message, PagesEnd};

use super::inbox::MOST_UNANSWERED_PINGS;
use super::page_in::KeptPages;
use super::referring::{OfStream, Referring};
use super::{Inbox, Input};
use crate::board::{Board, Misaccounted, Unit};
use crate::encoding::{Chooser, Encodings};
use crate::failure::{Failure, FailureCode};
use crate::ledger::Sweep;
use crate::report::LaneProgress;
use crate::scaler::LaneSample;
use crate::source::Event;

/// Units that wait for each stream: enough to keep it busy, few enough that what is sent was scanned just now.
const WAITING_A_STREAM: usize = 2;
/// How long a stream without work says nothing: well below what its peer takes for the end.
const IDLE_LIMIT: Duration = Duration::from_secs(2);
/// How long a full board is waited for before the caller looks at what else there is to do.
const ROOM_INTERVAL: Duration = Duration::from_millis(5);

/// How long a stream that has enough on its way waits before it is looked at again.
const FULL_INTERVAL: Duration = Duration::from_millis(1);

/// What a lane's streams take while the guest stands still, so that none of them has the others wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LanePace {
    /// The most pages of a unit.
    pub(crate) chunk_pages: u64,
    /// A stream takes no unit while more of its bytes are not acknowledged.
    pub(crate) most_unacked_bytes: u64,
}

/// Work between the driver, which scans, and the streams, which send.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    state: Mutex<State>,
    /// There is work, or it is over.
    work: Condvar,
    /// Work was taken.
    room: Condvar,
    round: AtomicU32,
    zero_pages: AtomicU64,
    bytes: AtomicU64,
    padding_bytes: AtomicU64,
    encodings: Mutex<Encodings>,
    /// The guest stands still.
    hurry: AtomicBool,
    /// Streams are connected under it.
    pub(crate) connecting: Interrupt,
    /// Pings that were not answered yet.
    pings: AtomicU64,
    /// Pings whose answers the driver has not taken yet.
    untaken_answers: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    board: Board,
    over: bool,
    /// What was sent has been promised to the destination: nothing is given back until there is a next sweep.
    sealed: bool,
    /// Streams closed meanwhile, with the units that were applied.
    closed_meanwhile: Vec<(u16, u64)>,
    /// By the streams' numbers on the board.
    lines: Vec<Line>,
    /// A stream had nothing to do since this was last asked.
    starved: bool,
    /// Work of a stream that broke is done, or was in this round, again: memory is read that was taken before.
    gave_back: bool,
}

/// A data stream as the driver sees it.
#[derive(Debug)]
struct Line {
    lane: usize,
    carries: Carries,
    /// Once it is connected.
    stream: Option<Stream>,
    /// The destination has welcomed it.
    ready: bool,
    /// What it has sent and is to send in this round.
    quota: Quota,
    /// Since when something is on its way and it was not seen to come on; none while nothing is.
    waits: Option<Waits>,
    failure: Option<String>,
    /// Its packets vanished for their size: the MTU that they kept to.
    vanishing_mtu: Option<u32>,
    /// Takes nothing more while so many bytes of it are not acknowledged.
    most_unacked: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    /// What TCP had carried then, where that was looked at.
    carried_bytes: Option<u64>,
}

/// Bytes of one stream in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Quota {
    sent: u64,
    /// To be reached by padding, where there is not that much work.
    least: u64,
}

impl Quota {
    fn owed(self) -> u64 {
        self.least.saturating_sub(self.sent)
    }
}

impl Line {
    /// Handed to the kernel so far, also of a unit under way.
    fn sent_bytes(&self) -> u64 {
        self.stream.as_ref().map_or(0, Stream::sent_bytes)
    }

    /// Whether it has as much on its way as it may.
    fn is_full(&self) -> bool {
        let unacked = || self.stream.as_ref().map_or(0, Stream::unacked_bytes);
        self.most_unacked.is_some_and(|most| unacked() > most)
    }
}

impl State {
    /// Everything has been handed to the wire.
    fn is_sent(&self) -> bool {
        let owes = |(stream, line): (usize, &Line)| line.quota.owed() > 0 && !self.board.is_broken(stream);
        self.board.is_sent() && !self.lines.iter().enumerate().any(owes)
    }

    /// The destination has applied everything, padding included.
    fn is_applied(&self) -> bool {
        self.is_sent() && self.board.is_applied()
    }

    /// The stream has come on: it begins to be waited for anew, where anything is on its way.
    fn came_on(&mut self, stream: usize) {
        let waits = self.board.under_way(stream) > 0;
        self.lines[stream].waits = waits.then(|| Waits { since: Instant::now(), carried_bytes: None });
    }

    fn break_off(&mut self, stream: usize, why: &str) {
        self.board.broken(stream);
        let line = &mut self.lines[stream];
        line.failure.get_or_insert_with(|| why.to_owned());
        if let Some(stream) = &line.stream {
            stream.close();
        }
    }
}

/// What came of the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Its work goes to those that are left.
    GivenBack {
        /// So many.
        live: usize,
    },
    /// Nothing: it was closed before, or all that it had has been promised to the destination.
    Nothing,
}

/// What there is to do for a stream.
enum Work {
    Unit(Unit),
    /// A unit of so many bytes of padding.
    Padding(u64),
    /// Nothing for a while: the peer takes silence for the end.
    Nothing,
    Over,
}

impl Dispatch {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The board's methods do not panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stream of a lane and returns its number on the board.
    pub(crate) fn open(&self, lane: usize, carries: Carries) -> usize {
        let mut state = self.lock();
        state.lines.push(Line {
            lane,
            carries,
            stream: None,
            ready: false,
            quota: Quota::default(),
            waits: None,
            failure: None,
            vanishing_mtu: None,
            most_unacked: None,
        });
        state.board.open()
    }

    /// Streams that were ever added.
    pub(crate) fn streams(&self) -> usize {
        self.lock().lines.len()
    }

    /// The lane of a stream, and what it is for.
    pub(crate) fn way_of(&self, stream: usize) -> (usize, Carries) {
        let line = &self.lock().lines[stream];
        (line.lane, line.carries)
    }

    /// The stream is connected: whatever ends the migration closes it.
    pub(crate) fn connected(&self, number: usize, stream: &Stream) {
        let mut state = self.lock();
        if state.over {
            stream.close();
        }
        state.lines[number].stream = Some(stream.clone());
    }

    /// The destination has welcomed it.
    pub(crate) fn ready(&self, number: usize) {
        self.lock().lines[number].ready = true;
    }

    /// Streams that have had something on its way for longer than `limit` and did not come on, while another has nothing to
    /// do. They are broken off. A stream comes on where TCP carries anything at all, or where a limit of bandwidth holds it.
    pub(crate) fn break_stalled(&self, limit: Duration) -> Vec<usize> {
        // The kernel is asked without the lock: it may have a sender to wait for.
        let carried: Vec<_> = self
            .stallable()
            .into_iter()
            .map(|(number, stream)| (number, stream.carried_bytes(), stream.is_held()))
            .collect();
        let mut state = self.lock();
        let mut stalled = Vec::new();
        for (number, bytes, is_held) in carried {
            let Some(waits) = &mut state.lines[number].waits else { continue };
            if is_held || waits.carried_bytes != Some(bytes) {
                *waits = Waits { since: Instant::now(), carried_bytes: Some(bytes) };
            } else if waits.since.elapsed() > limit {
                stalled.push(number);
            }
        }
        for stream in &stalled {
            state.break_off(*stream, &format!("it carried nothing for {} ms", limit.as_millis()));
        }
        drop(state);
        if !stalled.is_empty() {
            // Never for nothing: whoever is woken begins to count anew how long it has been silent.
            self.work.notify_all();
        }
        stalled
    }

    /// The streams that have something on its way, where another one could do it.
    fn stallable(&self) -> Vec<(usize, Stream)> {
        let state = self.lock();
        let State { board, lines, sealed, .. } = &*state;
        let live = || lines.iter().enumerate().filter(|(stream, _)| !board.is_broken(*stream));
        if *sealed || !live().any(|(stream, line)| board.under_way(stream) == 0 && line.ready) {
            return Vec::new();
        }
        let waiting = live().filter(|(_, line)| line.waits.is_some());
        waiting.filter_map(|(stream, line)| Some((stream, line.stream.clone()?))).collect()
    }

    /// What each lane does now, and whether there has always been work since this was last asked.
    pub(crate) fn look(&self, lanes: usize) -> (Vec<LaneSample>, bool) {
        let streams: Vec<_> = self.lock().lines.iter().map(|line| line.stream.clone()).collect();
        // The kernel is asked without the lock: it may have a sender to wait for.
        let carried: Vec<_> =
            streams.iter().map(|stream| stream.as_ref().map_or(0, Stream::carried_bytes)).collect();
        let mut state = self.lock();
        let mut samples = vec![LaneSample::default(); lanes];
        for (stream, line) in state.lines.iter().enumerate() {
            let sample = &mut samples[line.lane];
            sample.bytes += carried.get(stream).copied().unwrap_or(0);
            if !state.board.is_broken(stream) {
                sample.streams += 1;
                sample.connecting |= !line.ready;
            }
        }
        (samples, !std::mem::take(&mut state.starved))
    }

    /// What each lane was.
    pub(crate) fn lane_figures(&self, lanes: usize) -> Vec<LaneFigures> {
        let state = self.lock();
        let mut figures = vec![LaneFigures::default(); lanes];
        for line in &state.lines {
            let figures = &mut figures[line.lane];
            figures.bytes += line.sent_bytes();
            figures.streams += u32::from(line.ready);
            figures.broken.extend(line.failure.clone());
            figures.vanishing_mtu = figures.vanishing_mtu.max(line.vanishing_mtu);
        }
        figures
    }

    /// What each lane carries, as far as it has streams; which addresses it has is not known here.
    pub(crate) fn lanes(&self) -> Vec<LaneProgress> {
        let state = self.lock();
        let count = state.lines.iter().map(|line| line.lane + 1).max().unwrap_or(0);
        let mut lanes = vec![LaneProgress::default(); count];
        for line in &state.lines {
            let lane = &mut lanes[line.lane];
            lane.bytes += line.sent_bytes();
            lane.streams += u32::from(line.ready && line.failure.is_none());
        }
        lanes
    }

    /// What is sent from here on belongs to this round.
    pub(crate) fn set_round(&self, round: u32) {
        self.round.store(round, Ordering::Relaxed);
        let mut state = self.lock();
        state.lines.iter_mut().for_each(|line| line.quota = Quota::default());
        state.gave_back &= !state.board.is_sent();
    }

    /// Whether memory may be read in this round that was taken in an earlier one, or before it was given back.
    pub(crate) fn gave_back(&self) -> bool {
        self.lock().gave_back
    }

    /// The guest stands still from here on: nothing is tried out any more. `paces`: how it goes on with the lanes, by their
    /// numbers; none where one is as good as another. `fullest_chunk_pages`: what a unit would have of a whole chunk at most; many
    /// units of a page or two would cost more than they bring.
    pub(crate) fn hurry(&self, paces: &[Option<LanePace>], fullest_chunk_pages: u64) {
        self.hurry.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let State { board, lines, .. } = &mut *state;
        for line in lines {
            line.most_unacked = paces.get(line.lane).copied().flatten().map(|pace| pace.most_unacked_bytes);
        }
        if let Some(pages) = paces.iter().flatten().map(|pace| pace.chunk_pages).min() {
            board.cut_finer(pages.saturating_mul(CHUNK_PAGES) / fullest_chunk_pages.max(1));
        }
    }

    /// What is sent from here on leaves as soon as the windows take it. A congestion control that paces (BBR) has seen small rounds last,
    /// and spreads what leaves now by their rate: tens of ms on a slow wire.
    pub(crate) fn burst(&self) {
        let state = self.lock();
        state.lines.iter().filter_map(|line| line.stream.as_ref()).for_each(Stream::send_in_bursts);
    }

    /// Pages of a chunk: no unit may lie in two.
    pub(crate) fn chunk_pages(&self) -> u64 {
        self.lock().board.chunk_pages()
    }

    pub(crate) fn push(&self, unit: Unit) {
        self.lock().board.push(unit);
        // Whom it is for is the board's affair.
        self.work.notify_all();
    }

    /// Has the streams together send at least so many bytes in this round, by padding where there is no other work. Streams that
    /// are still being connected owe nothing: nobody waits for those.
    pub(crate) fn pad(&self, bytes: u64) {
        let mut state = self.lock();
        let State { board, lines, .. } = &mut *state;
        let able =
            lines.iter_mut().enumerate().filter(|(stream, line)| line.ready && !board.is_broken(*stream));
        let able: Vec<_> = able.map(|(_, line)| line).collect();
        // Work is taken by the chunk: one of two streams may have to send most of it.
        let share = bytes * 3 / 2 / able.len().max(1) as u64;
        for line in able {
            line.quota.least = share.min(bytes);
        }
        self.work.notify_all();
    }

    /// Waits a moment for room. True: there is some.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.lock();
        let full = |state: &mut State| state.board.waiting() >= WAITING_A_STREAM * state.board.live().max(1);
        let (mut state, _) =
            self.room.wait_timeout_while(state, ROOM_INTERVAL, full).unwrap_or_else(PoisonError::into_inner);
        !full(&mut state)
    }

    /// Waits for work, a while.
    fn take(&self, stream: usize) -> Work {
        let idle_since = Instant::now();
        let mut state = self.lock();
        loop {
            if state.over || state.board.is_broken(stream) {
                return Work::Over;
            }
            if state.board.waiting() > 0 && state.lines[stream].is_full() {
                // Others that are faster may take it meanwhile.
                (state, _) =
                    self.work.wait_timeout(state, FULL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if let Some(unit) = state.board.take(stream) {
                self.room.notify_all();
                state.came_on(stream);
                return Work::Unit(unit);
            }
            let owed = state.lines[stream].quota.owed();
            if owed > 0 {
                state.board.take_empty(stream);
                state.came_on(stream);
                return Work::Padding(owed);
            }
            state.starved = true;
            let left = IDLE_LIMIT.saturating_sub(idle_since.elapsed());
            if left.is_zero() {
                return Work::Nothing;
            }
            (state, _) = self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// True: everything has been handed to the wire.
    fn written(&self, stream: usize, bytes: u64) -> bool {
        let mut state = self.lock();
        state.lines[stream].quota.sent += bytes;
        state.board.written(stream);
        state.is_sent()
    }

    /// True: everything has been applied.
    pub(crate) fn applied(&self, stream: u16, units: u64) -> Result<bool, Misaccounted> {
        let mut state = self.lock();
        state.board.applied(stream, units)?;
        state.came_on(usize::from(stream));
        Ok(state.is_applied())
    }

    pub(crate) fn broken(&self, stream: usize, why: &str) {
        self.lock().break_off(stream, why);
        self.work.notify_all();
    }

    /// Gives back what a stream had.
    pub(crate) fn closed(&self, stream: u16, units: u64) -> Result<Closing, Misaccounted> {
        let mut state = self.lock();
        if state.sealed {
            // The destination knows what it was promised, and refuses where that does not come.
            let known = usize::from(stream) < state.lines.len();
            if known && state.closed_meanwhile.iter().all(|(other, _)| *other != stream) {
                state.closed_meanwhile.push((stream, units));
            }
            return Ok(Closing::Nothing);
        }
        if !state.board.closed(stream, units)? {
            return Ok(Closing::Nothing);
        }
        state.gave_back = true;
        let line = &mut state.lines[usize::from(stream)];
        // Where this side noticed first, it knows more.
        line.failure.get_or_insert_with(|| "the destination takes no more of it".to_owned());
        self.work.notify_all();
        Ok(Closing::GivenBack { live: state.board.live() })
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.lock().is_sent()
    }

    /// Whether what was sent of a page arrives before what this stream sends from here on.
    pub(crate) fn is_settled(&self, stream: usize, block: u16, page: u64) -> bool {
        self.lock().board.is_settled(stream, block, page)
    }

    pub(crate) fn is_applied(&self) -> bool {
        self.lock().is_applied()
    }

    /// Bytes handed to the data streams so far, those of units under way and padding included.
    pub(crate) fn handed_bytes(&self) -> u64 {
        self.lock().lines.iter().map(Line::sent_bytes).sum()
    }

    /// Bytes of padding sent on data streams: they tell nothing of what the wire takes, windows being small at first.
    pub(crate) fn padding_bytes(&self) -> u64 {
        self.padding_bytes.load(Ordering::Relaxed)
    }

    /// Everything sent since the begin: pages of units, zero pages, bytes of the data streams.
    pub(crate) fn sent(&self) -> Sweep {
        Sweep {
            pages: self.lock().board.pages(),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            told_pages: self.encodings().told_pages(),
            referred_pages: self.encodings().referred_pages(),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    /// What the units sent were encoded as.
    pub(crate) fn encodings(&self) -> Encodings {
        *self.encodings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that is not known to have been applied.
    pub(crate) fn unconfirmed(&self) -> Vec<Unit> {
        self.lock().board.unconfirmed().cloned().collect()
    }

    /// What has been sent, where that is all: from here on nothing is given back.
    pub(crate) fn seal(&self) -> Option<PagesEnd> {
        let mut state = self.lock();
        state.sealed = state.is_sent();
        state.sealed.then(|| PagesEnd { pages: state.board.pages(), units: state.board.taken() })
    }

    /// There is more to send: what broke meanwhile gives its work back. Returns how many streams are left.
    pub(crate) fn unseal(&self) -> Result<usize, Misaccounted> {
        let mut state = self.lock();
        state.sealed = false;
        for (stream, units) in std::mem::take(&mut state.closed_meanwhile) {
            state.gave_back |= state.board.closed(stream, units)?;
        }
        Ok(state.board.live())
    }

    /// Counts a ping that is about to be sent. False: [`MOST_UNANSWERED_PINGS`] are on their way,
    /// and it is not to be sent.
    pub(crate) fn asks(&self) -> bool {
        // The driver alone asks, and takes the answers.
        if self.untaken_answers.load(Ordering::Relaxed) >= MOST_UNANSWERED_PINGS {
            return false;
        }
        self.untaken_answers.fetch_add(1, Ordering::Relaxed);
        self.pings.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The driver has taken an answer from its inbox.
    pub(crate) fn took_answer(&self) {
        let less = |untaken: u64| untaken.checked_sub(1);
        let _ = self.untaken_answers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// A ping is answered. False: there was none.
    pub(crate) fn answered(&self) -> bool {
        self.pings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pings| pings.checked_sub(1)).is_ok()
    }

    /// Waits so long for the end of it; true: it has come.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let goes_on = |state: &mut State| !state.over;
        let waited = self.work.wait_timeout_while(self.lock(), limit, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0.over
    }

    /// Nothing more is taken; the streams' threads end.
    pub(crate) fn end(&self) {
        self.connecting.end();
        let mut state = self.lock();
        state.over = true;
        state.lines.iter().filter_map(|line| line.stream.as_ref()).for_each(Stream::close);
        self.work.notify_all();
    }
}

/// What a lane carried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Streams that were connected.
    pub streams: u32,
    /// Bytes handed to them.
    pub bytes: u64,
    /// Why streams of it broke.
    pub broken: Vec<String>,
    /// Packets as large as this MTU, that of its interface, vanished while small ones passed.
    pub vanishing_mtu: Option<u32>,
}

/// Ends the streams' threads however the driver ends.
pub(crate) struct Ending<'a> {
    pub(crate) dispatch: &'a Dispatch,
    pub(crate) control: Stream,
    pub(crate) kept: &'a KeptPages,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.kept.abandon();
        self.dispatch.end();
        self.control.close();
    }
}

/// One data stream's thread.
pub(crate) struct Worker<'a> {
    pub(crate) number: usize,
    pub(crate) sender: StreamSender,
    pub(crate) chooser: Chooser,
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) dispatch: &'a Dispatch,
    pub(crate) referring: &'a Referring,
    pub(crate) inbox: &'a Inbox,
}

impl Worker<'_> {
    pub(crate) fn run(mut self) {
        loop {
            let sent = match self.dispatch.take(self.number) {
                Work::Over => return,
                Work::Unit(unit) => self.send(unit),
                Work::Padding(bytes) => self.pad(bytes),
                Work::Nothing => self.sender.pad(1).map(|()| 0),
            };
            match sent {
                Ok(bytes) => {
                    if self.dispatch.written(self.number, bytes) {
                        self.inbox.moved();
                    }
                }
                // Not the stream's fault: another would not fare better.
                Err(LaneError::Memory(why)) => {
                    let failed = Event::Failed(Failure::new(FailureCode::MemoryFailed, why));
                    return self.inbox.put_now(Input::Machine(failed));
                }
                Err(error) => {
                    tracing::warn!(stream = self.number, %error, "a data stream broke");
                    self.dispatch.broken(self.number, &error.to_string());
                    self.inbox.put_now(Input::StreamBroke { number: self.number });
                    return;
                }
            }
        }
    }

    fn pad(&mut self, bytes: u64) -> Result<u64, LaneError> {
        self.sender.pad(bytes)?;
        self.sender.send(&Message::UnitEnd)?;
        self.dispatch.padding_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Reads what is to be sent as it is now: pages that hold zeros alone are told, not sent.
    fn send(&mut self, unit: Unit) -> Result<u64, LaneError> {
        let Some(region) = self.regions.get(usize::from(unit.block)) else {
            return Err(LaneError::Memory(format!("there is no RAM block {}", unit.block)));
        };
        let (mut full, mut zeros) = (Vec::with_capacity(unit.pages.len()), unit.zeros);
        for page in unit.pages.iter().flat_map(|run| run.first..run.end()) {
            let to = if region.is_zero(page) { &mut zeros } else { &mut full };
            push_merged(to, 0, PageRange { first: page, count: 1 });
        }
        let zero_pages = page_count(&zeros);
        let round = self.dispatch.round.load(Ordering::Relaxed);
        let hurry = self.dispatch.hurry.load(Ordering::Relaxed);
        self.chooser.prospect(self.referring.prospect(round));
        let packing = self.chooser.packing(page_count(&full) * PAGE_SIZE, hurry);
        self.referring.begins(packing, page_count(&full));
        // While the guest stands still nothing is told by it any more, and each look would be the pause's.
        if round > 0 && !hurry {
            self.referring.outdate(packing, unit.block, &full, &zeros);
        }
        let Worker { referring, dispatch, number, .. } = *self;
        let known = OfStream { referring, dispatch, stream: number, round };
        let pages = UnitPages { round, block: unit.block, region, pages: &full, zeros: &zeros };
        // Whatever keeps the unit from leaving counts: it is what the encoding has to make up for.
        let begun = Instant::now();
        let sent = self.sender.unit(&pages, packing, Some(&known))?;
        self.chooser.sent(packing, &sent, begun.elapsed());
        self.referring.sent(&sent, &self.chooser);
        self.dispatch.encodings.lock().unwrap_or_else(PoisonError::into_inner).add(&sent);
        self.dispatch.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.dispatch.bytes.fetch_add(sent.wire_bytes, Ordering::Relaxed);
        Ok(sent.wire_bytes)
    }
}

mod full_size;
#[cfg(test)]
mod tests;
