//! The source's side of references and deltas: what its streams share about the destination's
//! content, and the pages still owed because a guess failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_lanes::{Differing, Knowledge, Packing, Referring as Extent, UnitSent, is_sampled};
use godwit_ram::PageRange;
use godwit_wire::{BlockRun, Digests, PageHash, Place, prefix};
use parking_lot::{Mutex, MutexGuard};

use super::dispatch::Dispatch;
use crate::board::Unit;
use crate::encoding::{Chooser, Experience, Prospect};
use crate::failure::{Failure, FailureCode};
use crate::reference::{Content, ContentIndex, Owed, PageBits, SentPages};
use godwit_types::{ContentKind, ReferenceUse, ReferencedPages};

/// Settings for sending pages by reference.
#[derive(Clone, Copy, Debug)]
pub struct References {
    /// Permitted kinds of references; at most those that the destination agreed to.
    pub by: ReferenceUse,
    /// Use references wherever possible, not only where they pay.
    pub always: bool,
    /// Memory for knowledge of the destination's content, bytes.
    pub known_bytes: u64,
}

impl References {
    /// Memory for knowledge of 1.8 million pages.
    pub const KNOWN_BYTES: u64 = 64 << 20;
    /// Memory for knowledge of 29 million pages.
    const MOST_KNOWN_BYTES: u64 = 1 << 30;
    /// Memory for knowledge of a page, whatever the size of the table is.
    const KNOWN_PAGE_BYTES: u64 = 40;

    /// Returns the memory for knowledge of so many pages, so that a large guest finds all of its
    /// memory where it comes back. It is used as the destination announces content.
    #[must_use]
    pub fn known_bytes(pages: u64) -> u64 {
        let bytes = pages.saturating_mul(References::KNOWN_PAGE_BYTES);
        bytes.clamp(References::KNOWN_BYTES, References::MOST_KNOWN_BYTES)
    }
}

impl Default for References {
    fn default() -> Self {
        References { by: ReferenceUse::None, always: false, known_bytes: References::KNOWN_BYTES }
    }
}

/// Content of a destination as it describes it before the migration. It may be wrong.
#[derive(Clone, Copy, Debug)]
pub struct DescribedContent {
    pub kind: ContentKind,
    /// Rate at which its file was read, bytes per second; `None`: unknown.
    pub read_bytes_per_s: Option<u64>,
}

/// Settings for sending pages as deltas.
#[derive(Clone, Copy, Debug)]
pub struct Deltas {
    /// Memory for versions sent before, bytes; 0: no deltas.
    pub cache_bytes: u64,
    /// Use deltas wherever possible, not only where they pay.
    pub always: bool,
}

impl Deltas {
    /// Memory for the versions of some 16,000 pages.
    pub const CACHE_BYTES: u64 = 64 << 20;
}

impl Default for Deltas {
    fn default() -> Self {
        Deltas { cache_bytes: Deltas::CACHE_BYTES, always: false }
    }
}

/// Pages sent by reference or as deltas, and their outcome.
#[derive(Debug)]
pub(crate) struct Referring {
    by: ReferenceUse,
    always: bool,
    known: ContentIndex,
    deltas: Deltas,
    sent_pages: SentPages,
    /// The guest's memory here, which learns the hashes of its pages.
    departing: Option<Arc<Content>>,
    /// The destination's contents by their numbers less one; the others are memory.
    contents: Vec<DescribedContent>,
    /// Pages that were found in content that was sent before, in memory, on disks, and in files
    /// with retained pages.
    referenced: [AtomicU64; 4],
    owed: Mutex<Owed>,
    /// Pages sent by reference or as deltas, and those of them that were reported missing.
    rebuilt: AtomicU64,
    missed: AtomicU64,
    /// Experience of streams to this host: a new stream begins with it.
    pub(crate) experience: Arc<Experience>,
}

impl Referring {
    /// Creates the state. `unsent`: pages that the destination lacks from an earlier part of the
    /// migration.
    pub(crate) fn new(
        references: References,
        deltas: Deltas,
        experience: Arc<Experience>,
        block_pages: &[u64],
        unsent: Option<PageBits>,
    ) -> Referring {
        let owed = match unsent {
            Some(unsent) => Owed::since(block_pages, unsent),
            None => Owed::new(block_pages),
        };
        Referring {
            by: references.by,
            always: references.always,
            known: ContentIndex::new(references.known_bytes),
            deltas,
            sent_pages: SentPages::new(deltas.cache_bytes),
            departing: None,
            contents: Vec::new(),
            referenced: Default::default(),
            owed: Mutex::new(owed),
            rebuilt: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            experience,
        }
    }

