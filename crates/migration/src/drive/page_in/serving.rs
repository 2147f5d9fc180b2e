//! The source of a page-in. The guest is stopped here, and its pages are sent, those first that the
//! destination requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_lanes::{
    Carries, Incoming, Interrupt, LaneError, Packing, Stream, StreamReceiver, StreamSender,
    UnitPages,
};
use godwit_ram::pages::push_merged;
use godwit_ram::{MissingPages, PAGE_SIZE, PageRange, Region};
use godwit_wire::{BlockRun, MAX_PAGE_IN_STREAMS, Message, PAGE_IN_STREAM, PagedIn};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{CHUNK_PAGES, SILENCE_LIMIT};
use crate::drive::handshake::{Connect, Hello, say_hello};
use crate::failure::{Failure, FailureCode, lane_failure};
use crate::source::NotServed;

/// Pages of one piece that was not requested: 64 KiB.
const BACKGROUND_PAGES: usize = 16;
/// How long unrequested pages may fill the wire's queue, in addition to the round trip. Requested
/// pages come after that.
const QUEUE_TIME: Duration = Duration::from_millis(3);
/// Smallest window of unrequested bytes in flight.
const LEAST_WINDOW_BYTES: u64 = 128 << 10;
/// Largest window of unrequested bytes in flight, also used while the wire's rate is unknown.
const MOST_WINDOW_BYTES: u64 = 64 << 20;
const FIRST_WINDOW_BYTES: u64 = 256 << 10;
/// A stream that carries nothing for this long sends a keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Interval between two looks at what has arrived.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Time over which the wire's rate is measured.
const MEASURING_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for neighbours that are sent along with a requested page.
const NEIGHBOURS_TIME: Duration = Duration::from_micros(250);
/// Maximum neighbours sent along with a requested page.
const MOST_NEIGHBOURS: u64 = 16;
/// Pages sent here belong to no round.
const NO_ROUND: u32 = 0;
/// Streams of each lane for unrequested pages.
const STREAMS_A_LANE: u16 = 2;

/// Memory of a guest that has left, of which the destination lacks pages.
pub struct KeptPages {
    regions: Vec<Arc<Region>>,
    /// Pages that have not been sent in this session.
    left: MissingPages,
    /// Pages requested in this session. A page that a peer requests again and again is sent once.
    requested: MissingPages,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whether the list of remaining pages is known.
    listed: bool,
    /// Whether unrequested pages may be sent: not while the guest is paused for the hand-over's own
    /// traffic.
    all_may_go: bool,
    /// Pages that the guest wrote right before it was stopped, and that it probably accesses first.
    /// They precede all other unrequested pages.
    hot: VecDeque<BlockRun>,
    /// Whether those pages may be sent: once nothing of the hand-over follows any more.
    hot_may_go: bool,
    /// Requested pages, as block and page.
    demands: VecDeque<(usize, u64)>,
    /// Position from which unrequested pages are sent: behind the last requested page.
    cursor: (usize, u64),
    streams: Vec<Stream>,
    ended: Option<Ended>,
    /// Whether serving has ended for all sessions.
    abandoned: bool,
    sent_bytes: u64,
    window: Window,
}

/// Limit on unrequested bytes in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    round_trip: Duration,
    /// The wire's rate in bytes per second, as far as it is known.
    carried_bytes_per_s: f64,
    /// Start of the current measurement, and the bytes that had arrived by then.
    since: Option<(Instant, u64)>,
}

impl Window {
    /// Notes that so many bytes have arrived by now.
    fn arrived(&mut self, now: Instant, bytes: u64) {
        let Some((since, before)) = self.since else {
            self.since = Some((now, bytes));
            return;
        };
        let took = now.saturating_duration_since(since);
        if took >= MEASURING_INTERVAL {
            self.carried_bytes_per_s = bytes.saturating_sub(before) as f64 / took.as_secs_f64();
            self.since = Some((now, bytes));
        }
    }

