//! The board of work with a lock around it, and the threads that do the work: one per data stream.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
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
use crate::scaler::LaneSample;
use crate::source::Event;
use godwit_types::LaneProgress;

/// Units queued per stream: enough to keep it busy, and few enough that pages are sent soon after
/// they were scanned.
const WAITING_A_STREAM: usize = 2;
/// How long a stream without work stays silent: well below its peer's limit on silence.
const IDLE_LIMIT: Duration = Duration::from_secs(2);
/// How long to wait for room on a full board before the caller does its other work.
const ROOM_INTERVAL: Duration = Duration::from_millis(5);

/// How long a stream with enough data in flight waits before it is examined again.
const FULL_INTERVAL: Duration = Duration::from_millis(1);

/// Limits for a lane's streams while the guest is paused, so that none of them makes the others
/// wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LanePace {
    /// Maximum pages of a unit.
    pub(crate) chunk_pages: u64,
    /// A stream takes no unit while more of its bytes are unacknowledged.
    pub(crate) most_unacked_bytes: u64,
}

/// Work shared by the driver, which scans, and the streams, which send.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    state: Mutex<State>,
    /// Signals that there is work, or that the migration is over.
    work: Condvar,
    /// Signals that work was taken.
    room: Condvar,
    round: AtomicU32,
    zero_pages: AtomicU64,
    bytes: AtomicU64,
    padding_bytes: AtomicU64,
    encodings: Mutex<Encodings>,
    /// Whether the guest is paused.
    hurry: AtomicBool,
    /// Interrupts the connecting of streams.
    pub(crate) connecting: Interrupt,
    /// Number of pings that were not answered yet.
    pings: AtomicU64,
    /// Number of pings whose answers the driver has not taken yet.
    untaken_answers: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    board: Board,
    over: bool,
    /// Whether the totals sent have been promised to the destination: no work is given back until
    /// the next sweep.
    sealed: bool,
    /// Streams closed meanwhile, with the units that were applied.
    closed_meanwhile: Vec<(u16, u64)>,
    /// Lines by the streams' numbers on the board.
    lines: Vec<Line>,
    /// Whether a stream had nothing to do since the last query.
    starved: bool,
    /// Whether work of a broken stream is being done, or was done in this round, again: memory is
    /// then read that was taken before.
    gave_back: bool,
}

/// Data stream as the driver sees it.
#[derive(Debug)]
struct Line {
    lane: usize,
    carries: Carries,
    /// Set once the stream is connected.
    stream: Option<Stream>,
    /// Whether the destination has welcomed the stream.
    ready: bool,
    /// Bytes that it has sent and must send in this round.
    quota: Quota,
    /// Time since which data is in flight without progress; `None` if nothing is in flight.
    waits: Option<Waits>,
    failure: Option<String>,
    /// MTU that its packets kept to, if they were lost because of their size.
    vanishing_mtu: Option<u32>,
    /// The stream takes nothing more while so many of its bytes are unacknowledged.
    most_unacked: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    /// Bytes that TCP had carried at that time, if they were read.
    carried_bytes: Option<u64>,
}

/// Bytes of one stream in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Quota {
    sent: u64,
    /// Minimum, reached with padding if there is not that much work.
    least: u64,
}

impl Quota {
    fn owed(self) -> u64 {
        self.least.saturating_sub(self.sent)
    }
}

impl Line {
    /// Returns the bytes handed to the kernel so far, including those of the current unit.
    fn sent_bytes(&self) -> u64 {
        self.stream.as_ref().map_or(0, Stream::sent_bytes)
    }

    /// Returns whether it has as much data in flight as allowed.
    fn is_full(&self) -> bool {
        let unacked = || self.stream.as_ref().map_or(0, Stream::unacked_bytes);
        self.most_unacked.is_some_and(|most| unacked() > most)
    }
}

impl State {
    /// Returns whether everything has been handed to the wire.
    fn is_sent(&self) -> bool {
        let owes =
            |(stream, line): (usize, &Line)| line.quota.owed() > 0 && !self.board.is_broken(stream);
        self.board.is_sent() && !self.lines.iter().enumerate().any(owes)
    }

