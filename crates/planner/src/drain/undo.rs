//! Undo of a drain: moves its VMs back.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::place::{Placed, units};
use super::simulate::{Clock, fill, job};
use super::{DrainVm, PlannedMove, StayReason, Staying, UnderWay, summary, whole};
use crate::placement::{Host, Judge, Rule};
use crate::queue::Limits;

/// A VM of the drain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// The VM, with the facts for its move back.
    pub vm: DrainVm,
    /// Target and end time (milliseconds since 1970) of the drain's move; `None` while its job
    /// waits or runs.
    pub to: Option<(String, u64)>,
    /// The host that runs it now; `None` if no host does.
    pub found_on: Option<String>,
}

/// A drain to be undone, and the state of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct UndoRequest<'a> {
    /// Milliseconds since 1970.
    pub now_ms: u64,
    /// The host that was emptied.
    pub host: &'a str,
    /// The VMs of the drain.
    pub moved: &'a [Moved],
    /// The inventory.
    pub hosts: &'a [Host],
    /// Rules of operators.
    pub rules: &'a [Rule],
    /// Limits of the queue.
    pub limits: &'a Limits,
    /// All running migrations.
    pub running: &'a [UnderWay],
}

/// The plan of an undo.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UndoPlan {
    /// VMs whose jobs must be cancelled first: they have not left. If a cancel comes too late,
    /// another undo brings the VM back.
    pub cancel: Vec<String>,
    /// Moves back, in the order of their expected starts.
    pub moves: Vec<PlannedMove>,
    /// VMs that stay where they are, by name.
    pub stays: Vec<Staying>,
    /// Time until the last VM is back; `None` if a move can never begin at present.
    pub takes_ms: Option<u64>,
    /// Summary in one line.
    pub text: String,
}

/// Plans the undo of a drain. Assumes that the host is no longer in maintenance, which is the first
/// step of an undo.
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
    let by_name: HashMap<&str, (&Moved, &String)> =
        there.iter().map(|(moved, (to, _))| (moved.vm.vm.name.as_str(), (*moved, to))).collect();
    let source = |vm: &DrainVm| {
        by_name.get(vm.vm.name.as_str()).map(|(_, to)| (*to).clone()).unwrap_or_default()
    };
    for unit in units(&judge, there.iter().map(|(moved, _)| &moved.vm)) {
        placed.place(&mut judge, &unit, &candidates, &hosts, &source);
    }
    let (mut moves, stays) = placed.done();
    // The jobs are submitted in this order.
    let jobs = moves.iter().zip(0..).filter_map(|(planned, rank)| {
        let (moved, _) = by_name.get(planned.vm.as_str())?;
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

/// Whether someone has moved it back already.
fn is_back(moved: &Moved, host: &str) -> bool {
    moved.found_on.as_deref() == Some(host)
}