    fn bytes(&self) -> u64 {
        if self.carried_bytes_per_s <= 0.0 {
            return FIRST_WINDOW_BYTES;
        }
        let time = self.round_trip + QUEUE_TIME;
        whole(self.carried_bytes_per_s * time.as_secs_f64())
            .clamp(LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES)
    }
}

/// Whether there is room for more unrequested pages.
enum Room {
    There,
    /// Not for a while: the stream must send a keep-alive.
    NotYet,
    Over,
}

/// How a session ended.
#[derive(Clone, Debug)]
enum Ended {
    Complete(Box<PagedIn>),
    Cut(Failure),
}

/// Answer of the destination to a request for another session.
pub enum Again {
    Session(Vec<SessionStream>),
    /// All pages have arrived.
    Complete,
    /// The destination does not have this guest.
    Refused(Failure),
    /// Nothing is left to serve. What the destination has of the guest is unknown.
    Lost(Failure),
}

/// Stream of a session, welcomed by the destination.
pub struct SessionStream {
    stream: Stream,
    sender: StreamSender,
    receiver: StreamReceiver,
}

impl SessionStream {
    pub(crate) fn keep_alive(&mut self) -> Result<(), LaneError> {
        self.sender.pad(1)
    }

    pub(crate) fn close(&self) {
        self.stream.close();
    }
}

/// Opens the streams of a session on lanes that answer. `hello`: of any stream of the migration;
/// `rest`: how streams for unrequested pages are connected.
///
/// # Errors
/// No lane answers.
pub fn open_session(
    connect: &Connect<'_>,
    lanes: usize,
    interrupt: &Interrupt,
    hello: Hello,
    rest: Carries,
) -> Result<Vec<SessionStream>, Failure> {
    let open = |lane: usize, number: u16, carries| {
        let stream = connect(lane, carries, interrupt)?;
        let (mut sender, mut receiver) = (stream.sender(), stream.receiver());
        say_hello(&mut sender, &mut receiver, Hello { stream: number, ..hello })?;
        Ok(SessionStream { stream, sender, receiver })
    };
    let mut failure = Failure::new(FailureCode::LaneLost, "there is no lane");
    let mut session = Vec::new();
    for lane in 0..lanes {
        // Requests and their answers are small, and must pass everywhere.
        match open(lane, PAGE_IN_STREAM, Carries::Urgent) {
            Ok(stream) => {
                session.push(stream);
                break;
            }
            Err(error) => failure = error,
        }
    }
    if session.is_empty() {
        return Err(failure);
    }
    let mut number = PAGE_IN_STREAM;
    for lane in (0..lanes).flat_map(|lane| std::iter::repeat_n(lane, usize::from(STREAMS_A_LANE))) {
        number += 1;
        if number == PAGE_IN_STREAM + MAX_PAGE_IN_STREAMS {
            break;
        }
        match open(lane, number, rest) {
            Ok(stream) => session.push(stream),
            Err(error) => failure = error,
        }
    }
    if session.len() == 1 { Err(failure) } else { Ok(session) }
}

impl KeptPages {
    /// Keeps the memory of a guest, block by block.
    #[must_use]
    pub fn new(regions: Vec<Arc<Region>>) -> KeptPages {
        let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        let left = MissingPages::in_memory(&block_pages);
        let requested = MissingPages::in_memory(&block_pages);
        KeptPages { regions, left, requested, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state under the lock is consistent after each assignment.
        self.state.lock()
    }

    /// Returns the number of pages that have not been sent.
    #[must_use]
    pub fn left_pages(&self) -> u64 {
        self.left.count()
    }

    /// Returns the bytes handed to the streams of all sessions.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.lock().sent_bytes
    }

    /// Permits unrequested pages, because the guest runs at the destination.
    pub(crate) fn let_all_go(&self) {
        self.lock().all_may_go = true;
        self.changed.notify_all();
    }

