//! The destination's side of references and deltas. It reconstructs pages from content that this
//! host holds, if that still matches what the source expects. Other pages it reports as missing.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use godwit_lanes::{LaneError, StreamSender, hash_page, xor};
use godwit_ram::{PAGE_SIZE, PageRange, Region, push_merged};
use godwit_wire::{
    BlockRun, Delta, Digests, Message, PAGE_SIZE as PAGE_BYTES, PageHash, Place, References, prefix,
};
use parking_lot::{Mutex, RwLock};

use crate::board::CHUNK_PAGES;
use crate::reference::{Arrivals, Content, DIGEST_PAGES, PageBits};

/// Pieces of digests sent in a row without a pause. Messages in between, answers to pings above
/// all, wait no longer than these few KiB take.
const PIECES_IN_A_ROW: usize = 8;
const PAUSE: Duration = Duration::from_millis(1);
/// Poll interval for the progress of guests that arrive at the same time.
const ARRIVALS_INTERVAL: Duration = Duration::from_millis(10);
// A unit of round 0 brings one piece.
const _: () = assert!(CHUNK_PAGES == DIGEST_PAGES);

/// Content that a destination offers for references, in addition to the guest's own pages.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Memory on this host, the most promising first.
    pub contents: Vec<Arc<Content>>,
    /// Maximum pages that are announced to the source.
    pub most_pages: u64,
    /// Maximum pages announced before the source begins, if that needs no work. The rest is
    /// announced while pages arrive.
    pub first_pages: u64,
    /// Guests that arrive here at the same time. Their content is announced as it arrives.
    pub beside: Option<Beside>,
}

/// Guests that arrive at the same time as another one.
#[derive(Clone, Debug)]
pub struct Beside {
    /// The guest in question. The sources of the others learn what has arrived of it.
    pub own: Arc<Content>,
    /// Guests whose arrival began before.
    pub others: Vec<Arc<Content>>,
    /// Where later arrivals are registered.
    pub arrivals: Arc<Arrivals>,
    /// Number of arrivals registered before this one ([`Arrivals::since`]).
    pub begun: u64,
}

impl Beside {
    /// Registers a guest whose arrival begins now.
    #[must_use]
    pub fn begin(arrivals: &Arc<Arrivals>, own: Arc<Content>) -> Beside {
        arrivals.begin(&own);
        let (all, begun) = arrivals.since(0);
        let is_other =
            |content: &Arc<Content>| content.is_arriving() && !Arc::ptr_eq(content, &own);
        let others = all.into_iter().filter(is_other).collect();
        Beside { own, others, arrivals: Arc::clone(arrivals), begun }
    }

    /// Returns the guests whose arrival began since the last call.
    fn more(&mut self) -> Vec<Arc<Content>> {
        let (new, begun) = self.arrivals.since(self.begun);
        self.begun = begun;
        self.others.drain(..).chain(new).collect()
    }
}

/// All content that a source may refer to, indexed by its number less one. It grows during the
/// migration.
#[derive(Clone, Debug)]
pub(super) struct Offered(Arc<RwLock<Vec<Arc<Content>>>>);

impl Offered {
    fn find(&self, number: u16) -> Option<Arc<Content>> {
        let contents = self.0.read();
        contents.get(usize::from(number.checked_sub(1)?)).cloned()
    }

    fn has(&self, content: &Arc<Content>) -> bool {
        let contents = self.0.read();
        contents.iter().any(|offered| Arc::ptr_eq(offered, content))
    }

    /// Returns the number of a new content, or `None` if all numbers are used.
    fn add(&self, content: Arc<Content>) -> Option<u16> {
        let mut contents = self.0.write();
        let number = u16::try_from(contents.len() + 1).ok()?;
        contents.push(content);
        Some(number)
    }
}

/// Sources of content for pages, and the pages that could not be reconstructed.
#[derive(Debug)]
pub(super) struct Contents {
    offered: Offered,
    /// The arriving guest's own memory, if it is announced to others.
    own: Option<Arc<Content>>,
    lacking: Mutex<PageBits>,
    /// Number of missing pages: mostly 0.
    lacks: AtomicU64,
}

