//! The board of work with a lock around it, for the driver, which finds pages, and the threads of
//! the data streams, which send them.
//!
//! **In a round** the driver calls [`Dispatch::set_round`], then [`Dispatch::has_room`] and
//! [`Dispatch::push`] for each unit that the sweep finds. After the sweep the round is over when
//! [`Dispatch::is_sent`]; before a switchover the driver also waits for [`Dispatch::is_applied`],
//! with [`Dispatch::pad`] on a long path. A brief round may follow that and is not waited for; its
//! pages go with their content only ([`Dispatch::set_content_only`]). Each stream calls
//! [`Dispatch::take`] and [`Dispatch::written`] in turn. Reports of the destination call
//! [`Dispatch::applied`]. A stream that breaks calls [`Dispatch::broken`], and [`Dispatch::closed`]
//! gives its work to the others.
//!
//! **In a switchover** each sweep begins with [`Dispatch::set_round`], [`Dispatch::hurry`] and
//! [`Dispatch::unseal`]. Then pages follow as in a round, up to [`Dispatch::seal`], which returns
//! the totals for the destination.

mod full_size;
pub(crate) mod lanes;
pub(crate) mod pings;
pub(crate) mod stream_state;
mod totals;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{Interrupt, Stream};
use godwit_ram::CHUNK_PAGES;
use godwit_wire::PagesEnd;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::board::{Board, Misaccounted, Unit};
use crate::ledger::SentTotals;
use pings::Pings;
use stream_state::{LanePace, Quota, StreamState, Waits};
use totals::Totals;

/// Units queued per stream: enough to keep it busy, and few enough that pages are sent soon after
/// they were scanned.
const WAITING_A_STREAM: usize = 2;
/// How long a stream without work stays silent: well below its peer's limit on silence.
const IDLE_LIMIT: Duration = Duration::from_secs(2);
/// How long a stream with enough data in flight waits before it is examined again.
const FULL_INTERVAL: Duration = Duration::from_millis(1);

/// Work shared by the driver, which scans, and the streams, which send.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    state: Mutex<State>,
    /// Signals that there is work, or that the migration is over.
    work: Condvar,
    round: AtomicU32,
    /// Whether the guest is paused.
    hurry: AtomicBool,
    /// Whether pages go only with their content, and none by reference or as a delta, which the
    /// destination may fail to rebuild.
    content_only: AtomicBool,
    pub(crate) totals: Totals,
    pub(crate) pings: Pings,
    /// Interrupts the connecting of streams.
    pub(crate) connecting: Interrupt,
}

#[derive(Debug, Default)]
struct State {
    board: Board,
    over: bool,
    /// Whether the driver waits for room.
    room_awaited: bool,
    /// Whether the totals sent have been promised to the destination: no work is given back until
    /// the next sweep.
    sealed: bool,
    /// Streams closed meanwhile, with the units that were applied.
    closed_meanwhile: Vec<(u16, u64)>,
    /// Streams by their numbers on the board.
    streams: Vec<StreamState>,
    /// Whether a stream had nothing to do since the last query.
    starved: bool,
    /// Whether work of a broken stream is being done, or was done in this round, again: streams
    /// then read pages that an earlier take returned.
    reads_taken_pages: bool,
}

impl State {
    /// Returns whether enough units wait for the streams.
    fn is_full(&self) -> bool {
        self.board.waiting() >= WAITING_A_STREAM * self.board.live().max(1)
    }

    /// Returns whether everything has been handed to the wire.
    fn is_sent(&self) -> bool {
        let owes = |(stream, one): (usize, &StreamState)| {
            one.quota.owed() > 0 && !self.board.is_broken(stream)
        };
        self.board.is_sent() && !self.streams.iter().enumerate().any(owes)
    }

    /// Returns whether the destination has applied everything, padding included.
    fn is_applied(&self) -> bool {
        self.is_sent() && self.board.is_applied()
    }

    /// Notes progress of the stream: its wait begins anew if data is in flight.
    fn came_on(&mut self, stream: usize) {
        let waits = self.board.under_way(stream) > 0;
        self.streams[stream].waits =
            waits.then(|| Waits { since: Instant::now(), carried_bytes: None });
    }