    /// Sets the pages that the guest has just written.
    pub(crate) fn set_hot(&self, hot: Vec<BlockRun>) {
        self.lock().hot = hot.into();
    }

    /// Permits the pages that the guest accesses first: it will run there as soon as the messages
    /// sent so far arrive.
    pub(crate) fn let_hot_go(&self) {
        self.lock().hot_may_go = true;
        self.changed.notify_all();
    }

    /// Sets the round trip, as far as it is known.
    pub(crate) fn set_round_trip(&self, round_trip: Duration) {
        self.lock().window.round_trip = round_trip;
    }

    /// Ends serving: the guest runs here again, or this agent ends.
    pub fn abandon(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        state.streams.iter().for_each(Stream::close);
        self.changed.notify_all();
    }

    /// Runs one session until it ends. `list`: the remaining pages, if the destination need not
    /// list them.
    fn session(&self, streams: Vec<SessionStream>, list: Option<&[BlockRun]>) -> Ended {
        self.begin(&streams, list);
        let mut streams = streams.into_iter();
        let Some(SessionStream { stream, sender, receiver }) = streams.next() else {
            return Ended::Cut(Failure::new(FailureCode::LaneLost, "there is no stream"));
        };
        if let Err(error) = stream.limit_silence(SILENCE_LIMIT) {
            return Ended::Cut(lane_failure(&error));
        }
        let sender = Mutex::new(sender);
        std::thread::scope(|scope| {
            let sender = &sender;
            scope.spawn(move || self.ends_by(self.read_requests(receiver, sender)));
            scope.spawn(move || self.ends_by(self.answer(sender).map(|()| None)));
            for SessionStream { sender, .. } in streams {
                scope.spawn(move || self.ends_by(self.send_the_rest(sender).map(|()| None)));
            }
        });
        let mut state = self.lock();
        state.streams.clear();
        let gone = || Ended::Cut(Failure::new(FailureCode::LaneLost, "the session ended"));
        state.ended.take().unwrap_or_else(gone)
    }

    fn begin(&self, streams: &[SessionStream], list: Option<&[BlockRun]>) {
        self.forget();
        for run in list.unwrap_or_default() {
            self.left.insert(usize::from(run.block), PageRange::new(run.first, run.count));
        }
        let mut state = self.lock();
        let State { abandoned, sent_bytes, cursor, window, all_may_go, hot_may_go, .. } = *state;
        let hot = std::mem::take(&mut state.hot);
        let connected_in = streams.iter().filter_map(|one| one.stream.connected_in()).min();
        let round_trip = connected_in
            .into_iter()
            .chain(Some(window.round_trip).filter(|known| !known.is_zero()))
            .min();
        *state = State {
            listed: list.is_some(),
            // After a cut the guest already runs; and the message that it runs may come before this
            // thread does.
            all_may_go: all_may_go || list.is_none(),
            hot,
            hot_may_go,
            window: Window { round_trip: round_trip.unwrap_or_default(), ..Window::default() },
            streams: streams.iter().map(|one| one.stream.clone()).collect(),
            abandoned,
            sent_bytes,
            cursor,
            ..State::default()
        };
        if abandoned {
            state.streams.iter().for_each(Stream::close);
        }
    }

    fn forget(&self) {
        for (block, region) in self.regions.iter().enumerate() {
            for set in [&self.left, &self.requested] {
                for run in set.runs(block, region.all_pages()) {
                    (run.first..run.end()).for_each(|page| {
                        set.remove(block, page);
                    });
                }
            }
        }
    }

    /// Handles the end of one of the session's threads: unless it has completed its work, the
    /// session ends too.
    fn ends_by(&self, result: Result<Option<PagedIn>, LaneError>) {
        let ended = match result {
            Ok(None) => return,
            Ok(Some(figures)) => Ended::Complete(Box::new(figures)),
            Err(error) => Ended::Cut(lane_failure(&error)),
        };
        let mut state = self.lock();
        state.ended.get_or_insert(ended);
        state.streams.iter().for_each(Stream::close);
        self.changed.notify_all();
    }

