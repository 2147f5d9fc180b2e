//! Memory that a destination holds, and the digests by which a source finds pages in it. A page's
//! digest is computed when it is first requested, and may be of what the page held then: its user
//! verifies the content. While a guest arrives, its progress is recorded piece by piece.
//!
//! The memory of a guest that has left may be given up piece by piece ([`Content::shrink`]). Memory
//! that was given back to the kernel reads as zeros, which the guest's pages were not. So a piece
//! is dropped first: it has no digests any more, and is not read. Pieces may move to a file on a
//! disk instead ([`Content::spill`]), which is content like any other.
//!
//! An image of a disk is content as well ([`Content::of_disk`]): most of a guest's page cache is in
//! it. A reference names a page by its digest, so it does not matter what a part of the image
//! means: the clusters of a qcow2 image are aligned, and their mapping is not read. (What qcow2 has
//! compressed is not found.) Somebody may write to the image meanwhile; a digest is a guess there
//! as everywhere.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_lanes::{Page, hash_pages, pages_of};
use godwit_ram::{PAGE_SIZE, PageFile, PageRange, RamError, Region};
use godwit_types::ContentKind;
use godwit_wire::{BlockRun, PAGE_SIZE as PAGE_BYTES, Place, prefix};
use parking_lot::{Mutex, MutexGuard};

use super::origins::Origins;
use super::piece::{DIGEST_PAGES, Digested, Piece, Prefixes, pieces};
use super::store::{SealedFile, Store};

/// Pages read in one call.
const READ_PAGES: u64 = 64;
/// Minimum number of known pages that are not read: a call takes as long as reading some pages.
const LEAST_SKIPPED_PAGES: u64 = 16;
static ZERO_PAGE: Page = [0; PAGE_BYTES as usize];

/// Memory of a guest that is or was here, or a file with pages of guests.
#[derive(Debug)]
pub struct Content {
    kind: ContentKind,
    blocks: Vec<Block>,
    /// Pieces that have arrived since the guest began to arrive, in that order.
    arrived_pieces: Mutex<Vec<(u16, PageRange)>>,
    /// Whether the guest has not arrived completely yet.
    arriving: AtomicBool,
    /// Other guests' memory that its pages were copied from.
    origins: Origins,
    /// Held while pieces are given up: two at once would give up more than is needed.
    shrinking: Mutex<()>,
    /// Rate at which its file was read last, bytes per second; 0: unknown.
    read_bytes_per_s: AtomicU64,
    /// Pieces that were moved into it.
    moved_in: AtomicU64,
    /// Pages that other guests took from it.
    taken_pages: AtomicU64,
}

#[derive(Debug)]
struct Block {
    file: Store,
    pieces: Arc<[Piece]>,
}

impl Block {
    fn new(file: Store) -> Block {
        let pieces = pieces(file.pages());
        Block { file, pieces }
    }
}

impl Content {
    /// Describes the memory of a guest, block by block.
    ///
    /// # Errors
    /// [`RamError::Io`]: the process has no free descriptors.
    pub fn of(regions: &[Arc<Region>]) -> Result<Content, RamError> {
        let block = |region: &Arc<Region>| Store::of_region(region).map(Block::new);
        let blocks = regions.iter().map(block).collect::<Result<_, _>>()?;
        Ok(Content::new(ContentKind::Memory, blocks))
    }

    fn new(kind: ContentKind, blocks: Vec<Block>) -> Content {
        Content {
            kind,
            blocks,
            arrived_pieces: Mutex::default(),
            shrinking: Mutex::default(),
            arriving: AtomicBool::new(false),
            origins: Origins::default(),
            read_bytes_per_s: AtomicU64::new(0),
            moved_in: AtomicU64::new(0),
            taken_pages: AtomicU64::new(0),
        }
    }

    /// Describes an image of a disk with what is known of it; [`Content::index`] adds to that.
    #[must_use]
    pub fn of_disk(file: PageFile, digested: &Digested) -> Content {
        let pieces = Arc::clone(&digested.0);
        let content = Content::new(
            ContentKind::Disk,
            vec![Block { file: Store::Plain(file), pieces: Arc::clone(&pieces) }],
        );
        let known = (0..).zip(&*pieces).filter(|(_, piece)| piece.prefixes().is_some());
        let known = known.map(|(number, _)| (0, content.blocks[0].pages_of(number)));
        content.arrived_pieces().extend(known);
        content
    }

