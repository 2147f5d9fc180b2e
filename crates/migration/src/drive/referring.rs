//! The source's side of references and deltas: what its streams share of what the destination has, and what is owed because a
//! guess failed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_lanes::{Differing, Knowledge, Packing, Referring as Asked, UnitSent, is_sampled};
use godwit_ram::PageRange;
use godwit_wire::{BlockRun, Digests, PageHash, Place, prefix};

use super::dispatch::Dispatch;
use crate::board::Unit;
use crate::encoding::{Chooser, Experience, Prospect};
use crate::failure::{Failure, FailureCode};
use crate::reference::{Known, Owed, PageBits, ReferenceUse, SentPages};

/// How a source tells pages by their content.
#[derive(Clone, Copy, Debug)]
pub struct References {
    /// What by; no more than the destination agreed to.
    pub by: ReferenceUse,
    /// Wherever it is possible, not only where it pays.
    pub always: bool,
    /// Memory for what is known of the destination's content, bytes.
    pub known_bytes: u64,
}

impl References {
    /// Memory for what is known of 1.8 million pages.
    pub const KNOWN_BYTES: u64 = 64 << 20;
}

impl Default for References {
    fn default() -> Self {
        References { by: ReferenceUse::None, always: false, known_bytes: References::KNOWN_BYTES }
    }
}

/// How a source tells pages by what differs from what it sent of them before.
#[derive(Clone, Copy, Debug)]
pub struct Deltas {
    /// Memory for what was sent, bytes; 0: none is told so.
    pub cache_bytes: u64,
    /// Wherever it is possible, not only where it pays.
    pub always: bool,
}

impl Deltas {
    /// Memory for what was sent of some 16,000 pages.
    pub const CACHE_BYTES: u64 = 64 << 20;
}

impl Default for Deltas {
    fn default() -> Self {
        Deltas { cache_bytes: Deltas::CACHE_BYTES, always: false }
    }
}

/// What is told by what the destination has, and what came of it.
#[derive(Debug)]
pub(crate) struct Referring {
    by: ReferenceUse,
    always: bool,
    known: Known,
    deltas: Deltas,
    sent_pages: SentPages,
    owed: Mutex<Owed>,
    /// Pages told by their content, and those that were missing then.
    told: AtomicU64,
    missed: AtomicU64,
    /// What streams to this host have learnt: a new stream begins with that.
    pub(crate) experience: Arc<Experience>,
}

