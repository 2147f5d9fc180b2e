//! A sweep over guest memory: what is dirty is protected again, looked at, and sent.
//!
//! The order is what makes it right: a page is protected before it is read, so a write during the read shows in the
//! next sweep; a page judged zero while the guest writes it is dirty again by the same rule.

use std::sync::Arc;

use godwit_lanes::LaneSender;
use godwit_ram::{PageRange, Region};
use godwit_wire::BlockRun;

use super::{Tracking, lane_failure};
use crate::failure::{Failure, FailureCode};
use crate::ledger::Sweep;

/// Pages scanned and sent in one go: 8 MiB, so that what is sent is fresh and a cancel does not wait.
const CHUNK_PAGES: u64 = 2048;
/// Runs of zero pages collected before they are sent.
const ZERO_RUNS: usize = 1024;

/// What a sweep looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Every page, in round 0; what the file never held is known to be zero without reading it.
    Everything,
    /// What was written since it was last protected.
    Dirty,
}

pub(crate) struct Sweeper<'a, T> {
    pub(crate) regions: &'a [Arc<Region>],
    pub(crate) tracker: &'a mut T,
    pub(crate) sender: &'a mut LaneSender,
    pub(crate) round: u32,
    zeros: Vec<BlockRun>,
    sweep: Sweep,
}

impl<'a, T: Tracking> Sweeper<'a, T> {
    pub(crate) fn new(
        regions: &'a [Arc<Region>],
        tracker: &'a mut T,
        sender: &'a mut LaneSender,
        round: u32,
    ) -> Self {
        Sweeper { regions, tracker, sender, round, zeros: Vec::new(), sweep: Sweep::default() }
    }

    /// Sweeps all blocks. `between` runs after each chunk with the pages looked at so far and stops the sweep by returning
    /// false; then the answer is none.
    pub(crate) fn run(
        mut self,
        scope: Scope,
        mut between: impl FnMut(&mut LaneSender, u64) -> Result<bool, Failure>,
    ) -> Result<Option<Sweep>, Failure> {
        let begun_bytes = self.sender.sent_bytes();
        let mut before_block = 0;
        for (block, region) in self.regions.iter().enumerate() {
            let mut at = 0;
            while at < region.pages() {
                at = self.chunk(scope, block, region, at)?;
                if !between(self.sender, before_block + at)? {
                    return Ok(None);
                }
            }
            before_block += region.pages();
        }
        self.flush_zeros()?;
        self.sweep.bytes = self.sender.sent_bytes() - begun_bytes;
        Ok(Some(self.sweep))
    }

    fn chunk(&mut self, scope: Scope, block: usize, region: &Region, at: u64) -> Result<u64, Failure> {
        let number = u16::try_from(block).map_err(|_| memory_failure(&"too many RAM blocks"))?;
        let rest = PageRange { first: at, count: region.pages() - at };
        let mut runs = Vec::new();
        let next = match scope {
            Scope::Dirty => self
                .tracker
                .take_dirty(block, rest, CHUNK_PAGES, &mut runs)
                .map_err(|error| memory_failure(&error))?,
            Scope::Everything => {
                let chunk = PageRange { first: at, count: rest.count.min(CHUNK_PAGES) };
                // What was written since tracking began is sent now: the next round need not bring it again.
                let mut written = Vec::new();
                let mut from = chunk.first;
                while from < chunk.end() {
                    let left = PageRange { first: from, count: chunk.end() - from };
                    from = self
                        .tracker
                        .take_dirty(block, left, u64::MAX, &mut written)
                        .map_err(|error| memory_failure(&error))?;
                }
                region.data_ranges(chunk, &mut runs).map_err(|error| memory_failure(&error))?;
                self.holes(number, chunk, &runs)?;
                chunk.end()
            }
        };
        self.runs(number, region, &runs)?;
        Ok(next)
    }

    /// What lies between `data` within `chunk` is zero.
    fn holes(&mut self, block: u16, chunk: PageRange, data: &[PageRange]) -> Result<(), Failure> {
        let mut at = chunk.first;
        for run in data {
            self.zero_run(block, at, run.first.saturating_sub(at))?;
            at = run.end();
        }
        self.zero_run(block, at, chunk.end().saturating_sub(at))
    }

    /// Sends runs, zero pages apart.
    fn runs(&mut self, block: u16, region: &Region, runs: &[PageRange]) -> Result<(), Failure> {
        let mut full: Vec<PageRange> = Vec::with_capacity(runs.len());
        for run in runs {
            for page in run.first..run.end() {
                if region.is_zero(page) {
                    self.zero_run(block, page, 1)?;
                    continue;
                }
                match full.last_mut() {
                    Some(last) if last.end() == page => last.count += 1,
                    _ => full.push(PageRange { first: page, count: 1 }),
                }
            }
        }
        self.sweep.pages += full.iter().map(|run| run.count).sum::<u64>();
        self.sender.pages(self.round, block, region, &full).map_err(|error| lane_failure(&error))
    }

    fn zero_run(&mut self, block: u16, first: u64, count: u64) -> Result<(), Failure> {
        if count == 0 {
            return Ok(());
        }
        self.sweep.pages += count;
        self.sweep.zero_pages += count;
        match self.zeros.last_mut() {
            Some(last) if last.block == block && last.first + last.count == first => last.count += count,
            _ => self.zeros.push(BlockRun { block, first, count }),
        }
        if self.zeros.len() >= ZERO_RUNS { self.flush_zeros() } else { Ok(()) }
    }

    fn flush_zeros(&mut self) -> Result<(), Failure> {
        let runs = std::mem::take(&mut self.zeros);
        self.sender.zeros(self.round, runs).map_err(|error| lane_failure(&error))
    }
}

pub(crate) fn memory_failure(error: &impl ToString) -> Failure {
    Failure::new(FailureCode::MemoryFailed, error.to_string())
}