    /// Creates content without pages in an empty file. As many as there are in `from` can be moved
    /// into it ([`Content::spill`]).
    ///
    /// # Errors
    /// [`RamError::Io`]: the kernel has no random numbers.
    pub fn for_spilled(from: &Content, file: File, path: &Path) -> Result<Content, RamError> {
        // Pieces at the end of a block are shorter, and take a whole place.
        let count = from.blocks.iter().map(|block| block.pieces.len()).sum::<usize>();
        let file = SealedFile::new(file, path, count as u64 * DIGEST_PAGES)?;
        let pieces = (0..count).map(|_| Piece::absent()).collect();
        let block = Block { file: Store::Sealed(file), pieces };
        Ok(Content::new(ContentKind::Spilled, vec![block]))
    }

    /// Returns what it is.
    #[must_use]
    pub fn kind(&self) -> ContentKind {
        self.kind
    }

    /// Returns the rate at which its file was read last, bytes per second; `None`: unknown, or as
    /// fast as memory.
    #[must_use]
    pub fn read_bytes_per_s(&self) -> Option<u64> {
        Some(self.read_bytes_per_s.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Notes the rate at which its file is read.
    pub fn set_read_bytes_per_s(&self, rate: u64) {
        self.read_bytes_per_s.store(rate, Ordering::Relaxed);
    }

    /// Computes the digests of a piece of an image, whatever is known of it, and lists it for
    /// [`Content::arrived_since`] if that is news. Returns what was read.
    ///
    /// # Errors
    /// [`RamError::Io`]: the image cannot be read.
    pub fn index(&self, piece: PageRange) -> Result<Reading, RamError> {
        let mut reading = Reading::default();
        let Some(block) = self.blocks.first() else { return Ok(reading) };
        let Some(of) = block.piece(piece.first / DIGEST_PAGES) else { return Ok(reading) };
        let prefixes = block.work_out(piece, &[0; _], &mut reading)?;
        if of.replace(&prefixes) && of.prefixes().is_some() {
            self.arrived_pieces().push((0, piece));
        }
        Ok(reading)
    }

    /// Moves pieces into `to`, of those that would be given up first the most useful one first,
    /// until no more than so many bytes are left. Ends early if `goes_on` returns false.
    ///
    /// # Errors
    /// [`RamError::Io`]: the disk is full, or fails. What was moved stays there.
    pub fn spill(
        &self,
        most_bytes: u64,
        to: &Content,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), RamError> {
        loop {
            // A piece may take less than its pages have; then more are chosen.
            let chosen = self.excess_pieces(most_bytes);
            if chosen.is_empty() {
                return Ok(());
            }
            for (block, number) in chosen.into_iter().rev() {
                if !goes_on() || !block.spill_piece(number, to)? {
                    return Ok(());
                }
            }
        }
    }

    /// Returns pieces that have to be given up so that at most so many bytes are left, the least
    /// useful first.
    fn excess_pieces(&self, most_bytes: u64) -> Vec<(&Block, u64)> {
        let mut excess_bytes = self.taken_bytes().saturating_sub(most_bytes);
        let mut chosen = Vec::new();
        for (block, number) in self.least_useful_first() {
            if excess_bytes == 0 {
                break;
            }
            if block.piece(number).is_some_and(Piece::is_held) {
                chosen.push((block, number));
                excess_bytes = excess_bytes.saturating_sub(block.pages_of(number).len_bytes());
            }
        }
        chosen
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

    /// Returns the number of pages that other guests took from it by reference.
    #[must_use]
    pub fn taken_pages(&self) -> u64 {
        self.taken_pages.load(Ordering::Relaxed)
    }

    /// Notes that another guest took pages from it by reference.
    pub fn note_taken(&self, pages: u64) {
        self.taken_pages.fetch_add(pages, Ordering::Relaxed);
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

    /// Returns pieces that have arrived, or of an image those whose digests are known, after so
    /// many others: at most `most`.
    #[must_use]
    pub fn arrived_since(&self, count: usize, most: usize) -> Vec<(u16, PageRange)> {
        let arrived = self.arrived_pieces();
        let new = arrived.get(count..).unwrap_or_default();
        new.get(..most).unwrap_or(new).to_vec()
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
            let held = (0..).zip(block.pieces.iter()).filter(|(_, piece)| piece.is_held());
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
        // An image is indexed by a thread of its own: nobody waits for its disk.
        if !of.is_done() && of.is_held() && self.kind != ContentKind::Disk {
            let known = of.prefixes().unwrap_or([0; _]);
            if known.iter().take(count).any(|prefix| *prefix == 0) {
                // If the piece is dropped meanwhile, its memory may have been given back before it
                // was read. Nothing is added then.
                of.add(&block.work_out(piece, &known, &mut Reading::default())?);
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

/// Returns the runs of a piece's pages whose prefixes are 0, and what is between them if it is
/// short.
fn unknown_runs(piece: PageRange, known: &Prefixes) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for (page, _) in (piece.first..piece.end()).zip(known).filter(|(_, prefix)| **prefix == 0) {
        match runs.last_mut() {
            Some(run) if page - run.end() < LEAST_SKIPPED_PAGES => run.count = page + 1 - run.first,
            _ => runs.push(PageRange::new(page, 1)),
        }
    }
    runs
}

/// Computes the prefixes that are 0. Those of zero pages stay 0.
fn hash_unknown<'a>(pages: impl Iterator<Item = (&'a mut u64, &'a Page)>) {
    let (prefixes, pages): (Vec<_>, Vec<_>) =
        pages.filter(|(prefix, page)| **prefix == 0 && **page != ZERO_PAGE).unzip();
    for (of, hash) in prefixes.into_iter().zip(hash_pages(pages)) {
        *of = prefix(&hash);
    }
}

/// What was read of a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    pub bytes: u64,
    pub time: Duration,
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
        for (number, piece) in (0..).zip(self.pieces.iter()) {
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

    /// Moves a piece to another content, with its digests, and gives its memory back. Returns false
    /// if there is no room for it.
    fn spill_piece(&self, number: u64, to: &Content) -> Result<bool, RamError> {
        let (Some(of), Some(there)) = (self.piece(number), to.blocks.first()) else {
            return Ok(false);
        };
        let pages = self.pages_of(number);
        let mut bytes = vec![0; usize::try_from(pages.len_bytes()).unwrap_or(0)];
        self.file.copy_out(pages.first, &mut bytes)?;
        // Checked after the read: a piece is dropped before its memory is given back.
        if !of.is_held() {
            return Ok(true);
        }
        let mut prefixes = of.prefixes().unwrap_or([0; _]);
        hash_unknown(prefixes.iter_mut().zip(pages_of(&bytes)));
        if prefixes.iter().any(|prefix| *prefix != 0) {
            let place = to.moved_in.fetch_add(1, Ordering::SeqCst);
            let Some(into) = there.piece(place) else { return Ok(false) };
            there.file.copy_in(place * DIGEST_PAGES, &mut bytes)?;
            into.appear(&prefixes);
        }
        if of.drop_it() {
            self.give_back_dropped(number)?;
        }
        Ok(true)
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
    fn work_out(
        &self,
        piece: PageRange,
        known: &Prefixes,
        reading: &mut Reading,
    ) -> Result<Prefixes, RamError> {
        let mut prefixes = [0; _];
        let mut bytes = vec![0; usize::try_from(READ_PAGES * PAGE_SIZE).unwrap_or(0)];
        for run in unknown_runs(piece, known) {
            let mut at = run.first;
            // What was never written is not read either.
            while let Some(data) = self.file.data_from(at)?.filter(|data| *data < run.end()) {
                let pages = PageRange::between(data, run.end().min(data + READ_PAGES));
                let bytes = bytes
                    .get_mut(..usize::try_from(pages.len_bytes()).unwrap_or(0))
                    .unwrap_or_default();
                let begun = Instant::now();
                self.file.copy_out(data, bytes)?;
                reading.bytes += bytes.len() as u64;
                reading.time += begun.elapsed();
                let from = usize::try_from(data - piece.first).unwrap_or(usize::MAX);
                let of_pages = prefixes.iter_mut().zip(known).skip(from).zip(pages_of(bytes));
                // A digest noted on arrival needs no work.
                let unknown = of_pages.filter(|((_, known), _)| **known == 0);
                hash_unknown(unknown.map(|((prefix, _), page)| (prefix, page)));
                at = pages.end();
            }
        }
        Ok(prefixes)
    }
}
