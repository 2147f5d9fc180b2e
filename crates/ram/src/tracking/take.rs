//! One pass over a block: look, then claim.
//!
//! Claiming names a range, and KVM drops its mappings of all of it. So a window of the block is
//! looked at first, which disturbs nothing, and only the clusters of dirty pages found in it are
//! claimed. A page that becomes dirty between the two is claimed with its cluster or stays dirty
//! for the next pass. Correctness does not depend on the look being up to date.

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

use super::ahead::{self, Ahead, Examiner, Piece, pieces};
use super::block::STEP_PAGES;
use super::cores::each;
use super::figures::{ChunkCount, DirtyCount};
use super::kernel::io_or_gone;
use super::maps::Segment;
use super::pagemap::{EMPTY_RUN, Pagemap, Scan};
use super::sync_memory::{SyncMemory, Tracked};
use super::{DirtyTracker, RUNS_A_SCAN};
use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, normalise, page_count, push_merged};

/// Dirty runs with fewer clean pages than this between them (8 MiB) are claimed in one call. Each
/// call costs the guest a round of TLB flushes, and each clean page at most one fault.
pub(super) const CLUSTER_GAP_PAGES: u64 = 2048;

/// Memory that changes over in one call: 32 MiB, or one chunk. It takes some 20 ms.
const CHANGED_PAGES: u64 = 8192;

/// Scanned stretch of one segment, and the dirty pages found in it.
pub(super) struct Window {
    pub(super) end: u64,
    pub(super) dirty: Vec<PageRange>,
}

pub(super) fn take_dirty(
    tracker: &mut DirtyTracker,
    block: usize,
    within: PageRange,
    max_pages: u64,
    out: &mut Vec<PageRange>,
) -> Result<u64, TrackError> {
    tracker.block(block, within)?;
    let mut ahead = std::mem::take(&mut tracker.ahead).resume(block, within);
    let next = take_ahead(tracker, block, within, max_pages, &mut ahead, out)?;
    if next < within.end() {
        tracker.ahead = ahead.pause(next);
    }
    Ok(next)
}

fn take_ahead(
    tracker: &mut DirtyTracker,
    block: usize,
    within: PageRange,
    max_pages: u64,
    ahead: &mut Ahead,
    out: &mut Vec<PageRange>,
) -> Result<u64, TrackError> {
    let threads = tracker.scan_threads();
    let DirtyTracker { pid, pagemap, blocks, runs, sync_memory, userfaultfd, cores, .. } = tracker;
    let Some(tracked_block) = blocks.get(block) else { return Ok(within.end()) };
    let floor = out.len();
    let mut taking = Taking { pid: *pid, block, pagemap, runs, out, floor, left: max_pages };
    if let Some(memory) = sync_memory.as_mut() {
        memory.forget_changes();
    }
    let mut changed = 0;
    for segment in &tracked_block.segments {
        let wanted = segment.pages.intersect(within);
        let mut at = wanted.first;
        while at < wanted.end() {
            let memory = sync_memory.as_ref();
            let examiner = Examiner { pagemap, memory, cores: *cores, threads };
            let rest = PageRange::between(at, wanted.end());
            let dirty = ahead.next(&examiner, segment, rest);
            let Some(dirty) = dirty.map_err(|errno| failed(*pid, errno))? else { break };
            let (stretch, _) = dirty.split(STEP_PAGES);
            let Some(memory) = sync_memory.as_mut() else {
                let seen = taking.scan(Scan::Look, segment, stretch, 0)?;
                match taking.claim(segment, &seen)? {
                    Stopped::Full(next) => return Ok(next),
                    Stopped::End(end) => at = end,
                }
                continue;
            };
            let next = taking.next_step(memory, segment, stretch, within.first)?;
            let (chunk, into) = match next {
                Step::Taken(Stopped::Full(next)) => return Ok(next),
                Step::Taken(Stopped::End(end)) => {
                    at = end;
                    continue;
                }
                Step::Change { chunk, into } => (chunk, into),
            };
            if changed >= CHANGED_PAGES {
                // The chunk changes over at the next call, which must not begin within it.
                return Ok(chunk.first.max(at));
            }
            changed += chunk.count;
            let runs = &mut *taking.runs;
            let mut tracked = Tracked { userfaultfd, pagemap, block: tracked_block, runs };
            // The stretch is repeated: a chunk of it is under the other protection now.
            match into {
                Protection::Synchronous => memory.take_over(block, chunk, &mut tracked)?,
                Protection::Asynchronous => memory.give_back(block, chunk, &mut tracked)?,
            }
        }
    }
    Ok(within.end())
}

