use godwit_api::control::NameConflict;
use godwit_api::{HostEvent, MigrationStatus};
use godwit_qemu::Uuid;
use godwit_types::Incarnation;

use super::*;
use crate::rig;

const GUEST: (u128, u128) = (7, 70);
const OTHER: (u128, u128) = (8, 80);

/// Returns a report of a guest.
fn report(state: VmState, epoch: u64, (uuid, incarnation): (u128, u128)) -> HostEvent {
    let mut info = rig::vm("web", "x", None);
    (info.state, info.epoch, info.incarnation) = (state, epoch, Incarnation::new(incarnation));
    info.spec.uuid = Some(Uuid::from_u128(uuid));
    info.migration = matches!(state, VmState::MigratingOut).then(|| "m1".to_owned());
    HostEvent::Vm(Box::new(info))
}

fn migration(from: &str, to: &str) -> HostEvent {
    HostEvent::Migration(Box::new(MigrationStatus::begun("m1", "web", from, to, 1)))
}

fn gone() -> HostEvent {
    HostEvent::VmGone("web".into())
}

/// Returns an inventory of reachable hosts without VMs.
fn reachable(names: &[&str]) -> Inventory {
    let mut inventory = Inventory::default();
    names.iter().for_each(|name| rig::put_host(&mut inventory, rig::host(name, None), &[], vec![]));
    inventory
}

/// Returns the host that holds the name, and those whose claims are conflicts.
fn seen(inventory: &Inventory) -> (String, Vec<String>) {
    let vm = inventory.vm("web").unwrap();
    (vm.summary.host, vm.summary.conflicts)
}

fn of(host: &str, conflicts: &[&str]) -> (String, Vec<String>) {
    (host.to_owned(), conflicts.iter().map(|host| (*host).to_owned()).collect())
}

#[test]
fn an_unexplained_claim_is_a_conflict_and_changes_nothing() {
    for state in
        [VmState::Running, VmState::Stopped, VmState::Failed, VmState::Starting, VmState::Paused]
    {
        for guest in [GUEST, OTHER] {
            let mut inventory = reachable(&["a", "liar"]);
            inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
            let before = inventory.vm("web").unwrap().info;
            let changes = inventory.apply("liar", report(state, 1 << 47, guest), 2);
            let shown =
                |change: &Change| matches!(change, Change::NameConflict(one) if one.vm == "web");
            assert!(changes.iter().any(shown), "{state} {changes:?}");
            assert_eq!(seen(&inventory), of("a", &["liar"]), "{state}");
            assert_eq!(inventory.vm("web").unwrap().info, before);
            let all = Cursor { behind: None, limit: 10 };
            let NameConflict { holder, claims, .. } =
                inventory.name_conflicts(&all).items.remove(0);
            assert_eq!((holder.host.as_str(), claims[0].host.as_str()), ("a", "liar"));
            assert_eq!(inventory.tally().name_conflicts, 1);
            let changes = inventory.apply("liar", gone(), 3);
            assert!(changes.contains(&Change::NameConflictGone("web".into())), "{changes:?}");
            assert_eq!((seen(&inventory), inventory.conflict_count()), (of("a", &[]), 0));
        }
    }
}

#[test]
fn doubt_of_a_host_outside_the_hand_over_does_not_count() {
    let mut inventory = reachable(&["a", "liar"]);
    inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
    let HostEvent::Vm(mut lie) = report(VmState::Paused, 9, GUEST) else { unreachable!() };
    lie.in_doubt = true;
    inventory.apply("liar", HostEvent::Vm(lie), 1);
    assert!(!inventory.vm("web").unwrap().summary.in_doubt);
    assert_eq!(seen(&inventory), of("a", &["liar"]));
}

