//! Tests of plans, their times, and their undoing.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::placement::{RuleKind, Strength};
use crate::queue::{HostFacts, HostLimit, Presence, TargetObstacle};

const GIB: u64 = 1 << 30;
const NOW: u64 = 1_800_000_000_000;
const MINUTE: u64 = 60_000;

fn host(name: &str, free_gib: u64) -> Host {
    Host {
        facts: HostFacts {
            name: name.into(),
            link_bits_per_s: Some(10_000_000_000),
            memory_total_bytes: 256 * GIB,
            memory_free_bytes: free_gib * GIB,
            ..HostFacts::default()
        },
        cores: 32,
        arrivals_limit: 8,
        ..Host::default()
    }
}

/// Returns a VM whose move takes a minute alone, and fills the link.
fn vm(name: &str, gib: u64) -> DrainVm {
    let vm = Vm { name: name.into(), memory_bytes: gib * GIB, vcpus: 2, ..Vm::default() };
    DrainVm { vm, estimate_ms: MINUTE, ..DrainVm::default() }
}

fn rule(name: &str, kind: RuleKind, vms: &[&str]) -> Rule {
    let vms = vms.iter().map(ToString::to_string).collect();
    Rule { name: name.into(), strength: Strength::Must, kind, vms }
}

/// Host a with these VMs, and other hosts.
#[derive(Debug)]
struct Given {
    vms: Vec<DrainVm>,
    hosts: Vec<Host>,
    rules: Vec<Rule>,
    limits: Limits,
    running: Vec<UnderWay>,
}

impl Given {
    fn new(vms: Vec<DrainVm>, others: Vec<Host>) -> Given {
        let mut a = host("a", 0);
        a.facts.maintenance = true;
        a.vms = vms.iter().map(|vm| vm.vm.name.clone()).collect();
        let mut hosts = vec![a];
        hosts.extend(others);
        Given { vms, hosts, rules: Vec::new(), limits: Limits::default(), running: Vec::new() }
    }

    fn plan(&self) -> DrainPlan {
        plan(&self.request())
    }

    fn request(&self) -> DrainRequest<'_> {
        DrainRequest {
            now_ms: NOW,
            host: "a",
            vms: &self.vms,
            hosts: &self.hosts,
            rules: &self.rules,
            limits: &self.limits,
            running: &self.running,
        }
    }
}

fn target<'a>(plan: &'a DrainPlan, vm: &str) -> Option<&'a str> {
    plan.moves.iter().find(|planned| planned.vm == vm).map(|planned| planned.target.as_str())
}

#[test]
fn the_largest_is_placed_first_so_that_all_fit() {
    // Small ones placed first would go where most is free, and leave no host for the large one.
    let vms = vec![vm("s1", 4), vm("s2", 4), vm("large", 14)];
    let plan = Given::new(vms, vec![host("b", 16), host("c", 9)]).plan();
    assert!(plan.stays.is_empty(), "{}", plan.text);
    assert_eq!(target(&plan, "large"), Some("b"));
    assert_eq!((target(&plan, "s1"), target(&plan, "s2")), (Some("c"), Some("c")));
}

#[test]
fn a_vm_that_cannot_move_is_named_and_the_others_move() {
    let gpu =
        Obstacle { code: "device-passthrough".into(), message: "device gpu0 can't move".into() };
    let vms = vec![vm("huge", 64), DrainVm { immovable: Some(gpu), ..vm("gpu", 2) }, vm("web", 2)];
    let mut given = Given::new(vms, vec![host("b", 16), host("c", 8)]);
    given.hosts[2].facts.presence = Presence::Away;
    let plan = given.plan();
    assert_eq!(target(&plan, "web"), Some("b"));
    let texts: Vec<_> =
        plan.stays.iter().map(|stays| (stays.vm.as_str(), stays.text.as_str())).collect();
    assert_eq!(
        texts,
        [
            ("gpu", "device gpu0 can't move (device-passthrough)"),
            (
                "huge",
                "none of 2 hosts can take it (memory 2, away 1); nearest is b: memory: it needs 64 \
                GiB, 16 GiB are left"
            ),
        ]
    );
    assert_eq!(
        plan.text,
        "1 move in about 1 min; 2 VMs cannot move, the first: gpu (device gpu0 can't move \
        (device-passthrough))"
    );
}

