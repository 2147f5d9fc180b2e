//! High availability on real hosts: a protected VM whose host fails in every way, and the proof
//! that it never ran twice.
//!
//! The guest keeps a ledger on its disk (`godwit_guest::ledger`): a write of an earlier boot after
//! a later one has begun shows in it, and so do two boots at once. Beside it, the vCPUs of all
//! hosts are observed from outside. Agents and the manager are asked nothing for that.
//!
//! A [`Stage`] is a lab of three hosts: a has the manager and reads heartbeats, b and c run the VM.
//! The hosts share datastores, each of which a single host can lose; what its QEMUs have open they
//! go on writing, and no lock keeps a second writer away (`unlocked`): the worst case.
//! `godwit-bench ha` tries all [`cells()`], the end-to-end tests some of them.
//!
//! The lab's own parts are the hardware: a watchdog (`watchdog`), BMCs (`bmcs`), and storage that
//! can hang (`passages`).

mod bmcs;
mod cells;
mod passages;
mod stage;
mod unlocked;
mod watchdog;

pub use cells::{Cell, Expected, Fault, Means, Parts, Setting, cells};
pub use stage::{CellReport, Manner, Pace, Stage};
