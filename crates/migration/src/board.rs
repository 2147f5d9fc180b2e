//! Assigns work to streams. A unit of work is what is to be sent of one chunk of memory. Streams
//! take units from one shared queue, so a fast stream takes more. No I/O, no threads:
//! `drive::dispatch` puts a lock around it.
//!
//! Three rules make it correct without a barrier between rounds:
//! - The units of one stream arrive in the order in which it took them (TCP).
//! - While a unit of a chunk is on its way, or waits for the stream of an earlier one, the next
//!   unit of that chunk goes to the same stream. So an older page never arrives after a newer one.
//! - What was on its way on a broken stream is sent again by the others, once the destination has
//!   reported how many of its units it took and that it takes no more.
//!
//! The size of a unit determines how long a slow stream keeps the others waiting at the end. When
//! everything has been applied, the chunks may be made smaller ([`Board::cut_finer`]): nothing is
//! on its way that was accounted for in larger ones.

use std::collections::{HashMap, VecDeque};

use godwit_ram::PageRange;

/// Most that is sent twice when a stream breaks in the middle of a chunk: 2 MiB.
pub use godwit_ram::CHUNK_PAGES;

/// Pages of the smallest chunk: 64 KiB.
pub const LEAST_CHUNK_PAGES: u64 = 16;

/// Chunk of a RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Chunk {
    block: u16,
    number: u64,
}

/// Pages of one chunk that are to be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    /// The RAM block's number.
    pub block: u16,
    /// Pages to read and send, ascending, within one chunk.
    pub pages: Vec<PageRange>,
    /// Pages known to be zero without being read, ascending, within the same chunk.
    pub zeros: Vec<PageRange>,
}

impl Unit {
    fn chunk(&self, pages: u64) -> Chunk {
        let first =
            self.pages.first().into_iter().chain(self.zeros.first()).map(|range| range.first).min();
        Chunk { block: self.block, number: first.unwrap_or(0) / pages }
    }

    /// Returns the number of pages in the unit.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.pages.iter().chain(&self.zeros).map(|range| range.count).sum()
    }
}

/// Error in the destination's report about a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the destination took {claimed} units of stream {stream}, which sent {sent}, and {before} \
    before"
)]
pub struct Misaccounted {
    stream: u16,
    claimed: u64,
    sent: u64,
    before: u64,
}

#[derive(Debug, Default)]
struct Stream {
    /// Units that only this stream may send, because the chunk's last unit is on its way here.
    bound: VecDeque<Unit>,
    /// Units taken and not known to have been applied.
    under_way: VecDeque<Unit>,
    taken: u64,
    applied: u64,
    /// Whether the last unit taken has not been handed to the socket completely.
    writing: bool,
    /// Whether the stream takes no more work.
    broken: bool,
    /// Whether the destination has reported that it takes no more of the stream.
    closed: bool,
}

/// The only stream that may send a chunk's units for now.
#[derive(Clone, Copy, Debug)]
struct Owner {
    stream: usize,
    /// Number of the chunk's last unit that the stream has taken.
    number: u64,
    /// Units of the chunk that wait for this stream.
    bound: u32,
}

/// Work of a migration and the streams that do it.
#[derive(Debug, Default)]
pub struct Board {
    queue: VecDeque<Unit>,
    streams: Vec<Stream>,
    /// Owner of each chunk that is on its way.
    owners: HashMap<Chunk, Owner>,
    /// Pages of all units that were taken and not given back.
    pages: u64,
    /// Pages of a chunk, if not [`CHUNK_PAGES`].
    finer: Option<u64>,
}

impl Board {
    /// Returns the pages of a chunk. No unit may span two chunks.
    #[must_use]
    pub fn chunk_pages(&self) -> u64 {
        self.finer.unwrap_or(CHUNK_PAGES)
    }

