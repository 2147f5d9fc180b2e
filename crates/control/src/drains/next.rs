//! What is to be done next for a drain, of what is known: no I/O and no clock.
//!
//! A VM that has no move and could go is **homeless**: it is planned and gets a move. So VMs that
//! are met again later (their target was lost,
//! their move failed, they came to the host meanwhile, or another manager took over between the
//! plan and the moves) need no case of
//! their own.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::{DrainState, HostState, Move, MoveState};
use godwit_api::{VmInfo, VmState};
use godwit_planner::drain::{DrainVm, Moved, PlannedMove};
use godwit_planner::placement::Obstacle;

use super::record::{HostDrain, Legs, Way};
use crate::cluster::inventory::{Inventory, SeenHost};
use crate::cluster::planner_input::{datastores, estimate_ms, placement_vm};
use crate::preflight;

/// Moves that a VM gets in a drain, each to another host.
const MOST_MOVES_OF_A_VM: usize = 3;
/// A move that has waited so long for its target's memory gets another target.
const MEMORY_WAIT_MS: u64 = 60_000;
/// So long a host that keeps pages of a VM may be silent before they are not waited for any more:
/// what a cut lasts at most, unless somebody
/// asked for more, before a migration is given up.
const PAGES_WAIT_MS: u64 = 5 * 60_000;
/// What a waiting move's target will not come out of by itself soon.
const LOST_TARGETS: [&str; 3] = ["target-away", "target-maintenance", "target-not-in-inventory"];

/// What is to be done next.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// The host takes VMs though it is emptied: it is set into maintenance again.
    Close,
    /// A plan for these VMs, and moves by it.
    Place(Vec<DrainVm>),
    /// Moves that are planned and that nobody has asked for yet: the plan was too large for one
    /// transaction, and its rest was not written.
    Submit(Vec<PlannedMove>),
    /// Call these moves off.
    CallOff(Vec<Leaving>),
    /// A plan to bring these back.
    BringBack(Vec<Moved>),
    /// It is over.
    End(DrainState),
    /// Nothing until something happens.
    Wait,
}

/// A move that is called off.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Leaving {
    pub(super) id: String,
    pub(super) vm: String,
    /// The unavailable target, if another one is needed.
    pub(super) passed_over: Option<String>,
}

/// What is to be done next for a drain that runs or is undone.
pub(super) fn next(drain: &HostDrain, legs: &Legs<'_>, inventory: &Inventory, now_ms: u64) -> Next {
    let plan = inventory.host_plan(&drain.host);
    match drain.state {
        DrainState::Running | DrainState::Undoing if plan.is_none() => forgotten(legs),
        DrainState::Running if plan.is_some_and(|plan| !plan.maintenance) => Next::Close,
        DrainState::Running => {
            let mut lost = lost_targets(legs, now_ms);
            lost.extend(strays(drain, legs, inventory, now_ms));
            if !lost.is_empty() {
                return Next::CallOff(lost);
            }
            let homeless = homeless(drain, legs, inventory, now_ms);
            let unasked = unasked_out(drain, legs, &homeless);
            if !unasked.is_empty() {
                return Next::Submit(unasked);
            }
            let is_news = homeless.iter().any(|vm| !stays(drain, &vm.vm.name));
            let has_live = legs.live().next().is_some();
            // What stayed because there was no room is tried once more when all others have gone.
            if is_news
                || (!has_live && !homeless.is_empty() && drain.placed_unix_ms < last_end_ms(legs))
            {
                return Next::Place(homeless);
            }
            let has_passing =
                inventory.vms_of(&drain.host).any(|info| is_passing(info, inventory, now_ms));
            if has_live || has_passing { Next::Wait } else { Next::End(DrainState::Done) }
        }
        DrainState::Undoing => {
            let live_out = legs.live().filter(|one| one.from == drain.host);
            let live_out: Vec<&Move> = live_out.collect();
            if !live_out.is_empty() {
                return call_off_waiting(live_out.into_iter());
            }
            let Some(back) = &drain.back else { return Next::BringBack(moved(legs, inventory)) };
            let unasked = unasked_back(back, legs, inventory);
            if !unasked.is_empty() {
                return Next::Submit(unasked);
            }
            let is_awaited = |one: &PlannedMove| {
                !has_leg_back(back, legs, &one.vm) && is_awaited(one, inventory)
            };
            if back.moves.iter().any(is_awaited) {
                return Next::Wait;
            }
            if legs.live().next().is_some() { Next::Wait } else { Next::End(DrainState::Undone) }
        }
        DrainState::Planned | DrainState::Done | DrainState::Cancelled | DrainState::Undone => {
            Next::Wait
        }
    }
}