/// How memory is protected.
enum Protection {
    Synchronous,
    Asynchronous,
}

/// Result of a step of a take.
enum Step {
    Taken(Stopped),
    /// A chunk must change over first.
    Change {
        chunk: PageRange,
        into: Protection,
    },
}

struct Taking<'a> {
    pid: i32,
    block: usize,
    pagemap: &'a Pagemap,
    runs: &'a mut [page_region],
    out: &'a mut Vec<PageRange>,
    /// Entries of `out` before this index belong to the caller.
    floor: usize,
    /// Number of pages that may still be taken.
    left: u64,
}

/// Where a part of a take stopped.
enum Stopped {
    /// Enough pages were taken: the page to go on from.
    Full(u64),
    /// The part is complete.
    End(u64),
}

impl Taking<'_> {
    fn scan(
        &mut self,
        what: Scan,
        segment: &Segment,
        pages: PageRange,
        max_pages: u64,
    ) -> Result<Window, TrackError> {
        scan(self.pagemap, what, segment, pages, max_pages, self.runs)
            .map_err(|errno| failed(self.pid, errno))
    }

    /// Claims what was seen in asynchronous memory, and what was written there since.
    fn claim(&mut self, segment: &Segment, seen: &Window) -> Result<Stopped, TrackError> {
        for cluster in clusters(&seen.dirty, CLUSTER_GAP_PAGES) {
            let mut next = cluster.first;
            while next < cluster.end() {
                if self.left == 0 {
                    return Ok(Stopped::Full(next));
                }
                let rest = PageRange::between(next, cluster.end());
                let claimed = self.scan(Scan::Claim, segment, rest, self.left)?;
                for range in claimed.dirty {
                    self.left = self.left.saturating_sub(range.count);
                    push_merged(self.out, self.floor, range);
                }
                next = claimed.end;
            }
        }
        Ok(Stopped::End(seen.end))
    }

    /// Takes the first pages of `stretch`, those under one protection, unless a chunk of them is to
    /// change over. `begin`: where the call began.
    fn next_step(
        &mut self,
        memory: &mut SyncMemory,
        segment: &Segment,
        stretch: PageRange,
        begin: u64,
    ) -> Result<Step, TrackError> {
        let (piece, is_synchronous) = memory.of_one_kind(self.block, stretch);
        let chunk = memory.chunk_of(self.block, piece.first);
        // If an earlier call has returned pages of a chunk, they may be being read now: the chunk
        // does not change over.
        let is_begun = chunk.first < begin;
        if is_synchronous {
            if !is_begun && memory.gives_back(self.block, chunk) {
                return Ok(Step::Change { chunk, into: Protection::Asynchronous });
            }
            if memory.is_stopping() {
                return self.noted(memory, segment, piece).map(Step::Taken);
            }
            return self.synchronous(memory, segment, piece.intersect(chunk)).map(Step::Taken);
        }
        let grows = memory.grows();
        let piece = if grows && is_begun { piece.intersect(chunk) } else { piece };
        let seen = self.scan(Scan::Look, segment, piece, 0)?;
        match seen.dirty.first().filter(|_| grows && !is_begun) {
            Some(run) => {
                let chunk = memory.chunk_of(self.block, run.first);
                Ok(Step::Change { chunk, into: Protection::Synchronous })
            }
            None => self.claim(segment, &seen).map(Step::Taken),
        }
    }

    /// Takes the dirty pages of synchronous memory: exactly the pages seen or noted are protected.
    fn synchronous(
        &mut self,
        memory: &mut SyncMemory,
        segment: &Segment,
        pages: PageRange,
    ) -> Result<Stopped, TrackError> {
        let mut seen = self.scan(Scan::LookAnywhere, segment, pages, 0)?;
        memory.add_noted(self.block, PageRange::between(pages.first, seen.end), &mut seen.dirty);
        self.protect(memory, segment, &seen.dirty, seen.end)
    }

    /// Takes the noted pages of synchronous memory.
    fn noted(
        &mut self,
        memory: &SyncMemory,
        segment: &Segment,
        pages: PageRange,
    ) -> Result<Stopped, TrackError> {
        let mut dirty = Vec::new();
        let end = memory.noted(self.block, pages, &mut dirty);
        self.protect(memory, segment, &dirty, end)
    }

    /// Takes `dirty`, the dirty pages of synchronous memory up to page `end`.
    fn protect(
        &mut self,
        memory: &SyncMemory,
        segment: &Segment,
        dirty: &[PageRange],
        end: u64,
    ) -> Result<Stopped, TrackError> {
        for run in dirty {
            let (taken, _) = run.split(self.left);
            if !taken.is_empty() {
                let protected = memory.protect(self.block, segment, taken);
                protected.map_err(|errno| io_or_gone("write-protect the RAM", self.pid, errno))?;
                push_merged(self.out, self.floor, taken);
                self.left -= taken.count;
            }
            if taken.count < run.count {
                return Ok(Stopped::Full(taken.end()));
            }
        }
        Ok(Stopped::End(end))
    }
}