#[test]
fn planned_moves_keep_apart_and_together() {
    let names = ["n1", "n2", "n3"];
    let mut given = Given::new(
        names.map(|name| vm(name, 2)).into(),
        vec![host("b", 64), host("c", 32), host("d", 16)],
    );
    given.rules = vec![rule("apart", RuleKind::Apart, &names)];
    let of = |plan: &DrainPlan| names.map(|name| target(plan, name).map(ToOwned::to_owned));
    let plan = given.plan();
    assert_eq!(of(&plan).into_iter().flatten().collect::<BTreeSet<_>>().len(), 3);
    given.rules = vec![rule("near", RuleKind::Together, &names)];
    let plan = given.plan();
    assert_eq!(of(&plan).into_iter().flatten().collect::<BTreeSet<_>>().len(), 1);
    assert_eq!(plan.moves[0].together_with.len(), 2);
    // Together they need more than any host has: all stay.
    for host in &mut given.hosts {
        host.facts.memory_free_bytes = 5 * GIB;
    }
    let plan = given.plan();
    assert!(plan.moves.is_empty() && plan.stays.len() == 3);
    assert!(plan.stays[0].text.contains("memory: it needs 6 GiB"), "{}", plan.stays[0].text);
    given.rules.push(rule("far", RuleKind::Apart, &["n1", "n2"]));
    assert_eq!(given.plan().stays[0].text, "rules want n1, n2 and n3 together, and rule far apart");
}

#[test]
fn a_vm_that_cannot_move_keeps_its_partners() {
    let gpu =
        Obstacle { code: "device-passthrough".into(), message: "device gpu0 can't move".into() };
    let mut given = Given::new(
        vec![DrainVm { immovable: Some(gpu), ..vm("db", 2) }, vm("web", 2)],
        vec![host("b", 64)],
    );
    given.rules = vec![rule("near", RuleKind::Together, &["db", "web"])];
    assert_eq!(given.plan().stays[1].text, "a rule keeps it with db, which cannot move");
}

#[test]
fn moves_that_share_the_link_take_as_long_as_one_after_the_other() {
    // Each fills a link of 1 Gb/s for a minute: 4 at once, 8 in all.
    let vms: Vec<_> = (0..8).map(|n| vm(&format!("vm{n}"), 8)).collect();
    let mut given = Given::new(vms, vec![host("b", 100)]);
    given.hosts[0].facts.link_bits_per_s = Some(1_000_000_000);
    let plan = given.plan();
    assert_eq!(plan.takes_ms, Some(8 * MINUTE));
    let ends: Vec<_> =
        plan.moves.iter().map(|planned| planned.expected.unwrap().ends_in_ms).collect();
    assert_eq!(ends, [[4 * MINUTE; 4], [8 * MINUTE; 4]].concat());
    // If the link has room for all of them, they take as long as each alone.
    given.hosts[0].facts.link_bits_per_s = Some(10_000_000_000);
    assert_eq!(given.plan().takes_ms, Some(MINUTE));
}

#[test]
fn a_move_that_cannot_begin_has_a_reason() {
    let mut given = Given::new(vec![vm("web", 2)], vec![host("b", 16)]);
    given.limits.hosts.insert("b".into(), HostLimit { out: None, into: Some(0) });
    let plan = given.plan();
    assert_eq!((plan.takes_ms, plan.moves[0].expected), (None, None));
    assert!(matches!(
        plan.moves[0].waits_for,
        Some(WaitReason::Target { obstacle: TargetObstacle::Limit { .. } })
    ));
    assert_eq!(plan.text, "1 move, of which 1 cannot begin at present");
}

