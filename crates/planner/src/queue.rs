//! The queue of moves: which waiting jobs start now, and what each of the others waits for.
//! [`schedule`] is a function of the facts at one moment: it does no I/O, keeps no state and reads
//! no clock. docs/queue.md describes it.
//!
//! **Limits** ([`limits`]) are never exceeded: moves out of a host, into a host, on a datastore, in
//! total; the memory of a target; one move per VM.
//!
//! **Order** (`order.rs`): the higher priority first; then the group that has not had its share of
//! a limit; then the group with fewest moves at that source; then the one that has waited longest
//! since its last move there; then the shorter move. No job waits forever: the advantage of a head
//! start or a short move is a finite time, and the priority of an unserved group rises.
//!
//! **A waiting job does not block others:** a job that cannot start is passed by all that can.
//! Capacity is reserved only for a job that has been passed over for long (`reservation.rs`).
//!
//! [`retry`] decides what follows a failed migration; [`lifecycle`] brings a job through crashes
//! without moving the VM twice.

mod capacity;
pub mod lifecycle;
pub mod limits;
mod order;
mod reason;
mod reservation;
pub mod retry;
mod schedule;
mod situation;
#[cfg(test)]
mod tests;

pub(crate) use order::stands_at;

pub use limits::{HostLimit, LINK_STEPS_BITS_PER_S, Limits, moves_at_once};
pub use reason::{Line, Tally, TargetObstacle, WaitReason};
pub use schedule::{Schedule, Start, Wait, schedule, starts};
pub use situation::{HostFacts, Presence, RunningMove, Served, Situation, WaitingJob};