    /// Takes in what the destination says of its contents.
    pub(crate) fn describing(self, contents: Vec<DescribedContent>) -> Referring {
        Referring { contents, ..self }
    }

    fn described(&self, content: u16) -> Option<&DescribedContent> {
        self.contents.get(usize::from(content).checked_sub(1)?)
    }

    /// Returns whether a page is there earlier if the destination reads it than if it is sent: a
    /// disk may be slower than the wire. `streams`: how many share the wire.
    fn is_fast(&self, content: u16, streams: usize) -> bool {
        let reads = self.described(content).and_then(|content| content.read_bytes_per_s);
        let carries = self.experience.wire_bytes_per_s().map(|rate| rate * streams as f64);
        reads.zip(carries).is_none_or(|(reads, carries)| reads as f64 >= carries)
    }

    /// Counts a page that is sent by reference.
    fn count(&self, content: u16) {
        let kind = self.described(content).map_or(ContentKind::Memory, |content| content.kind);
        let place = match kind {
            _ if content == 0 => 0,
            ContentKind::Memory | ContentKind::Other => 1,
            ContentKind::Disk => 2,
            ContentKind::Spilled => 3,
        };
        self.referenced[place].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the pages that were sent by reference.
    pub(crate) fn referenced(&self) -> ReferencedPages {
        let [own, memory, disk, spilled] =
            self.referenced.each_ref().map(|count| count.load(Ordering::Relaxed));
        ReferencedPages { own, memory, disk, spilled }
    }

    /// Notes the hashes of pages for a guest's memory that is retained here when it has left.
    pub(crate) fn noting(self, departing: Option<Arc<Content>>) -> Referring {
        Referring { departing, ..self }
    }

    /// Forgets the hashes of pages that the guest may have written since they were sent.
    pub(crate) fn forget_hashes(&self, block: u16, pages: &[PageRange]) {
        if let Some(departing) = &self.departing {
            pages.iter().for_each(|run| departing.forget(block, *run));
        }
    }

    fn owed(&self) -> MutexGuard<'_, Owed> {
        // Counts and bits, each changed by one assignment.
        self.owed.lock()
    }

    /// Returns what a chooser needs to know for a unit of this round.
    pub(crate) fn prospect(&self, round: u32) -> Prospect {
        let (rebuilt, missed) =
            (self.rebuilt.load(Ordering::Relaxed), self.missed.load(Ordering::Relaxed));
        Prospect {
            possible: self.by != ReferenceUse::None,
            always: self.always,
            foreign: self.known.foreign() > 0,
            missing: if rebuilt == 0 { 0.0 } else { (missed as f64 / rebuilt as f64).min(1.0) },
            wire_bytes_per_s: self.experience.wire_bytes_per_s(),
            // Nothing was sent before the first round.
            deltas: round > 0 && self.sent_pages.is_on(),
            always_deltas: self.deltas.always,
        }
    }

    /// Notes that a unit of so many pages is about to be sent.
    pub(crate) fn begins(&self, packing: Packing, pages: u64) {
        if packing.reference != Extent::No || packing.delta != Differing::No {
            self.owed().risk(pages);
        }
    }

    /// Notes that a unit was sent, by a stream that has learned from it.
    pub(crate) fn sent(&self, sent: &UnitSent, chooser: &Chooser) {
        self.rebuilt.fetch_add(sent.reference.pages + sent.delta.pages, Ordering::Relaxed);
        chooser.pass_on(&self.experience);
    }

    /// Discards the versions of pages that are sent without being kept: they no longer match what
    /// the destination has.
    pub(crate) fn outdate(
        &self,
        packing: Packing,
        block: u16,
        pages: &[PageRange],
        zeros: &[PageRange],
    ) {
        let has_others = self.sent_pages.has_others();
        let is_outdated = |page: &u64| match packing.delta {
            Differing::All => false,
            Differing::Sample => has_others && !is_sampled(*page),
            Differing::No => has_others || is_sampled(*page),
        };
        let numbers = |runs: &[PageRange]| {
            runs.iter().flat_map(|run| run.first..run.end()).collect::<Vec<_>>()
        };
        let outdated = numbers(pages).into_iter().filter(is_outdated);
        let zeroed = numbers(zeros).into_iter().filter(|page| has_others || is_sampled(*page));
        outdated.chain(zeroed).for_each(|page| self.sent_pages.forget(block, page));
    }

    /// Discards all versions, because what was sent on a stream may not have arrived.
    pub(crate) fn forget_sent(&self) {
        self.sent_pages.clear();
    }

    /// Takes in digests of the destination's content.
    pub(crate) fn add_digests(&self, digests: &Digests) -> Result<(), Failure> {
        if self.by != ReferenceUse::All || digests.place.content == 0 {
            let detail = "the destination sent content that was not requested";
            return Err(Failure::new(FailureCode::ProtocolBroken, detail));
        }
        self.known.add(digests);
        Ok(())
    }

