//! Tests of the ranking: exclusions, preferences and reasons.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::queue::{HostFacts, Presence};

const GIB: u64 = 1 << 30;

fn host(name: &str) -> Host {
    Host {
        facts: HostFacts {
            name: name.into(),
            link_bits_per_s: Some(10_000_000_000),
            memory_total_bytes: 256 * GIB,
            memory_free_bytes: 128 * GIB,
            ..HostFacts::default()
        },
        cores: 32,
        busy_cores: 8.0,
        vcpus_placed: 32,
        arrivals_limit: 8,
        ..Host::default()
    }
}

fn vm(name: &str) -> Vm {
    Vm {
        name: name.into(),
        memory_bytes: 8 * GIB,
        vcpus: 4,
        busy_cores: Some(1.0),
        reference_group: None,
    }
}

fn rule(name: &str, strength: Strength, kind: RuleKind, vms: &[&str]) -> Rule {
    Rule { name: name.into(), strength, kind, vms: vms.iter().map(ToString::to_string).collect() }
}

fn names(ranking: &Ranking) -> Vec<&str> {
    ranking.fits.iter().map(|ranked| ranked.host.as_str()).collect()
}

fn text_of<'a>(ranking: &'a Ranking, host: &str) -> &'a str {
    &ranking.ruled_out.iter().find(|ruled_out| ruled_out.host == host).unwrap().text
}

#[test]
fn a_host_that_is_nearly_full_is_not_called_best_alone() {
    let mut hosts = vec![host("a")];
    let free = |hosts: &mut [Host], gib: u64| {
        hosts[0].facts.memory_free_bytes = gib * GIB;
        let best = rank(hosts, &[], &vm("web"), &Obstacles::new()).fits.remove(0);
        (best.why, best.warning)
    };
    let (why, warning) = free(&mut hosts, 20);
    assert!(why.starts_with("best, but nearly full: 12 GiB of 256 GiB"), "{why}");
    let warning = warning.unwrap();
    assert!(warning.text.starts_with("nearly full: 12 GiB of 256 GiB"), "{}", warning.text);
    assert!(warning.remedy.contains("less memory"), "{}", warning.remedy);
    let (why, warning) = free(&mut hosts, 22);
    assert!(why.starts_with("best: 14 GiB of 256 GiB") && warning.is_none(), "{why}");
    assert!(!is_nearly_full(0, 0) && is_nearly_full(0, 1) && !is_nearly_full(1, 1));
}

#[test]
fn the_host_with_most_left_is_first_and_the_others_have_a_reason() {
    let (mut hosts, clear) = (vec![host("a"), host("b"), host("c")], Obstacles::new());
    hosts[1].facts.memory_free_bytes = 200 * GIB;
    hosts[2].busy_cores = 30.0;
    let ranking = rank(&hosts, &[], &vm("web"), &clear);
    assert_eq!(names(&ranking), ["b", "a", "c"]);
    assert_eq!(
        ranking.fits[0].why,
        "best: 192 GiB of 256 GiB memory left after it, 23.0 of 32 cores idle, no VMs \
        arriving"
    );
    assert_eq!(
        ranking.fits[1].why,
        "behind b: 120 GiB of 256 GiB memory left after it, against 192 GiB of 256 GiB memory left \
        after it"
    );
    assert_eq!(
        ranking.fits[2].why,
        "behind b: 1.0 of 32 cores idle, against 23.0 of 32 cores idle"
    );
    assert!(ranking.ruled_out.is_empty());
    // No rule is broken: the part is 0, not -0, which JSON distinguishes.
    assert!(ranking.fits.iter().all(|ranked| ranked.score.rules.is_sign_positive()));
}

#[test]
fn the_parts_are_as_documented() {
    let mut hosts = vec![host("a")];
    hosts[0].arrivals = 8;
    hosts[0].facts.reference_groups.insert("debian".into());
    let clone = Vm { reference_group: Some("debian".into()), ..vm("web") };
    let score = rank(&hosts, &[], &clone, &Obstacles::new()).fits[0].score;
    let expected = godwit_api::control::PlacementScore {
        total: 18.75 + 21.5625 + 7.1875 + 7.5 + 5.0,
        memory: 40.0 * 120.0 / 256.0,
        cpu: 30.0 * 23.0 / 32.0,
        vcpus: 10.0 * (1.0 - 36.0 / 128.0),
        lanes: 7.5,
        clones: 5.0,
        rules: 0.0,
    };
    assert_eq!(score, expected);
}

