use godwit_api::HostEvent;
use godwit_api::control::{
    Change, Cluster, JournalEntry, JournalSeverity, Page, Problem, ProblemCode, Role,
};
use godwit_api::{VmInfo, VmState};
use http::{Method, StatusCode};
use serde_json::json;

use crate::cluster::inventory::HostPlan;
use crate::cluster::state::State;
use crate::http::tests::{Managed, host_a};
use crate::journal::events::Next;
use crate::rig;

async fn page(managed: &Managed, query: &str) -> Page<JournalEntry> {
    managed.root(Method::GET, &format!("/api/v1/journal?{query}"), None).await.read()
}

/// Waits until an entry matches, and returns the newest one.
async fn entry(managed: &Managed, query: &str) -> JournalEntry {
    loop {
        if let Some(entry) = page(managed, query).await.items.into_iter().next() {
            return entry;
        }
        tokio::task::yield_now().await;
    }
}

/// Lets a host connect and report these VMs.
fn connect(state: &State, host: &str, vms: &[&str]) {
    let plan = HostPlan { address: format!("http://{host}:7700"), ..HostPlan::default() };
    state.change(|inventory| Some(inventory.plan_host(host, plan)));
    state.reached(host);
    state.apply(host, HostEvent::Host(Box::new(rig::host(host, None))));
    for vm in vms {
        state.apply(host, HostEvent::Vm(Box::new(rig::vm(vm, host, None))));
    }
    state.apply(host, HostEvent::Known);
}

