use std::slice;

use godwit_api::control::{Change, RuleState};
use godwit_store::records::Record;
use godwit_store::{MemoryStore, Store};
use serde_json::{Value, json};

use super::*;
use crate::journal::events::Next;
use crate::rig::{LateStore, ask_and_go, follower, host, leader, over_file, put_host, until, vm};

fn request(value: Value) -> CreateRule {
    serde_json::from_value(value).unwrap()
}

fn rule(value: Value) -> Rule {
    read(request(value)).unwrap()
}

#[test]
fn a_rule_that_contradicts_itself_or_has_no_effect_is_refused() {
    for (why, value) in [
        ("at least two VMs", json!({ "name": "r", "kind": "apart", "vms": ["x"] })),
        ("at least two VMs", json!({ "name": "r", "kind": "together", "vms": [] })),
        ("names VM x twice", json!({ "name": "r", "kind": "apart", "vms": ["x", "x"] })),
        (
            "names no hosts",
            json!({ "name": "r", "kind": "apart", "vms": ["x", "y"], "hosts": { "names": ["a"] } }),
        ),
        ("leaves no host", json!({ "name": "r", "kind": "on", "vms": ["x"] })),
        ("leaves no host", json!({ "name": "r", "kind": "on", "vms": ["x"], "hosts": {} })),
        (
            "excludes no host",
            json!({ "name": "r", "kind": "not-on", "vms": ["x"], "hosts": { "labels": {} } }),
        ),
        (
            "names no VM",
            json!({ "name": "r", "kind": "on", "vms": [], "hosts": { "names": ["a"] } }),
        ),
        (
            "names host a twice",
            json!({ "name": "r", "kind": "on", "vms": ["x"], "hosts": { "names": ["a", "a"] } }),
        ),
        (
            "has no key",
            json!({ "name": "r", "kind": "on", "vms": ["x"], "hosts": { "labels": { "": "v" } } }),
        ),
        ("invalid name", json!({ "name": "../r", "kind": "apart", "vms": ["x", "y"] })),
        ("VM \"a/b\"", json!({ "name": "r", "kind": "apart", "vms": ["x", "a/b"] })),
        ("names 257 VMs", json!({ "name": "r", "kind": "apart", "vms": vec!["x"; 257] })),
    ] {
        let problem = read(request(value)).unwrap_err();
        assert_eq!(problem.code, ProblemCode::InvalidRequest);
        assert!(problem.detail.contains(why) && !problem.remedy.is_empty(), "{problem}");
    }
}

#[test]
fn must_rules_do_not_contradict_each_other() {
    let apart = rule(json!({ "name": "apart", "kind": "apart", "vms": ["x", "y", "z"] }));
    let together = |strength: &str, vms: &[&str]| {
        rule(json!({ "name": "r", "kind": "together", "strength": strength, "vms": vms }))
    };
    let on = |name: &str, kind: &str, hosts: &[&str]| {
        rule(json!({ "name": name, "kind": kind, "vms": ["x"], "hosts": { "names": hosts } }))
    };
    let problem = check_beside_others(&together("must", &["y", "q", "z"]), slice::from_ref(&apart))
        .unwrap_err();
    assert!(problem.detail.contains("y and z would have to be together and apart"), "{problem}");
    assert!(check_beside_others(&together("should", &["y", "z"]), slice::from_ref(&apart)).is_ok());
    assert!(check_beside_others(&together("must", &["x", "q"]), &[apart]).is_ok());
    for (one, other, is_possible) in [
        (on("1", "on", &["a"]), on("2", "not-on", &["a", "b"]), false),
        (on("1", "on", &["a", "c"]), on("2", "not-on", &["a", "b"]), true),
        (on("1", "on", &["a"]), on("2", "on", &["b"]), false),
        (on("1", "on", &["a", "b"]), on("2", "on", &["b"]), true),
        (on("1", "not-on", &["a"]), on("2", "not-on", &["b"]), true),
    ] {
        assert_eq!(
            check_beside_others(&one, slice::from_ref(&other)).is_ok(),
            is_possible,
            "{one:?} {other:?}"
        );
        assert_eq!(check_beside_others(&other, &[one]).is_ok(), is_possible);
    }
    let many: Vec<Rule> = (0..MOST_RULES).map(|n| on(&format!("r{n}"), "on", &["a"])).collect();
    assert!(check_beside_others(&on("one-more", "on", &["a"]), &many).is_err());
}

