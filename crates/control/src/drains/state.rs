//! State of a drain, and its form in the API.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::{
    Drain, DrainState, DrainVm, DrainVmState, Move, MovePriority, MoveState,
};
use godwit_api::{QemuEngineOptions, TravellingDisks};
use godwit_types::EngineKind;

use godwit_planner::drain::eta::{MoveEta, Progress, eta};
use godwit_planner::drain::{PlannedMove, Staying};

use crate::moves::ShownMoves;

/// Drain in execution. The progress is in its moves.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HostDrain {
    pub(super) host: String,
    pub(super) asked_by: String,
    pub(super) asked_unix_ms: u64,
    pub(super) priority: MovePriority,
    pub(super) engine: EngineKind,
    pub(super) qemu: QemuEngineOptions,
    /// How disks travel that a target does not share.
    pub(super) disks: Option<TravellingDisks>,
    pub(super) state: DrainState,
    /// Whether the host was in maintenance before.
    pub(super) was_in_maintenance: bool,
    /// Last plan of each VM for the way out.
    pub(super) plan: Way,
    /// Time of the last planning, milliseconds since 1970.
    pub(super) placed_unix_ms: u64,
    /// Plan of the way back, if the drain is undone.
    pub(super) back: Option<Way>,
    /// Ineligible targets of a VM's cancelled moves.
    pub(super) passed_over: BTreeMap<String, BTreeSet<String>>,
    pub(super) ended_unix_ms: Option<u64>,
    /// Result of each VM once the drain is over. Moves are removed earlier than drains.
    pub(super) outcome: Vec<DrainVm>,
}

/// Plan for VMs: out of the host, or back.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Way {
    pub(super) planned_at_ms: u64,
    pub(super) moves: Vec<PlannedMove>,
    /// Reasons of VMs that stay, by name.
    pub(super) stays: BTreeMap<String, String>,
}

impl Way {
    /// Returns the parts of a plan that a drain uses.
    pub(super) fn of(planned_at_ms: u64, moves: Vec<PlannedMove>, stays: Vec<Staying>) -> Way {
        let stays = stays.into_iter().map(|staying| (staying.vm, staying.text)).collect();
        Way { planned_at_ms, moves, stays }
    }

    /// Replaces the plans of some VMs by those of a later plan.
    pub(super) fn update(&mut self, later: &Way) {
        // Times of each plan are relative to its own creation.
        let shift_ms = later.planned_at_ms.saturating_sub(self.planned_at_ms);
        let named: BTreeSet<&String> =
            later.moves.iter().map(|one| &one.vm).chain(later.stays.keys()).collect();
        self.moves.retain(|one| !named.contains(&one.vm));
        self.stays.retain(|vm, _| !named.contains(vm));
        self.moves.extend(later.moves.iter().cloned().map(|mut planned| {
            if let Some(expected) = &mut planned.expected {
                expected.starts_in_ms += shift_ms;
                expected.ends_in_ms += shift_ms;
            }
            planned
        }));
        self.stays.extend(later.stays.clone());
    }
}

/// Moves of a drain, by VM, the newest last.
#[derive(Debug, Default)]
pub(super) struct Legs<'a> {
    pub(super) out: BTreeMap<&'a str, Vec<&'a Move>>,
    pub(super) back: BTreeMap<&'a str, Vec<&'a Move>>,
}

impl<'a> Legs<'a> {
    /// Collects the moves of a drain, in the order of their requests.
    pub(super) fn of(id: &str, host: &str, moves: &'a ShownMoves) -> Legs<'a> {
        let mut legs = Legs::default();
        for one in moves.of_drain(id) {
            let leg = if one.from == host { &mut legs.out } else { &mut legs.back };
            leg.entry(one.vm.as_str()).or_default().push(one);
        }
        for of_vm in legs.out.values_mut().chain(legs.back.values_mut()) {
            of_vm.sort_by_key(|one| one.asked_unix_ms);
        }
        legs
    }

    /// Returns the open moves, out and back.
    pub(super) fn live(&self) -> impl Iterator<Item = &'a Move> {
        self.out
            .values()
            .chain(self.back.values())
            .flatten()
            .copied()
            .filter(|one| !one.state.is_over())
    }
}

