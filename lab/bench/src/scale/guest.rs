//! Simulated guest: a clock, a working set spread over all memory, and random writes to it. Its
//! dirty pages are in the set that the engine's tracking by faults keeps.

use std::time::Duration;

use godwit_lab::random::Random;
use godwit_migration::drive::Tracking;
use godwit_ram::tracking::simulation::NotedPages;
use godwit_ram::{CHUNK_PAGES, DirtyCount, PageRange, ThrottleFigures, TrackError};

use super::cost::Cost;

/// Writes that are made together, so that their own cost can be measured and left out.
const WRITES_AT_A_TIME: u64 = 256;

/// Pages that a guest writes: pieces of 2 MiB at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkingSet {
    pieces: u64,
    /// Distance from piece to piece.
    stride_pages: u64,
}

impl WorkingSet {
    /// Creates a set of `set_pages`, or of all memory if that is smaller. Both sizes are rounded
    /// down to 2 MiB, and count as 2 MiB at least.
    pub(crate) fn new(memory_pages: u64, set_pages: u64) -> WorkingSet {
        let chunks = (memory_pages / CHUNK_PAGES).max(1);
        let pieces = (set_pages / CHUNK_PAGES).clamp(1, chunks);
        WorkingSet { pieces, stride_pages: chunks / pieces * CHUNK_PAGES }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pieces * CHUNK_PAGES
    }

    /// Returns the number of a page of memory, from its number in the set.
    pub(crate) fn page(&self, number: u64) -> u64 {
        number / CHUNK_PAGES * self.stride_pages + number % CHUNK_PAGES
    }

    /// Returns the pieces in ascending order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = PageRange> {
        (0..self.pieces).map(|piece| PageRange::new(piece * self.stride_pages, CHUNK_PAGES))
    }
}

/// Properties of a simulated guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestPlan {
    pub(crate) memory_pages: u64,
    pub(crate) working_set: WorkingSet,
    pub(crate) dirty_pages_per_s: f64,
    /// Whether its dirty pages are found by faults, and not by scans.
    pub(crate) by_faults: bool,
    /// Time for a scan of the page tables of all its memory.
    pub(crate) scan: Duration,
}

/// Simulated guest, tracked.
#[derive(Debug)]
pub(crate) struct Guest {
    plan: GuestPlan,
    noted: NotedPages,
    random: Random,
    /// Simulated time. Scans take some of it.
    pub(crate) clock: Duration,
    /// Simulated time up to which the writes are made, and the part of a write left over.
    written_until: Duration,
    part_of_a_write: f64,
    /// Most newly written pages per second.
    limit: Option<f64>,
    is_stopping: bool,
    /// Simulated time of the searches for dirty pages since a sweep began.
    pub(crate) search: Duration,
    /// Cost of making the writes, which is not the engine's.
    pub(crate) writing: Cost,
}

impl Guest {
    pub(crate) fn new(plan: GuestPlan) -> Guest {
        Guest {
            plan,
            noted: NotedPages::new(plan.memory_pages),
            random: Random::new(1),
            clock: Duration::ZERO,
            written_until: Duration::ZERO,
            part_of_a_write: 0.0,
            limit: None,
            is_stopping: false,
            search: Duration::ZERO,
            writing: Cost::default(),
        }
    }

    /// Makes all writes that are due.
    pub(crate) fn write_due(&mut self) {
        self.write(1);
    }

    /// Stops the guest's writes for good.
    pub(crate) fn stop(&mut self) {
        self.write_due();
        self.limit = Some(0.0);
    }

    /// Makes the writes that are due, if there are at least so many.
    fn write(&mut self, least: u64) {
        let pages_per_s = self.plan.dirty_pages_per_s.min(self.limit.unwrap_or(f64::INFINITY));
        let since_s = self.clock.saturating_sub(self.written_until).as_secs_f64();
        let due = since_s * pages_per_s + self.part_of_a_write;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few seconds"
        )]
        let writes = due as u64;
        if writes < least {
            return;
        }
        (self.written_until, self.part_of_a_write) = (self.clock, due - writes as f64);
        let (cost, ()) = Cost::of(|| {
            let set = self.plan.working_set;
            (0..writes).for_each(|_| self.noted.write(set.page(self.random.next() % set.pages())));
        });
        self.writing.add(cost);
    }

    /// Passes the time that a scan of so many pages takes, and returns it.
    fn scan(&mut self, pages: u64) -> Duration {
        let share = pages as f64 / self.plan.memory_pages as f64;
        let time = self.plan.scan.mul_f64(share);
        self.clock += time;
        time
    }

    /// Passes the time of a scan that belongs to a sweep.
    fn search_pages(&mut self, pages: u64) {
        let time = self.scan(pages);
        self.search += time;
    }

    /// Passes the time for counting the dirty pages.
    pub(crate) fn look(&mut self) {
        if !self.plan.by_faults {
            self.scan(self.plan.memory_pages);
        }
        self.write_due();
    }
}