impl Contents {
    pub(super) fn new(offer: &Offer, block_pages: &[u64]) -> Contents {
        Contents {
            offered: Offered(Arc::new(RwLock::new(offer.contents.clone()))),
            own: offer.beside.as_ref().map(|beside| Arc::clone(&beside.own)),
            lacking: Mutex::new(PageBits::new(block_pages)),
            lacks: AtomicU64::new(0),
        }
    }

    /// Returns the content that a source may refer to. It grows with what other guests bring.
    pub(super) fn offered(&self) -> Offered {
        self.offered.clone()
    }

    /// Notes that a round later than 0 has written pages: their earlier content is no longer known.
    pub(super) fn changed(&self, block: u16, pages: PageRange) {
        if let Some(own) = &self.own {
            (pages.first..pages.end()).for_each(|page| own.note(block, page, 0));
        }
    }

    /// Notes that a unit of round 0 has brought the piece with that page. `is_told`: by references
    /// and zeros alone.
    pub(super) fn has_come(&self, block: u16, page: u64, is_told: bool) {
        if let Some(own) = &self.own {
            own.has_come(block, page, is_told);
        }
    }

    /// Reconstructs pages from references. Appends those that cannot be reconstructed to `missing`.
    /// `own`: the arriving guest's memory; `region`: the block of it that is written. The pages are
    /// known to lie within it.
    pub(super) fn take(
        &self,
        references: &References,
        own: &[Arc<Region>],
        region: &Region,
        scratch: &mut Vec<u8>,
        missing: &mut Vec<BlockRun>,
    ) -> Result<(), LaneError> {
        let pages = PageRange::new(references.first, references.count());
        scratch.resize(usize::try_from(pages.len_bytes()).unwrap_or(0), 0);
        let found = self.read(references.place, own, scratch);
        let is_it = |(bytes, hash): (&[u8], &PageHash)| found && hash_page(bytes) == *hash;
        let each = scratch.chunks_exact(PAGE_BYTES as usize).zip(&references.hashes).map(is_it);
        let checked = Checked::new(references.block, references.first, each);
        let Place { content, block, page } = references.place;
        self.note(&checked, &references.hashes, content);
        let in_place = (content, block, page) == (0, references.block, references.first);
        self.settle(&checked, region, Some(scratch.as_slice()).filter(|_| !in_place), missing)
    }

    /// Reconstructs pages from their present content and a delta. Appends those that cannot be
    /// reconstructed to `missing`. `differences`: those of all its pages, which are known to lie
    /// within `region`.
    pub(super) fn change(
        &self,
        delta: &Delta,
        differences: &[u8],
        region: &Region,
        scratch: &mut Vec<u8>,
        missing: &mut Vec<BlockRun>,
    ) -> Result<(), LaneError> {
        scratch.resize(differences.len(), 0);
        let found = region.copy_out(delta.first * PAGE_SIZE, scratch).is_ok();
        let page_bytes = PAGE_BYTES as usize;
        let each = scratch.chunks_exact_mut(page_bytes).zip(differences.chunks_exact(page_bytes));
        let is_it = |((bytes, difference), base): ((&mut [u8], &[u8]), &u64)| {
            let is_it = found && prefix(&hash_page(bytes)) == *base;
            xor(bytes, difference);
            is_it
        };
        let checked = Checked::new(delta.block, delta.first, each.zip(&delta.bases).map(is_it));
        self.settle(&checked, region, Some(scratch.as_slice()), missing)
    }

    /// Makes these pages available for further references, so that they need not be hashed again.
    fn note(&self, checked: &Checked, hashes: &[PageHash], content: u16) {
        let Some(own) = &self.own else { return };
        let origin = self.offered.find(content).map_or(0, |origin| own.origin(&origin));
        for page in checked.good.iter().flat_map(|run| run.first..run.end()) {
            let hash = usize::try_from(page - checked.first).ok().and_then(|at| hashes.get(at));
            own.note_copy(checked.block, page, hash.map_or(0, prefix), origin);
        }
    }

