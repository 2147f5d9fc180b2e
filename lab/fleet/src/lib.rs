//! Simulated hosts: the API of many agents in one process, with simulated QEMU. Nothing runs and no
//! page moves. VMs are entries in a table, and a migration takes the time that its link would take.
//! For tests and benchmarks of the manager, which cannot notice the difference: the types are those
//! of `godwit-api`.
//!
//! Counts what a manager must not do: start a move twice, or exceed a limit of simultaneous moves.

mod asker;
mod churn;
mod counts;
mod fleet;
mod held_clock;
mod liar;
mod lied;
mod looks;
mod plan;
mod server;
mod world;

pub use asker::{Answered, Asker};
pub use counts::Counts;
pub use fleet::{Fleet, allow_many_files};
pub use held_clock::HeldClock;
pub use liar::{Liar, Lie};
pub use lied::{Lied, lie};
pub use looks::Looks;
pub use plan::FleetPlan;
pub use world::InjectedFault;
