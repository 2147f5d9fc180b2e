//! The destination's side of references and deltas: pages are made of what this host has already, where that is still what the
//! source means; what is not is said to be missing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_lanes::{LaneError, StreamSender, hash_page, xor};
use godwit_ram::{PAGE_SIZE, PageRange, Region, push_merged};
use godwit_wire::{
    BlockRun, Delta, Digests, Message, PAGE_SIZE as PAGE_BYTES, PageHash, Place, References, prefix,
};

use super::destination::lock;
use crate::reference::{Content, PageBits};

/// Pieces of digests that follow each other without a pause: what is said in between, the answers to pings above all, does not
/// wait longer than these few KiB take.
const PIECES_IN_A_ROW: usize = 8;
const PAUSE: Duration = Duration::from_millis(1);

/// What a destination lets a source refer to, beside the guest's own pages.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Memory that is here, the most promising first.
    pub contents: Vec<Arc<Content>>,
    /// The source is told of so many pages at most.
    pub most_pages: u64,
    /// Of so many before it begins, where that needs no work: the rest is told beside the pages that arrive.
    pub first_pages: u64,
}

/// What pages may be made of, and which could not be.
#[derive(Debug)]
pub(super) struct Contents {
    contents: Vec<Arc<Content>>,
    lacking: Mutex<PageBits>,
    /// How many are in there: mostly none.
    lacks: AtomicU64,
}

impl Contents {
    pub(super) fn new(offer: &Offer, block_pages: &[u64]) -> Contents {
        Contents {
            contents: offer.contents.clone(),
            lacking: Mutex::new(PageBits::new(block_pages)),
            lacks: AtomicU64::new(0),
        }
    }

    /// Makes pages of what they are said to be. What can't be is appended to `missing`. `own`: the arriving guest's memory,
    /// of which `region` is the block written to; the pages are known to lie within it.
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
        let in_place = (content, block, page) == (0, references.block, references.first);
        self.settle(&checked, region, Some(scratch.as_slice()).filter(|_| !in_place), missing)
    }

    /// Makes pages of what they hold and what differs in them. What can't be is appended to `missing`. `differences`: those of
    /// all its pages, which are known to lie within `region`.
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

    /// Writes the pages that are right, and notes the others. `bytes`: what all of them hold; none where that is there already.
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

    /// False: there is no such content.
    fn read(&self, place: Place, own: &[Arc<Region>], to: &mut [u8]) -> bool {
        if let Some(other) = place.content.checked_sub(1) {
            return self.contents.get(usize::from(other)).is_some_and(|it| it.copy_out(place, to).is_ok());
        }
        let offset = place.page.checked_mul(PAGE_SIZE);
        let region = own.get(usize::from(place.block));
        offset.zip(region).is_some_and(|(offset, region)| region.copy_out(offset, to).is_ok())
    }

    fn note_missing(&self, block: u16, first: u64, count: u64) {
        let mut lacking = self.lacking.lock().unwrap_or_else(PoisonError::into_inner);
        for page in first..first + count {
            lacking.insert(block, page);
        }
        self.lacks.store(lacking.count(), Ordering::SeqCst);
    }

    /// Pages have come: they are missing no more.
    pub(super) fn written(&self, block: u16, pages: PageRange) {
        if self.lacks() > 0 {
            let mut lacking = self.lacking.lock().unwrap_or_else(PoisonError::into_inner);
            lacking.take(block, pages, &mut Vec::new());
            self.lacks.store(lacking.count(), Ordering::SeqCst);
        }
    }

    /// Pages that were missing and have not come since.
    pub(super) fn lacks(&self) -> u64 {
        self.lacks.load(Ordering::SeqCst)
    }
}

/// Pages in a row, looked at one by one.
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

/// Says which pages are missing, in as many messages as it takes.
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

/// Tells a source what is here.
pub(super) struct Teller<'a> {
    /// Number and content, and the block and the pages of its next piece.
    pieces: Box<dyn Iterator<Item = Piece<'a>> + Send + 'a>,
    left: u64,
    first: u64,
}

struct Piece<'a> {
    number: u16,
    content: &'a Content,
    block: u16,
    pages: PageRange,
}

impl<'a> Teller<'a> {
    pub(super) fn new(offer: &'a Offer) -> Teller<'a> {
        let pieces = (1..=u16::MAX).zip(&offer.contents).flat_map(|(number, content)| {
            let piece = move |(block, pages)| Piece { number, content, block, pages };
            content.pieces().map(piece)
        });
        Teller { pieces: Box::new(pieces), left: offer.most_pages, first: offer.first_pages }
    }

    /// Before the source begins: what needs no work, and is not so much that it would have to wait.
    pub(super) fn begin(&mut self, sender: &Mutex<StreamSender>) {
        let least_left = self.left.saturating_sub(self.first);
        while self.left > least_left {
            let Some(piece) = self.pieces.next() else { return };
            let known = piece.content.is_worked_out(piece.block, piece.pages);
            if !self.tell(&piece, sender) || !known {
                return;
            }
        }
    }

    /// The rest, until all is told, or it is over: `end` is disconnected then, or `is_over` says so.
    pub(super) fn go_on<T>(
        mut self,
        sender: &Mutex<StreamSender>,
        end: &Receiver<T>,
        is_over: impl Fn() -> bool,
    ) {
        let mut in_a_row = 0;
        while let Some(piece) = self.pieces.next() {
            if is_over() || self.left == 0 || !self.tell(&piece, sender) {
                return;
            }
            in_a_row += 1;
            let pauses = in_a_row % PIECES_IN_A_ROW == 0;
            if pauses && matches!(end.recv_timeout(PAUSE), Err(RecvTimeoutError::Disconnected)) {
                return;
            }
        }
    }

    /// False: the source hears nothing any more.
    fn tell(&mut self, piece: &Piece<'_>, sender: &Mutex<StreamSender>) -> bool {
        let &Piece { number, content, block, pages } = piece;
        // What can't be read any more is not told.
        let prefixes = content.digests(block, pages).unwrap_or_default();
        if prefixes.is_empty() {
            return true;
        }
        self.left = self.left.saturating_sub(prefixes.len() as u64);
        let place = Place { content: number, block, page: pages.first };
        lock(sender).send(&Message::Digests(Digests { place, prefixes })).is_ok()
    }
}
