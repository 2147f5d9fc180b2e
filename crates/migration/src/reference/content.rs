//! Memory that a destination holds, and the digests by which a source finds pages in it. A page's
//! digest is computed when it is first requested, and may be of what the page held then: its user
//! verifies the content. While a guest arrives, its progress is recorded piece by piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use godwit_lanes::hash_page;
use godwit_ram::{PAGE_SIZE, PageRange, RamError, RamFile, Region};
use godwit_wire::{PAGE_SIZE as PAGE_BYTES, Place, prefix};
use parking_lot::{Mutex, MutexGuard};

use super::origins::{Origin, Origins};

/// Pages whose digests are computed together: 2 MiB.
pub const DIGEST_PAGES: u64 = 512;
/// Pages read in one call.
const READ_PAGES: u64 = 64;
static ZERO_PAGE: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Memory of a guest that is or was here.
#[derive(Debug)]
pub struct Content {
    blocks: Vec<Block>,
    /// Pieces that have arrived since the guest began to arrive, in that order.
    arrived_pieces: Mutex<Vec<(u16, PageRange)>>,
    /// Whether the guest has not arrived completely yet.
    arriving: AtomicBool,
    /// Other guests' memory that its pages were copied from.
    origins: Origins,
}

#[derive(Debug)]
struct Block {
    file: RamFile,
    /// Prefix by page; 0: a zero page, not computed, or written since.
    prefixes: Box<[AtomicU64]>,
    /// By page: the other guest's memory that it was copied from and still equals.
    origins: Box<[Origin]>,
    /// Whether digests are computed, by [`DIGEST_PAGES`].
    done: Box<[AtomicBool]>,
    /// Whether the piece has arrived since the guest began to arrive, by [`DIGEST_PAGES`].
    arrived: Box<[AtomicBool]>,
}

impl Content {
    /// Describes the memory of a guest, block by block.
    ///
    /// # Errors
    /// [`RamError::Io`]: the process has no free descriptors.
    pub fn of(regions: &[Arc<Region>]) -> Result<Content, RamError> {
        let block = |region: &Arc<Region>| {
            let file = RamFile::of(region)?;
            let prefixes = (0..file.pages()).map(|_| AtomicU64::new(0)).collect();
            let origins = (0..file.pages()).map(|_| Origin::default()).collect();
            let flags = || {
                (0..file.pages().div_ceil(DIGEST_PAGES)).map(|_| AtomicBool::new(false)).collect()
            };
            let (done, arrived) = (flags(), flags());
            Ok(Block { file, prefixes, origins, done, arrived })
        };
        let blocks = regions.iter().map(block).collect::<Result<_, _>>()?;
        Ok(Content {
            blocks,
            arrived_pieces: Mutex::default(),
            arriving: AtomicBool::new(false),
            origins: Origins::default(),
        })
    }

    /// Describes the memory of a guest that is about to arrive ([`Content::mark_arrived`]).
    ///
    /// # Errors
    /// As [`Content::of`].
    pub fn of_arriving(regions: &[Arc<Region>]) -> Result<Content, RamError> {
        let content = Content::of(regions)?;
        content.arriving.store(true, Ordering::Relaxed);
        Ok(content)
    }

    /// Returns whether the guest is still arriving.
    #[must_use]
    pub fn is_arriving(&self) -> bool {
        self.arriving.load(Ordering::Relaxed)
    }

    /// Notes that the guest has arrived.
    pub fn mark_arrived(&self) {
        self.arriving.store(false, Ordering::Relaxed);
    }