/// Of a host that is not known any more: its moves end as failed, by themselves, and those that are
/// on their way to it have their sources.
fn forgotten(legs: &Legs<'_>) -> Next {
    if legs.live().next().is_some() { Next::Wait } else { Next::End(DrainState::Cancelled) }
}

/// Calls off those that wait; where none do the others are waited for.
fn call_off_waiting<'a>(live: impl Iterator<Item = &'a Move>) -> Next {
    let waiting = live.filter(|one| one.state == MoveState::Waiting);
    let all: Vec<Leaving> = waiting.map(|one| called_off(one, None)).collect();
    if all.is_empty() { Next::Wait } else { Next::CallOff(all) }
}

/// Moves out that are planned, of VMs that could go, and not asked for: a VM gets each target once.
fn unasked_out(drain: &HostDrain, legs: &Legs<'_>, homeless: &[DrainVm]) -> Vec<PlannedMove> {
    let was_asked = |planned: &PlannedMove| {
        let mut had = legs.out.get(planned.vm.as_str()).into_iter().flatten();
        had.any(|one| one.to.as_ref() == Some(&planned.target))
    };
    let is_unasked = |planned: &&PlannedMove| {
        homeless.iter().any(|vm| vm.vm.name == planned.vm) && !was_asked(planned)
    };
    drain.plan.moves.iter().filter(is_unasked).cloned().collect()
}

/// Moves of the way back that are not requested yet: each VM gets one move.
fn unasked_back(back: &Way, legs: &Legs<'_>, inventory: &Inventory) -> Vec<PlannedMove> {
    let could_go = |planned: &PlannedMove| {
        inventory.planned_move(&planned.vm).is_none()
            && inventory.vm_info(&planned.vm).is_some_and(|info| {
                info.host == planned.source
                    && matches!(info.state, VmState::Running | VmState::Paused)
            })
    };
    let moves = back.moves.iter().filter(|one| !has_leg_back(back, legs, &one.vm) && could_go(one));
    moves.cloned().collect()
}

fn has_leg_back(back: &Way, legs: &Legs<'_>, vm: &str) -> bool {
    legs.back.get(vm).into_iter().flatten().any(|one| one.asked_unix_ms >= back.planned_at_ms)
}

/// Whether a planned move's VM may show yet: this manager has just begun, and the VM's host was not
/// asked.
fn is_awaited(planned: &PlannedMove, inventory: &Inventory) -> bool {
    inventory.vm_info(&planned.vm).is_none()
        && inventory.seen_host(&planned.source).is_some_and(|host| host.is_awaited)
}

/// Whether what keeps a VM from a move ends by itself: a migration of its own, or pages of it that
/// are still to come. It goes afterwards.
fn is_passing(info: &VmInfo, inventory: &Inventory, now_ms: u64) -> bool {
    let lacks = info.page_in.as_ref();
    // What is left of it here after it was handed over goes by itself. A host that is silent
    // reported
    // it before it handed the guest over, and reports again what it has.
    let is_left_over = || {
        !inventory.holds(&info.host, &info.name)
            && !info.in_doubt
            && (matches!(info.state, VmState::Paused | VmState::Stopping)
                || !inventory.is_heard(&info.host))
            && !inventory.is_conflict(&info.host, &info.name)
    };
    matches!(info.state, VmState::MigratingOut | VmState::MigratingIn)
        || is_left_over()
        || lacks.is_some_and(|lacks| lacks.connected || pages_may_come(info, inventory, now_ms))
}

/// Whether a host may have the pages that a VM lacks and is not sent at present: one that is heard
/// says that it keeps them, or one that is
/// not heard has not been silent for long.
fn pages_may_come(info: &VmInfo, inventory: &Inventory, now_ms: u64) -> bool {
    let others = inventory.others_with(&info.name, &info.host);
    // A host that keeps pages shows the VM as leaving, or where it was started anew meanwhile, as
    // paused.
    let keeps = |host: &String| {
        let told = inventory.vm_at(host, &info.name);
        told.is_some_and(|told| matches!(told.state, VmState::MigratingOut | VmState::Paused))
    };
    if others.iter().any(|host| inventory.is_heard(host) && keeps(host)) {
        return true;
    }
    let is_silent = |host: &SeenHost<'_>| host.state != HostState::Up && host.name != info.host;
    let may_return = |host: SeenHost<'_>| {
        host.is_awaited
            || host.heard_unix_ms.is_some_and(|heard_ms| now_ms < heard_ms + PAGES_WAIT_MS)
    };
    // Where nobody tells of it, it may have come from any that is silent.
    let mut silent = inventory.seen_hosts().filter(is_silent);
    silent.any(|host| {
        (others.is_empty() || others.iter().any(|other| other == host.name)) && may_return(host)
    })
}

