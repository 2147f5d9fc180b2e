//! Counts of dirty pages, and of how they were found.

use std::time::Duration;

use super::block::CHUNK_PAGES;
use crate::pages::PageRange;

/// Number of dirty pages, and their density.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirtyCount {
    /// All dirty pages.
    pub pages: u64,
    /// Pages among them that are dirty only because pages around them are: see
    /// [`super::DirtyTracker::by_faults`].
    pub filled_pages: u64,
    /// Most dirty pages in one chunk of [`CHUNK_PAGES`].
    pub fullest_chunk_pages: u64,
}

/// Statistics of tracking by faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultFigures {
    /// Writes that were answered without a limit.
    pub faults: u64,
    /// Total time that the answering thread was busy with them.
    pub answering: Duration,
    /// Whether [`DirtyTracker::start`] made all memory synchronous.
    pub by_faults: bool,
    /// Pages that are synchronous now.
    pub synchronous_pages: u64,
    /// Dirty pages that a scan found and no fault had named.
    pub unnoted_pages: u64,
}

/// Counter of pages per chunk, for runs in ascending order.
#[derive(Default)]
pub(super) struct ChunkCount {
    pub(super) chunk: u64,
    pub(super) pages: u64,
    pub(super) most: u64,
}

impl ChunkCount {
    pub(super) fn add(&mut self, run: PageRange) {
        let mut rest = run;
        while !rest.is_empty() {
            let (piece, after) = rest.split(CHUNK_PAGES - rest.first % CHUNK_PAGES);
            let chunk = piece.first / CHUNK_PAGES;
            if chunk != self.chunk {
                (self.chunk, self.pages) = (chunk, 0);
            }
            self.pages += piece.count;
            self.most = self.most.max(self.pages);
            rest = after;
        }
    }
}
