//! Tests of restarts and of admission control.

use proptest::prelude::*;

use super::RestartPriority::{High, Low, Normal};
use super::*;
use crate::placement::{Hosts, Obstacle, RuleKind, Strength};
use crate::queue::HostFacts;

const GIB: u64 = 1 << 30;

fn host(name: &str, free_gib: u64, vms: &[&str]) -> Host {
    Host {
        facts: HostFacts {
            name: name.into(),
            memory_total_bytes: 64 * GIB,
            memory_free_bytes: free_gib * GIB,
            ..HostFacts::default()
        },
        cores: 32,
        vms: vms.iter().map(ToString::to_string).collect(),
        ..Host::default()
    }
}

fn vm(name: &str, host: &str, gib: u64, priority: RestartPriority) -> ProtectedVm {
    ProtectedVm {
        vm: Vm { name: name.into(), memory_bytes: gib * GIB, vcpus: 1, ..Vm::default() },
        host: host.into(),
        priority,
        ..ProtectedVm::default()
    }
}

fn rule(kind: RuleKind, vms: &[&str]) -> Rule {
    let vms = vms.iter().map(ToString::to_string).collect();
    Rule { name: "r".into(), strength: Strength::Must, kind, vms }
}

fn order(plan: &Failover) -> Vec<&str> {
    plan.restarts.iter().map(|restart| restart.vm.as_str()).collect()
}

#[test]
fn restarts_are_in_the_order_of_priority_then_of_size() {
    let hosts = [host("a", 0, &["s", "l", "m", "n"]), host("b", 64, &["other"])];
    let vms = [
        vm("s", "a", 1, Low),
        vm("m", "a", 2, Normal),
        vm("n", "a", 4, Normal),
        vm("l", "a", 1, High),
        vm("other", "b", 1, High),
    ];
    let plan = failover(&hosts, &[], &vms, &["a"]);
    assert_eq!(order(&plan), ["l", "n", "m", "s"]);
    assert!(plan.unplaced.is_empty() && plan.restarts.iter().all(|restart| restart.host == "b"));
}

#[test]
fn a_lower_priority_goes_without_when_memory_is_short() {
    let hosts = [host("a", 0, &["big", "small"]), host("b", 8, &[])];
    let vms = [vm("big", "a", 8, Low), vm("small", "a", 4, High)];
    let plan = failover(&hosts, &[], &vms, &["a"]);
    assert_eq!(order(&plan), ["small"]);
    assert_eq!(plan.unplaced[0].vm, "big");
    assert!(plan.unplaced[0].ruled_out[0].text.contains("memory"), "{:?}", plan.unplaced);
}

#[test]
fn rules_hold_for_restarts_and_bind_nothing_to_a_failed_host() {
    let hosts = [host("a", 0, &["web", "db", "old"]), host("b", 64, &[]), host("c", 60, &[])];
    let vms = [vm("web", "a", 1, Normal), vm("db", "a", 1, Low)];
    let together = [rule(RuleKind::Together, &["web", "db", "old"])];
    let plan = failover(&hosts, &together, &vms, &["a"]);
    assert_eq!(order(&plan), ["web", "db"], "old is not protected, and stays behind");
    assert_eq!(plan.restarts[0].host, plan.restarts[1].host);
    let apart = [rule(RuleKind::Apart, &["web", "db"])];
    let plan = failover(&hosts, &apart, &vms, &["a"]);
    assert_ne!(plan.restarts[0].host, plan.restarts[1].host);
    let plan = failover(&hosts, &apart, &vms, &["a", "b"]);
    assert_eq!((order(&plan), plan.unplaced[0].vm.as_str()), (vec!["web"], "db"));
}

#[test]
fn vms_that_only_their_host_can_run_are_named_with_the_reason() {
    let hosts = [host("a", 0, &["web"]), host("b", 0, &[])];
    let web = vm("web", "a", 1, Normal);
    assert_eq!(unprotectable(&hosts, &[], &web), None, "full hosts are a matter of admission");
    let local = ProtectedVm { local_disks: vec!["/srv/web.qcow2".into()], ..web.clone() };
    let why = unprotectable(&hosts, &[], &local).unwrap().to_string();
    assert_eq!(why, "no other host has /srv/web.qcow2");
    let device = ProtectedVm { host_devices: vec!["0000:3b:00.0".into()], ..web.clone() };
    let why = unprotectable(&hosts, &[], &device).unwrap().to_string();
    assert_eq!(why, "it uses 0000:3b:00.0 of its host");
    let only_a = Hosts { names: vec!["a".into()], ..Hosts::default() };
    let why = unprotectable(&hosts, &[rule(RuleKind::On(only_a), &["web"])], &web).unwrap();
    assert!(why.to_string().starts_with("no other host may run it: b: rule r"), "{why}");
    let obstacle = Obstacle { code: "cpu".into(), message: "CPU lacks avx2".into() };
    let obstacles = Obstacles::from([("b".to_owned(), vec![obstacle])]);
    let blocked = ProtectedVm { obstacles, ..web.clone() };
    assert!(matches!(
        unprotectable(&hosts, &[], &blocked),
        Some(Unprotectable::NoOtherHost { .. })
    ));
    let why = unprotectable(&hosts[..1], &[], &web).unwrap().to_string();
    assert_eq!(why, "there is no other host");
}

