//! Decision on the next step of a drain, without I/O and without a clock.
//!
//! A VM that could leave but has no move is **unplaced**: it gets a plan and a move. So there are
//! no special cases for VMs that need another plan later: their target was lost, their move failed,
//! they came to the host in the meantime, or another manager took over between the plan and the
//! moves.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::{DrainState, HostState, Move, MoveState};
use godwit_api::{TravellingDisks, VmInfo, VmState};
use godwit_planner::drain::{DrainVm, Moved, PlannedMove};
use godwit_planner::placement::Obstacle;

use super::state::{HostDrain, Legs, Way};
use crate::cluster::inventory::{Inventory, SeenHost};
use crate::cluster::planner_input::{datastores, estimate_ms, placement_vm};
use crate::preflight;

/// Largest number of moves of a VM in a drain, each to another host.
const MOST_MOVES_OF_A_VM: usize = 3;
/// Longest wait of a move for its target's memory before it gets another target.
const MEMORY_WAIT_MS: u64 = 60_000;
/// Longest time for which a drain waits for pages of an unreachable host. By default a migration is
/// given up after an interruption of this length.
const PAGES_WAIT_MS: u64 = 5 * 60_000;
/// Codes of waiting moves whose target is unlikely to become eligible soon.
const LOST_TARGETS: [&str; 3] = ["target-away", "target-maintenance", "target-not-in-inventory"];

/// Next step of a drain.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Set the host into maintenance again, because it takes VMs although it is being drained.
    Close,
    /// Plan these VMs and request their moves.
    Place(Vec<DrainVm>),
    /// Request planned moves that do not exist yet: the plan was too large for one transaction, and
    /// the rest was not written.
    Submit(Vec<PlannedMove>),
    /// Cancel these moves.
    Cancel(Vec<Cancellation>),
    /// Plan to move these VMs back.
    BringBack(Vec<Moved>),
    /// End the drain in this state.
    End(DrainState),
    /// Wait for the next change.
    Wait,
}

/// Move to cancel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cancellation {
    pub(super) id: String,
    pub(super) vm: String,
    /// Target that became ineligible, if the VM needs another one.
    pub(super) passed_over: Option<String>,
}