impl HostDrain {
    /// Returns whether the drain is over.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, DrainState::Done | DrainState::Cancelled | DrainState::Undone)
    }

    /// Converts the drain for the API.
    pub(super) fn summary(&self, id: &str, legs: &Legs<'_>, now_ms: u64) -> Drain {
        let vms = if self.is_over() && !self.outcome.is_empty() {
            self.outcome.clone()
        } else {
            self.vms(legs, now_ms)
        };
        let way = self.back.as_ref().unwrap_or(&self.plan);
        let leg = if self.back.is_some() { &legs.back } else { &legs.out };
        let eta_unix_ms =
            if self.is_over() { None } else { eta(&way.moves, &progress(leg), now_ms).ends_ms };
        Drain {
            id: id.to_owned(),
            host: self.host.clone(),
            state: self.state,
            asked_by: self.asked_by.clone(),
            asked_unix_ms: self.asked_unix_ms,
            eta_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            vms,
        }
    }

    /// Returns the current state of each VM.
    pub(super) fn vms(&self, legs: &Legs<'_>, now_ms: u64) -> Vec<DrainVm> {
        let expected = eta(&self.plan.moves, &progress(&legs.out), now_ms).moves;
        let expected: BTreeMap<&str, &MoveEta> =
            expected.iter().map(|one| (one.vm.as_str(), one)).collect();
        let mut vms: BTreeMap<&str, DrainVm> = BTreeMap::new();
        for planned in &self.plan.moves {
            let newest = legs.out.get(planned.vm.as_str()).and_then(|all| all.last());
            let gone_unix_ms = expected.get(planned.vm.as_str()).and_then(|one| one.ends_ms);
            vms.insert(&planned.vm, DrainVm { gone_unix_ms, ..going(planned, newest.copied()) });
        }
        for (vm, why) in &self.plan.stays {
            let stays = DrainVm {
                vm: vm.clone(),
                state: DrainVmState::Stays,
                to: None,
                reason: why.clone(),
                r#move: legs.out.get(vm.as_str()).and_then(|all| Some(all.last()?.id.clone())),
                gone_unix_ms: None,
            };
            vms.insert(vm, stays);
        }
        for (vm, all) in &legs.back {
            let (Some(newest), Some(of)) = (all.last(), vms.get_mut(vm)) else { continue };
            of.r#move = Some(newest.id.clone());
            if newest.state == MoveState::Done {
                (of.state, of.reason) = (DrainVmState::Back, "moved back".to_owned());
            } else if let Some(failure) = newest.failure.as_ref().filter(|_| newest.state.is_over())
            {
                of.reason = format!("the move back failed: {failure}");
            }
        }
        for (vm, why) in self.back.iter().flat_map(|back| &back.stays) {
            if let Some(of) = vms.get_mut(vm.as_str()) {
                of.reason = format!("not moved back: {why}");
            }
        }
        vms.into_values().collect()
    }
}

/// Returns the state of a VM with a planned move, by its newest move.
fn going(planned: &PlannedMove, newest: Option<&Move>) -> DrainVm {
    let (state, reason) = match newest.map(|one| (one.state, one)) {
        Some((MoveState::Done, _)) => (DrainVmState::Gone, planned.why.clone()),
        Some((MoveState::Failed, one)) => (DrainVmState::Stays, failure(one)),
        Some((MoveState::Cancelled, _)) => {
            (DrainVmState::Stays, "its move was cancelled".to_owned())
        }
        Some((MoveState::Waiting, one)) => {
            let waits = one
                .waits
                .as_ref()
                .map_or(String::new(), |waits| format!("; waiting: {}", waits.text));
            (DrainVmState::Going, format!("{}{waits}", planned.why))
        }
        Some((MoveState::Starting | MoveState::Running, _)) | None => {
            (DrainVmState::Going, planned.why.clone())
        }
    };
    DrainVm {
        vm: planned.vm.clone(),
        state,
        to: Some(planned.target.clone()),
        reason,
        r#move: newest.map(|one| one.id.clone()),
        gone_unix_ms: None,
    }
}

fn failure(one: &Move) -> String {
    let text = one.failure.as_ref().map(ToString::to_string);
    text.unwrap_or_else(|| "its move failed".to_owned())
}

/// Returns the progress of the moves for the ETA.
fn progress(leg: &BTreeMap<&str, Vec<&Move>>) -> BTreeMap<String, Progress> {
    let of = |one: &Move| match one.state {
        MoveState::Waiting => Progress::Waiting { not_before_ms: None },
        MoveState::Starting | MoveState::Running => Progress::Running {
            started_ms: one.started_unix_ms.unwrap_or(one.asked_unix_ms),
            done: done(one),
        },
        MoveState::Done => Progress::Done {
            started_ms: one.started_unix_ms.unwrap_or(one.asked_unix_ms),
            ended_ms: one.ended_unix_ms.unwrap_or(one.asked_unix_ms),
        },
        MoveState::Failed | MoveState::Cancelled => Progress::Dropped,
    };
    leg.iter().filter_map(|(vm, all)| Some(((*vm).to_owned(), of(all.last()?)))).collect()
}

/// Returns the finished share of a migration, 0 to 1: by its predicted duration if there is one,
/// else by its bytes.
fn done(one: &Move) -> f64 {
    let Some(progress) = &one.progress else { return 0.0 };
    match progress.eta_ms {
        Some(eta_ms) if eta_ms + progress.elapsed_ms > 0.0 => {
            progress.elapsed_ms / (eta_ms + progress.elapsed_ms)
        }
        _ if progress.total_bytes > 0 => {
            (progress.sent_bytes as f64 / progress.total_bytes as f64).min(1.0)
        }
        _ => 0.0,
    }
}
