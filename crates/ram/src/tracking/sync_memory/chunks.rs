//! Which memory of a block is under synchronous protection, by chunk.

use crate::pages::PageRange;

/// Smallest chunk that changes over because of one written page: 8 MiB.
const LEAST_CHUNK_PAGES: u64 = 2048;
/// Maximum chunks of all blocks together: half of the mappings that a process may have (65,530),
/// since each may become a mapping of its own. A block of 1 TiB has chunks of 32 MiB.
const MOST_CHUNKS: u64 = 32_768;

/// Returns the size, in pages, of the aligned pieces in which a block of so many pages, one of
/// `blocks`, changes between asynchronous and synchronous protection.
#[must_use]
pub fn throttle_chunk_pages(block_pages: u64, blocks: usize) -> u64 {
    let most_chunks = (MOST_CHUNKS / (blocks as u64).max(1)).max(1);
    let mut chunk_pages = LEAST_CHUNK_PAGES;
    while block_pages.div_ceil(chunk_pages) > most_chunks {
        chunk_pages *= 2;
    }
    chunk_pages
}

/// Record of which chunks of a block are synchronous.
#[derive(Debug)]
pub(super) struct Chunks {
    all: PageRange,
    chunk_pages: u64,
    synchronous: Vec<bool>,
}

impl Chunks {
    /// Creates the record of one of `blocks` blocks, all of which is asynchronous.
    pub(super) fn new(all: PageRange, blocks: usize) -> Chunks {
        let chunk_pages = throttle_chunk_pages(all.count, blocks);
        let count = usize::try_from(all.count.div_ceil(chunk_pages)).unwrap_or(usize::MAX);
        Chunks { all, chunk_pages, synchronous: vec![false; count] }
    }

    fn index(&self, page: u64) -> usize {
        usize::try_from(page / self.chunk_pages).unwrap_or(usize::MAX)
    }

    pub(super) fn is_synchronous(&self, page: u64) -> bool {
        self.synchronous.get(self.index(page)).copied().unwrap_or(false)
    }

    /// Notes the protection of the chunk that contains `page`.
    pub(super) fn set(&mut self, page: u64, synchronous: bool) {
        let index = self.index(page);
        if let Some(chunk) = self.synchronous.get_mut(index) {
            *chunk = synchronous;
        }
    }

    /// Notes that all chunks are synchronous.
    pub(super) fn set_all(&mut self) {
        self.synchronous.fill(true);
    }

    /// Returns the chunk that contains `page`.
    pub(super) fn chunk_of(&self, page: u64) -> PageRange {
        let first = page / self.chunk_pages * self.chunk_pages;
        PageRange::new(first, self.chunk_pages).intersect(self.all)
    }

    /// Returns the first pages of `stretch` that are under one protection, and whether that is
    /// synchronous.
    pub(super) fn of_one_kind(&self, stretch: PageRange) -> (PageRange, bool) {
        let kind = self.is_synchronous(stretch.first);
        let mut end = stretch.first;
        while end < stretch.end() && self.is_synchronous(end) == kind {
            end = (end / self.chunk_pages + 1) * self.chunk_pages;
        }
        (PageRange::between(stretch.first, end.min(stretch.end())), kind)
    }

    /// Returns the number of synchronous pages.
    pub(super) fn synchronous_pages(&self) -> u64 {
        let chunks = self.synchronous.iter().zip(self.all.chunks(self.chunk_pages));
        chunks.filter(|(synchronous, _)| **synchronous).map(|(_, chunk)| chunk.count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_cut_where_the_protection_changes() {
        let mut chunks = Chunks::new(PageRange::new(0, 5 * 2048 + 7), 1);
        chunks.set(2048, true);
        chunks.set(3 * 2048 - 1 + 2048, true);
        chunks.set(5 * 2048 + 6, true);
        let mut rest = PageRange::new(100, 5 * 2048 - 93);
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (piece, kind) = chunks.of_one_kind(rest);
            pieces.push((piece.first, piece.end(), kind));
            rest = PageRange::between(piece.end(), rest.end());
        }
        let expected = [
            (100, 2048, false),
            (2048, 4096, true),
            (4096, 6144, false),
            (6144, 8192, true),
            (8192, 10_240, false),
            (10_240, 10_247, true),
        ];
        assert_eq!(pieces, expected);
        assert_eq!(chunks.chunk_of(10_241), PageRange::new(10_240, 7));
        assert_eq!(chunks.synchronous_pages(), 2 * 2048 + 7);
    }

    #[test]
    fn a_large_guest_has_large_chunks() {
        let chunks = |blocks| {
            let chunks = Chunks::new(PageRange::new(0, 1 << 28), blocks);
            (chunks.chunk_pages, chunks.synchronous.len())
        };
        assert_eq!(chunks(1), (1 << 13, 32_768));
        assert_eq!(chunks(8), (1 << 16, 4096));
        assert_eq!(chunks(100_000), (1 << 28, 1));
    }
}