fn stays(drain: &HostDrain, vm: &str) -> bool {
    drain.plan.stays.contains_key(vm)
}

/// When the last move ended, milliseconds since 1970.
fn last_end_ms(legs: &Legs<'_>) -> u64 {
    legs.out.values().flatten().filter_map(|one| one.ended_unix_ms).max().unwrap_or(0)
}

/// Waiting moves whose target is no longer available.
fn lost_targets(legs: &Legs<'_>, now_ms: u64) -> Vec<Leaving> {
    let is_lost = |one: &&&Move| {
        let Some(waits) = one.waits.as_ref().filter(|_| one.state == MoveState::Waiting) else {
            return false;
        };
        let has_waited = now_ms.saturating_sub(one.asked_unix_ms) > MEMORY_WAIT_MS;
        LOST_TARGETS.contains(&waits.code.as_str()) || (waits.code == "target-memory" && has_waited)
    };
    let newest = legs.out.values().filter_map(|all| all.last());
    newest.filter(is_lost).map(|one| called_off(one, one.to.clone())).collect()
}

/// Waiting moves of VMs that are on the host no more, or don't run any more.
fn strays(drain: &HostDrain, legs: &Legs<'_>, inventory: &Inventory, now_ms: u64) -> Vec<Leaving> {
    let is_stray = |one: &&Move| {
        let info = inventory.vm_info(&one.vm);
        let can_leave = |info: &VmInfo| {
            info.host == drain.host
                && (is_passing(info, inventory, now_ms)
                    || preflight::immovable(inventory, &info.name).is_none())
        };
        one.state == MoveState::Waiting
            && inventory.is_heard(&drain.host)
            && !info.is_some_and(|info| can_leave(info))
    };
    let newest = legs.out.values().filter_map(|all| all.last().copied());
    newest.filter(is_stray).map(|one| called_off(one, None)).collect()
}

fn called_off(one: &Move, passed_over: Option<String>) -> Leaving {
    Leaving { id: one.id.clone(), vm: one.vm.clone(), passed_over }
}

/// VMs that are on the host, could go, and have no move.
pub(super) fn homeless(
    drain: &HostDrain,
    legs: &Legs<'_>,
    inventory: &Inventory,
    now_ms: u64,
) -> Vec<DrainVm> {
    let all = inventory.vms_of(&drain.host).filter(|info| !is_passing(info, inventory, now_ms));
    let vms = all.filter_map(|info| {
        if !inventory.holds(&info.host, &info.name) {
            return Some(staying(info, inventory));
        }
        if inventory.planned_move(&info.name).is_some() {
            return None;
        }
        let had = legs.out.get(info.name.as_str()).map_or(&[][..], Vec::as_slice);
        let passed_over = drain.passed_over.get(&info.name);
        let tried: BTreeSet<&String> = had
            .iter()
            .filter(|one| one.state == MoveState::Failed)
            .filter_map(|one| one.to.as_ref())
            .chain(passed_over.into_iter().flatten())
            .collect();
        // Somebody called its move off: it is not the drain's any more.
        let was_called_off = had.last().is_some_and(|one| {
            one.state == MoveState::Cancelled
                && one.to.as_ref().is_none_or(|to| !tried.contains(to))
        });
        if was_called_off || tried.len() >= MOST_MOVES_OF_A_VM {
            return None;
        }
        Some(leaving(info, &tried, inventory))
    });
    vms.collect()
}

/// A VM whose name another host holds: moves by that name are the other VM's, so the manager moves
/// it nowhere.
fn staying(info: &VmInfo, inventory: &Inventory) -> DrainVm {
    let (name, here) = (&info.name, &info.host);
    let holder = inventory.holder(name).unwrap_or("another host");
    let runs = |info: &VmInfo| !matches!(info.state, VmState::Stopped | VmState::Failed);
    let at_holder = inventory.vm_at(holder, name);
    let both_run = runs(info) && at_holder.is_some_and(|other| runs(other));
    let what = if both_run { "2 running VMs are" } else { "2 VMs are" };
    let message = format!(
        "{what} named {name}: the one of host {holder} holds the name, and this one ({}) is {}; \
         end the one that is not to stay at its own host (`godwit --host {here} vm stop {name} \
         --force`, then `vm delete`), or give it the name with `godwit control bind {name} --to {here}`",
        info.spec.uuid.map_or_else(|| "no uuid".to_owned(), |uuid| uuid.to_string()),
        info.state,
    );
    DrainVm {
        vm: placement_vm(info),
        estimate_ms: 0,
        datastores: Vec::new(),
        immovable: Some(Obstacle { code: "name-conflict".to_owned(), message }),
        obstacles: BTreeMap::new(),
    }
}