#[test]
fn the_expected_end_follows_the_progress() {
    let vms: Vec<_> = (0..8).map(|n| vm(&format!("vm{n}"), 8)).collect();
    let mut given = Given::new(vms, vec![host("b", 100)]);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(1), into: None });
    let plan = given.plan();
    assert_eq!(plan.takes_ms, Some(8 * MINUTE));
    let before = eta(&plan.moves, &BTreeMap::new(), NOW);
    assert_eq!((before.ends_ms, before.done, before.of), (Some(NOW + 8 * MINUTE), 0, 8));
    // Two took twice as long each.
    let mut progress = BTreeMap::new();
    for (n, planned) in (0..2).zip(&plan.moves) {
        let (started_ms, ended_ms) = (NOW + 2 * n * MINUTE, NOW + 2 * (n + 1) * MINUTE);
        progress.insert(planned.vm.clone(), Progress::Done { started_ms, ended_ms });
    }
    let slow = eta(&plan.moves, &progress, NOW + 4 * MINUTE);
    assert!((slow.pace - 0.6).abs() < 1e-9, "{}", slow.pace);
    assert_eq!(slow.text, "2 of 8 moved, the rest in about 10 min (at 0.6 of the planned pace)");
    // A dropped move is not waited for.
    for planned in &plan.moves[2..] {
        progress.insert(planned.vm.clone(), Progress::Dropped);
    }
    let done = eta(&plan.moves, &progress, NOW + 4 * MINUTE);
    assert_eq!((done.text.as_str(), done.ends_ms), ("2 of 2 moved", Some(NOW + 4 * MINUTE)));
}

/// Returns the drain's moves as if its plan had been carried out.
fn moved(given: &Given, plan: &DrainPlan) -> Vec<Moved> {
    let of = |vm: &DrainVm| {
        let planned = plan.moves.iter().find(|planned| planned.vm == vm.vm.name)?;
        let at_ms = NOW + planned.expected?.ends_in_ms;
        let found_on = Some(planned.target.clone());
        Some(Moved { vm: vm.clone(), to: Some((planned.target.clone(), at_ms)), found_on })
    };
    given.vms.iter().filter_map(of).collect()
}

/// Returns the cluster after these moves.
fn carry_out(hosts: &[Host], moves: &[PlannedMove]) -> Vec<Host> {
    let mut hosts = hosts.to_vec();
    for planned in moves {
        for host in &mut hosts {
            if host.facts.name == planned.source {
                host.vms.retain(|vm| *vm != planned.vm);
                host.facts.memory_free_bytes += planned.memory_bytes;
            }
            if host.facts.name == planned.target {
                host.vms.push(planned.vm.clone());
                host.facts.memory_free_bytes -= planned.memory_bytes;
            }
        }
    }
    hosts
}

fn undone(given: &Given, moved: &[Moved], hosts: &[Host]) -> UndoPlan {
    undo(&UndoRequest {
        now_ms: NOW + 60 * MINUTE,
        host: "a",
        moved,
        hosts,
        rules: &given.rules,
        limits: &given.limits,
        running: &[],
    })
}

#[test]
fn undo_moves_back_the_last_first_and_names_the_rest() {
    let mut given =
        Given::new((0..4).map(|n| vm(&format!("vm{n}"), 8)).collect(), vec![host("b", 100)]);
    given.limits.hosts.insert("a".into(), HostLimit { out: Some(1), into: Some(1) });
    let plan = given.plan();
    let mut moved = moved(&given, &plan);
    let hosts = carry_out(&given.hosts, &plan.moves);
    let back = undone(&given, &moved, &hosts);
    let order =
        |moves: &[PlannedMove]| moves.iter().map(|planned| planned.vm.clone()).collect::<Vec<_>>();
    let mut first = order(&plan.moves);
    first.reverse();
    assert_eq!(order(&back.moves), first);
    // One was moved on, one is not running, one has not left yet.
    moved[0].found_on = Some("c".into());
    moved[1].found_on = None;
    moved[2].to = None;
    let back = undone(&given, &moved, &hosts);
    assert_eq!(back.cancel, ["vm2"]);
    assert_eq!(order(&back.moves), ["vm3"]);
    let texts: Vec<_> = back.stays.iter().map(|stays| stays.text.as_str()).collect();
    assert_eq!(texts, ["it is on c now, but this drain moved it to b", "it no longer runs on b"]);
}

