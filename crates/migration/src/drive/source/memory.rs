//! Guest memory as the driver sees it: what a round sends, what remains, and what the destination
//! lacks after a cut.

use std::sync::Arc;
use std::time::Duration;

use godwit_ram::{DirtyCount, Region};
use godwit_wire::BlockRun;

use super::job::Unsent;
use crate::drive::course::Course;
use crate::drive::dispatch::Dispatch;
use crate::drive::heat::Heat;
use crate::drive::referring::Referring;
use crate::drive::sweep::{Scope, SweepStep, Sweeper, Sweeping};
use crate::drive::tracking::Tracking;
use crate::failure::Failure;
use crate::ledger::SentTotals;
use crate::reference::PageBits;

pub(super) struct Memory<'a> {
    regions: &'a [Arc<Region>],
    pub(super) referring: &'a Referring,
    /// Memory that the guest writes again and again.
    heat: Heat,
    /// What was hot before the guest was paused; `None`: it has not been.
    last_hot: Option<Vec<BlockRun>>,
    /// Whether round 0 covers all of memory.
    sends_all: bool,
    /// Memory that round 0 has not visited.
    unswept: PageBits,
    /// The sweep under way.
    sweeping: Option<Sweeping>,
    /// Time that the last sweep took to find its pages.
    pub(super) search: Duration,
    /// Time that the last look at all of the memory took.
    pub(super) scan: Duration,
    /// Totals sent before the current sweep.
    counted: SentTotals,
    /// Remaining pages as last counted, for progress.
    pub(super) remaining_pages: u64,
    /// Most of them in one chunk.
    pub(super) fullest_chunk_pages: u64,
}

impl<'a> Memory<'a> {
    /// Creates the state. `sends_all`: the destination has nothing yet.
    pub(super) fn new(
        regions: &'a [Arc<Region>],
        referring: &'a Referring,
        sends_all: bool,
    ) -> Memory<'a> {
        let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        let unswept =
            if sends_all { PageBits::all(&block_pages) } else { PageBits::new(&block_pages) };
        Memory {
            regions,
            referring,
            heat: Heat::new(regions),
            last_hot: None,
            sends_all,
            unswept,
            sweeping: None,
            search: Duration::ZERO,
            scan: Duration::ZERO,
            counted: SentTotals::default(),
            remaining_pages: 0,
            fullest_chunk_pages: 0,
        }
    }

    /// Returns whether round 0 covers all of memory.
    pub(super) fn sends_all(&self) -> bool {
        self.sends_all
    }

    pub(super) fn total_pages(&self) -> u64 {
        self.regions.iter().map(|region| region.pages()).sum()
    }

    /// Begins the sweep of a round. `course`: the order of round 0.
    pub(super) fn begin_round(&mut self, round: u32, chunk_pages: u64, course: Course) {
        self.last_hot = None;
        let all = round == 0 && self.sends_all;
        let scope = if all { Scope::Untouched } else { Scope::Dirty };
        self.begin(scope, chunk_pages, course);
    }

    /// Begins a sweep of the pages that are dirty while the guest is paused.
    pub(super) fn begin_last(&mut self, chunk_pages: u64) {
        self.last_hot = Some(self.hot());
        self.begin(Scope::Last, chunk_pages, Course::default());
    }

    fn begin(&mut self, scope: Scope, chunk_pages: u64, course: Course) {
        self.abandon_sweep();
        let sweep = Sweeping::new(scope, self.regions, &self.heat, chunk_pages, course);
        (self.sweeping, self.search) = (Some(sweep), Duration::ZERO);
    }

    /// Returns the memory that the guest writes again and again. A paused guest writes nothing:
    /// then, what it wrote before.
    pub(super) fn hot(&self) -> Vec<BlockRun> {
        self.last_hot.clone().unwrap_or_else(|| self.heat.hot())
    }

    /// Takes a step of the sweep under way; `None` if there is none.
    pub(super) fn step(
        &mut self,
        tracker: &mut impl Tracking,
        dispatch: &Dispatch,
    ) -> Option<Result<SweepStep, Failure>> {
        let sweep = self.sweeping.as_mut()?;
        let mut sweeper = Sweeper {
            regions: self.regions,
            tracker,
            dispatch,
            referring: self.referring,
            heat: &mut self.heat,
            unswept: &mut self.unswept,
            search: &mut self.search,
        };
        let step = sweeper.step(sweep);
        match &step {
            Ok(SweepStep::Done) => self.sweeping = None,
            Ok(_) => {}
            Err(_) => self.abandon_sweep(),
        }
        Some(step)
    }

    /// Ends a sweep that has become pointless.
    pub(super) fn abandon_sweep(&mut self) {
        if let Some(sweep) = self.sweeping.take() {
            sweep.abandon(self.referring);
        }
    }

    /// Notes the dirty pages. Returns the number of pages that remain.
    pub(super) fn count(&mut self, dirty: DirtyCount) -> u64 {
        self.fullest_chunk_pages = dirty.fullest_chunk_pages;
        self.remaining_pages = dirty.pages + self.referring.waiting();
        self.remaining_pages
    }

    /// Returns what has been sent since the last call.
    pub(super) fn sent(&mut self, dispatch: &Dispatch) -> SentTotals {
        let sent = dispatch.sent();
        let before = std::mem::replace(&mut self.counted, sent);
        SentTotals {
            // Work that a broken stream gives back is counted when it is sent again.
            pages: sent.pages.saturating_sub(before.pages),
            zero_pages: sent.zero_pages - before.zero_pages,
            rebuilt_pages: sent.rebuilt_pages - before.rebuilt_pages,
            referred_pages: sent.referred_pages - before.referred_pages,
            bytes: sent.bytes - before.bytes,
        }
    }

    /// Returns the pages left in a round, for progress. Round 0 is over when all memory has been
    /// visited, and later ones when so many pages have been sent.
    pub(super) fn left(&self, round: u32, dispatch: &Dispatch) -> u64 {
        if let Some((visited, _)) = self.sweeping.as_ref().and_then(Sweeping::visited) {
            return self.total_pages() - visited;
        }
        let all = round == 0 && self.sends_all;
        let of_round = if all { self.total_pages() } else { self.remaining_pages };
        of_round.saturating_sub(dispatch.sent().pages.saturating_sub(self.counted.pages))
    }

    /// Returns how long the rest of round 0 takes by its speed so far; `None` before it has visited
    /// anything, and in later rounds.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let (visited, since) = self.sweeping.as_ref()?.visited()?;
        let left = self.total_pages().saturating_sub(visited);
        Duration::try_from_secs_f64(since.as_secs_f64() * left as f64 / visited as f64).ok()
    }

    /// Returns everything that the destination lacks. The streams' threads have ended: no more
    /// units are confirmed.
    pub(super) fn unsent(mut self, dispatch: &Dispatch) -> Unsent {
        self.abandon_sweep();
        dispatch.unconfirmed().iter().for_each(|unit| self.referring.owe(unit));
        self.unswept.add(&self.referring.unsent());
        Unsent(self.unswept)
    }
}