    /// Returns whether the destination has applied everything, padding included.
    fn is_applied(&self) -> bool {
        self.is_sent() && self.board.is_applied()
    }

    /// Notes progress of the stream: its wait begins anew if data is in flight.
    fn came_on(&mut self, stream: usize) {
        let waits = self.board.under_way(stream) > 0;
        self.lines[stream].waits =
            waits.then(|| Waits { since: Instant::now(), carried_bytes: None });
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

/// Consequence of the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// Its work goes to the remaining streams.
    GivenBack {
        /// Number of remaining streams.
        live: usize,
    },
    /// None: it was closed before, or everything that it had has been promised to the destination.
    Nothing,
}

/// Work for a stream.
enum Work {
    Unit(Unit),
    /// Send a unit of so many bytes of padding.
    Padding(u64),
    /// Nothing for a while: send a keep-alive, since the peer takes silence for the end.
    Nothing,
    Over,
}

impl Dispatch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
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

    /// Returns the number of streams that were ever added.
    pub(crate) fn streams(&self) -> usize {
        self.lock().lines.len()
    }

    /// Returns the lane of a stream, and the stream's purpose.
    pub(crate) fn way_of(&self, stream: usize) -> (usize, Carries) {
        let line = &self.lock().lines[stream];
        (line.lane, line.carries)
    }

    /// Notes that the stream is connected: the end of the migration closes it.
    pub(crate) fn connected(&self, number: usize, stream: &Stream) {
        let mut state = self.lock();
        if state.over {
            stream.close();
        }
        state.lines[number].stream = Some(stream.clone());
    }

    /// Notes that the destination has welcomed the stream.
    pub(crate) fn ready(&self, number: usize) {
        self.lock().lines[number].ready = true;
    }