    /// Writes the pages that match, and records the others as missing. `bytes`: the content of all
    /// of them; `None` if it is in place already.
    fn settle(
        &self,
        checked: &Checked,
        region: &Region,
        bytes: Option<&[u8]>,
        missing: &mut Vec<BlockRun>,
    ) -> Result<(), LaneError> {
        let &Checked { block, first, ref good, ref bad } = checked;
        for run in good {
            self.written(block, *run);
            let from = usize::try_from((run.first - first) * PAGE_SIZE).unwrap_or(usize::MAX);
            let to = from.saturating_add(usize::try_from(run.len_bytes()).unwrap_or(usize::MAX));
            if let Some(bytes) = bytes.and_then(|bytes| bytes.get(from..to)) {
                region
                    .copy_in(run.offset_bytes(), bytes)
                    .map_err(|error| LaneError::Memory(error.to_string()))?;
            }
        }
        for &PageRange { first, count } in bad {
            self.note_missing(block, first, count);
            missing.push(BlockRun { block, first, count });
        }
        Ok(())
    }

    /// Reads a page's content. Returns false if it does not exist.
    fn read(&self, place: Place, own: &[Arc<Region>], to: &mut [u8]) -> bool {
        if place.content > 0 {
            return self
                .offered
                .find(place.content)
                .is_some_and(|it| it.copy_out(place, to).is_ok());
        }
        let offset = place.page.checked_mul(PAGE_SIZE);
        let region = own.get(usize::from(place.block));
        offset.zip(region).is_some_and(|(offset, region)| region.copy_out(offset, to).is_ok())
    }

    fn note_missing(&self, block: u16, first: u64, count: u64) {
        let mut lacking = self.lacking.lock();
        for page in first..first + count {
            lacking.insert(block, page);
        }
        self.lacks.store(lacking.count(), Ordering::SeqCst);
    }

    /// Notes that pages have arrived: they are no longer missing.
    pub(super) fn written(&self, block: u16, pages: PageRange) {
        if self.lacks() > 0 {
            let mut lacking = self.lacking.lock();
            lacking.take(block, pages, &mut Vec::new());
            self.lacks.store(lacking.count(), Ordering::SeqCst);
        }
    }

    /// Returns the number of pages that were missing and have not arrived since.
    pub(super) fn lacks(&self) -> u64 {
        self.lacks.load(Ordering::SeqCst)
    }
}

/// Consecutive pages, verified one by one.
struct Checked {
    block: u16,
    first: u64,
    good: Vec<PageRange>,
    bad: Vec<PageRange>,
}

impl Checked {
    fn new(block: u16, first: u64, each: impl Iterator<Item = bool>) -> Checked {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for (page, is_it) in (first..).zip(each) {
            push_merged(if is_it { &mut good } else { &mut bad }, 0, PageRange::new(page, 1));
        }
        Checked { block, first, good, bad }
    }
}

/// Reports missing pages in as many messages as necessary.
pub(super) fn say_missing(mut runs: Vec<BlockRun>, say: impl Fn(&Message)) {
    while !runs.is_empty() {
        let mut measure = Vec::new();
        let message = Message::Missing { runs };
        let taken = message.encode(&mut measure);
        let Message::Missing { runs: mut all } = message else { return };
        let rest = all.split_off(taken);
        say(&Message::Missing { runs: all });
        runs = rest;
    }
}

/// Announces to a source what this host holds, and what arrives beside.
pub(super) struct Teller {
    /// Content that was here before, indexed by its number less one.
    contents: Vec<Arc<Content>>,
    /// Its pieces, from the first that was not announced before the source began.
    pieces: Box<dyn Iterator<Item = Piece> + Send>,
    /// Pieces announced before the source began.
    told_first: HashSet<(u16, u16, u64)>,
    beside: Option<Beside>,
    offered: Offered,
    /// Guests that arrive at the same time, by their content's number, and how many pieces of each
    /// have been announced.
    followed: Vec<(u16, Arc<Content>, usize)>,
    left: u64,
    first: u64,
}

