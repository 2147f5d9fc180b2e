//! Emptying a host: a target for each of its VMs, and when each move is expected to begin and end.
//!
//! **Who goes where** (`place.rs`). VMs are placed one after the other by [`crate::placement`], each with what was planned before it counted
//! as if it had arrived: memory, load, lanes, and rules. The largest memory goes first: a large VM fits in few places and a small one in
//! many, so small ones placed first would take the room that only large ones need. VMs that a `must` rule keeps together are placed as
//! one. A VM that can't go stays and is named with its reasons; the others go all the same.
//!
//! **When** (`simulate.rs`). The queue itself decides in simulated time who starts, with its own limits; moves that share a link share what
//! it carries. Other drains and jobs that wait are not known to it. [`eta`] corrects the times by what was moved and how fast.
//!
//! **Undo** ([`undo`]). VMs that the drain moved come back, those that were moved last first: what their source keeps of their memory is
//! freshest. What was moved on by somebody else, or does not fit any more, stays and is named.

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

/// A VM that is to be moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DrainVm {
    /// As placement needs it.
    pub vm: Vm,
    /// How long its move would take alone on the link.
    pub estimate_ms: u64,
    /// The datastores that its disks are on.
    pub datastores: Vec<String>,
    /// What keeps it from going anywhere (it is stopped, a device can't move); none: nothing.
    pub immovable: Option<Obstacle>,
    /// What preflight has found of single hosts.
    pub obstacles: Obstacles,
}

/// A migration that is under way when the plan is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnderWay {
    /// The migration.
    pub running: RunningMove,
    /// Its guest's memory, which is promised at its target.
    pub memory_bytes: u64,
    /// How long it is expected to take yet, alone on the link.
    pub remaining_ms: u64,
}

/// A host that is to be emptied, and all that is known.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest<'a> {
    /// Milliseconds since 1970.
    pub now_ms: u64,
    pub host: &'a str,
    /// The VMs that are to leave it, but for those that a migration has already.
    pub vms: &'a [DrainVm],
    /// The inventory, that host included.
    pub hosts: &'a [Host],
    /// What operators have asked for.
    pub rules: &'a [Rule],
    /// The queue's.
    pub limits: &'a Limits,
    /// All migrations that run.
    pub running: &'a [UnderWay],
}

/// A move that is planned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedMove {
    pub vm: String,
    /// The host that it leaves.
    pub source: String,
    /// The host that it goes to.
    pub target: String,
    pub memory_bytes: u64,
    pub why: String,
    /// VMs that a rule keeps with it: they go to the same host.
    pub together_with: Vec<String>,
    /// When it is expected to begin and end; none: never, as things are (`waits_for`).
    pub expected: Option<Expected>,
    /// What it would wait for without end.
    pub waits_for: Option<WaitReason>,
}

/// When a move is expected to run, since the plan was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// It begins then.
    pub starts_in_ms: u64,
    pub ends_in_ms: u64,
}

/// Why a VM stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum StayReason {
    /// It can't go anywhere.
    Immovable { obstacle: Obstacle },
    /// No host takes it: how many are ruled out by what (one host may be by several things), and the nearest ones with all of it.
    NoHost { hosts: usize, tally: Vec<(String, usize)>, nearest: Vec<RuledOut> },
    /// A rule keeps it with VMs that can't go.
    WithOthers { vms: Vec<String> },
    /// Rules want it both with and apart from another VM.
    Contradiction { rule: String, vms: Vec<String> },
    /// It is where the drain has not put it: somebody else's business.
    NotThere { expected: String, found: Option<String> },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staying {
    pub vm: String,
    /// Why.
    pub reason: StayReason,
    /// The same in one line.
    pub text: String,
}

/// How a host is emptied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainPlan {
    pub host: String,
    /// When this was planned.
    pub planned_at_ms: u64,
    /// What moves, in the order in which it is expected to begin.
    pub moves: Vec<PlannedMove>,
    pub stays: Vec<Staying>,
    /// How long it takes until the last move has ended; none: a move never begins, as things are.
    pub takes_ms: Option<u64>,
    /// All in one line.
    pub text: String,
}

/// How a host is emptied.
#[must_use]
pub fn plan(request: &DrainRequest<'_>) -> DrainPlan {
    let (mut moves, stays) = place::leave(request);
    simulate::expect(request, &mut moves);
    let takes_ms = whole(&moves);
    let text = summary(&moves, &stays, takes_ms);
    let (host, planned_at_ms) = (request.host.to_owned(), request.now_ms);
    DrainPlan { host, planned_at_ms, moves, stays, takes_ms, text }
}

/// Until the last move has ended.
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
            format!("{}, of which {stuck} can't begin as things are", Count(moves.len(), "move"))
        }
    };
    if let Some(first) = stays.first() {
        text += &format!("; {} can't go", Count(stays.len(), "VM"));
        text += &format!(", the first: {} ({})", first.vm, first.text);
    }
    text
}