/// Adds hosts a and b in rack 1 and c in rack 2, VMs x and y on a and VM z on c.
fn cluster(inventory: &mut Inventory) {
    put_host(
        inventory,
        host("a", None),
        &[("rack", "1")],
        vec![vm("x", "a", None), vm("y", "a", None)],
    );
    put_host(inventory, host("b", None), &[("rack", "1")], vec![]);
    put_host(inventory, host("c", None), &[("rack", "2")], vec![vm("z", "c", None)]);
}

#[test]
fn vms_that_break_a_rule_are_named_with_the_reason() {
    let mut inventory = Inventory::default();
    cluster(&mut inventory);
    let of = |kind: &str, vms: &[&str], hosts: Option<Value>| {
        rule_info(
            &rule(json!({ "name": "r", "kind": kind, "vms": vms, "hosts": hosts })),
            &inventory,
            16,
        )
    };
    let breakers = |info: &RuleInfo| -> Vec<String> {
        info.broken_by.iter().map(|one| format!("{} {}", one.vm, one.why)).collect()
    };
    let apart = of("apart", &["z", "y", "x"], None);
    assert_eq!((apart.state, apart.broken_by_count), (RuleState::Broken, 2));
    assert_eq!(breakers(&apart), ["x on a, with y", "y on a, with x"]);
    let together = of("together", &["x", "y", "z"], None);
    assert_eq!(breakers(&together), ["z on c, and x and y on a"]);
    // Of two hosts with equally many VMs, the first by name.
    assert_eq!(breakers(&of("together", &["x", "z"], None)), ["z on c, and x on a"]);
    let on = of("on", &["x", "z"], Some(json!({ "names": ["b"], "labels": { "rack": "2" } })));
    assert_eq!(breakers(&on), ["x on a, which is not one of the rule's hosts"]);
    let not_on = of("not-on", &["x", "z"], Some(json!({ "labels": { "rack": "2" } })));
    assert_eq!(breakers(&not_on), ["z on c, which the rule excludes"]);
    // An absent VM breaks no rule.
    let kept = of("apart", &["x", "z", "later"], None);
    assert_eq!(
        (kept.state, kept.broken_by, kept.absent),
        (RuleState::Kept, vec![], vec!["later".to_owned()])
    );
}

#[test]
fn a_saved_rule_equals_the_original() {
    for value in [
        json!({ "name": "r", "kind": "apart", "strength": "should", "vms": ["x", "y"] }),
        json!({ "name": "r", "kind": "together", "vms": ["x", "y"] }),
        json!({
            "name": "r", "kind": "on", "vms": ["x"],
            "hosts": { "names": ["a"], "labels": { "k": "v" } }
        }),
        json!({ "name": "r", "kind": "not-on", "vms": ["x"], "hosts": { "names": ["a"] } }),
    ] {
        let rule = rule(value);
        let text = RULES.encode("rules/r", &SavedRule::from(&rule)).unwrap();
        assert_eq!(RULES.decode_text("rules/r", &text).unwrap().rule("r"), rule, "{text}");
    }
    // Version 1, as an earlier manager saved it, must stay readable.
    let text = concat!(
        r#"{"kind":"rule","version":1,"record":{"strength":"must","#,
        r#""kind":{"not-on":{"names":["a"],"labels":{}}},"vms":["x"]}}"#
    );
    assert_eq!(SavedRule::VERSION, 1);
    assert!(RULES.decode_text("rules/r", text).is_ok());
}