    /// Reads requests until the destination has finished.
    fn read_requests(
        &self,
        mut receiver: StreamReceiver,
        sender: &Mutex<StreamSender>,
    ) -> Result<Option<PagedIn>, LaneError> {
        loop {
            let message = match receiver.receive()? {
                Incoming::Message(message) => message,
                Incoming::Pages(_) => return Err(LaneError::Unexpected(godwit_wire::Kind::Pages)),
            };
            match message {
                Message::Ping { sent_ns } => {
                    sender.lock().send(&Message::Pong { sent_ns, answered_ns: sent_ns })?;
                }
                Message::Fetch { runs } => self.add_demands(&runs)?,
                Message::Remaining { runs } if !self.lock().listed => {
                    for run in runs {
                        let pages = self.check(&run)?;
                        self.left.insert(usize::from(run.block), pages);
                    }
                }
                Message::RemainingEnd { .. } if !self.lock().listed => {
                    self.lock().listed = true;
                    self.changed.notify_all();
                }
                Message::PagedIn(figures) => return Ok(Some(*figures)),
                other => return Err(LaneError::Unexpected(other.kind())),
            }
        }
    }

    fn check(&self, run: &BlockRun) -> Result<PageRange, LaneError> {
        let pages = self.regions.get(usize::from(run.block)).map_or(0, |region| region.pages());
        match run.first.checked_add(run.count) {
            Some(end) if end <= pages => Ok(PageRange::new(run.first, run.count)),
            _ => {
                Err(LaneError::OutOfBounds { block: run.block, first: run.first, count: run.count })
            }
        }
    }

