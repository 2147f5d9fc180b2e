//! A sweep over guest memory: dirty pages are protected again and put on the board for the streams
//! to send.
//!
//! The order makes it correct. A page is protected before it is read, so a write during the read
//! shows in the next sweep. A page that is judged zero while the guest writes it is dirty again for
//! the same reason.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_ram::pages::{intersection, normalise, page_count};
use godwit_ram::{PageRange, Region, gaps};

use super::Tracking;
use super::dispatch::Dispatch;
use super::heat::{self, Heat, Stretch};
use super::referring::Referring;
use crate::board::Unit;
use crate::failure::{Failure, FailureCode};
use crate::reference::PageBits;

/// Dirty pages found at a time: 8 MiB, so that pages are sent right after they were scanned and a
/// cancel does not wait.
const SCAN_PAGES: u64 = 2048;

/// Memory that a sweep examines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// In round 0: pages not written since tracking began. What the file never held is known to be
    /// zero without reading it.
    Untouched,
    /// Pages written since they were last protected, hot ones last.
    Dirty,
    /// As [`Scope::Dirty`] while the guest is paused: nothing is hot any more, and the sweep uses
    /// as few looks as possible.
    Last,
}

pub(crate) struct Sweeper<'a, T> {
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) tracker: &'a mut T,
    pub(crate) dispatch: &'a Dispatch,
    /// Pages of a chunk: no unit spans two.
    pub(crate) chunk_pages: u64,
    /// Where round 0 begins, as a fraction of all memory from 0 to 1.
    pub(crate) begin_at: f64,
    /// Pages that the destination misses count as dirty.
    pub(crate) referring: &'a Referring,
    /// What was hot in earlier sweeps; updated with what this sweep finds.
    pub(crate) heat: &'a mut Heat,
    /// The sample of round 0.
    pub(crate) sample: &'a mut Sample,
    /// What round 0 has not visited yet.
    pub(crate) unswept: &'a mut PageBits,
}

/// Count of the pages that the guest has written some time after round 0 began. A long round shows
/// a lower rate, because a page that is written again in it counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Time of the sample, and the number of pages since tracking began.
    pub(crate) taken: Option<(Instant, u64)>,
}

/// Time in round 0 at which the sample is taken.
pub(crate) const SAMPLED_AFTER: Duration = Duration::from_millis(500);

