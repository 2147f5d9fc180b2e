use godwit_api::control::NameConflict;
use godwit_api::{HostEvent, MigrationStatus};
use godwit_qemu::Uuid;
use godwit_types::Incarnation;

use super::*;
use crate::rig;

const GUEST: (u128, u128) = (7, 70);
const OTHER: (u128, u128) = (8, 80);

/// A guest as one host reports it.
fn told(state: VmState, epoch: u64, (uuid, incarnation): (u128, u128)) -> HostEvent {
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

/// Hosts that are heard and have nothing.
fn heard(names: &[&str]) -> Inventory {
    let mut inventory = Inventory::default();
    names.iter().for_each(|name| rig::put_host(&mut inventory, rig::host(name, None), &[], vec![]));
    inventory
}

/// The host that operations go to, and those that claim the name without it.
fn seen(inventory: &Inventory) -> (String, Vec<String>) {
    let vm = inventory.vm("web").unwrap();
    (vm.summary.host, vm.summary.conflicts)
}

fn of(host: &str, conflicts: &[&str]) -> (String, Vec<String>) {
    (host.to_owned(), conflicts.iter().map(|host| (*host).to_owned()).collect())
}

#[test]
fn a_claim_that_nothing_explains_is_a_conflict_and_changes_nothing() {
    for state in
        [VmState::Running, VmState::Stopped, VmState::Failed, VmState::Starting, VmState::Paused]
    {
        for guest in [GUEST, OTHER] {
            let mut inventory = heard(&["a", "liar"]);
            inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
            let before = inventory.vm("web").unwrap().info;
            let changes = inventory.heard("liar", told(state, 1 << 47, guest), 2);
            let shown =
                |change: &Change| matches!(change, Change::NameConflict(told) if told.vm == "web");
            assert!(changes.iter().any(shown), "{state} {changes:?}");
            assert_eq!(seen(&inventory), of("a", &["liar"]), "{state}");
            assert_eq!(inventory.vm("web").unwrap().info, before);
            let all = Cursor { behind: None, limit: 10 };
            let NameConflict { holder, claims, .. } =
                inventory.name_conflicts(&all).items.remove(0);
            assert_eq!((holder.host.as_str(), claims[0].host.as_str()), ("a", "liar"));
            assert_eq!(inventory.tally().name_conflicts, 1);
            let changes = inventory.heard("liar", gone(), 3);
            assert!(changes.contains(&Change::NameConflictGone("web".into())), "{changes:?}");
            assert_eq!((seen(&inventory), inventory.conflict_count()), (of("a", &[]), 0));
        }
    }
}

#[test]
fn a_liars_doubt_is_not_the_vms() {
    let mut inventory = heard(&["a", "liar"]);
    inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
    let HostEvent::Vm(mut lie) = told(VmState::Paused, 9, GUEST) else { unreachable!() };
    lie.in_doubt = true;
    inventory.heard("liar", HostEvent::Vm(lie), 1);
    assert!(!inventory.vm("web").unwrap().summary.in_doubt);
    assert_eq!(seen(&inventory), of("a", &["liar"]));
}

#[test]
fn a_name_moves_with_a_migration_that_its_holder_reports() {
    let mut inventory = heard(&["a", "b", "liar"]);
    inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
    // Nobody but the holder says where it goes.
    inventory.heard("liar", migration("a", "liar"), 1);
    inventory.heard("liar", told(VmState::Running, 9, GUEST), 1);
    inventory.heard("a", told(VmState::MigratingOut, 3, GUEST), 1);
    assert_eq!(seen(&inventory).0, "a");
    inventory.heard("a", migration("a", "b"), 1);
    inventory.heard("b", told(VmState::MigratingIn, 4, GUEST), 1);
    assert_eq!(seen(&inventory).0, "a");
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    // The source keeps pages for a while.
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    inventory.heard("a", gone(), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
}

#[test]
fn a_source_that_keeps_pages_has_handed_the_name_over() {
    let mut inventory = heard(&["a", "b"]);
    inventory.heard("a", told(VmState::MigratingOut, 3, GUEST), 1);
    inventory.heard("a", migration("a", "b"), 1);
    // It is heard before the destination: it has no migration any more.
    inventory.heard("a", told(VmState::Paused, 3, GUEST), 1);
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn what_does_not_follow_from_a_migration_takes_no_name() {
    for (event, why) in [
        (told(VmState::Running, 3, GUEST), "the epoch is the holder's"),
        (told(VmState::Running, 4, OTHER), "it is another guest"),
    ] {
        let mut inventory = heard(&["a", "b"]);
        inventory.heard("a", told(VmState::MigratingOut, 3, GUEST), 1);
        inventory.heard("a", migration("a", "b"), 1);
        inventory.heard("b", event, 1);
        assert_eq!(seen(&inventory).0, "a", "{why}");
    }
    // A migration that is over: the holder runs it.
    let mut inventory = heard(&["a", "b"]);
    inventory.heard("a", told(VmState::MigratingOut, 3, GUEST), 1);
    inventory.heard("a", migration("a", "b"), 1);
    inventory.heard("a", told(VmState::Running, 5, GUEST), 1);
    inventory.heard("b", told(VmState::Running, 6, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
    inventory.heard("a", told(VmState::Paused, 5, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
}

#[test]
fn a_move_that_the_manager_began_brings_the_name_also_where_the_source_is_away() {
    let mut inventory = heard(&["a", "b"]);
    inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
    inventory.plan_move("web", Some("v1".into()), Some("b".into()));
    inventory.lost("a", "silent");
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_whose_holder_has_it_no_more_goes_to_where_it_was_handed() {
    let mut inventory = heard(&["a", "b", "liar"]);
    inventory.heard("a", told(VmState::MigratingOut, 3, GUEST), 1);
    inventory.heard("a", migration("a", "b"), 1);
    inventory.heard("b", told(VmState::MigratingIn, 4, GUEST), 1);
    inventory.heard("liar", told(VmState::Running, 9, GUEST), 1);
    // The source's end is heard before the target's beginning.
    inventory.heard("a", gone(), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("b", &["liar"]));
    // A name that nobody holds is free.
    inventory.heard("b", gone(), 1);
    assert_eq!(seen(&inventory), of("liar", &[]));
}

#[test]
fn a_migration_of_the_agents_own_while_its_source_was_away_is_known_when_that_is_heard() {
    let mut inventory = heard(&["a", "b"]);
    inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
    inventory.lost("a", "silent");
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    assert_eq!(seen(&inventory), of("a", &["b"]));
    // An agent that was restarted tells everything anew.
    inventory.reached("a");
    assert_eq!(seen(&inventory), of("a", &["b"]));
    inventory.heard("a", HostEvent::Known, 2);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_of_a_dead_host_waits_for_an_operator_or_for_the_host_to_be_forgotten() {
    let begin = || {
        let mut inventory = heard(&["a", "b"]);
        inventory.heard("a", told(VmState::Running, 3, GUEST), 1);
        inventory.lost("a", "dead");
        inventory.heard("b", told(VmState::Running, 1, OTHER), 1);
        assert_eq!(seen(&inventory), of("a", &["b"]));
        inventory
    };
    let mut bound = begin();
    assert_eq!(bound.bind("web", "c"), Err(NoClaim));
    bound.bind("web", "b").unwrap();
    // What the dead host has of it, it claims from then on.
    assert_eq!(seen(&bound), of("b", &["a"]));
    let mut forgotten = begin();
    forgotten.forget_host("a");
    assert_eq!(seen(&forgotten), of("b", &[]));
}

#[test]
fn what_the_store_has_holds_before_its_host_is_heard() {
    let mut first = heard(&["a"]);
    first.heard("a", told(VmState::Running, 3, GUEST), 1);
    let unstored = first.unstored_bindings();
    let binding = unstored["web"].clone().unwrap();
    first.binding_stored("web", Some(binding.clone()));
    assert!(first.unstored_bindings().is_empty());
    first.heard("a", gone(), 1);
    assert_eq!(first.unstored_bindings(), BTreeMap::from([("web".to_owned(), None)]));

    let mut next = Inventory::default();
    next.know_binding("web", Some(binding));
    rig::put_host(&mut next, rig::host("liar", None), &[], vec![]);
    next.plan_host("a", HostPlan::default());
    next.heard("liar", told(VmState::Running, 9, GUEST), 1);
    assert!(next.vm_info("web").is_none(), "its holder has not been heard");
    assert_eq!((next.holder("web"), next.conflict_count()), (Some("a"), 1));
    next.reached("a");
    next.heard("a", told(VmState::Running, 3, GUEST), 1);
    next.heard("a", HostEvent::Known, 1);
    assert_eq!(seen(&next), of("a", &["liar"]));
    assert!(next.unstored_bindings().is_empty());
    next.forget_host("liar");
    next.forget_host("a");
    assert_eq!(next.unstored_bindings(), BTreeMap::from([("web".to_owned(), None)]));
}

#[test]
fn a_holder_that_reports_nothing_once_it_is_heard_holds_nothing() {
    let mut inventory = Inventory::default();
    let binding = Binding { uuid: None, incarnation: Incarnation::UNRECORDED, host: "a".into() };
    inventory.know_binding("web", Some(binding));
    rig::put_host(&mut inventory, rig::host("b", None), &[], vec![]);
    inventory.heard("b", told(VmState::Running, 4, GUEST), 1);
    rig::put_host(&mut inventory, rig::host("a", None), &[], vec![]);
    assert_eq!(seen(&inventory), of("b", &[]));
}

#[test]
fn a_name_that_the_manager_makes_a_vm_of_is_that_hosts() {
    let mut inventory = heard(&["a", "liar"]);
    inventory.expect_vm("web", Some("a"));
    inventory.heard("liar", told(VmState::Running, 9, OTHER), 1);
    inventory.heard("a", told(VmState::Running, 1, GUEST), 1);
    inventory.expect_vm("web", None);
    assert_eq!(seen(&inventory), of("a", &["liar"]));
}

#[test]
fn two_agents_of_older_versions_report_no_incarnation_and_move_vms_all_the_same() {
    let mut inventory = heard(&["a", "b"]);
    inventory.heard("a", told(VmState::MigratingOut, 3, (7, 70)), 1);
    inventory.heard("a", migration("a", "b"), 1);
    inventory.heard("b", told(VmState::Running, 4, (7, 0)), 1);
    assert_eq!(seen(&inventory), of("b", &[]));
}