    fn arrived_pieces(&self) -> MutexGuard<'_, Vec<(u16, PageRange)>> {
        // A list, changed by one call.
        self.arrived_pieces.lock()
    }

    /// Notes that the piece with that page has arrived. `is_noted`: each of its pages is zero or
    /// was noted ([`Content::note`]), so that nothing has to be computed, and it holds nothing that
    /// was not here before.
    pub fn note_arrival(&self, block: u16, page: u64, is_noted: bool) {
        let Some(of) = self.blocks.get(usize::from(block)) else { return };
        let number = page / DIGEST_PAGES;
        let Some(place) = usize::try_from(number).ok().filter(|place| *place < of.arrived.len())
        else {
            return;
        };
        if is_noted {
            return of.done[place].store(true, Ordering::Release);
        }
        if !of.arrived[place].swap(true, Ordering::Relaxed) {
            let first = number * DIGEST_PAGES;
            self.arrived_pieces().push((
                block,
                PageRange::between(first, of.file.pages().min(first + DIGEST_PAGES)),
            ));
        }
    }

    /// Returns the pieces that have arrived after so many others.
    #[must_use]
    pub fn arrived_since(&self, count: usize) -> Vec<(u16, PageRange)> {
        self.arrived_pieces().get(count..).unwrap_or_default().to_vec()
    }

    /// Returns the number of its pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.file.pages()).sum()
    }

    /// Returns the memory that its digests take, bytes.
    #[must_use]
    pub fn digest_bytes(&self) -> u64 {
        8 * self.pages()
    }

    /// Returns the memory that its files occupy, bytes.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.file.taken_bytes()).sum()
    }

    /// Returns its memory to the kernel in steps of so many bytes, even if it is being read. Not
    /// for a guest that runs.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn empty(&self, step_bytes: u64) -> Result<(), RamError> {
        self.blocks.iter().try_for_each(|block| block.file.empty(step_bytes))
    }

    /// Returns all pieces whose digests are computed together, as (block, pages).
    pub fn pieces(&self) -> impl Iterator<Item = (u16, PageRange)> + '_ {
        (0..).zip(&self.blocks).flat_map(|(number, block)| {
            PageRange::new(0, block.file.pages())
                .chunks(DIGEST_PAGES)
                .map(move |piece| (number, piece))
        })
    }

    /// Notes that a page now holds content with that prefix. 0: its content has changed and is
    /// unknown.
    pub fn note(&self, block: u16, page: u64, prefix: u64) {
        self.note_copy(block, page, prefix, 0);
    }

    /// Notes a page that was copied from another guest's memory, with the number that
    /// [`Content::origin`] returned.
    pub fn note_copy(&self, block: u16, page: u64, prefix: u64, origin: u8) {
        let (Some(block), Ok(page)) = (self.blocks.get(usize::from(block)), usize::try_from(page))
        else {
            return;
        };
        if let (Some(known), Some(of)) = (block.prefixes.get(page), block.origins.get(page)) {
            known.store(prefix, Ordering::Relaxed);
            of.set(origin);
        }
    }

    /// Returns the number of another memory from which pages are copied; 0: there are too many.
    #[must_use]
    pub fn origin(&self, of: &Arc<Content>) -> u8 {
        self.origins.number(of)
    }

    /// Returns the digests of one of [`Content::pieces`] without copies of what is announced
    /// anyway, as (first page, digests), without zeros at either end. Returns `None` if nothing is
    /// left.
    ///
    /// # Errors
    /// As [`Content::digests`].
    pub fn news(
        &self,
        block: u16,
        piece: PageRange,
        is_announced: impl Fn(&Arc<Content>) -> bool,
    ) -> Result<Option<(u64, Vec<u64>)>, RamError> {
        let mut prefixes = self.digests(block, piece)?;
        let announced = self.origins.which(is_announced);
        let origins = self.blocks.get(usize::from(block)).map_or(&[][..], |block| &block.origins);
        let first = usize::try_from(piece.first).unwrap_or(usize::MAX);
        for (prefix, origin) in prefixes.iter_mut().zip(origins.get(first..).unwrap_or_default()) {
            let origin = usize::from(origin.number()).checked_sub(1);
            if origin.and_then(|origin| announced.get(origin)).is_some_and(|known| *known) {
                *prefix = 0;
            }
        }
        let is_news = |prefix: &u64| *prefix != 0;
        let (Some(from), Some(last)) =
            (prefixes.iter().position(is_news), prefixes.iter().rposition(is_news))
        else {
            return Ok(None);
        };
        prefixes.truncate(last + 1);
        Ok(Some((piece.first + from as u64, prefixes.split_off(from))))
    }

    /// Returns the digests of one of [`Content::pieces`], computing those that are unknown. The
    /// result is empty if no page of it can be announced.
    ///
    /// # Errors
    /// [`RamError::Io`]: the memory is gone.
    pub fn digests(&self, block: u16, piece: PageRange) -> Result<Vec<u64>, RamError> {
        let Some(block) = self.blocks.get(usize::from(block)) else { return Ok(Vec::new()) };
        let place = |page: u64| usize::try_from(page).unwrap_or(usize::MAX);
        let Some(done) = block.done.get(place(piece.first / DIGEST_PAGES)) else {
            return Ok(Vec::new());
        };
        if !done.load(Ordering::Acquire) {
            block.work_out(piece)?;
            done.store(true, Ordering::Release);
        }
        let known = block.prefixes.get(place(piece.first)..place(piece.end())).unwrap_or_default();
        let prefixes: Vec<u64> =
            known.iter().map(|prefix| prefix.load(Ordering::Relaxed)).collect();
        Ok(if prefixes.iter().all(|prefix| *prefix == 0) { Vec::new() } else { prefixes })
    }

    /// Returns whether the [`Content::digests`] of a piece need no work.
    #[must_use]
    pub fn is_worked_out(&self, block: u16, piece: PageRange) -> bool {
        let done = self.blocks.get(usize::from(block)).map_or(&[][..], |block| &block.done);
        let place = usize::try_from(piece.first / DIGEST_PAGES).unwrap_or(usize::MAX);
        done.get(place).is_some_and(|done| done.load(Ordering::Acquire))
    }

    /// Returns the number of pages whose digests need no work.
    #[must_use]
    pub fn worked_out(&self) -> u64 {
        let done = self.pieces().filter(|(block, piece)| self.is_worked_out(*block, *piece));
        done.map(|(_, piece)| piece.count).sum()
    }

    /// Copies pages from a place on, with their present content.
    ///
    /// # Errors
    /// [`RamError::Io`]: it does not have these pages, or no longer.
    pub fn copy_out(&self, place: Place, to: &mut [u8]) -> Result<(), RamError> {
        match self.blocks.get(usize::from(place.block)) {
            Some(block) => block.file.copy_out(place.page, to),
            None => Err(RamError::Io {
                what: "find a block of",
                path: "a guest's memory".into(),
                source: std::io::ErrorKind::NotFound.into(),
            }),
        }
    }
}