impl Referring {
    /// `unsent`: pages that the destination lacks from before.
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
            known: Known::new(references.known_bytes),
            deltas,
            sent_pages: SentPages::new(deltas.cache_bytes),
            owed: Mutex::new(owed),
            told: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            experience,
        }
    }

    fn owed(&self) -> MutexGuard<'_, Owed> {
        // Counts and bits, each changed by one assignment.
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a chooser has to know for a unit of this round.
    pub(crate) fn prospect(&self, round: u32) -> Prospect {
        let (told, missed) = (self.told.load(Ordering::Relaxed), self.missed.load(Ordering::Relaxed));
        Prospect {
            possible: self.by != ReferenceUse::None,
            always: self.always,
            foreign: self.known.foreign() > 0,
            missing: if told == 0 { 0.0 } else { (missed as f64 / told as f64).min(1.0) },
            wire_bytes_per_s: self.experience.wire_bytes_per_s(),
            // Nothing was sent before the first round.
            deltas: round > 0 && self.sent_pages.is_on(),
            always_deltas: self.deltas.always,
        }
    }

    /// A unit of so many pages is about to be sent.
    pub(crate) fn begins(&self, packing: Packing, pages: u64) {
        if packing.reference != Asked::No || packing.delta != Differing::No {
            self.owed().risk(pages);
        }
    }

    /// A unit was sent, by a stream that has learnt from it.
    pub(crate) fn sent(&self, sent: &UnitSent, chooser: &Chooser) {
        self.told.fetch_add(sent.reference.pages + sent.delta.pages, Ordering::Relaxed);
        chooser.pass_on(&self.experience);
    }

    /// What is sent of some pages of a block is not kept: what was sent before is no longer what the destination has.
    pub(crate) fn outdate(&self, packing: Packing, block: u16, pages: &[PageRange], zeros: &[PageRange]) {
        let has_others = self.sent_pages.has_others();
        let is_outdated = |page: &u64| match packing.delta {
            Differing::All => false,
            Differing::Sample => has_others && !is_sampled(*page),
            Differing::No => has_others || is_sampled(*page),
        };
        let numbers =
            |runs: &[PageRange]| runs.iter().flat_map(|run| run.first..run.end()).collect::<Vec<_>>();
        let outdated = numbers(pages).into_iter().filter(is_outdated);
        let zeroed = numbers(zeros).into_iter().filter(|page| has_others || is_sampled(*page));
        outdated.chain(zeroed).for_each(|page| self.sent_pages.forget(block, page));
    }

    /// What was sent on a stream may not have arrived.
    pub(crate) fn forget_sent(&self) {
        self.sent_pages.clear();
    }

    /// The destination tells what it has.
    pub(crate) fn take_in(&self, digests: &Digests) -> Result<(), Failure> {
        if self.by != ReferenceUse::All || digests.place.content == 0 {
            let detail = "the destination told of content that nobody asked for";
            return Err(Failure::new(FailureCode::ProtocolBroken, detail));
        }
        self.known.take_in(digests);
        Ok(())
    }

    /// The destination could not make pages of what it was sent.
    pub(crate) fn missing(&self, runs: &[BlockRun]) -> Result<(), Failure> {
        self.owed()
            .missing(runs)
            .map_err(|error| Failure::new(FailureCode::ProtocolBroken, error.to_string()))?;
        // No more than were at risk: before that was known the sum might have been beyond any number.
        self.missed.fetch_add(runs.iter().map(|run| run.count).sum(), Ordering::Relaxed);
        Ok(())
    }

    /// Everything that was sent has been applied.
    pub(crate) fn settled(&self) {
        self.owed().settled();
    }

    /// Pages that are owed.
    pub(crate) fn waiting(&self) -> u64 {
        self.owed().waiting()
    }

    /// A unit that was not sent, or may not have arrived.
    pub(crate) fn owe(&self, unit: &Unit) {
        let mut owed = self.owed();
        owed.owe(unit.block, &unit.pages);
        owed.owe(unit.block, &unit.zeros);
    }

    /// All that is owed.
    pub(crate) fn unsent(&self) -> PageBits {
        self.owed().pages().clone()
    }

    /// Takes what is owed within a range, to be sent.
    pub(crate) fn take(&self, block: u16, within: PageRange, out: &mut Vec<PageRange>) {
        self.owed().take(block, within, out);
    }

    /// Pages that were told to be missing.
    pub(crate) fn missing_pages(&self) -> u64 {
        self.owed().told()
    }
}

/// What one stream goes by.
pub(crate) struct OfStream<'a> {
    pub(crate) referring: &'a Referring,
    pub(crate) dispatch: &'a Dispatch,
    pub(crate) stream: usize,
    pub(crate) round: u32,
}

impl Knowledge for OfStream<'_> {
    fn find(&self, hash: &PageHash, block: u16, page: u64) -> Option<Place> {
        let place = self.referring.known.find(prefix(hash))?;
        // What is on its way on another stream may arrive after this.
        if place.content == 0 && !self.dispatch.is_settled(self.stream, place.block, place.page) {
            return None;
        }
        (!self.referring.owed().was_missing(block, page)).then_some(place)
    }

    fn sent(&self, hash: &PageHash, block: u16, page: u64) {
        self.referring.known.insert(prefix(hash), Place { content: 0, block, page });
    }

    fn sent_before(&self, block: u16, page: u64, old: &mut [u8]) -> bool {
        self.referring.sent_pages.find(block, page, old) && !self.referring.owed().was_missing(block, page)
    }

    fn sends(&self, block: u16, page: u64, bytes: &[u8]) {
        self.referring.sent_pages.keep(self.round, block, page, bytes);
    }
}
