//! The destination's side of references and deltas. It reconstructs pages from content that this
//! host holds, if that still matches what the source expects. Other pages it reports as missing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_lanes::{LaneError, hash_page, hash_pages, pages_of, xor};
use godwit_ram::pages::page_count;
use godwit_ram::{PAGE_SIZE, PageRange, Region, push_merged};
use godwit_wire::{
    BlockRun, Delta, Message, PAGE_SIZE as PAGE_BYTES, PageHash, Place, References, prefix,
};
use parking_lot::Mutex;

use super::announcing::{Offer, Offered};
use crate::reference::{Content, PageBits};

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
            offered: Offered::new(offer.contents.clone()),
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

    /// Notes that a unit of round 0 has brought the piece with that page. `by_reference`: with
    /// references and zeros alone.
    pub(super) fn note_arrival(&self, block: u16, page: u64, by_reference: bool) {
        if let Some(own) = &self.own {
            own.note_arrival(block, page, by_reference);
        }
    }

    /// Reconstructs pages from references. Appends those that cannot be reconstructed to `missing`.
    /// `own`: the arriving guest's memory; `region`: the block of it that is written. The pages are
    /// known to lie within it.
    pub(super) fn reconstruct(
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
        let hashes = if found { hash_pages(pages_of(scratch)) } else { Vec::new() };
        let expected = (0..).zip(&references.hashes);
        let each = expected.map(|(at, hash): (usize, _)| hashes.get(at) == Some(hash));
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
        let origin = self.offered.find(content);
        if let Some(origin) = &origin {
            origin.note_taken(page_count(&checked.good));
        }
        let Some(own) = &self.own else { return };
        let origin = origin.map_or(0, |origin| own.origin(&origin));
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
pub(super) fn send_missing(mut runs: Vec<BlockRun>, send: impl Fn(&Message)) {
    while !runs.is_empty() {
        let mut measure = Vec::new();
        let message = Message::Missing { runs };
        let taken = message.encode(&mut measure);
        let Message::Missing { runs: mut all } = message else { return };
        let rest = all.split_off(taken);
        send(&Message::Missing { runs: all });
        runs = rest;
    }
}
