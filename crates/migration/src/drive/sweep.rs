//! A sweep over guest memory: what is dirty is protected again and put on the board for the streams to send.
//!
//! The order is what makes it right: a page is protected before it is read, so a write during the read shows in the
//! next sweep; a page judged zero while the guest writes it is dirty again by the same rule.

use std::sync::Arc;

use godwit_ram::pages::{intersection, normalise};
use godwit_ram::{PageRange, Region, gaps};

use super::Tracking;
use super::dispatch::Dispatch;
use super::referring::Referring;
use crate::board::Unit;
use crate::failure::{Failure, FailureCode};

/// Dirty pages found in one go: 8 MiB, so that what is sent was scanned just now and a cancel does not wait.
const SCAN_PAGES: u64 = 2048;

/// What a sweep looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// In round 0: what was not written since tracking began. What the file never held is known to be zero without reading it.
    Untouched,
    /// What was written since it was last protected.
    Dirty,
}

pub(crate) struct Sweeper<'a, T> {
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) tracker: &'a mut T,
    pub(crate) dispatch: &'a Dispatch,
    /// Pages of a chunk: no unit lies in two.
    pub(crate) chunk_pages: u64,
    /// What the destination misses is dirty as well.
    pub(crate) referring: &'a Referring,
}

impl<T: Tracking> Sweeper<'_, T> {
    /// Sweeps all blocks. `between` runs again and again with the pages looked at so far and stops the sweep by returning
    /// false; so does this then.
    pub(crate) fn run(
        mut self,
        scope: Scope,
        mut between: impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        let mut before_block = 0;
        for (number, region) in self.regions.iter().enumerate() {
            let block = u16::try_from(number).map_err(|_| memory_failure(&"too many RAM blocks"))?;
            let mut at = 0;
            while at < region.pages() {
                let rest = PageRange { first: at, count: region.pages() - at };
                let (next, units) = match scope {
                    Scope::Dirty => self.dirty(block, rest)?,
                    Scope::Untouched => self.untouched(block, region, rest)?,
                };
                at = next;
                for unit in units {
                    while !self.dispatch.has_room() {
                        if !between(before_block + at)? {
                            return Ok(false);
                        }
                    }
                    self.dispatch.push(unit);
                }
                if !between(before_block + at)? {
                    return Ok(false);
                }
            }
            before_block += region.pages();
        }
        Ok(true)
    }

    fn take_dirty(
        &mut self,
        block: u16,
        within: PageRange,
        most: u64,
        found: &mut Vec<PageRange>,
    ) -> Result<u64, Failure> {
        self.tracker
            .take_dirty(usize::from(block), within, most, found)
            .map_err(|error| memory_failure(&error))
    }

    /// The next dirty pages, by chunk, and the page to go on from.
    fn dirty(&mut self, block: u16, rest: PageRange) -> Result<(u64, Vec<Unit>), Failure> {
        let mut found = Vec::new();
        let may_grow = !self.dispatch.gave_back();
        self.tracker.let_grow(may_grow);
        let next = self.take_dirty(block, rest, SCAN_PAGES, &mut found)?;
        if may_grow && self.dispatch.gave_back() {
            // Somebody may have read what changed over to the throttle just now: all of it counts as written.
            found.extend(self.tracker.changed_over());
            normalise(&mut found);
        }
        let dirty = found.len();
        self.referring.take(block, PageRange::between(rest.first, next), &mut found);
        if found.len() > dirty {
            normalise(&mut found);
        }
        let mut units: Vec<Unit> = Vec::new();
        let chunk_pages = self.chunk_pages;
        let pieces = found.iter().flat_map(|run| by_chunk(*run, chunk_pages));
        for piece in pieces {
            match units.last_mut() {
                Some(unit) if unit.pages[0].first / chunk_pages == piece.first / chunk_pages => {
                    unit.pages.push(piece);
                }
                _ => units.push(Unit { block, pages: vec![piece], zeros: Vec::new() }),
            }
        }
        Ok((next, units))
    }

    /// The next chunk but for what is dirty already, and the page after it. What is hot is left to the next round: sent now,
    /// it would be sent again then.
    fn untouched(
        &mut self,
        block: u16,
        region: &Region,
        rest: PageRange,
    ) -> Result<(u64, Vec<Unit>), Failure> {
        let (chunk, _) = rest.split(self.chunk_pages - rest.first % self.chunk_pages);
        let mut dirty = Vec::new();
        self.tracker.look(usize::from(block), chunk, &mut dirty).map_err(|error| memory_failure(&error))?;
        let untouched = gaps(chunk, &dirty);
        let mut data = Vec::new();
        region.data_ranges(chunk, &mut data).map_err(|error| memory_failure(&error))?;
        let pages = intersection(&data, &untouched);
        let zeros = intersection(&gaps(chunk, &data), &untouched);
        let unit = Unit { block, pages, zeros };
        Ok((chunk.end(), Vec::from_iter(Some(unit).filter(|unit| unit.page_count() > 0))))
    }
}

/// A run cut at the chunks' bounds.
pub(super) fn by_chunk(run: PageRange, chunk_pages: u64) -> impl Iterator<Item = PageRange> {
    let mut rest = run;
    std::iter::from_fn(move || {
        let (piece, after) = rest.split(chunk_pages - rest.first % chunk_pages);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

pub(crate) fn memory_failure(error: &impl ToString) -> Failure {
    Failure::new(FailureCode::MemoryFailed, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_at_the_bounds_of_chunks() {
        let cut = |chunk_pages| {
            let cut = by_chunk(PageRange { first: 500, count: 600 }, chunk_pages);
            cut.map(|run| (run.first, run.count)).collect::<Vec<_>>()
        };
        assert_eq!(cut(512), [(500, 12), (512, 512), (1024, 76)]);
        assert_eq!(cut(256), [(500, 12), (512, 256), (768, 256), (1024, 76)]);
    }
}