impl Block {
    fn work_out(&self, piece: PageRange) -> Result<(), RamError> {
        let mut bytes = vec![0; usize::try_from(READ_PAGES * PAGE_SIZE).unwrap_or(0)];
        let mut at = piece.first;
        while at < piece.end() {
            // What was never written is not read either.
            let Some(data) = self.file.data_from(at)?.filter(|data| *data < piece.end()) else {
                break;
            };
            let pages = PageRange::between(data, piece.end().min(data + READ_PAGES));
            let bytes = bytes
                .get_mut(..usize::try_from(pages.len_bytes()).unwrap_or(0))
                .unwrap_or_default();
            self.file.copy_out(data, bytes)?;
            for (page, bytes) in (pages.first..).zip(bytes.chunks_exact(ZERO_PAGE.len())) {
                let known = usize::try_from(page).ok().and_then(|page| self.prefixes.get(page));
                // A digest noted on arrival needs no work.
                if let Some(known) = known.filter(|known| known.load(Ordering::Relaxed) == 0) {
                    let digest = if bytes == ZERO_PAGE { 0 } else { prefix(&hash_page(bytes)) };
                    known.store(digest, Ordering::Relaxed);
                }
            }
            at = pages.end();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_pages_and_zero_pages_have_none() {
        let folder = tempfile::tempdir().unwrap();
        let region = |name: &str, pages: u64| {
            Arc::new(Region::create(&folder.path().join(name), pages * PAGE_SIZE, None).unwrap())
        };
        let regions = [region("a", 1300), region("b", 3)];
        for page in [0, 5, 700, 1299] {
            regions[0]
                .copy_in(page * PAGE_SIZE, &[u8::try_from(page % 251).unwrap() + 1; 4096])
                .unwrap();
        }
        let content = Content::of(&regions).unwrap();
        let pieces: Vec<_> = content.pieces().collect();
        assert_eq!((pieces.len(), content.pages(), content.digest_bytes()), (4, 1303, 1303 * 8));
        let mut nonzero = Vec::new();
        for (block, piece) in pieces {
            let digests = content.digests(block, piece).unwrap();
            assert_eq!(digests, content.digests(block, piece).unwrap());
            nonzero.extend((piece.first..).zip(digests).filter(|(_, digest)| *digest != 0));
        }
        let digest = |byte| prefix(&hash_page(&[byte; 4096]));
        assert_eq!(
            nonzero,
            [(0, digest(1)), (5, digest(6)), (700, digest(199)), (1299, digest(45))]
        );
        let mut page = [0; 4096];
        content.copy_out(Place { content: 1, block: 0, page: 5 }, &mut page).unwrap();
        assert_eq!(page, [6; 4096]);
        assert!(content.copy_out(Place { content: 1, block: 2, page: 0 }, &mut page).is_err());
        assert!(content.copy_out(Place { content: 1, block: 1, page: 3 }, &mut page).is_err());
        drop(regions);
        content.empty(1 << 20).unwrap();
        assert!(
            content.taken_bytes() == 0
                && content.copy_out(Place { content: 1, block: 0, page: 5 }, &mut page).is_err()
        );
    }

    #[test]
    fn copies_of_known_notifications_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let regions =
            [Arc::new(Region::create(&folder.path().join("a"), 8 * PAGE_SIZE, None).unwrap())];
        let (original, copy) = (Content::of(&regions).unwrap(), Content::of(&regions).unwrap());
        let original = Arc::new(original);
        let origin = copy.origin(&original);
        assert_eq!((origin, copy.origin(&original)), (1, 1));
        for page in 1..6 {
            copy.note(0, page, 10 + page);
        }
        for page in [1, 3, 5] {
            copy.note_copy(0, page, 10 + page, origin);
        }
        let news = |is_announced: bool| {
            let piece = PageRange::new(0, 8);
            copy.note_arrival(0, 0, true);
            copy.news(0, piece, |content| is_announced && Arc::ptr_eq(content, &original)).unwrap()
        };
        assert_eq!(news(true), Some((2, vec![12, 0, 14])));
        assert_eq!(news(false), Some((1, vec![11, 12, 13, 14, 15])));
        // A page written since is no longer a copy.
        copy.note(0, 5, 7);
        assert_eq!(news(true), Some((2, vec![12, 0, 14, 7])));
        [2, 4, 5].into_iter().for_each(|page| copy.note(0, page, 0));
        assert_eq!(news(true), None);
        drop(original);
        assert_eq!(
            copy.news(0, PageRange::new(0, 8), |_| true).unwrap(),
            Some((1, vec![11, 0, 13]))
        );
    }
}
