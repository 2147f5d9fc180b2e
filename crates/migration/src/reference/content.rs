//! Memory that a destination holds, and the digests by which a source finds pages in it. A page's
//! digest is computed when it is first requested, and may be of what the page held then: its user
//! verifies the content. While a guest arrives, its progress is recorded piece by piece.
//!
//! The memory of a guest that has left may be given up piece by piece ([`Content::shrink`]). Memory
//! that was given back to the kernel reads as zeros, which the guest's pages were not. So a piece
//! is dropped first: it has no digests any more, and is not read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_lanes::hash_page;
use godwit_ram::{PAGE_SIZE, PageRange, RamError, RamFile, Region};
use godwit_wire::{BlockRun, PAGE_SIZE as PAGE_BYTES, Place, prefix};
use parking_lot::{Mutex, MutexGuard};

use super::origins::Origins;
use super::piece::{DIGEST_PAGES, Piece, Prefixes};

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
    /// Held while pieces are given up: two at once would give up more than is needed.
    shrinking: Mutex<()>,
}

#[derive(Debug)]
struct Block {
    file: RamFile,
    pieces: Box<[Piece]>,
}

impl Content {
    /// Describes the memory of a guest, block by block.
    ///
    /// # Errors
    /// [`RamError::Io`]: the process has no free descriptors.
    pub fn of(regions: &[Arc<Region>]) -> Result<Content, RamError> {
        let block = |region: &Arc<Region>| {
            let file = RamFile::of(region)?;
            let pieces =
                (0..file.pages().div_ceil(DIGEST_PAGES)).map(|_| Piece::default()).collect();
            Ok(Block { file, pieces })
        };
        let blocks = regions.iter().map(block).collect::<Result<_, _>>()?;
        Ok(Content {
            blocks,
            arrived_pieces: Mutex::default(),
            shrinking: Mutex::default(),
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

    /// Drops pieces without data, and notes what is to be given up first. For a guest that has
    /// left. `hot`: memory that it wrote again and again.
    ///
    /// # Errors
    /// [`RamError::Io`]: the memory is gone.
    pub fn mark_departed(&self, hot: &[BlockRun]) -> Result<(), RamError> {
        self.blocks.iter().try_for_each(Block::drop_holes)?;
        for run in hot.iter().filter(|run| run.count > 0) {
            let Some(block) = self.blocks.get(usize::from(run.block)) else { continue };
            let last = run.first.saturating_add(run.count - 1);
            let pieces = (run.first / DIGEST_PAGES)..=(last / DIGEST_PAGES);
            pieces.map_while(|number| block.piece(number)).for_each(Piece::mark_hot);
        }
        Ok(())
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

    /// Returns the piece that contains a page.
    fn piece_of(&self, block: u16, page: u64) -> Option<&Piece> {
        self.blocks.get(usize::from(block))?.piece(page / DIGEST_PAGES)
    }

    /// Notes that the piece with that page has arrived. `is_noted`: each of its pages is zero or
    /// was noted ([`Content::note`]), so that nothing has to be computed, and it holds nothing that
    /// was not here before.
    pub fn note_arrival(&self, block: u16, page: u64, is_noted: bool) {
        let Some(of) = self.blocks.get(usize::from(block)) else { return };
        let number = page / DIGEST_PAGES;
        let Some(piece) = of.piece(number) else { return };
        if is_noted {
            return piece.mark_done();
        }
        if piece.arrives() {
            self.arrived_pieces().push((block, of.pages_of(number)));
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
        self.pieces().map(|(_, pages)| pages.count).sum()
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

    /// Gives up pieces until the digests of the others take at most so many bytes. The memory of
    /// these pieces is given back by [`Content::shrink`].
    pub fn shrink_digests(&self, most_bytes: u64) {
        let mut excess_bytes = self.digest_bytes().saturating_sub(most_bytes);
        for (block, number) in self.least_useful_first() {
            if excess_bytes == 0 {
                return;
            }
            if block.piece(number).is_some_and(Piece::drop_it) {
                excess_bytes = excess_bytes.saturating_sub(8 * block.pages_of(number).count);
            }
        }
    }

    /// Gives up pieces until the files occupy at most so many bytes, even if they are being read.
    /// Not for a guest that runs.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn shrink(&self, most_bytes: u64) -> Result<(), RamError> {
        let _only = self.shrinking.lock();
        for (block, number) in self.least_useful_first() {
            block.give_back_dropped(number)?;
        }
        for (block, number) in self.least_useful_first() {
            // Huge pages and pages of other sizes: only the kernel knows what a piece occupies.
            if self.taken_bytes() <= most_bytes {
                return Ok(());
            }
            if block.piece(number).is_some_and(Piece::drop_it) {
                block.give_back_dropped(number)?;
            }
        }
        Ok(())
    }

    /// Gives up one of [`Content::pieces`], and gives its memory back. Not for a guest that runs.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn drop_piece(&self, block: u16, piece: PageRange) -> Result<(), RamError> {
        let Some(block) = self.blocks.get(usize::from(block)) else { return Ok(()) };
        let number = piece.first / DIGEST_PAGES;
        if block.piece(number).is_some_and(Piece::drop_it) {
            block.give_back_dropped(number)?;
        }
        Ok(())
    }

    /// Returns the numbers of all pieces, also of dropped ones: first those that the guest has
    /// probably written since it left, and of these the last ones first.
    fn least_useful_first(&self) -> impl Iterator<Item = (&Block, u64)> {
        let of_heat = |hot: bool| {
            let numbers = |block: &'_ Block| (0..block.pieces.len() as u64).rev();
            let blocks = self.blocks.iter().rev();
            blocks.flat_map(move |block| numbers(block).map(move |number| (block, number))).filter(
                move |(block, number)| {
                    block.piece(*number).is_some_and(|piece| piece.is_hot() == hot)
                },
            )
        };
        of_heat(true).chain(of_heat(false))
    }

    /// Returns all pieces whose digests are computed together, as (block, pages).
    pub fn pieces(&self) -> impl Iterator<Item = (u16, PageRange)> + '_ {
        (0..).zip(&self.blocks).flat_map(|(number, block)| {
            let held = (0..).zip(&block.pieces).filter(|(_, piece)| piece.is_held());
            held.map(move |(piece, _)| (number, block.pages_of(piece)))
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
        if let (Some(piece), Ok(at)) =
            (self.piece_of(block, page), usize::try_from(page % DIGEST_PAGES))
        {
            piece.note(at, prefix, origin);
        }
    }

    /// Forgets what is known of pages that may have changed.
    pub fn forget(&self, block: u16, pages: PageRange) {
        let Some(of) = self.blocks.get(usize::from(block)) else { return };
        let mut rest = PageRange::new(0, of.file.pages()).intersect(pages);
        while let Some(piece) = of.piece(rest.first / DIGEST_PAGES).filter(|_| !rest.is_empty()) {
            let from = rest.first % DIGEST_PAGES;
            let (part, after) = rest.split(DIGEST_PAGES - from);
            let at = |page: u64| usize::try_from(page).unwrap_or(usize::MAX);
            piece.forget(at(from)..at(from + part.count));
            rest = after;
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
        if let Some(of) = self.piece_of(block, piece.first) {
            of.clear_by_origin(&mut prefixes, |origin| {
                let origin = usize::from(origin).checked_sub(1);
                origin.and_then(|origin| announced.get(origin)).is_some_and(|known| *known)
            });
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
        let Some(of) = block.piece(piece.first / DIGEST_PAGES) else { return Ok(Vec::new()) };
        let count = usize::try_from(piece.count).unwrap_or(usize::MAX);
        if !of.is_done() && of.is_held() {
            let known = of.prefixes().unwrap_or([0; _]);
            if known.iter().take(count).any(|prefix| *prefix == 0) {
                // If the piece is dropped meanwhile, its memory may have been given back before it
                // was read. Nothing is added then.
                of.add(&block.work_out(piece, &known)?);
            }
            of.mark_done();
        }
        let prefixes = of.prefixes().unwrap_or([0; _]);
        let prefixes = prefixes.get(..count).unwrap_or(&prefixes);
        Ok(if prefixes.iter().all(|prefix| *prefix == 0) { Vec::new() } else { prefixes.to_vec() })
    }

    /// Returns whether the [`Content::digests`] of a piece need no work.
    #[must_use]
    pub fn is_worked_out(&self, block: u16, piece: PageRange) -> bool {
        self.piece_of(block, piece.first).is_some_and(|piece| piece.is_done() || !piece.is_held())
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
        let gone = || RamError::Io {
            what: "find a page of",
            path: "a guest's memory".into(),
            source: std::io::ErrorKind::NotFound.into(),
        };
        let block = self.blocks.get(usize::from(place.block)).ok_or_else(gone)?;
        block.file.copy_out(place.page, to)?;
        // Checked after the read: a piece is dropped before its memory is given back.
        let last = place.page + (to.len() as u64).div_ceil(PAGE_SIZE).saturating_sub(1);
        let mut pieces = place.page / DIGEST_PAGES..=last / DIGEST_PAGES;
        let is_held = |number| block.piece(number).is_some_and(Piece::is_held);
        if pieces.all(is_held) { Ok(()) } else { Err(gone()) }
    }
}

impl Block {
    fn piece(&self, number: u64) -> Option<&Piece> {
        self.pieces.get(usize::try_from(number).ok()?)
    }

    /// Returns the pages of the piece with this number.
    fn pages_of(&self, number: u64) -> PageRange {
        let first = number * DIGEST_PAGES;
        PageRange::between(first, self.file.pages().min(first + DIGEST_PAGES))
    }

    /// Drops the pieces that were never written.
    fn drop_holes(&self) -> Result<(), RamError> {
        let data_from = |page| Ok(self.file.data_from(page)?.unwrap_or(u64::MAX));
        let mut next_data = data_from(0)?;
        for (number, piece) in (0..).zip(&self.pieces) {
            let pages = self.pages_of(number);
            if next_data < pages.first {
                next_data = data_from(pages.first)?;
            }
            if next_data >= pages.end() {
                piece.drop_it();
            }
        }
        Ok(())
    }

    /// Gives back the memory of a piece if it was dropped.
    fn give_back_dropped(&self, number: u64) -> Result<(), RamError> {
        if self.piece(number).is_some_and(Piece::take_owed) {
            self.file.punch(self.pages_of(number))?;
        }
        Ok(())
    }

    /// Computes the prefixes of a piece's pages that are not `known`. Returns 0 for these, and for
    /// zero pages.
    fn work_out(&self, piece: PageRange, known: &Prefixes) -> Result<Prefixes, RamError> {
        let mut prefixes = [0; _];
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
            let from = usize::try_from(data - piece.first).unwrap_or(usize::MAX);
            let of_pages = prefixes.iter_mut().zip(known).skip(from);
            for ((prefix_of, known), bytes) in of_pages.zip(bytes.chunks_exact(ZERO_PAGE.len())) {
                // A digest noted on arrival needs no work.
                if *known == 0 && bytes != ZERO_PAGE {
                    *prefix_of = prefix(&hash_page(bytes));
                }
            }
            at = pages.end();
        }
        Ok(prefixes)
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

    fn filled(folder: &tempfile::TempDir, name: &str, pages: u64) -> Arc<Region> {
        let region = Region::create(&folder.path().join(name), pages * PAGE_SIZE, None).unwrap();
        let whole = usize::try_from(pages * PAGE_SIZE).unwrap();
        region.copy_in(0, &vec![7; whole]).unwrap();
        Arc::new(region)
    }

    fn departed(regions: &[Arc<Region>], hot: &[BlockRun]) -> Content {
        let content = Content::of(regions).unwrap();
        content.mark_departed(hot).unwrap();
        content
    }

    fn held(content: &Content) -> Vec<(u16, u64)> {
        content.pieces().map(|(block, pages)| (block, pages.first / DIGEST_PAGES)).collect()
    }

    #[test]
    fn hot_memory_is_given_up_first_and_then_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let regions = [filled(&folder, "a", 4 * DIGEST_PAGES), filled(&folder, "b", 100)];
        // From the end of the first piece into the second, beyond the block, and in no block.
        let run = |block, first, count| BlockRun { block, first, count };
        let hot = [run(0, 511, 2), run(1, 90, u64::MAX), run(0, u64::MAX, 9), run(7, 0, 1)];
        let content = departed(&regions, &hot);
        let all = content.taken_bytes();
        let piece_bytes = DIGEST_PAGES * PAGE_SIZE;
        content.shrink(all).unwrap();
        assert_eq!((held(&content).len(), content.taken_bytes()), (5, all));
        content.shrink(all - 1).unwrap();
        assert_eq!(held(&content), [(0, 0), (0, 1), (0, 2), (0, 3)]);
        content.shrink(all - 100 * PAGE_SIZE - 1).unwrap();
        assert_eq!(held(&content), [(0, 0), (0, 2), (0, 3)]);
        content.shrink(5 * piece_bytes / 2).unwrap();
        assert_eq!(held(&content), [(0, 2), (0, 3)]);
        content.drop_piece(0, PageRange::new(2 * DIGEST_PAGES, DIGEST_PAGES)).unwrap();
        assert_eq!(held(&content), [(0, 3)]);
        content.shrink(0).unwrap();
        assert_eq!((content.pages(), content.digest_bytes(), content.taken_bytes()), (0, 0, 0));
    }

    #[test]
    fn the_limit_of_digests_gives_memory_up_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let content = departed(&[filled(&folder, "a", 2 * DIGEST_PAGES + 1)], &[]);
        content.shrink_digests(8 * (2 * DIGEST_PAGES + 1));
        assert_eq!(held(&content).len(), 3);
        content.shrink_digests(8 * 2 * DIGEST_PAGES - 1);
        assert_eq!((held(&content), content.digest_bytes()), (vec![(0, 0)], 8 * DIGEST_PAGES));
        // What was given up is given back, whatever the limit is.
        content.shrink(u64::MAX).unwrap();
        assert!(content.taken_bytes() < 2 * DIGEST_PAGES * PAGE_SIZE);
    }

    #[test]
    fn holes_take_nothing_and_are_not_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let region = Arc::new(Region::create(&path, 40 * DIGEST_PAGES * PAGE_SIZE, None).unwrap());
        for piece in [3, 4, 39] {
            region.copy_in((piece * DIGEST_PAGES + 9) * PAGE_SIZE, &[7; 4096]).unwrap();
        }
        let content = departed(&[region], &[]);
        assert_eq!((held(&content), content.pages()), (vec![(0, 3), (0, 4), (0, 39)], 3 * 512));
        let hole = Place { content: 1, block: 0, page: 5 };
        assert!(content.copy_out(hole, &mut [0; 4096]).is_err());
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(24))]

        /// Checks that what remains is as it was, and that nothing is known of the rest.
        #[test]
        fn dropped_memory_is_never_taken_for_zeros(
            steps in proptest::collection::vec((0_u64..6, 0_u64..4), 1..12),
            hot in proptest::collection::vec((0_u64..1300, 1_u64..700), 0..3),
        ) {
            const PAGES: u64 = 1300;
            let folder = tempfile::tempdir().unwrap();
            let region = filled(&folder, "a", PAGES);
            let byte = |page: u64| u8::try_from(page % 250).unwrap() + 1;
            for page in 0..PAGES {
                // Among the pages is a zero page in each piece.
                let byte = if page % 500 == 0 { 0 } else { byte(page) };
                region.copy_in(page * PAGE_SIZE, &[byte; 4096]).unwrap();
            }
            let hot: Vec<_> = hot
                .into_iter()
                .map(|(first, count)| BlockRun { block: 0, first, count })
                .collect();
            let content = departed(&[region], &hot);
            for (kind, piece) in steps {
                let pages = content.blocks[0].pages_of(piece);
                match kind {
                    0 => content.shrink(content.taken_bytes().saturating_sub(1)).unwrap(),
                    1 => content.shrink_digests(content.digest_bytes().saturating_sub(1)),
                    2 => content.drop_piece(0, pages).unwrap(),
                    3 => content.note(0, pages.first + 1, 5),
                    _ => drop(content.digests(0, pages).unwrap()),
                }
                let held = held(&content);
                proptest::prop_assert!(content.worked_out() <= content.pages());
                for number in 0..3 {
                    let is_held = held.contains(&(0, number));
                    let pages = content.blocks[0].pages_of(number);
                    let mut copy = vec![9; usize::try_from(pages.len_bytes()).unwrap()];
                    let place = Place { content: 1, block: 0, page: pages.first };
                    proptest::prop_assert_eq!(content.copy_out(place, &mut copy).is_ok(), is_held);
                    let digests = content.digests(0, pages).unwrap();
                    proptest::prop_assert_eq!(digests.is_empty(), !is_held);
                    if !is_held {
                        proptest::prop_assert!(content.is_worked_out(0, pages));
                        continue;
                    }
                    for (page, bytes) in (pages.first..).zip(copy.chunks_exact(4096)) {
                        let byte = if page % 500 == 0 { 0 } else { byte(page) };
                        proptest::prop_assert!(bytes.iter().all(|found| *found == byte));
                    }
                }
            }
            content.shrink(u64::MAX).unwrap();
            let held_bytes = content.pages() * PAGE_SIZE;
            proptest::prop_assert!(content.taken_bytes() <= held_bytes, "limit in what is held");
        }
    }

    #[test]
    fn known_pages_are_not_hashed_again() {
        let folder = tempfile::tempdir().unwrap();
        let content = Content::of(&[filled(&folder, "a", 3 * DIGEST_PAGES - 1)]).unwrap();
        let computed = prefix(&hash_page(&[7; 4096]));
        for page in 0..content.pages() {
            content.note(0, page, 5);
        }
        // From the first piece into the last, and beyond the block.
        content.forget(0, PageRange::new(DIGEST_PAGES - 1, DIGEST_PAGES + 2));
        content.forget(0, PageRange::new(3 * DIGEST_PAGES - 2, u64::MAX));
        content.forget(1, PageRange::new(0, 1));
        let digests: Vec<u64> =
            content.pieces().flat_map(|(_, piece)| content.digests(0, piece).unwrap()).collect();
        let forgotten = |page: u64| (511..1025).contains(&page) || page == 3 * DIGEST_PAGES - 2;
        assert_eq!(digests.len() as u64, content.pages());
        for (page, digest) in (0..).zip(digests) {
            assert_eq!(digest, if forgotten(page) { computed } else { 5 }, "{page}");
        }
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