/// Decides the next step of a drain that runs or is being undone.
pub(super) fn next(drain: &HostDrain, legs: &Legs<'_>, inventory: &Inventory, now_ms: u64) -> Next {
    let plan = inventory.host_plan(&drain.host);
    match drain.state {
        DrainState::Running | DrainState::Undoing if plan.is_none() => forgotten(legs),
        DrainState::Running if plan.is_some_and(|plan| !plan.maintenance) => Next::Close,
        DrainState::Running => {
            let mut lost = lost_targets(legs, now_ms);
            lost.extend(strays(drain, legs, inventory, now_ms));
            if !lost.is_empty() {
                return Next::Cancel(lost);
            }
            let unplaced = unplaced(drain, legs, inventory, now_ms);
            let unasked = unasked_out(drain, legs, &unplaced);
            if !unasked.is_empty() {
                return Next::Submit(unasked);
            }
            let is_news = unplaced.iter().any(|vm| !stays(drain, &vm.vm.name));
            let has_live = legs.live().next().is_some();
            // VMs that had no room are planned once more when all others have left.
            if is_news
                || (!has_live && !unplaced.is_empty() && drain.placed_unix_ms < last_end_ms(legs))
            {
                return Next::Place(unplaced);
            }
            let has_passing =
                inventory.vms_of(&drain.host).any(|info| is_passing(info, inventory, now_ms));
            if has_live || has_passing { Next::Wait } else { Next::End(DrainState::Done) }
        }
        DrainState::Undoing => {
            let live_out = legs.live().filter(|one| one.from == drain.host);
            let live_out: Vec<&Move> = live_out.collect();
            if !live_out.is_empty() {
                return cancel_waiting(live_out.into_iter());
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

/// Decides the next step if the host was removed. Moves from it fail by themselves, and moves on
/// their way to it still have their sources.
fn forgotten(legs: &Legs<'_>) -> Next {
    if legs.live().next().is_some() { Next::Wait } else { Next::End(DrainState::Cancelled) }
}

/// Cancels the waiting moves; if there are none, waits for the others.
fn cancel_waiting<'a>(live: impl Iterator<Item = &'a Move>) -> Next {
    let waiting = live.filter(|one| one.state == MoveState::Waiting);
    let all: Vec<Cancellation> = waiting.map(|one| cancellation(one, None)).collect();
    if all.is_empty() { Next::Wait } else { Next::Cancel(all) }
}

/// Returns planned moves out of VMs that could leave and that have not been requested. A VM gets
/// each target once.
fn unasked_out(drain: &HostDrain, legs: &Legs<'_>, unplaced: &[DrainVm]) -> Vec<PlannedMove> {
    let was_asked = |planned: &PlannedMove| {
        let mut had = legs.out.get(planned.vm.as_str()).into_iter().flatten();
        had.any(|one| one.to.as_ref() == Some(&planned.target))
    };
    let unplaced: BTreeSet<&str> = unplaced.iter().map(|vm| vm.vm.name.as_str()).collect();
    let is_unasked =
        |planned: &&PlannedMove| unplaced.contains(planned.vm.as_str()) && !was_asked(planned);
    drain.plan.moves.iter().filter(is_unasked).cloned().collect()
}

/// Returns planned moves back that have not been requested. Each VM gets one move.
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

/// Returns whether the VM of a planned move may still be reported: this manager has just started,
/// and the VM's host has not reported yet.
fn is_awaited(planned: &PlannedMove, inventory: &Inventory) -> bool {
    inventory.vm_info(&planned.vm).is_none()
        && inventory.seen_host(&planned.source).is_some_and(|host| host.is_awaited)
}

/// Returns whether the obstacle to a VM's move ends by itself: its own migration, or missing pages.
/// It can be moved afterwards.
fn is_passing(info: &VmInfo, inventory: &Inventory, now_ms: u64) -> bool {
    let lacks = info.page_in.as_ref();
    // The remains of a VM after its hand-over disappear by themselves. An unreachable host reported
    // the VM before the hand-over, and will report its real state later.
    let is_left_over = || {
        !inventory.holds(&info.host, &info.name)
            && !info.in_doubt
            && (matches!(info.state, VmState::Paused | VmState::Stopping)
                || !inventory.is_up(&info.host))
            && !inventory.is_conflict(&info.host, &info.name)
    };
    matches!(info.state, VmState::MigratingOut | VmState::MigratingIn)
        || is_left_over()
        || lacks.is_some_and(|lacks| lacks.connected || pages_may_come(info, inventory, now_ms))
}

/// Returns whether a host may still have the pages that a VM lacks and that are not being sent: a
/// connected host that reports keeping them, or a host that has not been unreachable for long.
fn pages_may_come(info: &VmInfo, inventory: &Inventory, now_ms: u64) -> bool {
    let others = inventory.others_with(&info.name, &info.host);
    // A host that keeps pages reports the VM as leaving or, if the agent was restarted, as paused.
    let keeps = |host: &String| {
        let report = inventory.vm_at(host, &info.name);
        report.is_some_and(|info| matches!(info.state, VmState::MigratingOut | VmState::Paused))
    };
    if others.iter().any(|host| inventory.is_up(host) && keeps(host)) {
        return true;
    }
    let is_silent = |host: &SeenHost<'_>| host.state != HostState::Up && host.name != info.host;
    let may_return = |host: SeenHost<'_>| {
        host.is_awaited
            || host.heard_unix_ms.is_some_and(|heard_ms| now_ms < heard_ms + PAGES_WAIT_MS)
    };
    // If no other host reports the VM, it may have come from any unreachable host.
    let mut silent = inventory.seen_hosts().filter(is_silent);
    silent.any(|host| {
        (others.is_empty() || others.iter().any(|other| other == host.name)) && may_return(host)
    })
}

fn stays(drain: &HostDrain, vm: &str) -> bool {
    drain.plan.stays.contains_key(vm)
}

/// Returns when the last move out ended, milliseconds since 1970.
fn last_end_ms(legs: &Legs<'_>) -> u64 {
    legs.out.values().flatten().filter_map(|one| one.ended_unix_ms).max().unwrap_or(0)
}

/// Returns waiting moves whose target is ineligible.
fn lost_targets(legs: &Legs<'_>, now_ms: u64) -> Vec<Cancellation> {
    let is_lost = |one: &&&Move| {
        let Some(waits) = one.waits.as_ref().filter(|_| one.state == MoveState::Waiting) else {
            return false;
        };
        let has_waited = now_ms.saturating_sub(one.asked_unix_ms) > MEMORY_WAIT_MS;
        LOST_TARGETS.contains(&waits.code.as_str()) || (waits.code == "target-memory" && has_waited)
    };
    let newest = legs.out.values().filter_map(|all| all.last());
    newest.filter(is_lost).map(|one| cancellation(one, one.to.clone())).collect()
}

/// Returns waiting moves of VMs that have left the host or cannot leave it any more.
fn strays(
    drain: &HostDrain,
    legs: &Legs<'_>,
    inventory: &Inventory,
    now_ms: u64,
) -> Vec<Cancellation> {
    let is_stray = |one: &&Move| {
        let info = inventory.vm_info(&one.vm);
        let can_leave = |info: &VmInfo| {
            info.host == drain.host
                && (is_passing(info, inventory, now_ms)
                    || preflight::immovable(inventory, &info.name).is_none())
        };
        one.state == MoveState::Waiting
            && inventory.is_up(&drain.host)
            && !info.is_some_and(|info| can_leave(info))
    };
    let newest = legs.out.values().filter_map(|all| all.last().copied());
    newest.filter(is_stray).map(|one| cancellation(one, None)).collect()
}

fn cancellation(one: &Move, passed_over: Option<String>) -> Cancellation {
    Cancellation { id: one.id.clone(), vm: one.vm.clone(), passed_over }
}

/// Returns VMs on the host that could leave and have no move.
pub(super) fn unplaced(
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
        // A user has cancelled its move, so the drain leaves it alone.
        let was_cancelled = had.last().is_some_and(|one| {
            one.state == MoveState::Cancelled
                && one.to.as_ref().is_none_or(|to| !tried.contains(to))
        });
        if was_cancelled || tried.len() >= MOST_MOVES_OF_A_VM {
            return None;
        }
        Some(leaving(info, &tried, inventory, drain.disks.as_ref()))
    });
    vms.collect()
}