#[test]
fn admission_finds_the_worst_failure() {
    let hosts = [host("a", 6, &["web"]), host("b", 6, &["db", "log"]), host("c", 6, &[])];
    let vms = [vm("web", "a", 4, Normal), vm("db", "b", 4, Normal), vm("log", "b", 4, Normal)];
    assert_eq!(shortfall(&hosts, &[], &vms, 0), None);
    assert_eq!(shortfall(&hosts, &[], &vms, 1), None);
    let short = shortfall(&hosts, &[], &vms, 2).unwrap();
    assert_eq!((short.hosts.len(), short.memory_bytes), (2, 8 * GIB));
    assert!(short.to_string().contains("do not fit elsewhere"), "{short}");
    assert_eq!(shortfall(&hosts, &[], &vms, 3).unwrap().vms.len(), 3);
    assert_eq!(shortfall(&hosts, &[], &vms, 4), None, "there are no four hosts");
}

#[test]
fn a_search_that_is_cut_short_says_so_and_has_what_it_found() {
    let hosts = [host("a", 6, &["web"]), host("b", 6, &["db", "log"]), host("c", 6, &[])];
    let vms = [vm("web", "a", 4, Normal), vm("db", "b", 4, Normal), vm("log", "b", 4, Normal)];
    let whole = search(&hosts, &[], &vms, 2, &mut || true);
    assert_eq!((&whole.worst, whole.is_cut_short), (&shortfall(&hosts, &[], &vms, 2), false));
    let none = Search { worst: None, is_cut_short: true };
    for most in 0..=vms.len() {
        let mut steps = 0..most;
        let cut = search(&hosts, &[], &vms, 2, &mut || steps.next().is_some());
        assert_eq!(cut, none, "{most}");
    }
    // The hosts with the most protected memory are combined first.
    let mut steps = 0..=vms.len();
    let cut = search(&hosts, &[], &vms, 2, &mut || steps.next().is_some());
    assert!(cut.is_cut_short && cut.worst.is_some_and(|worst| worst.hosts == ["b", "a"]));
}

#[test]
fn combinations_are_bounded() {
    let names: Vec<String> = (0..200).map(|number| number.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(combinations(&names, 1).len(), 200);
    assert_eq!(combinations(&names[..5], 2).len(), 10);
    for size in [2, 3, 4, 10, 199, 200] {
        let all = combinations(&names, size);
        let limit = 1..=MOST_COMBINATIONS;
        assert!(limit.contains(&all.len()), "{size}: {}", all.len());
        assert!(all.iter().all(|one| one.len() == size));
    }
}

proptest! {
    #[test]
    fn every_vm_restarts_or_is_unplaced_and_no_host_is_overfilled(
        sizes in prop::collection::vec((0_u64..8, 0_usize..4), 0..20),
        free in prop::collection::vec(0_u64..20, 4),
        failing in 1_usize..4,
    ) {
        let names = ["a", "b", "c", "d"];
        let mut hosts: Vec<Host> =
            names.iter().zip(&free).map(|(name, free)| host(name, *free, &[])).collect();
        let mut vms = Vec::new();
        for (number, (gib, at)) in sizes.into_iter().enumerate() {
            let name = format!("vm{number}");
            hosts[at].vms.push(name.clone());
            vms.push(vm(&name, names[at], gib, [High, Normal, Low][number % 3]));
        }
        let failed = &names[..failing];
        let plan = failover(&hosts, &[], &vms, failed);
        let lost = vms.iter().filter(|vm| failed.contains(&vm.host.as_str())).count();
        prop_assert_eq!(plan.restarts.len() + plan.unplaced.len(), lost);
        for (name, free) in names.iter().zip(&free) {
            let arrived = plan.restarts.iter().filter(|restart| restart.host == *name);
            let size = |name: &String| vms.iter().find(|vm| vm.vm.name == *name).unwrap();
            let used: u64 = arrived.map(|restart| size(&restart.vm).vm.memory_bytes).sum();
            prop_assert!(used == 0 || (used <= free * GIB && !failed.contains(name)));
        }
        if failing == 1 {
            let short = shortfall(&hosts, &[], &vms, 1);
            prop_assert!(plan.unplaced.is_empty() || short.is_some());
        }
    }
}
