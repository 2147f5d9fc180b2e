//! Plans for emptying a host: a target for each of its VMs, and the expected times of each move.
//!
//! **Placement** (`place.rs`). VMs are placed one after the other by [`crate::placement`]. Each
//! placement counts the earlier ones as if they had arrived: memory, load, lanes, and rules. The
//! largest memory goes first: a large VM fits in few places and a small one in many, so small ones
//! placed first would take the room that only large ones need. VMs that a `must` rule keeps
//! together are placed as one. A VM that cannot move stays and is listed with its reasons; the
//! others move anyway.
//!
//! **Times** (`simulate.rs`). The queue itself decides in simulated time which moves start, with
//! its own limits. Moves that share a link share its bandwidth. Other drains and waiting jobs are
//! not considered. [`eta`] corrects the times by the progress and the speed.
//!
//! **Undo** ([`undo`]). VMs that the drain moved come back, the last moved first: the memory that
//! their source retains is the most recent. A VM that was moved on by someone else, or no longer
//! fits, stays and is listed.

pub mod eta;
mod place;
mod simulate;
#[cfg(test)]
mod tests;
pub mod undo;

use serde::{Deserialize, Serialize};

use crate::placement::{Host, Obstacle, Obstacles, Rule, RuledOut, Vm};
use crate::queue::{Limits, RunningMove, WaitReason};
use crate::words::{Count, Span};

pub use eta::{Eta, MoveEta, Progress, eta};
pub use undo::{Moved, UndoPlan, UndoRequest, undo};

/// A VM to be moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DrainVm {
    /// The VM, for placement.
    pub vm: Vm,
    /// Duration of its move alone on the link.
    pub estimate_ms: u64,
    /// Datastores of its disks.
    pub datastores: Vec<String>,
    /// Why it cannot move to any host (it is stopped, a device cannot move); `None` if it can.
    pub immovable: Option<Obstacle>,
    /// Results of preflight checks for single hosts.
    pub obstacles: Obstacles,
}

/// A migration that runs when the plan is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnderWay {
    /// The migration.
    pub running: RunningMove,
    /// Memory of its guest, which is reserved at its target.
    pub memory_bytes: u64,
    /// Expected remaining duration, alone on the link.
    pub remaining_ms: u64,
}

/// A host to be emptied, and the state of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest<'a> {
    /// Milliseconds since 1970.
    pub now_ms: u64,
    pub host: &'a str,
    /// VMs that are to leave the host, without those that already migrate.
    pub vms: &'a [DrainVm],
    /// The inventory, including that host.
    pub hosts: &'a [Host],
    /// Rules of operators.
    pub rules: &'a [Rule],
    /// Limits of the queue.
    pub limits: &'a Limits,
    /// All running migrations.
    pub running: &'a [UnderWay],
}

/// A planned move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedMove {
    pub vm: String,
    /// The host that the VM leaves.
    pub source: String,
    /// The host that the VM moves to.
    pub target: String,
    pub memory_bytes: u64,
    pub why: String,
    /// VMs that a rule keeps with it: they move to the same host.
    pub together_with: Vec<String>,
    /// Expected times; `None` if it can never begin at present (`waits_for`).
    pub expected: Option<Expected>,
    /// What it would wait for indefinitely.
    pub waits_for: Option<WaitReason>,
}

/// Expected times of a move, relative to the time of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// Expected start.
    pub starts_in_ms: u64,
    pub ends_in_ms: u64,
}

/// Why a VM stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum StayReason {
    /// The VM cannot move to any host.
    Immovable { obstacle: Obstacle },
    /// No host can take it. Has the number of hosts excluded for each reason (one host may have
    /// several), and the nearest hosts with all their reasons.
    NoHost { hosts: usize, tally: Vec<(String, usize)>, nearest: Vec<RuledOut> },
    /// A rule keeps it with VMs that cannot move.
    WithOthers { vms: Vec<String> },
    /// Rules require it both with and apart from another VM.
    Contradiction { rule: String, vms: Vec<String> },
    /// It is not where the drain moved it: someone else moved it since.
    NotThere { expected: String, found: Option<String> },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staying {
    pub vm: String,
    /// The reason.
    pub reason: StayReason,
    /// The reason in one line.
    pub text: String,
}

/// The plan of a drain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainPlan {
    pub host: String,
    /// Time of the plan.
    pub planned_at_ms: u64,
    /// The moves in the order of their expected starts.
    pub moves: Vec<PlannedMove>,
    pub stays: Vec<Staying>,
    /// Time until the last move has ended; `None` if a move can never begin at present.
    pub takes_ms: Option<u64>,
    /// Summary in one line.
    pub text: String,
}

/// Plans how to empty a host.
#[must_use]
pub fn plan(request: &DrainRequest<'_>) -> DrainPlan {
    let (mut moves, stays) = place::leave(request);
    simulate::expect(request, &mut moves);
    let takes_ms = whole(&moves);
    let text = summary(&moves, &stays, takes_ms);
    let (host, planned_at_ms) = (request.host.to_owned(), request.now_ms);
    DrainPlan { host, planned_at_ms, moves, stays, takes_ms, text }
}

/// Returns the time until the last move has ended.
fn whole(moves: &[PlannedMove]) -> Option<u64> {
    moves
        .iter()
        .map(|planned| Some(planned.expected?.ends_in_ms))
        .try_fold(0, |last, end| Some(last.max(end?)))
}

fn summary(moves: &[PlannedMove], stays: &[Staying], takes_ms: Option<u64>) -> String {
    let stuck = moves.iter().filter(|planned| planned.expected.is_none()).count();
    let mut text = match takes_ms {
        _ if moves.is_empty() => "nothing moves".to_owned(),
        Some(takes_ms) => format!("{} in about {}", Count(moves.len(), "move"), Span(takes_ms)),
        None => {
            format!("{}, of which {stuck} cannot begin at present", Count(moves.len(), "move"))
        }
    };
    if let Some(first) = stays.first() {
        text += &format!("; {} cannot move", Count(stays.len(), "VM"));
        text += &format!(", the first: {} ({})", first.vm, first.text);
    }
    text
}