struct Piece {
    number: u16,
    content: Arc<Content>,
    block: u16,
    pages: PageRange,
}

impl Piece {
    fn key(&self) -> (u16, u16, u64) {
        (self.number, self.block, self.pages.first)
    }
}

/// Returns all pieces of several contents, which are numbered from 1 on.
fn pieces(contents: Vec<Arc<Content>>) -> impl Iterator<Item = Piece> + Send {
    (1..=u16::MAX).zip(contents).flat_map(|(number, content)| {
        let pieces: Vec<_> = content.pieces().collect();
        let piece =
            move |(block, pages)| Piece { number, content: Arc::clone(&content), block, pages };
        pieces.into_iter().map(piece)
    })
}

impl Teller {
    /// Creates a teller. `offered`: the contents of the offer, extended by what arrives beside.
    pub(super) fn new(offer: Offer, offered: Offered) -> Teller {
        let Offer { contents, most_pages, first_pages, beside } = offer;
        let pieces = Box::new(pieces(contents.clone()));
        let (told_first, followed) = (HashSet::new(), Vec::new());
        let (left, first) = (most_pages, first_pages);
        Teller { contents, pieces, told_first, beside, offered, followed, left, first }
    }

    /// Announces, before the source begins, what needs no work and is small enough not to delay it.
    pub(super) fn begin(&mut self, sender: &Mutex<StreamSender>) {
        let least_left = self.left.saturating_sub(self.first);
        let is_known = |piece: &Piece| piece.content.is_worked_out(piece.block, piece.pages);
        for piece in pieces(std::mem::take(&mut self.contents)).filter(is_known) {
            if self.left <= least_left || !self.tell(&piece, sender) {
                return;
            }
            self.told_first.insert(piece.key());
        }
    }

    /// Announces the rest, and what arrives beside, until the migration ends: `end` is disconnected
    /// then, or `is_over` returns true.
    pub(super) fn go_on<T>(
        mut self,
        sender: &Mutex<StreamSender>,
        end: &Receiver<T>,
        is_over: impl Fn() -> bool,
    ) {
        loop {
            let mut pieces = self.come();
            let pause = if pieces.is_empty() {
                let told = &self.told_first;
                let more = self.pieces.by_ref().filter(|piece| !told.contains(&piece.key()));
                pieces.extend(more.take(PIECES_IN_A_ROW));
                if pieces.is_empty() { ARRIVALS_INTERVAL } else { PAUSE }
            } else {
                PAUSE
            };
            if pieces.is_empty() && self.beside.is_none() {
                return;
            }
            for piece in pieces {
                if is_over() || self.left == 0 || !self.tell(&piece, sender) {
                    return;
                }
            }
            if is_over() || matches!(end.recv_timeout(pause), Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }

    /// Returns a few new pieces of each guest that arrives beside this one.
    fn come(&mut self) -> Vec<Piece> {
        for content in self.beside.as_mut().map(Beside::more).unwrap_or_default() {
            if let Some(number) = self.offered.add(Arc::clone(&content)) {
                self.followed.push((number, content, 0));
            }
        }
        let mut come = Vec::new();
        for (number, content, told) in &mut self.followed {
            let mut new = content.come_since(*told);
            new.truncate(PIECES_IN_A_ROW);
            *told += new.len();
            let piece = |(block, pages)| Piece {
                number: *number,
                content: Arc::clone(content),
                block,
                pages,
            };
            come.extend(new.into_iter().map(piece));
        }
        come
    }

    /// Announces a piece. Returns false if the source is unreachable.
    fn tell(&mut self, piece: &Piece, sender: &Mutex<StreamSender>) -> bool {
        let Piece { number, content, block, pages } = piece;
        // Content that can no longer be read is not announced.
        let news =
            content.news(*block, *pages, |origin| self.offered.has(origin)).unwrap_or_default();
        let Some((page, prefixes)) = news else { return true };
        self.left = self.left.saturating_sub(pages.count);
        let place = Place { content: *number, block: *block, page };
        sender.lock().send(&Message::Digests(Digests { place, prefixes })).is_ok()
    }
}