/// Passes the dirty pages of `within` to `found`, some at a time, and leaves them dirty.
pub(super) fn peek_dirty(
    tracker: &DirtyTracker,
    block: usize,
    within: PageRange,
    mut found: impl FnMut(&[PageRange]),
) -> Result<(), TrackError> {
    let most_runs = usize::try_from(within.count).unwrap_or(RUNS_A_SCAN).clamp(1, RUNS_A_SCAN);
    let mut runs = vec![EMPTY_RUN; most_runs];
    for segment in &tracker.block(block, within)?.segments {
        let rest = segment.pages.intersect(within);
        for piece in pieces(tracker.sync_memory.as_ref(), u64::MAX, block, segment, rest) {
            peek(tracker, &piece, &mut runs, &mut found)?;
        }
    }
    Ok(())
}

fn peek(
    tracker: &DirtyTracker,
    piece: &Piece<'_>,
    runs: &mut [page_region],
    mut found: impl FnMut(&[PageRange]),
) -> Result<(), TrackError> {
    match &tracker.sync_memory {
        Some(memory) if piece.is_synchronous => {
            memory.for_each_noted(piece.block, piece.pages, found);
            Ok(())
        }
        _ => piece
            .scan(&tracker.pagemap, runs, &mut found)
            .map_err(|errno| failed(tracker.pid, errno)),
    }
}

/// Counts the dirty pages of all blocks.
pub(super) fn count_dirty(tracker: &DirtyTracker) -> Result<DirtyCount, TrackError> {
    let pieces = all_pieces(tracker, |_| true);
    let threads = tracker.threads_for(pieces.iter().filter(|piece| !piece.is_synchronous));
    let counts = each(threads, &pieces, ahead::runs, |runs, piece| {
        let (mut count, mut chunk) = (DirtyCount::default(), ChunkCount::default());
        peek(tracker, piece, runs, |dirty| {
            dirty.iter().for_each(|range| chunk.add(*range));
            count.pages += page_count(dirty);
        })?;
        Ok(DirtyCount { fullest_chunk_pages: chunk.most, ..count })
    });
    counts.into_iter().try_fold(DirtyCount::default(), |sum, count: Result<_, TrackError>| {
        let count = count?;
        let fullest_chunk_pages = sum.fullest_chunk_pages.max(count.fullest_chunk_pages);
        Ok(DirtyCount { pages: sum.pages + count.pages, fullest_chunk_pages, ..sum })
    })
}

/// Adds to the notes of synchronous memory the dirty pages that no fault has named.
pub(super) fn check_notes(tracker: &mut DirtyTracker) -> Result<(), TrackError> {
    let unnoted = match &tracker.sync_memory {
        Some(memory) => find_unnoted(tracker, memory)?,
        None => 0,
    };
    if let Some(memory) = &mut tracker.sync_memory {
        memory.add_unnoted(unnoted);
    }
    Ok(())
}

/// Notes the dirty pages that no fault has named. Returns their number.
fn find_unnoted(tracker: &DirtyTracker, memory: &SyncMemory) -> Result<u64, TrackError> {
    let pieces = all_pieces(tracker, |piece| piece.is_synchronous);
    let threads = tracker.threads_for(pieces.iter());
    let unnoted = each(threads, &pieces, ahead::runs, |runs, piece| {
        let mut unnoted = 0;
        piece.scan(&tracker.pagemap, runs, |seen| {
            unnoted += memory.note_unnoted(piece.block, seen);
        })?;
        Ok(unnoted)
    });
    let sum: Result<u64, Errno> = unnoted.into_iter().sum();
    sum.map_err(|errno| failed(tracker.pid, errno))
}

