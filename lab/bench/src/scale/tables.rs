//! Scans of real page tables: a sparse mapping of this process of the guest's size, tracked by the
//! engine's own tracker. Only the working set holds data. This process writes in place of a guest.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use godwit_lab::random::Random;
use godwit_migration::millis;
use godwit_ram::tracking::simulation::with_library;
use godwit_ram::{
    DirtyTracker, PAGE_SIZE, PageRange, Region, ScanCores, TrackError, throttle_chunk_pages,
};
use serde::Serialize;

use super::cost::Cost;
use super::guest::WorkingSet;
use crate::figures::Spread;
use crate::footprint::status_bytes;

/// Pages that are written of 2 MiB so that all of it counts as dirty: an eighth.
const DENSE_PAGES: u64 = 64;

/// Milliseconds of the tracker's work on all memory, in one way of tracking.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TableTimes {
    /// Protects all memory, once. The first way of tracking makes the page tables.
    pub(crate) protect_ms: f64,
    /// Memory for page tables after that.
    pub(crate) page_table_mib: u64,
    /// Takes dirty pages while none are.
    pub(crate) clean_ms: Option<Spread>,
    /// Takes dirty pages.
    pub(crate) dirty_ms: Option<Spread>,
    pub(crate) dirty_pages: u64,
    /// Counts them before. A scan takes as long as a clean one.
    pub(crate) count_ms: Option<Spread>,
    /// Checks the notes of faults; with scans there are none.
    pub(crate) check_ms: Option<Spread>,
    /// Takes a chunk that changes over because 2 MiB of it are written densely; with scans none
    /// does.
    pub(crate) change_over_ms: Option<Spread>,
    /// Takes the last dirty pages of a guest that is being stopped.
    pub(crate) last_ms: Option<Spread>,
}

/// What is measured.
#[derive(Clone, Copy)]
pub(crate) struct TablePlan {
    pub(crate) working_set: WorkingSet,
    pub(crate) runs: u32,
    pub(crate) by_faults: bool,
    pub(crate) cores: ScanCores,
}

/// Writes data to the working set, without any tracking.
pub(crate) fn populate(region: &Region, working_set: WorkingSet) -> Result<()> {
    let data = vec![0x5a; 1 << 20];
    for piece in working_set.pieces() {
        for part in piece.chunks(data.len() as u64 / PAGE_SIZE) {
            region.copy_in(part.offset_bytes(), &data)?;
        }
    }
    Ok(())
}

/// Measures the tracker's work. `socket`: a free path for the socket at which this process serves
/// its tracker.
pub(crate) fn measure(region: &Arc<Region>, socket: &Path, plan: TablePlan) -> Result<TableTimes> {
    let served = with_library(socket, || measure_tracked(region, socket, plan));
    // It has served its purpose, also after an error.
    let _ = std::fs::remove_file(socket);
    served.context("cannot make the tracker's socket")?
}

fn measure_tracked(region: &Arc<Region>, socket: &Path, plan: TablePlan) -> Result<TableTimes> {
    let pid = i32::try_from(std::process::id())?;
    let regions = [Arc::clone(region)];
    let tracker = DirtyTracker::attach(socket, pid, &regions)?.by_faults(plan.by_faults);
    let mut tracker = tracker.scan_on(plan.cores);
    let (protect, started) = Cost::of(|| tracker.start());
    started?;
    let mut writer = Writer::new(region, plan.working_set)?;
    let all = region.all_pages();
    let take = |tracker: &mut DirtyTracker| {
        let (cost, taken) = Cost::of(|| take_all(tracker, all));
        taken?;
        anyhow::Ok(millis(cost.wall))
    };
    let (mut clean, mut count, mut dirty) = (Vec::new(), Vec::new(), Vec::new());
    let (mut check, mut last, mut dirty_pages) = (Vec::new(), Vec::new(), 0);
    for _ in 0..plan.runs {
        clean.push(take(&mut tracker)?);
        writer.write_scattered()?;
        if plan.by_faults {
            let (cost, checked) = Cost::of(|| tracker.check_notes());
            checked?;
            check.push(millis(cost.wall));
            let (cost, counted) = Cost::of(|| tracker.count_dirty());
            dirty_pages = counted?.pages;
            count.push(millis(cost.wall));
        }
        dirty.push(take(&mut tracker)?);
    }
    let mut change_over = Vec::new();
    let chunk_pages = throttle_chunk_pages(region.pages(), 1);
    let dense = plan.working_set.pieces().take(usize::try_from(plan.runs)?);
    for piece in dense.filter(|_| plan.by_faults) {
        let (pages, _) = piece.split(DENSE_PAGES);
        writer.write_pages(pages)?;
        let chunk = PageRange::new(piece.first / chunk_pages * chunk_pages, chunk_pages);
        let (cost, taken) = Cost::of(|| take_all(&mut tracker, chunk.intersect(all)));
        taken?;
        change_over.push(millis(cost.wall));
    }
    tracker.let_stop();
    for _ in 0..plan.runs {
        writer.write_scattered()?;
        last.push(take(&mut tracker)?);
    }
    Ok(TableTimes {
        protect_ms: millis(protect.wall),
        page_table_mib: status_bytes("self", "VmPTE")? >> 20,
        clean_ms: Spread::of(clean),
        dirty_ms: Spread::of(dirty),
        dirty_pages,
        count_ms: Spread::of(count),
        check_ms: Spread::of(check),
        change_over_ms: Spread::of(change_over),
        last_ms: Spread::of(last),
    })
}

/// Takes all dirty pages of a range. A call returns early after much memory has changed over.
fn take_all(tracker: &mut DirtyTracker, within: PageRange) -> Result<(), TrackError> {
    let (mut rest, mut out) = (within, Vec::new());
    while !rest.is_empty() {
        let next = tracker.take_dirty(0, rest, u64::MAX, &mut out)?;
        rest = PageRange::between(next, rest.end());
    }
    Ok(())
}

/// Writer of single pages through the mapping, as a guest writes them.
struct Writer<'a> {
    region: &'a Region,
    working_set: WorkingSet,
    random: Random,
    data: Vec<u8>,
    from: UnixStream,
    to: UnixStream,
}

impl<'a> Writer<'a> {
    fn new(region: &'a Region, working_set: WorkingSet) -> Result<Writer<'a>> {
        let (from, to) = UnixStream::pair()?;
        let data = vec![0xa5; usize::try_from(PAGE_SIZE)?];
        Ok(Writer { region, working_set, random: Random::new(2), data, from, to })
    }

    /// Writes a random page of each piece of the working set: too few for a chunk to change over.
    fn write_scattered(&mut self) -> Result<()> {
        let working_set = self.working_set;
        working_set.pieces().try_for_each(|piece| {
            let page = piece.first + self.random.next() % piece.count;
            self.write_pages(PageRange::new(page, 1))
        })
    }

    fn write_pages(&mut self, pages: PageRange) -> Result<()> {
        (pages.first..pages.end()).try_for_each(|page| {
            self.from.write_all(&self.data)?;
            Ok(self.region.receive(self.to.as_fd(), PageRange::new(page, 1))?)
        })
    }
}