    /// Breaks and returns streams that have had data in flight for longer than `limit` without
    /// progress, while another stream has nothing to do. A stream makes progress if TCP carries any
    /// byte, or if a bandwidth limit holds it.
    pub(crate) fn break_stalled(&self, limit: Duration) -> Vec<usize> {
        // The kernel is queried without the lock: the query may have to wait for a sender.
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
            // Only with a reason: a woken stream begins anew to count its silence.
            self.work.notify_all();
        }
        stalled
    }

    /// Returns the streams with data in flight, if another stream could do their work.
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

    /// Returns the state of each lane, and whether there has been work at every moment since the
    /// last call.
    pub(crate) fn look(&self, lanes: usize) -> (Vec<LaneSample>, bool) {
        let streams: Vec<_> = self.lock().lines.iter().map(|line| line.stream.clone()).collect();
        // The kernel is queried without the lock: the query may have to wait for a sender.
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

    /// Returns the totals of each lane.
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

    /// Returns the progress of each lane that has streams; its addresses are not known here.
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

    /// Sets the round to which everything sent from now on belongs.
    pub(crate) fn set_round(&self, round: u32) {
        self.round.store(round, Ordering::Relaxed);
        let mut state = self.lock();
        state.lines.iter_mut().for_each(|line| line.quota = Quota::default());
        state.gave_back &= !state.board.is_sent();
    }

    /// Returns whether memory may be read in this round that was taken in an earlier one, or before
    /// it was given back.
    pub(crate) fn gave_back(&self) -> bool {
        self.lock().gave_back
    }

    /// Notes that the guest is paused from now on: no more trials. `paces`: how it continues on the
    /// lanes, by their numbers; `None` if lanes do not differ. `fullest_chunk_pages`: maximum pages
    /// that a unit of a whole chunk would have; many units of a page or two would cost more than
    /// they gain.
    pub(crate) fn hurry(&self, paces: &[Option<LanePace>], fullest_chunk_pages: u64) {
        self.hurry.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let State { board, lines, .. } = &mut *state;
        for line in lines {
            line.most_unacked =
                paces.get(line.lane).copied().flatten().map(|pace| pace.most_unacked_bytes);
        }
        if let Some(pages) = paces.iter().flatten().map(|pace| pace.chunk_pages).min() {
            board.cut_finer(pages.saturating_mul(CHUNK_PAGES) / fullest_chunk_pages.max(1));
        }
    }

    /// Makes everything sent from now on leave as soon as the windows allow. A congestion control
    /// that paces (BBR) saw small rounds last, and would spread the data at their rate: over tens
    /// of ms on a slow wire.
    pub(crate) fn burst(&self) {
        let state = self.lock();
        state.lines.iter().filter_map(|line| line.stream.as_ref()).for_each(Stream::send_in_bursts);
    }

    /// Returns the pages of a chunk. No unit may span two chunks.
    pub(crate) fn chunk_pages(&self) -> u64 {
        self.lock().board.chunk_pages()
    }

    pub(crate) fn push(&self, unit: Unit) {
        self.lock().board.push(unit);
        // The board decides which stream gets it.
        self.work.notify_all();
    }

    /// Makes the streams together send at least so many bytes in this round, with padding if there
    /// is no other work. Streams that are still being connected have no share, because the round
    /// does not wait for them.
    pub(crate) fn pad(&self, bytes: u64) {
        let mut state = self.lock();
        let State { board, lines, .. } = &mut *state;
        let able = lines
            .iter_mut()
            .enumerate()
            .filter(|(stream, line)| line.ready && !board.is_broken(*stream));
        let able: Vec<_> = able.map(|(_, line)| line).collect();
        // Work is taken by the chunk: one of two streams may have to send most of it.
        let share = bytes * 3 / 2 / able.len().max(1) as u64;
        for line in able {
            line.quota.least = share.min(bytes);
        }
        self.work.notify_all();
    }

    /// Waits a moment for room. Returns whether there is some.
    pub(crate) fn has_room(&self) -> bool {
        let mut state = self.lock();
        let full = |state: &mut State| {
            state.board.waiting() >= WAITING_A_STREAM * state.board.live().max(1)
        };
        self.room.wait_while_for(&mut state, full, ROOM_INTERVAL);
        !full(&mut state)
    }

    /// Waits a while for work.
    fn take(&self, stream: usize) -> Work {
        let idle_since = Instant::now();
        let mut state = self.lock();
        loop {
            if state.over || state.board.is_broken(stream) {
                return Work::Over;
            }
            if state.board.waiting() > 0 && state.lines[stream].is_full() {
                // Other, faster streams may take it meanwhile.
                self.work.wait_for(&mut state, FULL_INTERVAL);
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
            self.work.wait_for(&mut state, left);
        }
    }

    /// Notes that a unit was written. Returns whether everything has been handed to the wire.
    fn written(&self, stream: usize, bytes: u64) -> bool {
        let mut state = self.lock();
        state.lines[stream].quota.sent += bytes;
        state.board.written(stream);
        state.is_sent()
    }

    /// Notes applied units. Returns whether everything has been applied.
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

    /// Closes a stream and gives back its work.
    pub(crate) fn closed(&self, stream: u16, units: u64) -> Result<Closing, Misaccounted> {
        let mut state = self.lock();
        if state.sealed {
            // The destination knows what it was promised, and refuses if that does not arrive.
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
        // If this side noticed first, it knows more.
        line.failure.get_or_insert_with(|| "the destination takes no more of it".to_owned());
        self.work.notify_all();
        Ok(Closing::GivenBack { live: state.board.live() })
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.lock().is_sent()
    }

    /// Returns whether everything sent of a page arrives before what this stream sends from now on.
    pub(crate) fn is_settled(&self, stream: usize, block: u16, page: u64) -> bool {
        self.lock().board.is_settled(stream, block, page)
    }

    pub(crate) fn is_applied(&self) -> bool {
        self.lock().is_applied()
    }

    /// Returns the bytes handed to the data streams so far, including padding and current units.
    pub(crate) fn handed_bytes(&self) -> u64 {
        self.lock().lines.iter().map(Line::sent_bytes).sum()
    }

    /// Returns the bytes of padding sent on data streams: they say nothing about the wire's rate,
    /// because windows are small at first.
    pub(crate) fn padding_bytes(&self) -> u64 {
        self.padding_bytes.load(Ordering::Relaxed)
    }

    /// Returns the totals sent since the start: pages of units, zero pages, bytes of the data
    /// streams.
    pub(crate) fn sent(&self) -> Sweep {
        Sweep {
            pages: self.lock().board.pages(),
            zero_pages: self.zero_pages.load(Ordering::Relaxed),
            told_pages: self.encodings().told_pages(),
            referred_pages: self.encodings().referred_pages(),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns how the units sent were encoded.
    pub(crate) fn encodings(&self) -> Encodings {
        *self.encodings.lock()
    }

    /// Returns all units that are not known to have been applied.
    pub(crate) fn unconfirmed(&self) -> Vec<Unit> {
        self.lock().board.unconfirmed().cloned().collect()
    }

    /// Returns the totals sent if everything has been sent. From then on no work is given back.
    pub(crate) fn seal(&self) -> Option<PagesEnd> {
        let mut state = self.lock();
        state.sealed = state.is_sent();
        state.sealed.then(|| PagesEnd { pages: state.board.pages(), units: state.board.taken() })
    }

    /// Resumes sending: streams that broke meanwhile give their work back. Returns the number of
    /// remaining streams.
    pub(crate) fn unseal(&self) -> Result<usize, Misaccounted> {
        let mut state = self.lock();
        state.sealed = false;
        for (stream, units) in std::mem::take(&mut state.closed_meanwhile) {
            state.gave_back |= state.board.closed(stream, units)?;
        }
        Ok(state.board.live())
    }

    /// Counts a ping that is about to be sent. Returns false if [`MOST_UNANSWERED_PINGS`] are on
    /// their way: it must not be sent.
    pub(crate) fn asks(&self) -> bool {
        // Only the driver sends pings and takes the answers.
        if self.untaken_answers.load(Ordering::Relaxed) >= MOST_UNANSWERED_PINGS {
            return false;
        }
        self.untaken_answers.fetch_add(1, Ordering::Relaxed);
        self.pings.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Notes that the driver has taken an answer from its inbox.
    pub(crate) fn took_answer(&self) {
        let less = |untaken: u64| untaken.checked_sub(1);
        let _ = self.untaken_answers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Notes the answer to a ping. Returns false if no ping was sent.
    pub(crate) fn answered(&self) -> bool {
        self.pings
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |pings| pings.checked_sub(1))
            .is_ok()
    }

    /// Waits up to `limit` for the end. Returns whether it has come.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let goes_on = |state: &mut State| !state.over;
        let mut state = self.lock();
        self.work.wait_while_for(&mut state, goes_on, limit);
        state.over
    }

    /// Ends the work: no more is taken, and the streams' threads end.
    pub(crate) fn end(&self) {
        self.connecting.end();
        let mut state = self.lock();
        state.over = true;
        state.lines.iter().filter_map(|line| line.stream.as_ref()).for_each(Stream::close);
        self.work.notify_all();
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFigures {
    /// Number of streams that were connected.
    pub streams: u32,
    /// Bytes handed to the streams.
    pub bytes: u64,
    /// Reasons why its streams broke.
    pub broken: Vec<String>,
    /// MTU of its interface at which packets were lost while small ones passed.
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

/// Thread of one data stream.
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
                // Not the stream's fault: another one would fail too.
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

    /// Sends a unit with its present content. Pages that hold only zeros are announced, not sent.
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
        // While the guest is paused, no later delta uses it, and each look would lengthen the
        // pause.
        if round > 0 && !hurry {
            self.referring.outdate(packing, unit.block, &full, &zeros);
        }
        let Worker { referring, dispatch, number, .. } = *self;
        let known = OfStream { referring, dispatch, stream: number, round };
        let pages = UnitPages { round, block: unit.block, region, pages: &full, zeros: &zeros };
        // All delays of the unit count: the encoding has to make up for them.
        let begun = Instant::now();
        let sent = self.sender.unit(&pages, packing, Some(&known))?;
        self.chooser.sent(packing, &sent, begun.elapsed());
        self.referring.sent(&sent, &self.chooser);
        self.dispatch.encodings.lock().add(&sent);
        self.dispatch.zero_pages.fetch_add(zero_pages, Ordering::Relaxed);
        self.dispatch.bytes.fetch_add(sent.wire_bytes, Ordering::Relaxed);
        Ok(sent.wire_bytes)
    }
}

mod full_size;
#[cfg(test)]
mod tests;