impl Tracking for Guest {
    fn start(&mut self) -> Result<(), TrackError> {
        (self.noted, self.written_until) = (NotedPages::new(self.plan.memory_pages), self.clock);
        Ok(())
    }

    fn check_notes(&mut self) -> Result<(), TrackError> {
        if self.plan.by_faults {
            self.scan(self.plan.memory_pages);
        }
        Ok(())
    }

    fn take_dirty(
        &mut self,
        _: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        self.write(WRITES_AT_A_TIME);
        let next = self.noted.take(within, max_pages, out);
        if !self.plan.by_faults || !self.is_stopping {
            self.search_pages(next - within.first);
        }
        Ok(next)
    }

    fn peek_dirty(
        &mut self,
        _: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        self.write(WRITES_AT_A_TIME);
        self.noted.peek(within, out);
        if !self.plan.by_faults {
            self.search_pages(within.count);
        }
        Ok(())
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        Ok(self.noted.count())
    }

    fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        self.write_due();
        self.limit = pages_per_s;
        Ok(())
    }

    fn let_change(&mut self, _: bool) {}

    fn changed_over(&self) -> Vec<PageRange> {
        Vec::new()
    }

    fn let_stop(&mut self) {
        self.is_stopping = true;
    }

    fn throttle_figures(&self) -> ThrottleFigures {
        ThrottleFigures::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY_PAGES: u64 = 64 * CHUNK_PAGES;

    fn guest(by_faults: bool) -> Guest {
        Guest::new(GuestPlan {
            memory_pages: MEMORY_PAGES,
            working_set: WorkingSet::new(MEMORY_PAGES, 4 * CHUNK_PAGES + 7),
            dirty_pages_per_s: 1000.0,
            by_faults,
            scan: Duration::from_millis(64),
        })
    }

    #[test]
    fn a_working_set_is_spread_over_all_memory() {
        let set = WorkingSet::new(MEMORY_PAGES, 4 * CHUNK_PAGES + 7);
        assert_eq!(set.pages(), 4 * CHUNK_PAGES);
        let firsts: Vec<u64> = set.pieces().map(|piece| piece.first / CHUNK_PAGES).collect();
        assert_eq!(firsts, [0, 16, 32, 48]);
        assert_eq!(set.page(CHUNK_PAGES + 3), 16 * CHUNK_PAGES + 3);
        assert_eq!(WorkingSet::new(MEMORY_PAGES, u64::MAX).pages(), MEMORY_PAGES);
        assert_eq!(WorkingSet::new(1, 1).pages(), CHUNK_PAGES);
    }

    #[test]
    fn pages_are_written_at_the_rate_and_within_the_set() {
        let mut guest = guest(true);
        guest.clock = Duration::from_millis(500);
        guest.write_due();
        let dirty = guest.count_dirty().unwrap();
        // 500 writes to 2,048 pages: some hit a page twice.
        assert!((400..=500).contains(&dirty.pages), "{dirty:?}");
        let mut pages = Vec::new();
        let all = PageRange::new(0, MEMORY_PAGES);
        guest.peek_dirty(0, all, &mut pages).unwrap();
        let in_set = |run: &PageRange| (run.first / CHUNK_PAGES).is_multiple_of(16);
        assert!(pages.iter().all(in_set), "{pages:?}");
        let mut taken = Vec::new();
        assert_eq!(guest.take_dirty(0, all, u64::MAX, &mut taken).unwrap(), MEMORY_PAGES);
        assert_eq!((taken, guest.count_dirty().unwrap().pages), (pages, 0));
        guest.stop();
        guest.clock += Duration::from_secs(9);
        guest.write_due();
        assert!(guest.count_dirty().unwrap().pages < 100, "only those written during the take");
    }

    #[test]
    fn scans_take_time_where_the_engine_scans() {
        let clock = |by_faults| {
            let mut guest = guest(by_faults);
            let all = PageRange::new(0, MEMORY_PAGES);
            let mut times = Vec::new();
            guest.peek_dirty(0, all, &mut Vec::new()).unwrap();
            times.push(guest.clock.as_millis());
            guest.check_notes().unwrap();
            times.push(guest.clock.as_millis());
            guest.take_dirty(0, all, u64::MAX, &mut Vec::new()).unwrap();
            times.push(guest.clock.as_millis());
            guest.let_stop();
            guest.take_dirty(0, all, u64::MAX, &mut Vec::new()).unwrap();
            times.push(guest.clock.as_millis());
            times
        };
        assert_eq!(clock(true), [0, 64, 128, 128]);
        assert_eq!(clock(false), [64, 64, 128, 192]);
    }
}
