//! Memory that a destination has, and the digests by which a source finds pages in it. A page's digest is worked out when it is
//! first asked for, and may be of what the page held then: whoever uses it looks again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use godwit_lanes::hash_page;
use godwit_ram::{PAGE_SIZE, PageRange, RamError, RamFile, Region};
use godwit_wire::{PAGE_SIZE as PAGE_BYTES, Place, prefix};

/// Pages whose digests are worked out in one go: 2 MiB.
pub const DIGEST_PAGES: u64 = 512;
/// Pages read in one call.
const READ_PAGES: u64 = 64;
static ZERO_PAGE: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Memory of a guest that is or was here.
#[derive(Debug)]
pub struct Content {
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    file: RamFile,
    /// By page; 0: zero, or not worked out.
    prefixes: Box<[AtomicU64]>,
    /// By [`DIGEST_PAGES`].
    done: Box<[AtomicBool]>,
}

impl Content {
    /// The memory of a guest, block by block.
    ///
    /// # Errors
    /// [`RamError::Io`]: the process has no more descriptors.
    pub fn of(regions: &[Arc<Region>]) -> Result<Content, RamError> {
        let block = |region: &Arc<Region>| {
            let file = RamFile::of(region)?;
            let prefixes = (0..file.pages()).map(|_| AtomicU64::new(0)).collect();
            let done = (0..file.pages().div_ceil(DIGEST_PAGES)).map(|_| AtomicBool::new(false)).collect();
            Ok(Block { file, prefixes, done })
        };
        Ok(Content { blocks: regions.iter().map(block).collect::<Result<_, _>>()? })
    }

    /// How many pages it has.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.file.pages()).sum()
    }

    /// Memory that its digests take, bytes.
    #[must_use]
    pub fn digest_bytes(&self) -> u64 {
        8 * self.pages()
    }

    /// Memory that its files hold, bytes.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.file.taken_bytes()).sum()
    }

    /// Gives its memory back to the kernel in steps of so many bytes, whoever still looks at it. Not for a guest that runs.
    ///
    /// # Errors
    /// [`RamError::Io`].
    pub fn empty(&self, step_bytes: u64) -> Result<(), RamError> {
        self.blocks.iter().try_for_each(|block| block.file.empty(step_bytes))
    }

    /// Every piece whose digests are worked out in one go, as (block, pages).
    pub fn pieces(&self) -> impl Iterator<Item = (u16, PageRange)> + '_ {
        (0..).zip(&self.blocks).flat_map(|(number, block)| {
            PageRange::new(0, block.file.pages()).chunks(DIGEST_PAGES).map(move |piece| (number, piece))
        })
    }

    /// The digests of one of [`Content::pieces`], worked out where they are not known; empty where nothing is told of any of
    /// its pages.
    ///
    /// # Errors
    /// [`RamError::Io`]: the memory is gone.
    pub fn digests(&self, block: u16, piece: PageRange) -> Result<Vec<u64>, RamError> {
        let Some(block) = self.blocks.get(usize::from(block)) else { return Ok(Vec::new()) };
        let place = |page: u64| usize::try_from(page).unwrap_or(usize::MAX);
        let Some(done) = block.done.get(place(piece.first / DIGEST_PAGES)) else { return Ok(Vec::new()) };
        if !done.load(Ordering::Acquire) {
            block.work_out(piece)?;
            done.store(true, Ordering::Release);
        }
        let known = block.prefixes.get(place(piece.first)..place(piece.end())).unwrap_or_default();
        let prefixes: Vec<u64> = known.iter().map(|prefix| prefix.load(Ordering::Relaxed)).collect();
        Ok(if prefixes.iter().all(|prefix| *prefix == 0) { Vec::new() } else { prefixes })
    }

    /// Whether [`Content::digests`] of a piece needs no work.
    #[must_use]
    pub fn is_worked_out(&self, block: u16, piece: PageRange) -> bool {
        let done = self.blocks.get(usize::from(block)).map_or(&[][..], |block| &block.done);
        let place = usize::try_from(piece.first / DIGEST_PAGES).unwrap_or(usize::MAX);
        done.get(place).is_some_and(|done| done.load(Ordering::Acquire))
    }

    /// Pages whose digests need no work.
    #[must_use]
    pub fn worked_out(&self) -> u64 {
        let done = self.pieces().filter(|(block, piece)| self.is_worked_out(*block, *piece));
        done.map(|(_, piece)| piece.count).sum()
    }

    /// Copies pages from a place on, as they are now.
    ///
    /// # Errors
    /// [`RamError::Io`]: it has not got them (any more).
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
            let Some(data) = self.file.data_from(at)?.filter(|data| *data < piece.end()) else { break };
            let pages = PageRange::between(data, piece.end().min(data + READ_PAGES));
            let bytes = bytes.get_mut(..usize::try_from(pages.len_bytes()).unwrap_or(0)).unwrap_or_default();
            self.file.copy_out(data, bytes)?;
            for (page, bytes) in (pages.first..).zip(bytes.chunks_exact(ZERO_PAGE.len())) {
                let digest = if bytes == ZERO_PAGE { 0 } else { prefix(&hash_page(bytes)) };
                if let Some(known) = usize::try_from(page).ok().and_then(|page| self.prefixes.get(page)) {
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
            regions[0].copy_in(page * PAGE_SIZE, &[u8::try_from(page % 251).unwrap() + 1; 4096]).unwrap();
        }
        let content = Content::of(&regions).unwrap();
        let pieces: Vec<_> = content.pieces().collect();
        assert_eq!((pieces.len(), content.pages(), content.digest_bytes()), (4, 1303, 1303 * 8));
        let mut told = Vec::new();
        for (block, piece) in pieces {
            let digests = content.digests(block, piece).unwrap();
            assert_eq!(digests, content.digests(block, piece).unwrap());
            told.extend((piece.first..).zip(digests).filter(|(_, digest)| *digest != 0));
        }
        let digest = |byte| prefix(&hash_page(&[byte; 4096]));
        assert_eq!(told, [(0, digest(1)), (5, digest(6)), (700, digest(199)), (1299, digest(45))]);
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
}
