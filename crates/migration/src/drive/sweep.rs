//! A sweep over guest memory, step by step: each step finds dirty pages, protects them again and
//! puts them on the board for the streams to send. The driver takes a step whenever it has no
//! message to handle; a step never waits.
//!
//! The order makes it correct. A page is protected before it is read, so a write during the read
//! shows in the next sweep. A page that is judged zero while the guest writes it is dirty again for
//! the same reason.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_ram::pages::{intersection, normalise, page_count};
use godwit_ram::{PageRange, Region, gaps};

use super::course::Course;
use super::dispatch::Dispatch;
use super::heat::{self, Heat, Stretch};
use super::referring::Referring;
use super::tracking::Tracking;
use crate::board::Unit;
use crate::failure::{Failure, memory_failure};
use crate::reference::PageBits;

/// Dirty pages found at a time: 8 MiB, so that pages are sent right after they were scanned and a
/// cancel does not wait.
const SCAN_PAGES: u64 = 2048;
/// Time in round 0 at which the number of pages that the guest has written is sampled. A long round
/// shows a lower rate, because a page that is written again in it counts once.
pub(crate) const SAMPLED_AFTER: Duration = Duration::from_millis(500);

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

/// What a step of a sweep works on.
pub(crate) struct Sweeper<'a, T> {
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) tracker: &'a mut T,
    pub(crate) dispatch: &'a Dispatch,
    /// Pages that the destination misses count as dirty.
    pub(crate) referring: &'a Referring,
    /// What was hot in earlier sweeps; updated with what this sweep finds.
    pub(crate) heat: &'a mut Heat,
    /// What round 0 has not visited yet.
    pub(crate) unswept: &'a mut PageBits,
    /// Time that the tracker takes to find pages; the sweep adds to it.
    pub(crate) search: &'a mut Duration,
}

/// Sweep under way. Where it gets its pages is in its route alone.
#[derive(Debug)]
pub(crate) struct Sweeping {
    route: Route,
    /// Pages of a chunk: no unit spans two.
    chunk_pages: u64,
    /// Units found that are not on the board. They are not dirty any more.
    found: VecDeque<Unit>,
}

/// Memory left to visit, in order.
#[derive(Debug)]
enum Route {
    Untouched(FirstVisit),
    Dirty(VecDeque<Stretch>),
}

/// Round 0 under way. Chunks with dirty pages are deferred until all others have been sent, those
/// with the fewest first. By then more of the pages that would have to be sent again are dirty, and
/// are left out.
#[derive(Debug)]
struct FirstVisit {
    begun: Instant,
    chunks: VecDeque<Stretch>,
    pass: Pass,
    visited_pages: u64,
    is_sampled: bool,
}

/// Which chunks round 0 visits.
#[derive(Debug)]
enum Pass {
    /// All of them. Those with dirty pages are deferred, with the number of these pages.
    First { deferred: Vec<(u64, Stretch)> },
    /// The deferred ones.
    Deferred,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepStep {
    /// What was found is on the board.
    Progress,
    /// The guest has written so many pages since tracking began.
    Sampled {
        /// The number of those pages.
        pages: u64,
    },
    /// The board has no room: a report of room was requested.
    Full,
    /// All memory is visited, and everything found is on the board.
    Done,
}

impl Sweeping {
    /// Begins a sweep. `course`: the order of round 0.
    pub(crate) fn new(
        scope: Scope,
        regions: &[Arc<Region>],
        heat: &Heat,
        chunk_pages: u64,
        course: Course,
    ) -> Sweeping {
        let route = match scope {
            Scope::Untouched => Route::Untouched(FirstVisit {
                begun: Instant::now(),
                chunks: chunks(regions, chunk_pages, course),
                pass: Pass::First { deferred: Vec::new() },
                visited_pages: 0,
                is_sampled: false,
            }),
            Scope::Last => Route::dirty(heat::all(regions)),
            Scope::Dirty => {
                let (cold, hot) = heat.order();
                Route::dirty(cold.into_iter().chain(hot))
            }
        };
        Sweeping { route, chunk_pages, found: VecDeque::new() }
    }

    /// Returns the pages that round 0 has visited, and its duration so far; `None` in later rounds.
    pub(crate) fn visited(&self) -> Option<(u64, Duration)> {
        match &self.route {
            Route::Untouched(visit) => Some((visit.visited_pages, visit.begun.elapsed())),
            Route::Dirty(_) => None,
        }
    }

    /// Ends a sweep that has become pointless. What was taken from the dirty pages and is not on
    /// the board must be sent by another attempt.
    pub(crate) fn abandon(self, referring: &Referring) {
        self.found.iter().for_each(|unit| referring.owe(unit));
    }
}

impl Route {
    fn dirty(stretches: impl IntoIterator<Item = Stretch>) -> Route {
        Route::Dirty(stretches.into_iter().filter(|stretch| !stretch.pages.is_empty()).collect())
    }
}

impl FirstVisit {
    fn is_over(&self) -> bool {
        let has_deferred = matches!(&self.pass, Pass::First { deferred } if !deferred.is_empty());
        self.chunks.is_empty() && !has_deferred
    }