fn reports(state: &State, vm: &str, host: &str, now: VmState) {
    let vm = VmInfo { state: now, ..rig::vm(vm, host, None) };
    state.apply(host, HostEvent::Vm(Box::new(vm)));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_in_the_journal_with_their_users_in_the_same_transaction() {
    let managed = Managed::begin().await;
    let admin = managed.token(Role::Admin).await.token;
    let ask = async |method: Method, path: &str, body| {
        let answer = managed.ask(method, path, Some(&admin), body).await;
        assert!(answer.status.is_success(), "{}", answer.body);
    };
    ask(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    ask(Method::PATCH, "/api/v1/hosts/a", Some(json!({ "maintenance": true }))).await;
    let rule = json!({ "name": "r", "kind": "apart", "vms": ["x", "y"] });
    ask(Method::POST, "/api/v1/rules", Some(rule)).await;
    ask(Method::DELETE, "/api/v1/rules/r", None).await;
    ask(Method::PATCH, "/api/v1/limits", Some(json!({ "in_all": 3 }))).await;
    ask(Method::DELETE, "/api/v1/hosts/a", None).await;
    // No wait: an entry is there when its request is answered.
    for (kind, object, text) in [
        ("host-added", "host:a", "host a joined the cluster at http://127.0.0.1:1"),
        ("host-maintenance", "host:a", "host a entered maintenance mode"),
        ("rule-created", "rule:r", "rule r was created"),
        ("rule-deleted", "rule:r", "rule r was deleted"),
        ("setting-changed", "cluster", "the limits of concurrent moves were changed"),
        ("host-removed", "host:a", "host a was removed from the cluster"),
    ] {
        let found = page(&managed, &format!("kind={kind}&object={object}")).await.items;
        let [entry] = &found[..] else { panic!("{kind}: {found:?}") };
        assert_eq!((entry.text.as_str(), entry.who.as_deref()), (text, Some("admin")));
    }
    // A refused request changes nothing.
    let refused = managed.ask(Method::DELETE, "/api/v1/rules/r", Some(&admin), None).await;
    assert_eq!(refused.problem(), ProblemCode::NotFound);
    assert_eq!(page(&managed, "kind=rule-deleted").await.items.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_hosts_report_is_in_the_journal_and_in_the_stream() {
    let managed = Managed::begin().await;
    let state = &managed.manager.state;
    connect(state, "a", &["web"]);
    let mut events = state.events().listen(None);
    reports(state, "web", "a", VmState::Stopped);
    let stopped = entry(&managed, "object=vm:web").await;
    assert_eq!(stopped.text, "VM web stopped on host a");
    assert_eq!(stopped.objects, ["vm:web", "host:a"]);
    loop {
        let Some(Next::Events(some)) = events.next().await else { panic!("no events") };
        let is_entry = |change: &Change| *change == Change::Journal(Box::new(stopped.clone()));
        if some.iter().any(|event| is_entry(&event.change)) {
            break;
        }
    }
    state.lost("a", "no route to host");
    let away = entry(&managed, "kind=host-away").await;
    assert_eq!(
        (away.severity, away.why.as_deref()),
        (JournalSeverity::Warning, Some("no route to host"),)
    );
    assert_eq!(entry(&managed, "text=NO%20ROUTE&severity=warning").await, away);
    // The first reports of a host are no news.
    assert_eq!(page(&managed, "kind=vm-created").await.items, []);
    assert_eq!(entry(&managed, "object=manager:m1").await.text, "manager m1 leads");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_journal_is_read_in_pages_and_by_time() {
    let managed = Managed::begin().await;
    let state = &managed.manager.state;
    connect(state, "a", &[]);
    for n in 0..7 {
        let vm = rig::vm(&format!("vm{n}"), "a", None);
        state.apply("a", HostEvent::Vm(Box::new(vm)));
    }
    let newest = entry(&managed, "object=vm:vm6").await;
    let (mut texts, mut next) = (Vec::new(), String::new());
    loop {
        let some = page(&managed, &format!("kind=vm-created&limit=3{next}")).await;
        texts.extend(some.items.into_iter().map(|entry| entry.text));
        match some.next {
            Some(cursor) => next = format!("&cursor={cursor}"),
            None => break,
        }
    }
    let expected: Vec<String> =
        (0..7).rev().map(|n| format!("VM vm{n} is new on host a")).collect();
    assert_eq!(texts, expected);
    let later = newest.at_unix_ms + 1;
    assert_eq!(page(&managed, &format!("from={later}")).await.items, []);
    assert_eq!(page(&managed, &format!("to={later}&limit=1")).await.items, [newest]);
    for wrong in ["from=9007199254740992", "kind=flood", "severity=1", "color=red", "limit=0"] {
        let refused = managed.root(Method::GET, &format!("/api/v1/journal?{wrong}"), None).await;
        assert_eq!(refused.problem(), ProblemCode::InvalidRequest, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_lies_or_flaps_does_not_fill_the_journal() {
    let managed = Managed::begin().await;
    let state = &managed.manager.state;
    connect(state, "liar", &["web"]);
    connect(state, "honest", &["db"]);
    for n in 0..3_000 {
        reports(state, "web", "liar", [VmState::Stopped, VmState::Running][n % 2]);
        let new = rig::vm(&format!("vm{n}"), "liar", None);
        state.apply("liar", HostEvent::Vm(Box::new(new)));
        state.lost("liar", "it flaps");
        connect(state, "liar", &["web"]);
        // The reader of the changes keeps up, as it does with a host's limited rate.
        if n % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    reports(state, "db", "honest", VmState::Stopped);
    assert_eq!(entry(&managed, "object=vm:db").await.text, "VM db stopped on host honest");
    let all = page(&managed, "limit=1000").await.items;
    let of_liar = all.iter().filter(|entry| entry.objects.contains(&"host:liar".to_owned()));
    // 500 at once, and 20 more in ten minutes.
    assert!(of_liar.count() <= 520);
    let flaps = page(&managed, "kind=host-away&limit=1000").await.items;
    assert!((1..=5).contains(&flaps.len()), "{}", flaps.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_of_a_host_that_is_away_are_unknown_and_requests_for_it_are_refused_at_once() {
    let managed = Managed::begin().await;
    let state = &managed.manager.state;
    connect(state, "a", &["web"]);
    connect(state, "b", &["db"]);
    let cluster: Cluster = managed.root(Method::GET, "/api/v1/cluster", None).await.read();
    assert_eq!((cluster.vms_running, cluster.vms_unknown), (2, 0));
    state.lost("a", "no route to host");
    let cluster: Cluster = managed.root(Method::GET, "/api/v1/cluster", None).await.read();
    assert_eq!((cluster.vms, cluster.vms_running, cluster.vms_unknown), (2, 1, 1));
    assert_eq!(cluster.hosts_away, ["a"]);
    for (method, path, body) in [
        (Method::POST, "/api/v1/vms/web/stop", Some(json!({}))),
        (Method::POST, "/api/v1/vms/web/start", Some(json!({}))),
        (Method::POST, "/api/v1/vms/web/moves", Some(json!({ "to": "b" }))),
        (Method::POST, "/api/v1/hosts/a/drain", Some(json!({}))),
        (Method::GET, "/api/v1/hosts/a/disks", None),
        (Method::GET, "/api/v1/hosts/a/jobs", None),
        (Method::GET, "/api/v1/hosts/a/foreign-guests", None),
    ] {
        let answer = managed.root(method, path, body).await;
        assert_eq!(answer.status, StatusCode::BAD_GATEWAY, "{path}: {}", answer.body);
        let problem: Problem = answer.read();
        assert_eq!(problem.code, ProblemCode::HostAway, "{path}");
        assert!(problem.remedy.contains("docs/recover.md"), "{path}: {problem:?}");
    }
    let to_it = Some(json!({ "to": "a" }));
    let refused = managed.root(Method::POST, "/api/v1/vms/db/moves", to_it).await;
    assert_eq!(refused.problem(), ProblemCode::Preflight);
}
