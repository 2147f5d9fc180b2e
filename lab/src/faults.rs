//! Real fault injection. A trial brings a migration to a moment ([`Moment`]), holds it there,
//! injects a fault ([`Fault`]), releases the migration and repairs the fault. It then checks the
//! agents and the processes: where the guest is, that it runs there and nowhere else, that its
//! memory is correct, that nothing is left over, and that it can migrate again.
//!
//! A [`Stage`] is a lab with a guest in which one cell after another is tried. `godwit-bench
//! faults` tries all cells and writes the table of docs/reliability.md. The end-to-end tests try
//! some cells. The soak draws them at random.

mod blow;
mod cells;
mod clock;
mod disks;
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
pub(crate) use clock::{expect_stepped, step};
pub use disks::{DiskCell, DiskCellReport, DiskFault, DiskMoment, DiskStage, disk_matrix};
pub use fault::Fault;
pub use lies::{LieReport, lies};
pub use moment::Moment;
pub use oom::MemoryGroup;
pub use soak::{SoakPlan, SoakReport, soak};
pub use stage::{CellReport, Stage, StagePlan};
pub use verdict::{remove_ended, settled};
pub use writes::{FailingWrite, Write, WriteError};