    fn add_demands(&self, runs: &[BlockRun]) -> Result<(), LaneError> {
        for run in runs {
            let pages = self.check(run)?;
            let block = usize::from(run.block);
            let mut wanted: Vec<(usize, u64)> = Vec::new();
            for page in (pages.first..pages.end()).filter(|page| self.left.contains(block, *page)) {
                if !self.requested.contains(block, page) {
                    self.requested.insert(block, PageRange::new(page, 1));
                    wanted.push((block, page));
                }
            }
            self.lock().demands.extend(wanted);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Sends requested pages.
    fn answer(&self, sender: &Mutex<StreamSender>) -> Result<(), LaneError> {
        while let Some((block, page)) = self.next_demand() {
            if self.left.remove(block, page) {
                self.send(&mut sender.lock(), block, &[PageRange::new(page, 1)])?;
            }
            let neighbours = self.claim_neighbours(block, page);
            let next = neighbours.last().map_or(page + 1, |run| run.end());
            self.lock().cursor = (block, next);
            if !neighbours.is_empty() {
                self.send(&mut sender.lock(), block, &neighbours)?;
            }
        }
        Ok(())
    }

    /// Returns the next request, or `None` if the session is over.
    fn next_demand(&self) -> Option<(usize, u64)> {
        let mut state = self.lock();
        loop {
            if state.ended.is_some() || state.abandoned {
                return None;
            }
            if let Some(next) = state.demands.pop_front() {
                return Some(next);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Claims pages that follow and are probably needed soon: as many as cost almost no time.
    fn claim_neighbours(&self, block: usize, page: u64) -> Vec<PageRange> {
        let most = {
            let state = self.lock();
            if !state.demands.is_empty() {
                return Vec::new();
            }
            state.window.carried_bytes_per_s * NEIGHBOURS_TIME.as_secs_f64() / PAGE_SIZE as f64
        };
        let Some(region) = self.regions.get(block) else { return Vec::new() };
        let mut claimed = Vec::new();
        for next in (page + 1..region.pages()).take(whole(most).min(MOST_NEIGHBOURS) as usize) {
            if self.left.remove(block, next) {
                push_merged(&mut claimed, 0, PageRange::new(next, 1));
            }
        }
        claimed
    }

    /// Sends unrequested pages until none is left.
    fn send_the_rest(&self, mut sender: StreamSender) -> Result<(), LaneError> {
        loop {
            match self.until_there_is_room() {
                Room::Over => break,
                Room::NotYet => sender.pad(1)?,
                Room::There => match self.next_piece() {
                    Some((block, pages)) => self.send(&mut sender, block, &pages).map(drop)?,
                    None => break,
                },
            }
        }
        sender.send(&Message::RemainingEnd { pages: 0 })
    }

    /// Waits until little is in flight, but no longer than a stream may be silent.
    fn until_there_is_room(&self) -> Room {
        let limit = Instant::now() + KEEP_ALIVE;
        let mut state = self.lock();
        loop {
            if state.ended.is_some() || state.abandoned {
                return Room::Over;
            }
            let left = limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Room::NotYet;
            }
            let may_go = state.all_may_go || (state.hot_may_go && !state.hot.is_empty());
            if !(state.listed && may_go) {
                self.changed.wait_for(&mut state, left);
                continue;
            }
            let arrived = state.streams.iter().map(Stream::carried_bytes).sum();
            state.window.arrived(Instant::now(), arrived);
            let on_its_way: u64 = state.streams.iter().map(Stream::unacked_bytes).sum();
            if on_its_way < state.window.bytes() {
                return Room::There;
            }
            self.changed.wait_for(&mut state, LOOK_INTERVAL);
        }
    }

    /// Returns the next unrequested piece, or `None` if nothing is left or the session is over.
    fn next_piece(&self) -> Option<(usize, Vec<PageRange>)> {
        let mut state = self.lock();
        if state.ended.is_some() || state.abandoned {
            return None;
        }
        if let Some(piece) = self.next_hot(&mut state.hot) {
            return Some(piece);
        }
        let (mut block, mut page) = state.cursor;
        while self.left.count() > 0 {
            let Some(region) = self.regions.get(block).filter(|region| page < region.pages())
            else {
                (block, page) =
                    if block + 1 < self.regions.len() { (block + 1, 0) } else { (0, 0) };
                continue;
            };
            let end = ((page / CHUNK_PAGES + 1) * CHUNK_PAGES).min(region.pages());
            let runs = self.left.runs(block, PageRange::between(page, end));
            let mut claimed = Vec::new();
            let each = runs.iter().flat_map(|run| run.first..run.end()).take(BACKGROUND_PAGES);
            for next in each.filter(|next| self.left.remove(block, *next)) {
                push_merged(&mut claimed, 0, PageRange::new(next, 1));
            }
            if let Some(last) = claimed.last() {
                state.cursor = (block, last.end());
                return Some((block, claimed));
            }
            page = end;
        }
        None
    }

    /// Returns as many pages of one block as make a piece.
    fn next_hot(&self, hot: &mut VecDeque<BlockRun>) -> Option<(usize, Vec<PageRange>)> {
        let (mut claimed, mut pages, mut of_block) = (Vec::new(), 0, None);
        while let Some(run) = hot.front_mut() {
            let block = usize::from(run.block);
            if run.count == 0 {
                hot.pop_front();
            } else if pages == BACKGROUND_PAGES || of_block.is_some_and(|one| one != block) {
                break;
            } else {
                if self.left.remove(block, run.first) {
                    push_merged(&mut claimed, 0, PageRange::new(run.first, 1));
                    (pages, of_block) = (pages + 1, Some(block));
                }
                *run = BlockRun { first: run.first + 1, count: run.count - 1, ..*run };
            }
        }
        Some((of_block?, claimed))
    }

    fn send(
        &self,
        sender: &mut StreamSender,
        block: usize,
        pages: &[PageRange],
    ) -> Result<u64, LaneError> {
        let none = || LaneError::Memory(format!("there is no RAM block {block}"));
        let region = self.regions.get(block).ok_or_else(none)?;
        let (mut full, mut zeros) = (Vec::with_capacity(pages.len()), Vec::new());
        for page in pages.iter().flat_map(|run| run.first..run.end()) {
            let to = if region.is_zero(page) { &mut zeros } else { &mut full };
            push_merged(to, 0, PageRange::new(page, 1));
        }
        let block = u16::try_from(block).map_err(|_| none())?;
        let unit = UnitPages { round: NO_ROUND, block, region, pages: &full, zeros: &zeros };
        let sent = sender.unit(&unit, Packing::default(), None)?;
        self.lock().sent_bytes += sent.wire_bytes;
        Ok(sent.wire_bytes)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a few pages, never negative"
)]
fn whole(pages: f64) -> u64 {
    pages as u64
}

/// Requests another session from the destination, for as long as necessary, or until the function
/// passed to it returns that serving is over.
pub type AskAgain<'a> = dyn Fn(&dyn Fn() -> bool) -> Again + Sync + 'a;

/// Serves a guest's pages, session after session, until all are at the destination. `first`:
/// streams that are open already, and the remaining pages. Returns the destination's statistics, or
/// `None` if the destination answered that it needs nothing any more.
///
/// # Errors
/// The destination does not have this guest, or serving was abandoned. A destination that has had a
/// session has not refused the guest.
pub fn serve(
    kept: &KeptPages,
    first: Option<(Vec<SessionStream>, Vec<BlockRun>)>,
    again: &AskAgain<'_>,
) -> Result<Option<PagedIn>, NotServed> {
    // The destination may run a guest for which it opened streams. This includes a shadow whose
    // QEMU needs pages before it reports whether its guest runs.
    let mut granted = false;
    let mut ended = first.map(|(streams, list)| kept.session(streams, Some(&list)));
    loop {
        match ended {
            Some(Ended::Complete(figures)) => return Ok(Some(*figures)),
            Some(Ended::Cut(failure)) => tracing::warn!(%failure, "page-in is cut"),
            None => {}
        }
        if kept.lock().abandoned {
            let failure =
                Failure::new(FailureCode::Cancelled, "the guest's pages are needed no more");
            return Err(NotServed::Lost(failure));
        }
        ended = match again(&|| kept.lock().abandoned) {
            Again::Session(streams) => {
                granted = true;
                Some(kept.session(streams, None))
            }
            Again::Complete => return Ok(None),
            Again::Lost(failure) => return Err(NotServed::Lost(failure)),
            Again::Refused(failure) if granted => return Err(NotServed::Lost(failure)),
            Again::Refused(failure) => return Err(NotServed::Refused(failure)),
        };
    }
}

#[cfg(test)]
mod tests {
    use godwit_ram::PAGE_SIZE;

    use super::*;

    #[test]
    fn recently_written_pages_go_first() {
        let dir = tempfile::tempdir().unwrap();
        let region = |name: &str| {
            Arc::new(Region::create(&dir.path().join(name), 64 * PAGE_SIZE, None).unwrap())
        };
        let kept = KeptPages::new(vec![region("a.ram"), region("b.ram")]);
        let run = |block, first, count| BlockRun { block, first, count };
        kept.set_hot(vec![run(0, 40, 20), run(1, 3, 2)]);
        // Page 41 is not missing.
        kept.begin(&[], Some(&[run(0, 0, 2), run(0, 40, 1), run(0, 42, 18), run(1, 0, 10)]));
        let pieces: Vec<_> = std::iter::from_fn(|| kept.next_piece()).collect();
        let pages = |first, count| PageRange::new(first, count);
        let expected = [
            (0, vec![pages(40, 1), pages(42, 15)]),
            (0, vec![pages(57, 3)]),
            (1, vec![pages(3, 2)]),
            (0, vec![pages(0, 2)]),
            (1, vec![pages(0, 3), pages(5, 5)]),
        ];
        assert_eq!(pieces, expected);
        assert_eq!(kept.left_pages(), 0);
    }
}