impl<T: Tracking> Sweeper<'_, T> {
    /// Sweeps all blocks, hot memory last. `between` is called repeatedly with the number of pages
    /// examined so far. If it returns false, the sweep stops and returns false too.
    pub(crate) fn run(
        mut self,
        scope: Scope,
        mut between: impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        let mut looked_at = 0;
        let all_swept = match scope {
            Scope::Untouched => self.untouched_memory(&mut looked_at, &mut between)?,
            Scope::Last => {
                self.dirty_memory(&heat::all(self.regions), &mut looked_at, &mut between)?
            }
            Scope::Dirty => {
                let (cold, hot) = self.heat.order();
                self.dirty_memory(&cold, &mut looked_at, &mut between)?
                    && self.dirty_memory(&hot, &mut looked_at, &mut between)?
            }
        };
        if all_swept {
            self.heat.swept();
        }
        Ok(all_swept)
    }

    /// Performs round 0. Chunks with dirty pages are deferred until all others have been sent,
    /// those with the fewest first. By then more of the pages that would have to be sent again are
    /// dirty, and are left out.
    fn untouched_memory(
        &mut self,
        looked_at: &mut u64,
        between: &mut impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        let begun = Instant::now();
        let mut put_off: Vec<(u64, Stretch)> = Vec::new();
        for Stretch { block, pages: chunk } in self.chunks() {
            let dirty = self.look(block, chunk)?;
            self.take_sample(begun)?;
            let unit = if dirty.is_empty() {
                *looked_at += chunk.count;
                self.untouched(block, chunk, &dirty)?
            } else {
                put_off.push((page_count(&dirty), Stretch { block, pages: chunk }));
                None
            };
            let is_put_off = unit.is_none() && !dirty.is_empty();
            if !self.push(unit, *looked_at, between)? {
                return Ok(false);
            }
            if !is_put_off {
                self.unswept.take(block, chunk, &mut Vec::new());
            }
        }
        put_off.sort_by_key(|(dirty_pages, _)| *dirty_pages);
        for (_, Stretch { block, pages: chunk }) in put_off {
            let dirty = self.look(block, chunk)?;
            self.take_sample(begun)?;
            self.heat.found(block, &dirty);
            let unit = self.untouched(block, chunk, &dirty)?;
            *looked_at += chunk.count;
            if !self.push(unit, *looked_at, between)? {
                return Ok(false);
            }
            self.unswept.take(block, chunk, &mut Vec::new());
        }
        Ok(true)
    }

    /// Returns all memory in the order of round 0.
    fn chunks(&self) -> Vec<Stretch> {
        let of = |Stretch { block, pages }: Stretch| {
            by_chunk(pages, self.chunk_pages).map(move |pages| Stretch { block, pages })
        };
        let mut chunks: Vec<_> = heat::all(self.regions).into_iter().flat_map(of).collect();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "below the number of chunks"
        )]
        let first = (self.begin_at.clamp(0.0, 1.0) * chunks.len() as f64) as usize;
        let first = first.min(chunks.len());
        chunks.rotate_left(first);
        chunks
    }

    fn dirty_memory(
        &mut self,
        stretches: &[Stretch],
        looked_at: &mut u64,
        between: &mut impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        for Stretch { block, pages } in stretches {
            let mut rest = *pages;
            while !rest.is_empty() {
                let (next, units) = self.dirty(*block, rest)?;
                *looked_at += next - rest.first;
                rest = PageRange::between(next, rest.end());
                if !self.push(units, *looked_at, between)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Puts units on the board when it has room.
    fn push(
        &mut self,
        units: impl IntoIterator<Item = Unit>,
        looked_at: u64,
        between: &mut impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        self.tracker.steer();
        let mut units = units.into_iter();
        while let Some(unit) = units.next() {
            while !self.dispatch.has_room() {
                self.tracker.steer();
                let goes_on = between(looked_at);
                if !matches!(goes_on, Ok(true)) {
                    // Taken from the dirty pages and not sent: another attempt has to send it.
                    std::iter::once(unit).chain(units).for_each(|unit| self.referring.owe(&unit));
                    return goes_on;
                }
            }
            self.dispatch.push(unit);
        }
        between(looked_at)
    }

    fn take_sample(&mut self, begun: Instant) -> Result<(), Failure> {
        if self.sample.taken.is_none() && begun.elapsed() >= SAMPLED_AFTER {
            let dirty = self.tracker.count_dirty().map_err(|error| memory_failure(&error))?;
            self.sample.taken = Some((Instant::now(), dirty.pages));
        }
        Ok(())
    }

    fn look(&mut self, block: u16, pages: PageRange) -> Result<Vec<PageRange>, Failure> {
        let mut dirty = Vec::new();
        self.tracker
            .look(usize::from(block), pages, &mut dirty)
            .map_err(|error| memory_failure(&error))?;
        Ok(dirty)
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

    /// Returns the next dirty pages, by chunk, and the page to go on from.
    fn dirty(&mut self, block: u16, rest: PageRange) -> Result<(u64, Vec<Unit>), Failure> {
        let mut found = Vec::new();
        let may_grow = !self.dispatch.gave_back();
        self.tracker.let_grow(may_grow);
        let next = self.take_dirty(block, rest, SCAN_PAGES, &mut found)?;
        if may_grow && self.dispatch.gave_back() {
            // A stream may have read memory that changed over to the throttle just now, so all of
            // it counts as written.
            found.extend(self.tracker.changed_over());
            normalise(&mut found);
        }
        self.heat.found(block, &found);
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

    /// Returns a chunk without its dirty pages: sent now, these would be sent again in the next
    /// round.
    fn untouched(
        &self,
        block: u16,
        chunk: PageRange,
        dirty: &[PageRange],
    ) -> Result<Option<Unit>, Failure> {
        let number = usize::from(block);
        let region =
            self.regions.get(number).ok_or_else(|| memory_failure(&"no such RAM block"))?;
        let untouched = gaps(chunk, dirty);
        let mut data = Vec::new();
        region.data_ranges(chunk, &mut data).map_err(|error| memory_failure(&error))?;
        let pages = intersection(&data, &untouched);
        let zeros = intersection(&gaps(chunk, &data), &untouched);
        Ok(Some(Unit { block, pages, zeros }).filter(|unit| unit.page_count() > 0))
    }
}

/// Splits a run at the chunks' boundaries.
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