#[test]
fn equal_hosts_are_ordered_by_name() {
    let mut hosts = vec![host("c"), host("a"), host("b")];
    let ranking = rank(&hosts, &[], &vm("web"), &Obstacles::new());
    assert_eq!(names(&ranking), ["a", "b", "c"]);
    assert_eq!(ranking.fits[1].why, "equal to a, and after it by name");
    hosts.reverse();
    assert_eq!(rank(&hosts, &[], &vm("web"), &Obstacles::new()), ranking);
}

#[test]
fn all_reasons_of_an_exclusion_are_listed() {
    let mut hosts = vec![host("a"), host("b"), host("c"), host("d")];
    hosts[0].vms = vec!["web".into()];
    hosts[1].vms = vec!["web2".into()];
    hosts[1].facts.memory_promised_bytes = 124 * GIB;
    hosts[2].facts.presence = Presence::Away;
    hosts[2].facts.maintenance = true;
    let apart = rule("web-apart", Strength::Must, RuleKind::Apart, &["web", "web2"]);
    let cpu = Obstacle { code: "cpu-model".into(), message: "host d lacks avx512f".into() };
    let found = Obstacles::from([("d".to_owned(), vec![cpu])]);
    let ranking = rank(&hosts, &[apart], &vm("web"), &found);
    assert!(ranking.fits.is_empty());
    assert_eq!(text_of(&ranking, "a"), "it runs there");
    assert_eq!(
        text_of(&ranking, "b"),
        "memory: it needs 8 GiB, 4 GiB are left; rule web-apart: it must not be with web2, which \
        is there"
    );
    assert_eq!(text_of(&ranking, "c"), "away: its agent does not answer; in maintenance");
    assert_eq!(text_of(&ranking, "d"), "host d lacks avx512f (cpu-model)");
    let json = serde_json::to_value(&ranking).unwrap();
    assert_eq!(json["ruled_out"][1]["reasons"][1]["breach"]["breach"], "with");
    assert_eq!(serde_json::from_value::<Ranking>(json).unwrap(), ranking);
}

#[test]
fn a_should_rule_is_broken_only_if_the_alternatives_are_much_worse() {
    let mut hosts = vec![host("a"), host("b")];
    hosts[0].vms = vec!["db".into()];
    let together = [rule("near", Strength::Should, RuleKind::Together, &["web", "db"])];
    hosts[0].busy_cores = 20.0;
    let ranking = rank(&hosts, &together, &vm("web"), &Obstacles::new());
    assert_eq!(names(&ranking), ["a", "b"]);
    assert_eq!(ranking.fits[1].why, "behind a: it would break rule near");
    assert_eq!(ranking.fits[1].breaks, ["near"]);
    (hosts[0].busy_cores, hosts[0].facts.memory_free_bytes) = (32.0, 10 * GIB);
    assert_eq!(names(&rank(&hosts, &together, &vm("web"), &Obstacles::new())), ["b", "a"]);
}

#[test]
fn affinity_names_the_partner_and_its_host() {
    let mut hosts = vec![host("a"), host("b")];
    hosts[0].vms = vec!["db".into(), "web".into()];
    let together = [rule("near", Strength::Must, RuleKind::Together, &["web", "db"])];
    let ranking = rank(&hosts, &together, &vm("web"), &Obstacles::new());
    assert_eq!(text_of(&ranking, "b"), "rule near: it must be with db, on a");
}

#[test]
fn hosts_are_selected_by_name_or_by_all_labels() {
    let mut hosts = vec![host("a"), host("b"), host("c")];
    hosts[1].labels = BTreeMap::from([("rack".into(), "1".into()), ("ssd".into(), "yes".into())]);
    hosts[2].labels = BTreeMap::from([("rack".into(), "1".into())]);
    let ssd =
        BTreeMap::from([("rack".to_owned(), "1".to_owned()), ("ssd".to_owned(), "yes".to_owned())]);
    let on = |kind| [rule("licence", Strength::Must, kind, &["web"])];
    let fits = |rules: &[Rule]| {
        let ranking = rank(&hosts, rules, &vm("web"), &Obstacles::new());
        ranking.fits.into_iter().map(|ranked| ranked.host).collect::<Vec<_>>()
    };
    let by = Hosts { names: vec!["a".into()], labels: ssd };
    assert_eq!(fits(&on(RuleKind::On(by.clone()))), ["a", "b"]);
    assert_eq!(fits(&on(RuleKind::NotOn(by))), ["c"]);
    assert!(fits(&on(RuleKind::On(Hosts::default()))).is_empty());
}