/// Returns the pieces of all memory that are `wanted`.
fn all_pieces<'a>(
    tracker: &'a DirtyTracker,
    wanted: impl Fn(&Piece<'a>) -> bool,
) -> Vec<Piece<'a>> {
    let memory = tracker.sync_memory.as_ref();
    let segments =
        tracker.blocks.iter().enumerate().flat_map(|(number, block)| {
            block.segments.iter().map(move |segment| (number, segment))
        });
    let range_pages = tracker.cores.range_pages;
    segments
        .flat_map(|(number, segment)| pieces(memory, range_pages, number, segment, segment.pages))
        .filter(wanted)
        .collect()
}

/// Scans the first pages of `stretch` in all mappings of the segment. The answer is complete up to
/// the end returned, at least one page. Returns at most `max_pages` dirty pages (0: no limit).
pub(super) fn scan(
    pagemap: &Pagemap,
    scan: Scan,
    segment: &Segment,
    stretch: PageRange,
    max_pages: u64,
    runs: &mut [page_region],
) -> Result<Window, Errno> {
    let mut stretch = stretch;
    if segment.addresses.len() > 1 && max_pages > 0 {
        // Each mapping may have its own dirty pages, and together they must not exceed the limit.
        stretch = stretch.split(max_pages).0;
    }
    let mut dirty = Vec::new();
    for (index, &address) in segment.addresses.iter().enumerate() {
        let mapping = Scanner { pagemap, scan, address, first_page: segment.pages.first };
        let mut end = mapping.scan(stretch, max_pages, runs, &mut dirty)?;
        if index == 0 || scan != Scan::Claim {
            // The window reaches as far as this scan came. A look may have gone further in another
            // mapping: what it saw there is still dirty. A claim has not.
            stretch = PageRange::between(stretch.first, end);
            continue;
        }
        while end < stretch.end() {
            end = mapping.scan(PageRange::between(end, stretch.end()), 0, runs, &mut dirty)?;
        }
    }
    if scan != Scan::Claim {
        for range in &mut dirty {
            *range = range.intersect(stretch);
        }
    }
    if segment.addresses.len() > 1 {
        normalise(&mut dirty);
    }
    Ok(Window { end: stretch.end(), dirty })
}

/// Scanner of one mapping, in pages of the block.
struct Scanner<'a> {
    pagemap: &'a Pagemap,
    scan: Scan,
    /// Address at which the segment's first page is mapped.
    address: u64,
    /// The segment's first page.
    first_page: u64,
}

impl Scanner<'_> {
    /// Appends the dirty pages to `dirty` and returns the page up to which the answer is complete.
    fn scan(
        &self,
        pages: PageRange,
        max_pages: u64,
        runs: &mut [page_region],
        dirty: &mut Vec<PageRange>,
    ) -> Result<u64, Errno> {
        let address = |page: u64| self.address + (page - self.first_page) * PAGE_SIZE;
        let page = |address: u64| self.first_page + (address - self.address) / PAGE_SIZE;
        let (start, end) = (address(pages.first), address(pages.end()));
        let scanned = self.pagemap.scan(self.scan, start, end, max_pages, runs)?;
        let found = runs.iter().take(scanned.runs);
        dirty.extend(found.map(|run| PageRange::between(page(run.start), page(run.end))));
        if scanned.end <= start || scanned.end > end {
            // Going on would loop forever, or leave the block.
            return Err(Errno::IO);
        }
        Ok(page(scanned.end))
    }
}

/// Joins runs that are closer to each other than `gap`.
pub(super) fn clusters(dirty: &[PageRange], gap: u64) -> Vec<PageRange> {
    let mut clusters: Vec<PageRange> = Vec::new();
    for range in dirty.iter().filter(|range| !range.is_empty()) {
        match clusters.last_mut() {
            Some(last) if range.first - last.end() < gap => {
                *last = PageRange::between(last.first, range.end());
            }
            _ => clusters.push(*range),
        }
    }
    clusters
}

fn failed(pid: i32, errno: Errno) -> TrackError {
    io_or_gone("scan the page map", pid, errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_join_what_is_near() {
        let dirty = [PageRange::new(0, 2), PageRange::new(5, 1), PageRange::new(40, 2)];
        assert_eq!(clusters(&dirty, 4), [PageRange::new(0, 6), PageRange::new(40, 2)]);
        assert_eq!(clusters(&dirty, 1), dirty);
        assert!(clusters(&[], 4).is_empty());
    }
}
