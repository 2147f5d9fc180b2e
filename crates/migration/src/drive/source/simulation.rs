//! The driver's sweeps and its board without streams, for the benchmark of large guests. It is not
//! a stable interface.

use std::sync::Arc;

use godwit_lanes::{Carries, UnitSent};
use godwit_ram::{DirtyCount, Region};

use super::memory::Memory;
use crate::board::Unit;
use crate::drive::course::Course;
use crate::drive::dispatch::{Dispatch, Work};
use crate::drive::referring::{Deltas, References, Referring};
use crate::drive::tracking::Tracking;
use crate::failure::{Failure, FailureCode};
use crate::ledger::SentTotals;

pub use crate::drive::sweep::SweepStep;

/// State that the driver shares with the threads of its streams.
#[derive(Debug)]
pub struct Shared {
    regions: Vec<Arc<Region>>,
    dispatch: Dispatch,
    referring: Referring,
}

impl Shared {
    /// Creates the state of a migration that begins.
    #[must_use]
    pub fn new(regions: Vec<Arc<Region>>) -> Shared {
        let block_pages: Vec<u64> = regions.iter().map(|region| region.pages()).collect();
        let referring = Referring::new(
            References::default(),
            Deltas::default(),
            Arc::default(),
            &block_pages,
            None,
        );
        Shared { regions, dispatch: Dispatch::default(), referring }
    }
}

/// Sweeps over memory whose units one simulated stream takes.
pub struct Sweeps<'a> {
    dispatch: &'a Dispatch,
    memory: Memory<'a>,
    stream: u16,
}

impl<'a> Sweeps<'a> {
    /// Creates the state before round 0.
    #[must_use]
    pub fn new(shared: &'a Shared) -> Sweeps<'a> {
        let Shared { regions, dispatch, referring } = shared;
        let memory = Memory::new(regions, referring, true);
        let stream = u16::try_from(dispatch.open(0, Carries::Pages)).unwrap_or(u16::MAX);
        Sweeps { dispatch, memory, stream }
    }

    /// Begins the sweep of a round.
    pub fn begin_round(&mut self, round: u32) {
        self.dispatch.set_round(round);
        self.memory.begin_round(round, self.dispatch.chunk_pages(), Course::default());
    }

    /// Begins the sweep for the last pages of a guest that is paused.
    pub fn begin_last(&mut self, round: u32) {
        self.dispatch.set_round(round);
        self.dispatch.hurry(&[], self.memory.fullest_chunk_pages);
        self.memory.begin_last(self.dispatch.chunk_pages());
    }

    /// Takes a step of the sweep under way.
    ///
    /// # Errors
    /// The memory or its tracking failed.
    pub fn step(&mut self, tracker: &mut impl Tracking) -> Result<SweepStep, Failure> {
        self.memory.step(tracker, self.dispatch).unwrap_or(Ok(SweepStep::Done))
    }

    /// Returns the number of units on the board that the stream has not taken.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.dispatch.waiting()
    }

    /// Takes the next unit for the stream. Returns `None` if none waits.
    pub fn take(&mut self) -> Option<Unit> {
        if self.waiting() == 0 {
            return None;
        }
        match self.dispatch.next_work(self.stream.into()) {
            Work::Unit { unit, .. } => Some(unit),
            Work::Padding(_) | Work::Nothing | Work::Over => None,
        }
    }

    /// Notes that the unit last taken is on the wire, with so many bytes.
    pub fn written(&mut self, bytes: u64) {
        self.dispatch.totals.sent(&UnitSent { wire_bytes: bytes, ..UnitSent::default() }, 0);
        self.dispatch.written(self.stream.into(), bytes);
    }

    /// Notes that the destination has applied so many units since the beginning.
    ///
    /// # Errors
    /// The number is impossible.
    pub fn applied(&mut self, units: u64) -> Result<(), Failure> {
        self.dispatch
            .applied(self.stream, units)
            .map(|_| ())
            .map_err(|error| Failure::new(FailureCode::ProtocolBroken, error.to_string()))
    }

    /// Returns what was sent since the last call.
    pub fn sent(&mut self) -> SentTotals {
        self.memory.sent(self.dispatch)
    }

    /// Returns the pages that remain if so many are dirty.
    pub fn remaining(&mut self, dirty: DirtyCount) -> u64 {
        self.memory.count(dirty)
    }
}