/// Returns the entry of a VM whose name another host holds. Moves of that name apply to the other
/// VM, so the manager cannot move this one.
fn staying(info: &VmInfo, inventory: &Inventory) -> DrainVm {
    let (name, here) = (&info.name, &info.host);
    let holder = inventory.holder(name).unwrap_or("another host");
    let runs = |info: &VmInfo| !info.state.is_off();
    let at_holder = inventory.vm_at(holder, name);
    let both_run = runs(info) && at_holder.is_some_and(|other| runs(other));
    let what = if both_run { "2 running VMs are" } else { "2 VMs are" };
    let message = format!(
        "{what} named {name}: the one of host {holder} holds the name, and this one ({}) is {}; \
         remove the unwanted one on its own host (for this one `godwit --host {here} vm stop \
         {name} --force`, then `vm delete`), or bind the name to this one with \
         `godwit control bind {name} --to {here}`",
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

fn leaving(
    info: &VmInfo,
    tried: &BTreeSet<&String>,
    inventory: &Inventory,
    disks: Option<&TravellingDisks>,
) -> DrainVm {
    let of_tried = |host: &&String| {
        let message = format!("a move to {host} has failed already in this drain");
        ((*host).clone(), vec![Obstacle { code: "tried".to_owned(), message }])
    };
    let mut obstacles = preflight::obstacles_with_disks(inventory, &info.name, disks);
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

/// Returns the VMs that the drain has moved, to plan their way back.
fn moved(legs: &Legs<'_>, inventory: &Inventory) -> Vec<Moved> {
    let done = legs
        .out
        .values()
        .filter_map(|all| all.iter().rev().find(|one| one.state == MoveState::Done));
    let vms = done.filter_map(|one| {
        let info = inventory.vm_info(&one.vm)?;
        Some(Moved {
            vm: leaving(info, &BTreeSet::new(), inventory, None),
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
    fn an_old_report_of_an_unreachable_source_is_not_a_second_vm() {
        let mut inventory = Inventory::default();
        let before = rig::vm("web", "a", None);
        rig::put_host(&mut inventory, rig::host("a", None), &[], vec![before.clone()]);
        rig::put_host(&mut inventory, rig::host("b", None), &[], vec![]);
        inventory.plan_move("web", Some("v1".into()), Some("b".into()));
        inventory.lost("a", "silent");
        let arrived = VmInfo { epoch: before.epoch + 1, ..rig::vm("web", "b", None) };
        inventory.apply("b", HostEvent::Vm(Box::new(arrived)), 2);
        assert_eq!(inventory.holder("web"), Some("b"));
        assert!(is_passing(&before, &inventory, 3));
        // A second VM on a connected host does not disappear by itself.
        inventory.reached("a");
        inventory.apply("a", HostEvent::Vm(Box::new(before.clone())), 4);
        inventory.apply("a", HostEvent::Known, 4);
        assert!(!is_passing(&before, &inventory, 5));
    }

    #[test]
    fn a_drain_waits_some_minutes_for_pages_of_an_unreachable_host() {
        let mut inventory = Inventory::default();
        let guest = VmInfo {
            state: VmState::Running,
            page_in: Some(PageInState { missing_pages: 7, connected: false }),
            ..rig::vm("db", "a", None)
        };
        let kept = VmInfo { state: VmState::MigratingOut, epoch: 1, ..rig::vm("db", "b", None) };
        rig::put_host(&mut inventory, rig::host("a", None), &[], vec![guest.clone()]);
        rig::put_host(&mut inventory, rig::host("b", None), &[], vec![kept]);
        // The host reported at 1 ms.
        let waits = |inventory: &Inventory, now_ms| is_passing(&guest, inventory, now_ms);
        assert!(waits(&inventory, 10 * PAGES_WAIT_MS), "the host is connected");
        inventory.lost("b", "silent");
        assert!(waits(&inventory, PAGES_WAIT_MS) && !waits(&inventory, PAGES_WAIT_MS + 1));
        // After the manager's start the location of the pages is unknown until every host has
        // reported.
        inventory.apply("b", HostEvent::VmGone("db".to_owned()), 1);
        assert!(waits(&inventory, PAGES_WAIT_MS) && !waits(&inventory, PAGES_WAIT_MS + 1));
        inventory.plan_host("c", crate::cluster::inventory::HostPlan::default());
        assert!(waits(&inventory, 10 * PAGES_WAIT_MS));
        inventory.lost("c", "no route");
        assert!(!waits(&inventory, 10 * PAGES_WAIT_MS));
        let connected =
            VmInfo { page_in: Some(PageInState { missing_pages: 7, connected: true }), ..guest };
        assert!(is_passing(&connected, &inventory, 10 * PAGES_WAIT_MS));
    }
}