fn clusters() -> impl Strategy<Value = Given> {
    let vms = prop::collection::vec((1..12u64, 1..20u64, any::<bool>()), 1..14);
    let hosts = prop::collection::vec((0..40u64, 0..6u8), 1..6);
    let rules = prop::collection::vec(
        (0..3u8, prop::collection::btree_set(0..14usize, 2..4), 0..5usize),
        0..5,
    );
    (vms, hosts, rules, 1..5u32).prop_map(|(vms, hosts, rules, out)| {
        let vm_named = |(index, (gib, minutes, datastore)): (usize, (u64, u64, bool))| DrainVm {
            estimate_ms: minutes * MINUTE,
            datastores: datastore.then(|| "ceph".to_owned()).into_iter().collect(),
            ..vm(&format!("vm{index}"), gib)
        };
        let host_named = |(index, (free, presence)): (usize, (u64, u8))| {
            let mut host = host(&format!("h{index}"), free);
            host.facts.maintenance = presence == 0;
            if presence == 1 {
                host.facts.presence = Presence::Away;
            }
            host
        };
        let rule_named = |(index, (kind, vms, host)): (usize, (u8, BTreeSet<usize>, usize))| {
            let names: Vec<_> = vms.into_iter().map(|vm| format!("vm{vm}")).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let hosts = crate::placement::Hosts {
                names: vec![format!("h{host}")],
                labels: BTreeMap::new(),
            };
            let kind = match kind {
                0 => RuleKind::Together,
                1 => RuleKind::Apart,
                _ => RuleKind::NotOn(hosts),
            };
            rule(&format!("r{index}"), kind, &names)
        };
        let vms = vms.into_iter().enumerate().map(vm_named).collect();
        let mut given = Given::new(vms, hosts.into_iter().enumerate().map(host_named).collect());
        given.rules = rules.into_iter().enumerate().map(rule_named).collect();
        given.limits.hosts.insert("a".into(), HostLimit { out: Some(out), into: Some(out) });
        given.limits.datastores.insert("ceph".into(), 2);
        given
    })
}

