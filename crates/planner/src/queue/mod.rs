//! The queue of moves: which waiting jobs start now, and what each of the others waits for. [`schedule`] is a function of what is known
//! at one moment: it asks nobody, keeps nothing and reads no clock. docs/queue.md tells it in words.
//!
//! **What is never exceeded** ([`limits`]): moves out of a host, into a host, on a datastore, in all; the memory that a target has; one
//! move a VM.
//!
//! **Who is next** (`order.rs`): the higher priority; then who has not had its share of a limit; then who has fewest moves at that source;
//! then who has waited longest since its last move there; then the shorter move. No job waits for ever: what a head start or a short move
//! gains in the line is a finite time, and who goes unserved rises.
//!
//! **Nobody blocks others** by waiting: a job that can't start is passed by all that can. Only one that has been passed over for long is
//! kept what becomes free (`hold.rs`).
//!
//! [`retry`] says what becomes of a job whose migration failed, [`lifecycle`] how a job comes through crashes without being moved twice.

mod capacity;
mod hold;
pub mod lifecycle;
pub mod limits;
mod order;
mod reason;
pub mod retry;
mod schedule;
mod situation;
#[cfg(test)]
mod tests;

pub use limits::{HostLimit, Limits, moves_at_once};
pub use reason::{Line, Tally, TargetObstacle, WaitReason};
pub use schedule::{Schedule, Start, Wait, schedule};
pub use situation::{HostFacts, Presence, Priority, RunningMove, Served, Situation, WaitingJob};
