//! Faults injected for real: a migration is brought to a moment ([`Moment`]), held there, struck ([`Fault`]), let go, and mended. Then it
//! is looked, at the agents and at the processes: where the guest is, that it runs there and nowhere else, that its memory is right,
//! that nothing is left over, and that it moves again.
//!
//! A [`Stage`] is a lab with a guest in which one cell after the other is tried. `godwit-bench faults` tries all of them and writes the
//! table of docs/reliability.md; the end-to-end tests try some; the soak draws them at random.

mod blow;
mod cells;
mod clock;
mod fault;
mod lies;
mod moment;
mod moving;
mod oom;
mod soak;
mod stage;
mod verdict;
mod writes;

pub use cells::{Cell, Place, matrix, singles};
pub use clock::build_clock;
pub use fault::Fault;
pub use lies::{LieReport, lies};
pub use moment::Moment;
pub use soak::{SoakPlan, SoakReport, soak};
pub use stage::{CellReport, Stage, StagePlan};
pub use verdict::{remove_ended, settled};
pub use writes::{FailingWrite, Write, WriteError};
