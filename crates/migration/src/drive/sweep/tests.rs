use std::sync::Arc;

use godwit_lanes::Carries;
use godwit_ram::{CHUNK_PAGES, DirtyCount, PAGE_SIZE, ThrottleFigures, TrackError};

use super::*;
use crate::drive::dispatch::Work;
use crate::drive::referring::{Deltas, References};

/// Guest of one block that has written all of it, or nothing, and the looks at it.
struct Guest {
    is_dirty: bool,
    looks: usize,
}

impl Tracking for Guest {
    fn start(&mut self) -> Result<(), TrackError> {
        Ok(())
    }

    fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        most: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        let (taken, _) = within.split(most);
        self.peek_dirty(block, taken, out)?;
        Ok(taken.end())
    }

    fn peek_dirty(
        &mut self,
        _: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        self.looks += 1;
        out.extend(self.is_dirty.then_some(within));
        Ok(())
    }

    fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        Ok(DirtyCount::default())
    }

    fn throttle(&mut self, _: Option<f64>) -> Result<(), TrackError> {
        Ok(())
    }

    fn let_change(&mut self, _: bool) {}

    fn changed_over(&self) -> Vec<PageRange> {
        Vec::new()
    }

    fn let_stop(&mut self) {}

    fn throttle_figures(&self) -> ThrottleFigures {
        ThrottleFigures::default()
    }
}

/// Chunks of the guest, and of one look of a sweep for dirty pages.
const CHUNKS: u64 = 12;
const LOOK_CHUNKS: u64 = SCAN_PAGES / CHUNK_PAGES;

/// Sweeps memory for a stream that takes `taken` units, each when the board is full, until the
/// board stays full or the sweep is done; then abandons the sweep. Returns the last step, the
/// looks, and the chunks that the board, the debts to the destination and round 0 then have.
fn swept(scope: Scope, taken: u64) -> (SweepStep, usize, [u64; 3]) {
    let folder = tempfile::tempdir().unwrap();
    let pages = CHUNKS * CHUNK_PAGES;
    let region = Region::create(&folder.path().join("ram"), pages * PAGE_SIZE, None).unwrap();
    let regions = [Arc::new(region)];
    let (references, deltas) = (References::default(), Deltas::default());
    let referring = Referring::new(references, deltas, Arc::default(), &[pages], None);
    let (dispatch, mut heat) = (Dispatch::default(), Heat::new(&regions));
    let stream = dispatch.open(0, Carries::Pages);
    let is_dirty = scope != Scope::Untouched;
    let mut unswept = if is_dirty { PageBits::new(&[pages]) } else { PageBits::all(&[pages]) };
    let mut guest = Guest { is_dirty, looks: 0 };
    let mut sweep = Sweeping::new(scope, &regions, &heat, CHUNK_PAGES, Course::default());
    let mut sweeper = Sweeper {
        regions: &regions,
        tracker: &mut guest,
        dispatch: &dispatch,
        referring: &referring,
        heat: &mut heat,
        unswept: &mut unswept,
        search: &mut Duration::default(),
    };
    let mut left = taken;
    let last = loop {
        match sweeper.step(&mut sweep).unwrap() {
            SweepStep::Full if left > 0 => {
                left -= 1;
                let Work::Unit { makes_room: true, .. } = dispatch.next_work(stream) else {
                    panic!("no work, or no report of room")
                };
                dispatch.written(stream, 0);
            }
            SweepStep::Progress | SweepStep::Sampled { .. } => {}
            last => break last,
        }
    };
    sweep.abandon(&referring);
    let on_board = dispatch.unconfirmed().iter().map(Unit::page_count).sum::<u64>();
    let chunks = [on_board, referring.unsent().count(), unswept.count()];
    (last, guest.looks, chunks.map(|pages| pages / CHUNK_PAGES))
}

#[test]
fn a_sweep_goes_on_where_the_board_was_full_and_looks_once_at_each_page() {
    assert_eq!(swept(Scope::Last, CHUNKS), (SweepStep::Done, 3, [CHUNKS, 0, 0]));
    let looks = usize::try_from(CHUNKS).unwrap();
    assert_eq!(swept(Scope::Untouched, CHUNKS), (SweepStep::Done, looks, [CHUNKS, 0, 0]));
}

#[test]
fn an_abandoned_sweep_owes_what_it_took_and_did_not_put_on_the_board() {
    for taken in 0..LOOK_CHUNKS - 2 {
        let on_board = taken + 2;
        let dirty = swept(Scope::Last, taken);
        assert_eq!(dirty, (SweepStep::Full, 1, [on_board, LOOK_CHUNKS - on_board, 0]));
        let (step, _, chunks) = swept(Scope::Untouched, taken);
        assert_eq!((step, chunks), (SweepStep::Full, [on_board, 1, CHUNKS - on_board - 1]));
    }
}

#[test]
fn a_run_is_cut_at_the_bounds_of_chunks() {
    let cut = |chunk_pages| {
        let cut = by_chunk(PageRange { first: 500, count: 600 }, chunk_pages);
        cut.map(|run| (run.first, run.count)).collect::<Vec<_>>()
    };
    assert_eq!(cut(512), [(500, 12), (512, 512), (1024, 76)]);
    assert_eq!(cut(256), [(500, 12), (512, 256), (768, 256), (1024, 76)]);
}