#[test]
fn rules_outlive_the_manager() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("manager.db");
    over_file(&path, async |manager| {
        for name in ["r1", "r2"] {
            let asked = json!({ "name": name, "kind": "apart", "vms": ["x", "y"] });
            manager.rules.create(request(asked)).await.unwrap();
        }
        manager.rules.delete("r1").await.unwrap();
    });
    over_file(&path, async |manager| {
        let page = manager.rules.list(&RuleFilter::default(), &Cursor { behind: None, limit: 10 });
        assert_eq!((page.total, page.items[0].name.as_str()), (1, "r2"));
        // The store knows the rule too: it can be deleted and created again.
        manager.rules.delete("r2").await.unwrap();
        let asked = json!({ "name": "r2", "kind": "together", "vms": ["x", "y"] });
        manager.rules.create(request(asked)).await.unwrap();
    });
    over_file(&path, async |manager| {
        assert_eq!(manager.rules.show("r2").unwrap().kind, RuleKind::Together);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_knows_the_rules_and_changes_none() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let manager = leader(Arc::clone(&store)).await;
    let asked = json!({ "name": "r1", "kind": "apart", "vms": ["x", "y"] });
    manager.rules.create(request(asked.clone())).await.unwrap();
    let (other, _standby) = follower(&store);
    until(&other, |inventory| inventory.rule("r1").is_some()).await;
    let refused = other
        .rules
        .create(request(json!({ "name": "r2", "kind": "apart", "vms": ["x", "z"] })))
        .await;
    assert_eq!(refused.unwrap_err().code, ProblemCode::NoLeader);
    assert!(other.rules.show("r2").is_err());
    manager.rules.delete("r1").await.unwrap();
    until(&other, |inventory| inventory.rule("r1").is_none()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_published() {
    let manager = leader(Arc::new(MemoryStore::new())).await;
    manager.state.change(|inventory| {
        cluster(inventory);
        None
    });
    let mut events = manager.state.events().listen(None);
    let asked = json!({ "name": "r1", "kind": "apart", "vms": ["x", "y"] });
    manager.rules.create(request(asked.clone())).await.unwrap();
    assert_eq!(
        manager.rules.create(request(asked)).await.unwrap_err().code,
        ProblemCode::AlreadyExists
    );
    manager.rules.delete("r1").await.unwrap();
    assert_eq!(manager.rules.delete("r1").await.unwrap_err().code, ProblemCode::NotFound);
    let Some(Next::Events(events)) = events.next().await else { panic!("no event") };
    let changes: Vec<&Change> = events.iter().map(|event| &event.change).collect();
    let [Change::Journal(_), Change::Rule(made), Change::Journal(_), Change::RuleGone(gone)] =
        changes[..]
    else {
        panic!("{changes:?}")
    };
    assert_eq!((made.state, gone.as_str()), (RuleState::Broken, "r1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_concurrent_contradictory_rules_one_kind_is_created() {
    let manager = leader(Arc::new(MemoryStore::new())).await;
    let asked = (0..16).map(|number| {
        let kind = if number % 2 == 0 { "apart" } else { "together" };
        let (manager, name) = (Arc::clone(&manager), format!("r{number}"));
        async move {
            manager
                .rules
                .create(request(json!({ "name": name, "kind": kind, "vms": ["x", "y"] })))
                .await
        }
    });
    let made: Vec<_> = futures::future::join_all(asked).await;
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 8);
    let kinds: BTreeSet<RuleKind> = made.into_iter().flatten().map(|rule| rule.kind).collect();
    assert_eq!(kinds.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_completes_even_if_the_caller_disconnects() {
    let store: Arc<dyn Store> = Arc::new(LateStore::default());
    let manager = leader(Arc::clone(&store)).await;
    let asked = json!({ "name": "r1", "kind": "apart", "vms": ["x", "y"] });
    ask_and_go(&*store, manager.rules.create(request(asked))).await;
    until(&manager, |inventory| inventory.rule("r1").is_some()).await;
    manager.rules.delete("r1").await.unwrap();
}