    /// Takes in pages that the destination could not reconstruct.
    pub(crate) fn missing(&self, runs: &[BlockRun]) -> Result<(), Failure> {
        self.owed()
            .missing(runs)
            .map_err(|error| Failure::new(FailureCode::ProtocolBroken, error.to_string()))?;
        // No more than were at risk. Before that is checked, the sum might exceed any number.
        self.missed.fetch_add(runs.iter().map(|run| run.count).sum(), Ordering::Relaxed);
        Ok(())
    }

    /// Notes that everything sent has been applied.
    pub(crate) fn settled(&self) {
        self.owed().settled();
    }

    /// Returns the number of pages owed.
    pub(crate) fn waiting(&self) -> u64 {
        self.owed().waiting()
    }

    /// Notes a unit that was not sent, or may not have arrived.
    pub(crate) fn owe(&self, unit: &Unit) {
        let mut owed = self.owed();
        owed.owe(unit.block, &unit.pages);
        owed.owe(unit.block, &unit.zeros);
    }

    /// Returns all pages owed.
    pub(crate) fn unsent(&self) -> PageBits {
        self.owed().pages().clone()
    }

    /// Takes the pages owed within a range, to be sent.
    pub(crate) fn take(&self, block: u16, within: PageRange, out: &mut Vec<PageRange>) {
        self.owed().take(block, within, out);
    }

    /// Returns the number of pages reported as missing.
    pub(crate) fn missing_pages(&self) -> u64 {
        self.owed().reported()
    }
}

/// Knowledge that one stream uses.
pub(crate) struct OfStream<'a> {
    pub(crate) referring: &'a Referring,
    pub(crate) dispatch: &'a Dispatch,
    pub(crate) stream: usize,
    /// Number of streams that share the wire.
    pub(crate) streams: usize,
    pub(crate) round: u32,
}

impl Knowledge for OfStream<'_> {
    fn find(&self, hash: &PageHash, block: u16, page: u64) -> Option<Place> {
        if let Some(departing) = &self.referring.departing {
            departing.note(block, page, prefix(hash));
        }
        let place = self.referring.known.find(prefix(hash))?;
        // What is on its way on another stream may arrive after this.
        if place.content == 0 && !self.dispatch.is_settled(self.stream, place.block, place.page) {
            return None;
        }
        if place.content > 0 && !self.referring.is_fast(place.content, self.streams) {
            return None;
        }
        if self.referring.owed().was_missing(block, page) {
            return None;
        }
        self.referring.count(place.content);
        Some(place)
    }

    fn sent(&self, hash: &PageHash, block: u16, page: u64) {
        self.referring.known.insert(prefix(hash), Place { content: 0, block, page });
    }

    fn sent_before(&self, block: u16, page: u64, old: &mut [u8]) -> bool {
        self.referring.sent_pages.find(block, page, old)
            && !self.referring.owed().was_missing(block, page)
    }

    fn sends(&self, block: u16, page: u64, bytes: &[u8]) {
        self.referring.sent_pages.keep(self.round, block, page, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_slower_than_the_wire_is_not_referred_to() {
        let referring =
            Referring::new(References::default(), Deltas::default(), Arc::default(), &[8], None);
        let disk =
            |read_bytes_per_s| DescribedContent { kind: ContentKind::Disk, read_bytes_per_s };
        let memory = DescribedContent { kind: ContentKind::Memory, read_bytes_per_s: None };
        let referring = referring.describing(vec![memory, disk(Some(100)), disk(None)]);
        let fast = |streams| [1, 2, 3, 9].map(|content| referring.is_fast(content, streams));
        assert_eq!(fast(4), [true; 4], "the wire's rate is unknown");
        referring.experience.set_wire(50.0);
        assert_eq!((fast(2), fast(3)), ([true; 4], [true, false, true, true]));
        [0, 1, 2, 2, 9].into_iter().for_each(|content| referring.count(content));
        let expected = ReferencedPages { own: 1, memory: 2, disk: 2, spilled: 0 };
        assert_eq!(referring.referenced(), expected);
    }

    #[test]
    fn the_table_has_room_for_all_pages_of_a_guest() {
        // 10 GiB, a size just above a power of two, and 64 GiB.
        for pages in [2_621_440, 2_097_153, 16_777_216] {
            assert!(ContentIndex::new(References::known_bytes(pages)).most() >= pages, "{pages}");
        }
        assert_eq!(References::known_bytes(1), References::KNOWN_BYTES);
        assert!(ContentIndex::new(References::known_bytes(u64::MAX)).most() > 29_000_000);
    }
}
