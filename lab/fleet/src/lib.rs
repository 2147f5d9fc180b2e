//! Hosts that are not there: the API of many agents in one process, with a stand-in for QEMU. Nothing runs and no page moves; VMs are entries in
//! a table, and a migration takes the time that its link would. For tests and benchmarks of the manager, which can't tell the difference: the
//! types are those of `godwit-api`.
//!
//! It counts what a manager must not do: begin a move twice, or more of them at a time than a limit allows.

mod asker;
mod churn;
mod counts;
mod fleet;
mod liar;
mod lied;
mod looks;
mod plan;
mod server;
mod world;

pub use asker::{Answered, Asker};
pub use counts::Counts;
pub use fleet::{Fleet, allow_many_files};
pub use liar::{Liar, Lie};
pub use lied::{Lied, lie};
pub use looks::Looks;
pub use plan::FleetPlan;
pub use world::InjectedFault;