fn clusters() -> impl Strategy<Value = (Vec<Host>, Vec<Rule>)> {
    let host_of = (0..64u64, 0..40u32, 0..4u8, any::<bool>(), 0..8usize);
    let rule_of = (any::<bool>(), 0..4u8, 0..5usize, prop::collection::btree_set(0..6usize, 1..4));
    let hosts = prop::collection::vec(host_of, 5);
    (hosts, prop::collection::vec(rule_of, 0..6)).prop_map(|(hosts, rules)| {
        let host_named = |(index, (free, busy, presence, maintenance, vm)): (usize, _)| {
            let mut host = host(&format!("h{index}"));
            host.facts.memory_free_bytes = free * GIB / 2;
            host.facts.maintenance = maintenance && presence == 0;
            if presence == 3 {
                host.facts.presence = Presence::Away;
            }
            (host.busy_cores, host.vms) = (f64::from(busy), vec![format!("vm{vm}")]);
            host
        };
        let rule_named =
            |(index, (must, kind, host, vms)): (usize, (bool, u8, usize, BTreeSet<usize>))| {
                let on = Hosts { names: vec![format!("h{host}")], labels: BTreeMap::new() };
                let kind = match kind {
                    0 => RuleKind::Together,
                    1 => RuleKind::Apart,
                    2 => RuleKind::On(on),
                    _ => RuleKind::NotOn(on),
                };
                let strength = if must { Strength::Must } else { Strength::Should };
                let vms = vms.into_iter().map(|vm| format!("vm{vm}")).collect();
                Rule { name: format!("r{index}"), strength, kind, vms }
            };
        let hosts = hosts.into_iter().enumerate().map(host_named).collect();
        (hosts, rules.into_iter().enumerate().map(rule_named).collect())
    })
}

/// Whether a VM on a host breaks a rule. Independent of the implementation under test.
fn breaks(rule: &Rule, vm: &str, host: &Host, hosts: &[Host]) -> bool {
    if !rule.vms.iter().any(|named| named == vm) {
        return false;
    }
    let on =
        |name: &String| hosts.iter().filter(|host| host.vms.contains(name)).collect::<Vec<_>>();
    let others = rule.vms.iter().filter(|named| *named != vm);
    match &rule.kind {
        RuleKind::Together => others.into_iter().any(|other| {
            let places = on(other);
            !places.is_empty() && places.iter().all(|place| place.facts.name != host.facts.name)
        }),
        RuleKind::Apart => others.into_iter().any(|other| host.vms.contains(other)),
        RuleKind::On(hosts) => !hosts.contains(host),
        RuleKind::NotOn(hosts) => hosts.contains(host),
    }
}

proptest! {
    #[test]
    fn a_host_that_a_must_rule_forbids_is_not_ranked(
        (hosts, rules) in clusters(),
        blocked in 0..5usize,
    ) {
        let web = vm("vm0");
        let code = Obstacle { code: "no-disk".into(), message: "no such disk".into() };
        let blocked = format!("h{blocked}");
        let found = Obstacles::from([(blocked.clone(), vec![code])]);
        let ranking = rank(&hosts, &rules, &web, &found);
        prop_assert_eq!(ranking.fits.len() + ranking.ruled_out.len(), hosts.len());
        let of = |name: &String| hosts.iter().find(|host| host.facts.name == *name).unwrap();
        for ranked in &ranking.fits {
            let host = of(&ranked.host);
            let broken = rules.iter().filter(|rule| breaks(rule, "vm0", host, &hosts));
            let is_must = |rule: &&Rule| rule.strength == Strength::Must;
            let (must, should): (Vec<_>, Vec<_>) = broken.partition(is_must);
            prop_assert!(must.is_empty(), "{} breaks {:?}", ranked.host, must);
            let should: Vec<_> = should.into_iter().map(|rule| rule.name.clone()).collect();
            prop_assert_eq!(&ranked.breaks, &should);
            prop_assert!(host.facts.memory_left_bytes() >= web.memory_bytes);
            prop_assert!(host.facts.presence == Presence::Up && !host.facts.maintenance);
            prop_assert!(ranked.host != blocked && !ranked.why.is_empty());
        }
        prop_assert!(ranking.fits.is_sorted_by(|one, other| one.score.total >= other.score.total));
        for ruled_out in &ranking.ruled_out {
            let host = of(&ruled_out.host);
            let must = rules.iter().any(|rule| {
                rule.strength == Strength::Must && breaks(rule, "vm0", host, &hosts)
            });
            let has_cause = must
                || host.facts.memory_left_bytes() < web.memory_bytes
                || host.facts.presence != Presence::Up
                || host.facts.maintenance
                || host.vms.contains(&web.name)
                || ruled_out.host == blocked;
            prop_assert!(has_cause && !ruled_out.reasons.is_empty());
        }
        let mut turned = hosts.clone();
        turned.reverse();
        prop_assert_eq!(rank(&turned, &rules, &web, &found), ranking);
    }
}
