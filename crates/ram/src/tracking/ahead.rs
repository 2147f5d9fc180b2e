//! Memory examined ahead of a take, in ranges on several cores: a take then goes only where dirty
//! pages are. Examining protects nothing.
//!
//! A page that becomes dirty after its range was examined stays dirty for the next pass. So what
//! was examined serves one pass alone: a call that does not go on exactly where the last one
//! stopped begins anew. The pass over a paused guest's memory begins after the guest has stopped.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

use super::RUNS_A_SCAN;
use super::cores::{ScanCores, each};
use super::maps::Segment;
use super::pagemap::{EMPTY_RUN, Pagemap, Scan};
use super::sync_memory::SyncMemory;
use super::take::{CLUSTER_GAP_PAGES, clusters, scan};
use crate::pages::{PageRange, normalise, page_count};

/// Ranges that a thread examines at first, and most that it examines at once where hardly anything
/// is dirty: 2 and 32 GiB, about 1 and 15 ms. With fewer, starting the threads takes longer.
const FIRST_RANGES_OF_A_THREAD: usize = 8;
const MOST_RANGES_OF_A_THREAD: usize = 128;
/// Dirty pages after which they are taken before more is examined.
const ENOUGH_PAGES: u64 = 2048;
/// Time after which memory is examined again: what has become dirty since is then taken in this
/// pass.
const STALE_AFTER: Duration = Duration::from_millis(200);

/// Result of examining memory.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    block: usize,
    /// What the next call of the pass takes from.
    rest: PageRange,
    /// Everything before this page is examined.
    end: u64,
    examined: Option<Instant>,
    /// Where dirty pages are, in ascending order.
    clusters: VecDeque<PageRange>,
}

/// What examines memory.
pub(super) struct Examiner<'a> {
    pub(super) pagemap: &'a Pagemap,
    pub(super) memory: Option<&'a SyncMemory>,
    pub(super) cores: ScanCores,
    pub(super) threads: usize,
}

/// Pages of one segment under one protection.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) block: usize,
    pub(super) segment: &'a Segment,
    pub(super) pages: PageRange,
    pub(super) is_synchronous: bool,
}

/// Dirty pages of a piece.
struct Seen {
    pages: u64,
    clusters: Vec<PageRange>,
}

impl Ahead {
    /// Goes on with a pass, or begins one if `within` is not what the last call left.
    pub(super) fn resume(self, block: usize, within: PageRange) -> Ahead {
        let is_fresh = self.examined.is_some_and(|at| at.elapsed() < STALE_AFTER);
        if is_fresh && self.block == block && self.rest == within {
            return self;
        }
        Ahead { block, rest: within, end: within.first, ..Ahead::default() }
    }

    /// Ends a call that stopped before page `next`.
    pub(super) fn pause(self, next: u64) -> Ahead {
        Ahead { rest: PageRange::between(next, self.rest.end()), ..self }
    }

    /// Returns the next pages of `rest`, a part of `segment`, that must be looked at; `None` if
    /// none is dirty.
    pub(super) fn next(
        &mut self,
        examiner: &Examiner<'_>,
        segment: &Segment,
        rest: PageRange,
    ) -> Result<Option<PageRange>, Errno> {
        let mut at = rest.first;
        loop {
            while self.clusters.front().is_some_and(|cluster| cluster.end() <= at) {
                self.clusters.pop_front();
            }
            if let Some(cluster) = self.clusters.front().filter(|run| run.first < rest.end()) {
                return Ok(Some(cluster.intersect(PageRange::between(at, rest.end()))));
            }
            at = at.max(self.end);
            if at >= rest.end() {
                return Ok(None);
            }
            let left = PageRange::between(at, rest.end());
            if !examiner.cores.are_worth(left.count) || examiner.threads < 2 {
                return Ok(Some(left));
            }
            let (end, found) = examiner.examine(self.block, segment, left)?;
            (self.end, self.examined) = (end, Some(Instant::now()));
            self.clusters.extend(found);
        }
    }
}