    /// Makes chunks of at most so many pages, if nothing is on its way or waits; otherwise they
    /// keep their size. Returns their size in pages now: the former size divided by a power of two.
    pub fn cut_finer(&mut self, pages: u64) -> u64 {
        let mut cut = self.chunk_pages();
        while cut > pages && cut > LEAST_CHUNK_PAGES {
            cut /= 2;
        }
        if self.is_applied() {
            self.finer = Some(cut);
        }
        self.chunk_pages()
    }

    fn chunk(&self, unit: &Unit) -> Chunk {
        unit.chunk(self.chunk_pages())
    }

    /// Adds a stream and returns its number.
    pub fn open(&mut self) -> usize {
        self.streams.push(Stream::default());
        self.streams.len() - 1
    }

    /// Adds a unit of work.
    pub fn push(&mut self, unit: Unit) {
        match self.owner(&unit) {
            Some(stream) => self.bind(stream, unit),
            None => self.queue.push_back(unit),
        }
    }

    fn bind(&mut self, stream: usize, unit: Unit) {
        let chunk = self.chunk(&unit);
        if let Some(owner) = self.owners.get_mut(&chunk) {
            owner.bound += 1;
        }
        self.streams[stream].bound.push_back(unit);
    }

    /// Returns the stream that alone may send a unit now.
    fn owner(&self, unit: &Unit) -> Option<usize> {
        let owner = self.owners.get(&self.chunk(unit))?;
        let there = &self.streams[owner.stream];
        (!there.closed && (owner.bound > 0 || owner.number > there.applied)).then_some(owner.stream)
    }

    /// Takes the next unit for a stream. Returns `None` if there is none for it now.
    pub fn take(&mut self, stream: usize) -> Option<Unit> {
        if self.streams[stream].broken {
            return None;
        }
        let unit = loop {
            if let Some(bound) = self.streams[stream].bound.pop_front() {
                let chunk = self.chunk(&bound);
                if let Some(owner) = self.owners.get_mut(&chunk) {
                    owner.bound -= 1;
                }
                break bound;
            }
            let unit = self.queue.pop_front()?;
            match self.owner(&unit) {
                Some(other) if other != stream => self.bind(other, unit),
                _ => break unit,
            }
        };
        let taker = &mut self.streams[stream];
        taker.taken += 1;
        taker.writing = true;
        taker.under_way.push_back(unit.clone());
        self.pages += unit.page_count();
        let number = taker.taken;
        let chunk = self.chunk(&unit);
        let bound = self.owners.get(&chunk).filter(|owner| owner.stream == stream);
        let bound = bound.map_or(0, |owner| owner.bound);
        self.owners.insert(chunk, Owner { stream, number, bound });
        Some(unit)
    }

    /// Takes a unit without pages for a stream. It is accounted for like any other and never given
    /// back.
    pub fn take_empty(&mut self, stream: usize) {
        let taker = &mut self.streams[stream];
        taker.taken += 1;
        taker.writing = true;
        taker.under_way.push_back(Unit::default());
    }

    /// Notes that the unit last taken by a stream has been handed to its socket.
    pub fn written(&mut self, stream: usize) {
        self.streams[stream].writing = false;
    }

    /// Notes that the destination has applied so many units of a stream since it began.
    ///
    /// # Errors
    /// The number is impossible.
    pub fn applied(&mut self, stream: u16, units: u64) -> Result<(), Misaccounted> {
        let pages = self.chunk_pages();
        let misaccounted = |sent, before| Misaccounted { stream, claimed: units, sent, before };
        let known = self.streams.get_mut(usize::from(stream)).ok_or(misaccounted(0, 0))?;
        if units > known.taken || units < known.applied || known.closed {
            return Err(misaccounted(known.taken, known.applied));
        }
        let done = usize::try_from(units - known.applied).unwrap_or(usize::MAX);
        known.applied = units;
        let done: Vec<Chunk> = known
            .under_way
            .drain(..done.min(known.under_way.len()))
            .map(|unit| unit.chunk(pages))
            .collect();
        for chunk in done {
            let done = |owner: &Owner| {
                owner.stream == usize::from(stream) && owner.number <= units && owner.bound == 0
            };
            if self.owners.get(&chunk).is_some_and(done) {
                self.owners.remove(&chunk);
            }
        }
        Ok(())
    }

