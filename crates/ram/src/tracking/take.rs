//! One pass over a block: look, then claim.
//!
//! Claiming names a range, and KVM drops its mappings of all of it. So a window of the block is looked at first, which
//! disturbs nobody, and only the clusters of dirty pages found in it are claimed. What becomes dirty between the two is
//! claimed with its cluster or stays dirty for the next pass; nothing depends on the look being up to date.

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

use super::maps::Segment;
use super::pagemap::{EMPTY_RUN, Pagemap, Scan};
use super::{DirtyTracker, RUNS_A_SCAN, STEP_PAGES, io_or_gone};
use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, normalise, page_count, push_merged};

/// Dirty runs with fewer clean pages than this between them (8 MiB) are claimed in one call: each call costs the guest a
/// round of TLB flushes, each clean page at most one fault.
const CLUSTER_GAP_PAGES: u64 = 2048;

/// A stretch of one segment that was scanned, and what was dirty in it.
struct Window {
    end: u64,
    dirty: Vec<PageRange>,
}

pub(super) fn take_dirty(
    tracker: &mut DirtyTracker,
    block: usize,
    within: PageRange,
    max_pages: u64,
    out: &mut Vec<PageRange>,
) -> Result<u64, TrackError> {
    tracker.block(block, within)?;
    let DirtyTracker { pid, pagemap, blocks, runs, .. } = tracker;
    let segments = blocks.get(block).map_or(&[][..], |block| &block.segments);
    let floor = out.len();
    let mut left = max_pages;
    for segment in segments {
        let wanted = segment.pages.intersect(within);
        let mut at = wanted.first;
        while at < wanted.end() {
            let stretch = PageRange::between(at, wanted.end().min(at + STEP_PAGES));
            let seen =
                scan(pagemap, Scan::Look, segment, stretch, 0, runs).map_err(|errno| failed(*pid, errno))?;
            for cluster in clusters(&seen.dirty, CLUSTER_GAP_PAGES) {
                let mut next = cluster.first;
                while next < cluster.end() {
                    if left == 0 {
                        return Ok(next);
                    }
                    let rest = PageRange::between(next, cluster.end());
                    let claimed = scan(pagemap, Scan::Claim, segment, rest, left, runs)
                        .map_err(|errno| failed(*pid, errno))?;
                    for range in claimed.dirty {
                        left = left.saturating_sub(range.count);
                        push_merged(out, floor, range);
                    }
                    next = claimed.end;
                }
            }
            at = seen.end;
        }
    }
    Ok(within.end())
}

pub(super) fn count_dirty(tracker: &DirtyTracker) -> Result<u64, TrackError> {
    let mut runs = vec![EMPTY_RUN; RUNS_A_SCAN];
    let mut count = 0;
    for segment in tracker.blocks.iter().flat_map(|block| &block.segments) {
        let mut at = segment.pages.first;
        while at < segment.pages.end() {
            let stretch = PageRange::between(at, segment.pages.end());
            let seen = scan(&tracker.pagemap, Scan::Look, segment, stretch, 0, &mut runs)
                .map_err(|errno| failed(tracker.pid, errno))?;
            count += page_count(&seen.dirty);
            at = seen.end;
        }
    }
    Ok(count)
}

/// Scans the first pages of `stretch`, in all mappings of the segment: up to the end it gives, at least one page, the
/// answer is complete. Gives at most `max_pages` dirty pages (0: no limit).
fn scan(
    pagemap: &Pagemap,
    scan: Scan,
    segment: &Segment,
    stretch: PageRange,
    max_pages: u64,
    runs: &mut [page_region],
) -> Result<Window, Errno> {
    let mut stretch = stretch;
    if segment.addresses.len() > 1 && max_pages > 0 {
        // Each mapping may have its own dirty pages, and together they must not be more than the limit.
        stretch = stretch.split(max_pages).0;
    }
    let mut dirty = Vec::new();
    for (index, &address) in segment.addresses.iter().enumerate() {
        let mapping = Scanner { pagemap, scan, address, first_page: segment.pages.first };
        let mut end = mapping.scan(stretch, max_pages, runs, &mut dirty)?;
        if index == 0 || scan == Scan::Look {
            // As far as this one came, so far does the window reach. A look may have gone further in another mapping:
            // what it saw there is still dirty. A claim has not.
            stretch = PageRange::between(stretch.first, end);
            continue;
        }
        while end < stretch.end() {
            end = mapping.scan(PageRange::between(end, stretch.end()), 0, runs, &mut dirty)?;
        }
    }
    if scan == Scan::Look {
        for range in &mut dirty {
            *range = range.intersect(stretch);
        }
    }
    if segment.addresses.len() > 1 {
        normalise(&mut dirty);
    }
    Ok(Window { end: stretch.end(), dirty })
}

/// Scans one mapping, in pages of the block.
struct Scanner<'a> {
    pagemap: &'a Pagemap,
    scan: Scan,
    /// Where the segment's first page is mapped.
    address: u64,
    /// The segment's first page.
    first_page: u64,
}

impl Scanner<'_> {
    /// Appends the dirty pages to `dirty` and gives the page up to which the answer is complete.
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
            // Going on would be forever, or past the block.
            return Err(Errno::IO);
        }
        Ok(page(scanned.end))
    }
}

/// Joins runs that are nearer to each other than `gap`.
fn clusters(dirty: &[PageRange], gap: u64) -> Vec<PageRange> {
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