impl Examiner<'_> {
    /// Examines memory from the start of `left` until enough dirty pages are found. Returns the
    /// page up to which it is examined, and where the dirty pages are.
    fn examine(
        &self,
        block: usize,
        segment: &Segment,
        left: PageRange,
    ) -> Result<(u64, Vec<PageRange>), Errno> {
        let (mut rest, mut clusters, mut pages) = (left, Vec::new(), 0);
        let mut ranges = FIRST_RANGES_OF_A_THREAD * self.threads;
        let most_ranges = MOST_RANGES_OF_A_THREAD * self.threads;
        while !rest.is_empty() {
            let pieces: Vec<Piece<'_>> =
                pieces(self.memory, self.cores.range_pages, block, segment, rest)
                    .take(ranges)
                    .collect();
            let end = pieces.last().map_or(rest.end(), |piece| piece.pages.end());
            let scanned = pieces.iter().filter(|piece| self.scans(piece)).count();
            let threads = self.threads.min(scanned);
            let examined = each(threads, &pieces, runs, |runs, piece| self.look(runs, piece));
            for of_piece in examined {
                let seen = of_piece?;
                pages += seen.pages;
                clusters.extend(seen.clusters);
            }
            rest = PageRange::between(end, rest.end());
            if pages >= ENOUGH_PAGES || (pages > 0 && ranges == most_ranges) {
                break;
            }
            ranges = (2 * ranges).min(most_ranges);
        }
        Ok((rest.first, clusters))
    }

    /// Finds the dirty pages of a piece.
    fn look(&self, runs: &mut [page_region], piece: &Piece<'_>) -> Result<Seen, Errno> {
        let mut dirty = Vec::new();
        if self.scans(piece) {
            piece.scan(self.pagemap, runs, |seen| dirty.extend_from_slice(seen))?;
        }
        if let Some(memory) = self.memory.filter(|_| piece.is_synchronous) {
            memory.for_each_noted(piece.block, piece.pages, |noted| {
                dirty.extend_from_slice(noted);
            });
            normalise(&mut dirty);
        }
        Ok(Seen { pages: page_count(&dirty), clusters: clusters(&dirty, CLUSTER_GAP_PAGES) })
    }

    /// Returns whether a piece is scanned: the notes alone name the dirty pages of synchronous
    /// memory once the guest is being stopped.
    fn scans(&self, piece: &Piece<'_>) -> bool {
        !piece.is_synchronous || !self.memory.is_some_and(SyncMemory::is_stopping)
    }
}

impl Piece<'_> {
    /// Passes the pages that are not marked to `found`, some at a time.
    pub(super) fn scan(
        &self,
        pagemap: &Pagemap,
        runs: &mut [page_region],
        mut found: impl FnMut(&[PageRange]),
    ) -> Result<(), Errno> {
        let what = if self.is_synchronous { Scan::LookAnywhere } else { Scan::Look };
        let mut rest = self.pages;
        while !rest.is_empty() {
            let seen = scan(pagemap, what, self.segment, rest, 0, runs)?;
            found(&seen.dirty);
            rest = PageRange::between(seen.end, rest.end());
        }
        Ok(())
    }
}

/// Cuts `rest`, a part of a segment, into pieces of at most `range_pages`. Memory that is not
/// scanned is not cut.
pub(super) fn pieces<'a>(
    memory: Option<&'a SyncMemory>,
    range_pages: u64,
    block: usize,
    segment: &'a Segment,
    rest: PageRange,
) -> impl Iterator<Item = Piece<'a>> {
    let mut rest = rest;
    std::iter::from_fn(move || {
        // Aligned, so that a chunk of memory belongs to one piece.
        let (within, _) = rest.split(range_pages - rest.first % range_pages);
        let kind = memory.map(|memory| match memory.of_one_kind(block, within) {
            (_, true) if memory.is_stopping() => memory.of_one_kind(block, rest),
            kind => kind,
        });
        let (pages, is_synchronous) = kind.unwrap_or((within, false));
        rest = PageRange::between(pages.end(), rest.end());
        (!pages.is_empty()).then_some(Piece { block, segment, pages, is_synchronous })
    })
}

/// Creates a thread's buffer for the kernel's answers.
pub(super) fn runs() -> Vec<page_region> {
    vec![EMPTY_RUN; RUNS_A_SCAN]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_examined_serves_the_pass_that_goes_on() {
        let within = PageRange::new(10, 90);
        let begun = || Ahead {
            examined: Some(Instant::now()),
            end: 80,
            clusters: [PageRange::new(40, 5)].into(),
            ..Ahead::default().resume(1, within)
        };
        let goes_on = |block, within| begun().pause(30).resume(block, within).end == 80;
        assert!(goes_on(1, PageRange::between(30, 100)));
        assert!(!goes_on(0, PageRange::between(30, 100)));
        assert!(!goes_on(1, PageRange::between(29, 100)));
        assert!(!goes_on(1, PageRange::between(30, 99)));
        let anew = begun().pause(30).resume(1, within);
        assert_eq!((anew.end, anew.clusters.len(), anew.rest), (10, 0, within));
    }

    #[test]
    fn pieces_end_at_multiples_of_a_range() {
        let segment = Segment { pages: PageRange::new(5, 50), addresses: vec![1 << 20] };
        let cut = |range_pages| -> Vec<PageRange> {
            let rest = PageRange::new(7, 30);
            pieces(None, range_pages, 0, &segment, rest).map(|piece| piece.pages).collect()
        };
        let expected = [PageRange::new(7, 9), PageRange::new(16, 16), PageRange::new(32, 5)];
        assert_eq!(cut(16), expected);
        assert_eq!(cut(u64::MAX), [PageRange::new(7, 30)]);
    }
}