/// Returns the rules that the cluster breaks, of those for VMs on these hosts.
fn broken(rules: &[Rule], hosts: &[Host]) -> BTreeSet<String> {
    let on = |vm: &String| hosts.iter().position(|host| host.vms.contains(vm));
    let is_broken = |rule: &&Rule| {
        let places: Vec<usize> = rule.vms.iter().filter_map(on).collect();
        let distinct: BTreeSet<_> = places.iter().collect();
        match &rule.kind {
            RuleKind::Together => distinct.len() > 1,
            RuleKind::Apart => distinct.len() < places.len(),
            RuleKind::On(of) => places.iter().any(|place| !of.contains(&hosts[*place])),
            RuleKind::NotOn(of) => places.iter().any(|place| of.contains(&hosts[*place])),
        }
    };
    rules.iter().filter(is_broken).map(|rule| rule.name.clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_plan_overcommits_nothing_and_breaks_no_rule(given in clusters()) {
        let plan = given.plan();
        prop_assert_eq!(plan.moves.len() + plan.stays.len(), given.vms.len());
        let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
        for planned in &plan.moves {
            *taken.entry(&planned.target).or_default() += planned.memory_bytes;
            prop_assert!(planned.expected.is_some(), "{:?}", planned.waits_for);
        }
        for host in &given.hosts {
            let taken = taken.get(host.facts.name.as_str()).copied().unwrap_or(0);
            prop_assert!(taken <= host.facts.memory_left_bytes());
            let stands = host.facts.presence == Presence::Up && !host.facts.maintenance;
            prop_assert!(taken == 0 || stands);
        }
        let after = carry_out(&given.hosts, &plan.moves);
        let (before, after) = (broken(&given.rules, &given.hosts), broken(&given.rules, &after));
        prop_assert!(after.is_subset(&before), "{:?} and not {:?}", after, before);
        prop_assert!(plan.stays.iter().all(|stays| !stays.text.is_empty()));
        prop_assert_eq!(given.plan(), plan);
    }

    #[test]
    fn undo_restores(mut given in clusters()) {
        // A rule that was broken before cannot be restored without breaking it again.
        let before = broken(&given.rules, &given.hosts);
        given.rules.retain(|rule| !before.contains(&rule.name));
        let plan = given.plan();
        let after = carry_out(&given.hosts, &plan.moves);
        let back = undone(&given, &moved(&given, &plan), &after);
        prop_assert!(back.stays.is_empty(), "{:?}", back.stays);
        let restored = carry_out(&after, &back.moves);
        for (one, other) in given.hosts.iter().zip(&restored) {
            prop_assert_eq!(one.facts.memory_free_bytes, other.facts.memory_free_bytes);
            let vms = |host: &Host| host.vms.iter().cloned().collect::<BTreeSet<_>>();
            prop_assert_eq!(vms(one), vms(other));
        }
    }

    #[test]
    fn the_expected_end_is_in_the_future_and_progress_does_not_delay_it(
        given in clusters(),
        done in 0..14usize,
        minutes in 1..60u64,
        share in 0.0..1.0f64,
    ) {
        let plan = given.plan();
        let mut progress = BTreeMap::new();
        for planned in plan.moves.iter().take(done) {
            let (started_ms, ended_ms) = (NOW, NOW + minutes * MINUTE);
            progress.insert(planned.vm.clone(), Progress::Done { started_ms, ended_ms });
        }
        if let Some(planned) = plan.moves.get(done) {
            progress.insert(planned.vm.clone(), Progress::Running { started_ms: NOW, done: share });
        }
        let now_ms = NOW + minutes * MINUTE;
        let one = eta(&plan.moves, &progress, now_ms);
        prop_assert!(one.pace.is_finite() && one.of == plan.moves.len());
        prop_assert!(one.ends_ms.is_some());
        for of in &one.moves {
            prop_assert!(of.starts_ms <= of.ends_ms);
            if !matches!(progress.get(&of.vm), Some(Progress::Done { .. })) {
                prop_assert!(of.ends_ms >= Some(now_ms));
            }
        }
        if let Some(planned) = plan.moves.get(done) {
            let running = Progress::Running { started_ms: NOW, done: (share + 1.0) / 2.0 };
            progress.insert(planned.vm.clone(), running);
            let further = eta(&plan.moves, &progress, now_ms);
            let latest = one.ends_ms.map(|ends| ends + 2);
            prop_assert!(further.ends_ms <= latest, "{:?} {:?}", further, one);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The simulation asks the queue about few jobs at a time.
    #[test]
    fn the_expected_times_are_those_of_the_whole_queue(
        vms in proptest::collection::vec((1_u64..8, 1_u64..40), 1..60),
        limits in (1_u32..6, 1_u32..6, proptest::option::of(1_u32..9)),
        hosts in 1_usize..5,
    ) {
        let vms = vms.iter().enumerate().map(|(number, (gib, minutes))| DrainVm {
            estimate_ms: minutes * MINUTE, ..vm(&format!("vm{number}"), *gib)
        });
        let others = (0..hosts).map(|number| host(&format!("b{number}"), 240));
        let mut given = Given::new(vms.collect(), others.collect());
        let (out, into, in_all) = limits;
        given.limits = Limits {
            in_all, out_of_host: Some(out), into_host: Some(into), ..Limits::default()
        };
        let plan = given.plan();
        let mut moves = place::leave(&given.request()).0;
        let mut whole = simulate::clock(&given.request(), &moves);
        whole.least_asked = usize::MAX;
        simulate::fill(whole, &mut moves);
        prop_assert_eq!(plan.moves, moves);
    }
}

/// Regression: each step of the simulation ranked all waiting moves.
#[test]
fn a_plan_for_thousands_of_vms_is_quick() {
    let vms = (0..5_000).map(|number| vm(&format!("vm{number:04}"), 1)).collect();
    let others = (0..40).map(|number| host(&format!("b{number:02}"), 200)).collect();
    let plan = Given::new(vms, others).plan();
    assert_eq!((plan.moves.len(), plan.stays.len()), (5_000, 0));
    assert!(plan.takes_ms.is_some());
}