#[test]
fn a_name_moves_with_a_migration_that_its_holder_reports() {
    let mut inventory = reachable(&["a", "b", "liar"]);
    inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
    // Only the holder's report of a migration counts.
    inventory.apply("liar", migration("a", "liar"), 1);
    inventory.apply("liar", report(VmState::Running, 9, GUEST), 1);
    inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
    assert_eq!(seen(&inventory).0, "a");
    inventory.apply("a", migration("a", "b"), 1);
    inventory.apply("b", report(VmState::MigratingIn, 4, GUEST), 1);
    assert_eq!(seen(&inventory).0, "a");
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    // The source keeps pages for a while.
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    inventory.apply("a", gone(), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
}

#[test]
fn a_source_that_keeps_pages_has_handed_the_name_over() {
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
    inventory.apply("a", migration("a", "b"), 1);
    // The source reports before the destination, and no longer has a migration.
    inventory.apply("a", report(VmState::Paused, 3, GUEST), 1);
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_migration_moves_a_name_only_to_the_same_guest_in_a_later_epoch() {
    for (event, why) in [
        (report(VmState::Running, 3, GUEST), "the epoch is the holder's"),
        (report(VmState::Running, 4, OTHER), "it is another guest"),
    ] {
        let mut inventory = reachable(&["a", "b"]);
        inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
        inventory.apply("a", migration("a", "b"), 1);
        inventory.apply("b", event, 1);
        assert_eq!(seen(&inventory).0, "a", "{why}");
    }
    // The migration is over, and the guest runs on the holder.
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
    inventory.apply("a", migration("a", "b"), 1);
    inventory.apply("a", report(VmState::Running, 5, GUEST), 1);
    inventory.apply("b", report(VmState::Running, 6, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
    inventory.apply("a", report(VmState::Paused, 5, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
}

#[test]
fn a_move_by_the_manager_moves_the_name_even_if_the_source_is_away() {
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
    inventory.plan_move("web", Some("v1".into()), Some("b".into()));
    inventory.lost("a", "silent");
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_whose_holder_lost_the_vm_goes_to_the_destination_of_its_migration() {
    let mut inventory = reachable(&["a", "b", "liar"]);
    inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
    inventory.apply("a", migration("a", "b"), 1);
    inventory.apply("b", report(VmState::MigratingIn, 4, GUEST), 1);
    inventory.apply("liar", report(VmState::Running, 9, GUEST), 1);
    // The source reports the end before the destination reports the start.
    inventory.apply("a", gone(), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    // A name without holder is free.
    inventory.apply("b", gone(), 1);
    assert_eq!(seen(&inventory), of("liar", &[]));
}

#[test]
fn a_migration_while_its_source_was_away_moves_the_name_once_the_source_is_back() {
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
    inventory.lost("a", "silent");
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
    // A restarted agent reports everything anew.
    inventory.reached("a");
    assert_eq!(seen(&inventory), of("a", &["b"]));
    inventory.apply("a", HostEvent::Known, 2);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_of_a_dead_host_moves_when_an_operator_binds_it_or_the_host_is_forgotten() {
    let begin = || {
        let mut inventory = reachable(&["a", "b"]);
        inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
        inventory.lost("a", "dead");
        inventory.apply("b", report(VmState::Running, 1, OTHER), 1);
        assert_eq!(seen(&inventory), of("a", &["b"]));
        inventory
    };
    let mut bound = begin();
    assert_eq!(bound.bind("web", "c"), Err(NoClaim));
    bound.bind("web", "b").unwrap();
    // The dead host's last report is a conflict from then on.
    assert_eq!(seen(&bound), of("b", &["a"]));
    let mut forgotten = begin();
    forgotten.forget_host("a");
    assert_eq!(seen(&forgotten), of("b", &[]));
}

#[test]
fn a_vm_that_agents_restarted_takes_its_name_along_if_its_holder_is_away() {
    let own = |(uuid, incarnation)| {
        let event = report(VmState::Running, 1, (uuid, incarnation));
        let HostEvent::Vm(mut info) = event else { unreachable!() };
        info.spec.protect_by_agents = true;
        HostEvent::Vm(info)
    };
    let restarted = (GUEST.0, 71);
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", own(GUEST), 1);
    inventory.apply("b", own(restarted), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]), "its holder is up");
    inventory.lost("a", "dead");
    inventory.apply("b", own(restarted), 2);
    assert_eq!(seen(&inventory), of("b", &[]));
    for claim in [own(OTHER), report(VmState::Running, 1, restarted)] {
        let mut inventory = reachable(&["a", "liar"]);
        inventory.apply("a", own(GUEST), 1);
        inventory.lost("a", "dead");
        inventory.apply("liar", claim, 1);
        assert_eq!(seen(&inventory), of("a", &["liar"]), "another VM, or one that is not so");
    }
    // The next leader knows the binding alone.
    let mut next = Inventory::default();
    let mut first = reachable(&["a"]);
    first.apply("a", own(GUEST), 1);
    next.know_binding("web", first.unstored_bindings()["web"].clone());
    ["a", "b"].iter().for_each(|host| drop(next.plan_host(host, HostPlan::default())));
    next.reached("b");
    next.apply("b", own(restarted), 1);
    assert_eq!(next.holder("web"), Some("a"));
    next.apply("b", HostEvent::Known, 1);
    assert_eq!(seen(&next), of("b", &[]));
    // A VM that agents do not restart keeps its holder.
    let mut inventory = reachable(&["a", "liar"]);
    inventory.apply("a", report(VmState::Running, 1, GUEST), 1);
    inventory.lost("a", "dead");
    inventory.apply("liar", own(restarted), 1);
    assert_eq!(seen(&inventory), of("a", &["liar"]));
}

#[test]
fn a_stored_binding_applies_before_its_host_reports() {
    let mut first = reachable(&["a"]);
    first.apply("a", report(VmState::Running, 3, GUEST), 1);
    let unstored = first.unstored_bindings();
    let binding = unstored["web"].clone().unwrap();
    first.binding_stored("web", Some(binding.clone()));
    assert!(first.unstored_bindings().is_empty());
    first.apply("a", gone(), 1);
    assert_eq!(first.unstored_bindings(), BTreeMap::from([("web".to_owned(), None)]));

    let mut next = Inventory::default();
    next.know_binding("web", Some(binding));
    rig::put_host(&mut next, rig::host("liar", None), &[], vec![]);
    next.plan_host("a", HostPlan::default());
    next.apply("liar", report(VmState::Running, 9, GUEST), 1);
    assert!(next.vm_info("web").is_none(), "its holder has not reported");
    assert_eq!((next.holder("web"), next.conflict_count()), (Some("a"), 1));
    next.reached("a");
    next.apply("a", report(VmState::Running, 3, GUEST), 1);
    next.apply("a", HostEvent::Known, 1);
    assert_eq!(seen(&next), of("a", &["liar"]));
    assert!(next.unstored_bindings().is_empty());
    next.forget_host("liar");
    next.forget_host("a");
    assert_eq!(next.unstored_bindings(), BTreeMap::from([("web".to_owned(), None)]));
}

#[test]
fn a_reachable_holder_that_does_not_report_the_vm_loses_the_name() {
    let mut inventory = Inventory::default();
    let incarnation = Incarnation::UNRECORDED;
    let binding = Binding { uuid: None, incarnation, host: "a".into(), by_agents: false };
    inventory.know_binding("web", Some(binding));
    rig::put_host(&mut inventory, rig::host("b", None), &[], vec![]);
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    rig::put_host(&mut inventory, rig::host("a", None), &[], vec![]);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_is_reserved_for_the_host_on_which_the_manager_creates_the_vm() {
    let mut inventory = reachable(&["a", "liar"]);
    inventory.expect_vm("web", Some("a"));
    inventory.apply("liar", report(VmState::Running, 9, OTHER), 1);
    inventory.apply("a", report(VmState::Running, 1, GUEST), 1);
    inventory.expect_vm("web", None);
    assert_eq!(seen(&inventory), of("a", &["liar"]));
}

#[test]
fn vms_move_between_agents_that_report_no_incarnation() {
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::MigratingOut, 3, (7, 70)), 1);
    inventory.apply("a", migration("a", "b"), 1);
    inventory.apply("b", report(VmState::Running, 4, (7, 0)), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_report_is_outdated_once_a_later_holder_has_had_the_guest_in_a_later_epoch() {
    let mut inventory = reachable(&["a", "b"]);
    inventory.apply("a", report(VmState::Running, 3, GUEST), 1);
    inventory.apply("a", report(VmState::MigratingOut, 3, GUEST), 1);
    inventory.apply("a", migration("a", "b"), 1);
    inventory.lost("a", "no route to host");
    assert!(!inventory.is_outdated("a", "web"), "nobody else has had it");
    inventory.apply("b", report(VmState::MigratingIn, 4, GUEST), 1);
    assert!(!inventory.is_outdated("a", "web"), "it may return");
    inventory.apply("b", report(VmState::Running, 4, GUEST), 1);
    assert_eq!(inventory.holder("web"), Some("b"));
    assert!(inventory.is_outdated("a", "web") && !inventory.is_outdated("b", "web"));
    // That stays true when the VM has left the later holder.
    inventory.apply("b", gone(), 1);
    assert!(inventory.is_outdated("a", "web"));
    inventory.apply("a", report(VmState::Running, 5, GUEST), 1);
    assert!(!inventory.is_outdated("a", "web"));
    // The claim of a host that does not hold the name changes nothing.
    inventory.apply("b", report(VmState::Running, 1 << 40, GUEST), 1);
    assert_eq!(inventory.holder("web"), Some("a"));
    assert!(!inventory.is_outdated("a", "web"));
}