    /// Marks a stream as broken: its socket failed, and it takes no more work. [`Board::closed`]
    /// gives back its units.
    pub fn broken(&mut self, stream: usize) {
        self.streams[stream].broken = true;
        self.streams[stream].writing = false;
    }

    /// Notes that the destination has applied so many units of a stream and takes no more of it.
    /// The others send the rest. Returns false if this was known.
    ///
    /// # Errors
    /// The number is impossible.
    pub fn closed(&mut self, stream: u16, units: u64) -> Result<bool, Misaccounted> {
        if self.streams.get(usize::from(stream)).is_some_and(|known| known.closed) {
            // Both ends may notice a broken stream.
            return Ok(false);
        }
        self.applied(stream, units)?;
        let gone = &mut self.streams[usize::from(stream)];
        (gone.broken, gone.closed, gone.writing) = (true, true, false);
        self.pages -= gone.under_way.iter().map(Unit::page_count).sum::<u64>();
        let back = gone.under_way.drain(..).chain(gone.bound.drain(..));
        let back: Vec<Unit> = back.filter(|unit| unit.page_count() > 0).collect();
        self.owners.retain(|_, owner| owner.stream != usize::from(stream));
        for unit in back.into_iter().rev() {
            self.queue.push_front(unit);
        }
        Ok(true)
    }

    /// Returns all units that are not known to have been applied: those that wait, and those on
    /// their way.
    pub fn unconfirmed(&self) -> impl Iterator<Item = &Unit> {
        let of_streams =
            self.streams.iter().flat_map(|stream| stream.bound.iter().chain(&stream.under_way));
        self.queue.iter().chain(of_streams)
    }

    /// Returns whether a stream takes no more work.
    #[must_use]
    pub fn is_broken(&self, stream: usize) -> bool {
        self.streams[stream].broken
    }

    /// Returns the pages of all units that were taken and not given back.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns whether everything sent of a page arrives at the destination before anything that
    /// `stream` sends from now on.
    #[must_use]
    pub fn is_settled(&self, stream: usize, block: u16, page: u64) -> bool {
        let chunk = Chunk { block, number: page / self.chunk_pages() };
        self.owners.get(&chunk).is_none_or(|owner| owner.stream == stream)
    }

