//! Bringing back what a drain has moved.

use serde::{Deserialize, Serialize};

use super::place::{Placed, units};
use super::simulate::{Clock, fill, job};
use super::{DrainVm, PlannedMove, StayReason, Staying, UnderWay, summary, whole};
use crate::placement::{Host, Judge, Rule};
use crate::queue::Limits;

/// A VM that the drain was to move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The VM, with what is known of its way back.
    pub vm: DrainVm,
    /// Where the drain has moved it to, and when that ended, milliseconds since 1970; none: its job waits or runs yet.
    pub to: Option<(String, u64)>,
    /// The host that has it now; none: nobody has it running.
    pub found_on: Option<String>,
}

/// A drain that is to be undone, and all that is known.
#[derive(Clone, Copy, Debug)]
pub struct UndoRequest<'a> {
    /// Milliseconds since 1970.
    pub now_ms: u64,
    /// The host that was emptied.
    pub host: &'a str,
    /// What the drain was to move.
    pub moved: &'a [Moved],
    /// The inventory.
    pub hosts: &'a [Host],
    /// What operators have asked for.
    pub rules: &'a [Rule],
    /// The queue's.
    pub limits: &'a Limits,
    /// All migrations that run.
    pub running: &'a [UnderWay],
}

/// How a drain is undone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UndoPlan {
    /// VMs whose jobs are to be cancelled first: they have not left. One whose cancel comes too late is brought back by asking again.
    pub cancel: Vec<String>,
    /// What comes back, in the order in which it is expected to begin.
    pub moves: Vec<PlannedMove>,
    /// What stays where it is, by name.
    pub stays: Vec<Staying>,
    /// How long it takes until the last is back; none: a move never begins, as things are.
    pub takes_ms: Option<u64>,
    /// All in one line.
    pub text: String,
}

/// How a drain is undone. The host is taken to be out of maintenance: that is the first step of it.
#[must_use]
pub fn undo(request: &UndoRequest<'_>) -> UndoPlan {
    let hosts: Vec<Host> = request.hosts.iter().map(|host| opened(host, request.host)).collect();
    let left = request.moved.iter().filter_map(|moved| Some((moved, moved.to.as_ref()?)));
    let mut left: Vec<(&Moved, &(String, u64))> = left.collect();
    left.sort_by(|(one, (_, at)), (other, (_, of_other))| {
        of_other.cmp(at).then_with(|| one.vm.vm.name.cmp(&other.vm.vm.name))
    });
    let (there, gone): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|(moved, (to, _))| moved.found_on.as_ref() == Some(to));
    let mut placed = Placed::new(there.iter().map(|(moved, _)| &moved.vm));
    for (moved, (to, _)) in gone.iter().filter(|(moved, _)| !is_back(moved, request.host)) {
        let (expected, found) = (to.clone(), moved.found_on.clone());
        placed.stay(&moved.vm, StayReason::NotThere { expected, found });
    }
    let mut judge = Judge::new(&hosts, request.rules);
    let candidates: Vec<usize> = judge.index(request.host).into_iter().collect();
    let source = |vm: &DrainVm| {
        let of = there.iter().find(|(moved, _)| moved.vm.vm.name == vm.vm.name);
        of.map(|(_, (to, _))| to.clone()).unwrap_or_default()
    };
    for unit in units(&judge, there.iter().map(|(moved, _)| &moved.vm)) {
        placed.place(&mut judge, &unit, &candidates, &hosts, &source);
    }
    let (mut moves, stays) = placed.done();
    // In this order they are submitted.
    let jobs = moves.iter().zip(0..).filter_map(|(planned, rank)| {
        let (moved, _) = there.iter().find(|(moved, _)| moved.vm.vm.name == planned.vm)?;
        Some(job(planned, &moved.vm, request.now_ms + rank))
    });
    let facts = hosts.iter().map(|host| &host.facts);
    fill(
        Clock::new(jobs.collect(), request.running, facts, request.limits, request.now_ms),
        &mut moves,
    );
    let waiting = request.moved.iter().filter(|moved| moved.to.is_none());
    let cancel = waiting.map(|moved| moved.vm.vm.name.clone()).collect();
    let takes_ms = whole(&moves);
    let text = summary(&moves, &stays, takes_ms);
    UndoPlan { cancel, moves, stays, takes_ms, text }
}

fn opened(host: &Host, name: &str) -> Host {
    let mut host = host.clone();
    host.facts.maintenance &= host.facts.name != name;
    host
}

/// Somebody has brought it back already.
fn is_back(moved: &Moved, host: &str) -> bool {
    moved.found_on.as_deref() == Some(host)
}