    fn break_off(&mut self, stream: usize, why: &str) {
        self.board.broken(stream);
        let one = &mut self.streams[stream];
        one.failure.get_or_insert_with(|| why.to_owned());
        if let Some(stream) = &one.stream {
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
pub(crate) enum Work {
    Unit {
        unit: Unit,
        /// Whether the driver waits for the room that this makes on the board.
        makes_room: bool,
    },
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

    /// Sets the round to which everything sent from now on belongs.
    pub(crate) fn set_round(&self, round: u32) {
        self.round.store(round, Ordering::Relaxed);
        let mut state = self.lock();
        state.streams.iter_mut().for_each(|one| one.quota = Quota::default());
        state.reads_taken_pages &= !state.board.is_sent();
    }

    /// Sets whether pages go only with their content, and none by reference or as a delta.
    pub(crate) fn set_content_only(&self, content_only: bool) {
        self.content_only.store(content_only, Ordering::Relaxed);
    }

    /// Returns whether pages go only with their content.
    pub(crate) fn is_content_only(&self) -> bool {
        self.content_only.load(Ordering::Relaxed)
    }

    /// Returns the round, and whether the guest is paused.
    pub(crate) fn round(&self) -> (u32, bool) {
        (self.round.load(Ordering::Relaxed), self.hurry.load(Ordering::Relaxed))
    }

    /// Returns whether a stream may still read pages that an earlier take returned: memory must not
    /// change over to the throttle meanwhile.
    pub(crate) fn reads_taken_pages(&self) -> bool {
        self.lock().reads_taken_pages
    }

    /// Notes that the guest is paused from now on: no more trials. `paces`: how it continues on the
    /// lanes, by their numbers; `None` if lanes do not differ. `fullest_chunk_pages`: maximum pages
    /// that a unit of a whole chunk would have; many units of a page or two would cost more than
    /// they gain.
    pub(crate) fn hurry(&self, paces: &[Option<LanePace>], fullest_chunk_pages: u64) {
        self.hurry.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        let State { board, streams, .. } = &mut *state;
        for one in streams {
            one.most_unacked =
                paces.get(one.lane).copied().flatten().map(|pace| pace.most_unacked_bytes);
        }
        if let Some(pages) = paces.iter().flatten().map(|pace| pace.chunk_pages).min() {
            board.cut_finer(pages.saturating_mul(CHUNK_PAGES) / fullest_chunk_pages.max(1));
        }
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
        let State { board, streams, .. } = &mut *state;
        let able = streams
            .iter_mut()
            .enumerate()
            .filter(|(stream, one)| one.ready && !board.is_broken(*stream));
        let able: Vec<_> = able.map(|(_, one)| one).collect();
        // Work is taken by the chunk: one of two streams may have to send most of it.
        let share = bytes * 3 / 2 / able.len().max(1) as u64;
        for one in able {
            one.quota.least = share.min(bytes);
        }
        self.work.notify_all();
    }

    /// Returns whether there is room. If not, the stream that next makes room reports it
    /// ([`Work::Unit`]).
    pub(crate) fn has_room(&self) -> bool {
        let mut state = self.lock();
        state.room_awaited = state.is_full();
        !state.room_awaited
    }

    /// Returns the number of units that no stream has taken.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().board.waiting()
    }

    /// Waits a while for work.
    pub(crate) fn next_work(&self, stream: usize) -> Work {
        let idle_since = Instant::now();
        let mut state = self.lock();
        loop {
            if state.over || state.board.is_broken(stream) {
                return Work::Over;
            }
            if state.board.waiting() > 0 && state.streams[stream].is_full() {
                // Other, faster streams may take it meanwhile.
                self.work.wait_for(&mut state, FULL_INTERVAL);
                continue;
            }
            if let Some(unit) = state.board.take(stream) {
                state.came_on(stream);
                let makes_room = state.room_awaited && !state.is_full();
                state.room_awaited &= !makes_room;
                return Work::Unit { unit, makes_room };
            }
            let owed = state.streams[stream].quota.owed();
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
    pub(crate) fn written(&self, stream: usize, bytes: u64) -> bool {
        let mut state = self.lock();
        state.streams[stream].quota.sent += bytes;
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
            let known = usize::from(stream) < state.streams.len();
            if known && state.closed_meanwhile.iter().all(|(other, _)| *other != stream) {
                state.closed_meanwhile.push((stream, units));
            }
            return Ok(Closing::Nothing);
        }
        if !state.board.closed(stream, units)? {
            return Ok(Closing::Nothing);
        }
        state.reads_taken_pages = true;
        let one = &mut state.streams[usize::from(stream)];
        // If this side noticed first, it knows more.
        one.failure.get_or_insert_with(|| "the destination takes no more of it".to_owned());
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

    /// Returns the totals sent since the start: pages of units, zero pages, bytes of the data
    /// streams.
    pub(crate) fn sent(&self) -> SentTotals {
        SentTotals {
            pages: self.lock().board.pages(),
            zero_pages: self.totals.zero_pages(),
            rebuilt_pages: self.totals.encodings().rebuilt_pages(),
            referred_pages: self.totals.encodings().referred_pages(),
            bytes: self.totals.bytes(),
        }
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
            state.reads_taken_pages |= state.board.closed(stream, units)?;
        }
        Ok(state.board.live())
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
        state.streams.iter().filter_map(|one| one.stream.as_ref()).for_each(Stream::close);
        self.work.notify_all();
    }
}

#[cfg(test)]
mod tests;