    /// Returns the number of units that no stream has taken.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len() + self.streams.iter().map(|stream| stream.bound.len()).sum::<usize>()
    }

    /// Returns whether everything has been handed to sockets that are not known to have failed.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        let settled = |stream: &Stream| {
            stream.closed || (!stream.writing && (!stream.broken || stream.under_way.is_empty()))
        };
        self.waiting() == 0 && self.streams.iter().all(settled)
    }

    /// Returns whether the destination has applied everything.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        self.waiting() == 0 && self.streams.iter().all(|stream| stream.under_way.is_empty())
    }

    /// Returns how many units a stream has taken that are not known to have been applied.
    #[must_use]
    pub fn under_way(&self, stream: usize) -> usize {
        self.streams[stream].under_way.len()
    }

    /// Returns the number of streams that take work.
    #[must_use]
    pub fn live(&self) -> usize {
        self.streams.iter().filter(|stream| !stream.broken).count()
    }

    /// Returns the units that each stream has taken since it began, by stream number.
    #[must_use]
    pub fn taken(&self) -> Vec<u64> {
        self.streams
            .iter()
            .map(|stream| if stream.closed { stream.applied } else { stream.taken })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unit(page: u64) -> Unit {
        Unit { block: 0, pages: vec![PageRange { first: page, count: 1 }], zeros: Vec::new() }
    }

    #[test]
    fn a_chunk_on_its_way_binds_its_next_unit() {
        let mut board = Board::default();
        let (a, b) = (board.open(), board.open());
        board.push(unit(3));
        assert_eq!(board.take(a), Some(unit(3)));
        board.push(unit(4));
        assert_eq!(board.take(b), None, "the chunk is on its way on the other stream");
        assert_eq!(board.take(a), Some(unit(4)));
        board.applied(0, 1).unwrap();
        board.push(unit(5));
        assert_eq!(board.take(b), None, "its second unit still is");
        board.applied(0, 2).unwrap();
        board.push(unit(6));
        assert_eq!(
            board.take(b),
            None,
            "an older unit of the chunk still waits for the other stream"
        );
        assert_eq!((board.take(a), board.take(a)), (Some(unit(5)), Some(unit(6))));
        assert!(
            board.is_settled(a, 0, 5) && !board.is_settled(b, 0, 5) && board.is_settled(b, 0, 600)
        );
        board.applied(0, 4).unwrap();
        assert!(board.is_settled(b, 0, 5));
        board.push(unit(7));
        assert_eq!(board.take(b), Some(unit(7)));
    }

    #[test]
    fn a_broken_stream_gives_back_what_was_not_applied() {
        let mut board = Board::default();
        let (a, b) = (board.open(), board.open());
        for page in [0, 600, 1200] {
            board.push(unit(page));
            board.take(a).unwrap();
            board.written(a);
        }
        board.push(unit(1));
        assert!(!board.is_sent());
        board.broken(a);
        assert_eq!(
            (board.take(a), board.take(b)),
            (None, None),
            "not before the destination has said what it took"
        );
        assert!(!board.is_sent() && !board.is_applied());
        board.closed(0, 2).unwrap();
        assert_eq!(board.take(b), Some(unit(1200)));
        assert_eq!(board.take(b), Some(unit(1)));
        board.written(b);
        assert!(board.is_sent() && !board.is_applied());
        board.applied(1, 2).unwrap();
        assert!(board.is_applied());
        assert_eq!((board.live(), board.taken()), (1, vec![2, 2]));
    }

    #[test]
    fn chunks_are_split_only_when_nothing_is_in_flight() {
        let mut board = Board::default();
        let (a, b) = (board.open(), board.open());
        board.push(unit(0));
        board.take(a).unwrap();
        assert_eq!(board.cut_finer(40), CHUNK_PAGES);
        board.applied(0, 1).unwrap();
        assert_eq!(board.cut_finer(40), 32);
        for page in [0, 31, 32] {
            board.push(unit(page));
        }
        assert_eq!(board.take(a), Some(unit(0)));
        assert_eq!(board.take(b), Some(unit(32)), "another chunk by now");
        assert_eq!((board.take(b), board.take(a)), (None, Some(unit(31))));
        board.applied(0, 3).unwrap();
        board.applied(1, 1).unwrap();
        assert_eq!((board.cut_finer(64), board.cut_finer(0)), (32, LEAST_CHUNK_PAGES));
    }

    #[test]
    fn a_claim_that_can_not_be_is_an_error() {
        let mut board = Board::default();
        board.open();
        assert!(board.applied(0, 1).is_err() && board.applied(1, 0).is_err());
        board.push(unit(0));
        board.take(0).unwrap();
        board.applied(0, 1).unwrap();
        assert!(board.applied(0, 0).is_err());
        board.closed(0, 1).unwrap();
        assert!(board.applied(0, 1).is_err(), "a closed stream takes nothing");
    }

    /// Step of a run: the guest writes a page, a stream takes work, the destination applies a unit
    /// or receives a message, or a stream breaks.
    #[derive(Clone, Debug)]
    enum Step {
        Write(u64),
        Take(usize),
        Apply(usize),
        Acknowledge(usize),
        Break(usize),
        Finer(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..PAGES).prop_map(|page| Step::Write(place(page))),
            4 => (0..STREAMS).prop_map(Step::Take),
            3 => (0..STREAMS).prop_map(Step::Apply),
            2 => (0..STREAMS).prop_map(Step::Acknowledge),
            1 => (0..STREAMS).prop_map(Step::Break),
            1 => (0..CHUNK_PAGES).prop_map(Step::Finer),
        ];
        prop::collection::vec(step, 0..300)
    }

    /// Few, so that they collide: two chunks, of which one may be cut in two.
    const PAGES: u64 = 4;
    const STREAMS: usize = 4;

    /// Returns the number of a page in the first or the second chunk.
    fn place(page: u64) -> u64 {
        match page {
            2 => LEAST_CHUNK_PAGES + 3,
            3 => CHUNK_PAGES + 7,
            _ => page,
        }
    }

    /// Source, its streams as pipes, and destination. A page holds the number of times that it was
    /// written.
    #[derive(Default)]
    struct World {
        board: Board,
        source: HashMap<u64, u64>,
        destination: HashMap<u64, u64>,
        pipes: Vec<VecDeque<Vec<(u64, u64)>>>,
        applied: Vec<u64>,
        gone: Vec<bool>,
    }

    impl World {
        fn take(&mut self, stream: usize) -> bool {
            let Some(unit) = self.board.take(stream) else { return false };
            let read = unit.pages.iter().flat_map(|range| range.first..range.end());
            let read =
                read.map(|page| (page, self.source.get(&page).copied().unwrap_or(0))).collect();
            self.pipes[stream].push_back(read);
            self.board.written(stream);
            true
        }

        fn apply(&mut self, stream: usize) -> bool {
            let Some(pages) = self.pipes[stream].pop_front() else { return false };
            for (page, version) in pages {
                let before = self.destination.insert(page, version).unwrap_or(0);
                assert!(before <= version, "page {page} went back from {before} to {version}");
            }
            self.applied[stream] += 1;
            true
        }

        fn break_off(&mut self, stream: usize) {
            // The last stream stays: a migration without streams is over.
            if self.gone[stream] || self.board.live() == 1 {
                return;
            }
            self.gone[stream] = true;
            self.board.broken(stream);
            self.pipes[stream].clear();
            self.board.closed(u16::try_from(stream).unwrap(), self.applied[stream]).unwrap();
        }

        fn acknowledge(&mut self, stream: usize) {
            if !self.gone[stream] {
                self.board.applied(u16::try_from(stream).unwrap(), self.applied[stream]).unwrap();
            }
        }
    }

    proptest! {
        #[test]
        fn no_page_goes_back_and_none_is_lost(steps in steps()) {
            let mut world = World::default();
            for _ in 0..STREAMS {
                world.board.open();
                world.pipes.push(VecDeque::new());
                world.applied.push(0);
                world.gone.push(false);
            }
            for step in steps {
                match step {
                    Step::Write(page) => {
                        *world.source.entry(page).or_default() += 1;
                        world.board.push(unit(page));
                    }
                    Step::Take(stream) => { world.take(stream); }
                    Step::Apply(stream) => { world.apply(stream); }
                    Step::Acknowledge(stream) => world.acknowledge(stream),
                    Step::Break(stream) => world.break_off(stream),
                    Step::Finer(pages) => { world.board.cut_finer(pages); }
                }
            }
            // All go on until no work is left.
            let mut busy = true;
            while busy {
                busy = false;
                for stream in 0..STREAMS {
                    busy |= world.take(stream);
                    busy |= world.apply(stream);
                    world.acknowledge(stream);
                }
            }
            prop_assert!(world.board.is_sent() && world.board.is_applied());
            prop_assert_eq!(world.destination, world.source);
        }
    }
}