    fn next(&mut self) -> Option<Stretch> {
        if self.chunks.is_empty()
            && let Pass::First { mut deferred } = std::mem::replace(&mut self.pass, Pass::Deferred)
        {
            deferred.sort_by_key(|(dirty_pages, _)| *dirty_pages);
            self.chunks = deferred.into_iter().map(|(_, chunk)| chunk).collect();
        }
        self.chunks.pop_front()
    }
}

impl<T: Tracking> Sweeper<'_, T> {
    /// Takes a step: finds pages, unless some wait for room, and puts them on the board.
    pub(crate) fn step(&mut self, sweep: &mut Sweeping) -> Result<SweepStep, Failure> {
        if sweep.found.is_empty() {
            let next = match &mut sweep.route {
                Route::Untouched(visit) => {
                    if let Some(pages) = self.sample(visit)? {
                        return Ok(SweepStep::Sampled { pages });
                    }
                    self.visit(visit)?
                }
                Route::Dirty(left) => self.next_units(left, sweep.chunk_pages)?,
            };
            let Some(found) = next else {
                self.heat.swept();
                return Ok(SweepStep::Done);
            };
            sweep.found = found.into();
        }
        while !sweep.found.is_empty() {
            if !self.dispatch.has_room() {
                return Ok(SweepStep::Full);
            }
            sweep.found.pop_front().into_iter().for_each(|unit| self.dispatch.push(unit));
        }
        Ok(SweepStep::Progress)
    }

    /// Visits the next chunk of round 0. Returns its unit, or `None` at the end.
    fn visit(&mut self, visit: &mut FirstVisit) -> Result<Option<Vec<Unit>>, Failure> {
        let Some(chunk) = visit.next() else { return Ok(None) };
        let Stretch { block, pages } = chunk;
        let dirty = self.peek_dirty(block, pages)?;
        if let Pass::First { deferred } = &mut visit.pass
            && !dirty.is_empty()
        {
            deferred.push((page_count(&dirty), chunk));
            return Ok(Some(Vec::new()));
        }
        self.heat.found(block, &dirty);
        let unit = self.untouched(block, pages, &dirty)?;
        visit.visited_pages += pages.count;
        self.unswept.take(block, pages, &mut Vec::new());
        Ok(Some(unit.into_iter().collect()))
    }

    /// Counts what the guest has written, once in round 0.
    fn sample(&mut self, visit: &mut FirstVisit) -> Result<Option<u64>, Failure> {
        let is_due = !visit.is_sampled && visit.begun.elapsed() >= SAMPLED_AFTER;
        if !is_due || visit.is_over() {
            return Ok(None);
        }
        visit.is_sampled = true;
        let dirty = self.tracker.count_dirty().map_err(|error| memory_failure(&error))?;
        Ok(Some(dirty.pages - dirty.filled_pages))
    }

    /// Takes the next dirty pages. Returns `None` at the end.
    fn next_units(
        &mut self,
        left: &mut VecDeque<Stretch>,
        chunk_pages: u64,
    ) -> Result<Option<Vec<Unit>>, Failure> {
        let Some(Stretch { block, pages }) = left.front_mut() else { return Ok(None) };
        let (next, units) = self.take_units(*block, *pages, chunk_pages)?;
        *pages = PageRange::between(next, pages.end());
        if pages.is_empty() {
            left.pop_front();
        }
        Ok(Some(units))
    }

    fn peek_dirty(&mut self, block: u16, pages: PageRange) -> Result<Vec<PageRange>, Failure> {
        let (mut dirty, begun) = (Vec::new(), Instant::now());
        let found = self.tracker.peek_dirty(usize::from(block), pages, &mut dirty);
        *self.search += begun.elapsed();
        found.map_err(|error| memory_failure(&error))?;
        Ok(dirty)
    }

    fn take_dirty(
        &mut self,
        block: u16,
        within: PageRange,
        most: u64,
        found: &mut Vec<PageRange>,
    ) -> Result<u64, Failure> {
        let begun = Instant::now();
        let next = self.tracker.take_dirty(usize::from(block), within, most, found);
        *self.search += begun.elapsed();
        next.map_err(|error| memory_failure(&error))
    }

    /// Takes the next dirty pages of a block. Returns the page to go on from, and the units.
    fn take_units(
        &mut self,
        block: u16,
        rest: PageRange,
        chunk_pages: u64,
    ) -> Result<(u64, Vec<Unit>), Failure> {
        let mut found = Vec::new();
        let may_change = !self.dispatch.reads_taken_pages();
        self.tracker.let_change(may_change);
        let next = self.take_dirty(block, rest, SCAN_PAGES, &mut found)?;
        if may_change && self.dispatch.reads_taken_pages() {
            // A stream may have read memory that changed over to the throttle just now, so all of
            // it counts as written.
            found.extend(self.tracker.changed_over());
            normalise(&mut found);
        }
        self.heat.found(block, &found);
        let dirty_runs = found.len();
        self.referring.take(block, PageRange::between(rest.first, next), &mut found);
        if found.len() > dirty_runs {
            normalise(&mut found);
        }
        let mut units: Vec<Unit> = Vec::new();
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

/// Returns all memory in the order of round 0.
fn chunks(regions: &[Arc<Region>], chunk_pages: u64, course: Course) -> VecDeque<Stretch> {
    let of = |Stretch { block, pages }: Stretch| {
        by_chunk(pages, chunk_pages).map(move |pages| Stretch { block, pages })
    };
    let mut chunks: VecDeque<_> = heat::all(regions).into_iter().flat_map(of).collect();
    course.arrange(&mut chunks);
    chunks
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

#[cfg(test)]
mod tests;