fn leaving(info: &VmInfo, tried: &BTreeSet<&String>, inventory: &Inventory) -> DrainVm {
    let of_tried = |host: &&String| {
        let message = format!("a move of it to {host} has failed already in this drain");
        ((*host).clone(), vec![Obstacle { code: "tried".to_owned(), message }])
    };
    let mut obstacles = preflight::obstacles(inventory, &info.name);
    for (host, tried) in tried.iter().map(of_tried) {
        obstacles.entry(host).or_default().extend(tried);
    }
    DrainVm {
        vm: placement_vm(info),
        estimate_ms: estimate_ms(info.memory_bytes, &info.host, inventory),
        datastores: datastores(&info.name, inventory),
        immovable: preflight::immovable(inventory, &info.name),
        obstacles,
    }
}

/// What the drain has moved, for the way back.
fn moved(legs: &Legs<'_>, inventory: &Inventory) -> Vec<Moved> {
    let done = legs
        .out
        .values()
        .filter_map(|all| all.iter().rev().find(|one| one.state == MoveState::Done));
    let vms = done.filter_map(|one| {
        let info = inventory.vm_info(&one.vm)?;
        Some(Moved {
            vm: leaving(info, &BTreeSet::new(), inventory),
            to: Some((one.to.clone()?, one.ended_unix_ms.unwrap_or(one.asked_unix_ms))),
            found_on: matches!(info.state, VmState::Running | VmState::Paused)
                .then(|| info.host.clone()),
        })
    });
    vms.collect()
}

#[cfg(test)]
mod tests {
    use godwit_api::{HostEvent, PageInState};

    use super::*;
    use crate::rig;

    #[test]
    fn what_a_silent_host_reported_before_it_handed_a_vm_over_is_no_second_vm() {
        let mut inventory = Inventory::default();
        let before = rig::vm("web", "a", None);
        rig::put_host(&mut inventory, rig::host("a", None), &[], vec![before.clone()]);
        rig::put_host(&mut inventory, rig::host("b", None), &[], vec![]);
        inventory.plan_move("web", Some("v1".into()), Some("b".into()));
        inventory.lost("a", "silent");
        let arrived = VmInfo { epoch: before.epoch + 1, ..rig::vm("web", "b", None) };
        inventory.heard("b", HostEvent::Vm(Box::new(arrived)), 2);
        assert_eq!(inventory.holder("web"), Some("b"));
        assert!(is_passing(&before, &inventory, 3));
        // A second VM that runs on a host that answers does not leave by itself.
        inventory.reached("a");
        inventory.heard("a", HostEvent::Vm(Box::new(before.clone())), 4);
        inventory.heard("a", HostEvent::Known, 4);
        assert!(!is_passing(&before, &inventory, 5));
    }

    #[test]
    fn a_silent_host_that_keeps_pages_is_waited_for_for_some_minutes() {
        let mut inventory = Inventory::default();
        let told = VmInfo {
            state: VmState::Running,
            page_in: Some(PageInState { missing_pages: 7, connected: false }),
            ..rig::vm("db", "a", None)
        };
        let kept = VmInfo { state: VmState::MigratingOut, epoch: 1, ..rig::vm("db", "b", None) };
        rig::put_host(&mut inventory, rig::host("a", None), &[], vec![told.clone()]);
        rig::put_host(&mut inventory, rig::host("b", None), &[], vec![kept]);
        // Heard at 1 ms.
        let waits = |inventory: &Inventory, now_ms| is_passing(&told, inventory, now_ms);
        assert!(waits(&inventory, 10 * PAGES_WAIT_MS), "it is heard");
        inventory.lost("b", "silent");
        assert!(waits(&inventory, PAGES_WAIT_MS) && !waits(&inventory, PAGES_WAIT_MS + 1));
        // After the manager's start nobody knows where its pages are, until every host has been
        // asked.
        inventory.heard("b", HostEvent::VmGone("db".to_owned()), 1);
        assert!(waits(&inventory, PAGES_WAIT_MS) && !waits(&inventory, PAGES_WAIT_MS + 1));
        inventory.plan_host("c", crate::cluster::inventory::HostPlan::default());
        assert!(waits(&inventory, 10 * PAGES_WAIT_MS));
        inventory.lost("c", "no route");
        assert!(!waits(&inventory, 10 * PAGES_WAIT_MS));
        let connected =
            VmInfo { page_in: Some(PageInState { missing_pages: 7, connected: true }), ..told };
        assert!(is_passing(&connected, &inventory, 10 * PAGES_WAIT_MS));
    }
}
