//! Placement rules over the API.

use godwit_api::control::{Page, PreflightRanking, ProblemCode, Role, RuleInfo, RuleState};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::http::tests::*;
use crate::rig::{host, put_host, vm};

const RULES: &str = "/api/v1/rules";

fn apart(name: &str) -> Value {
    json!({ "name": name, "kind": "apart", "vms": ["x", "y"] })
}

/// Adds hosts a, b and c, VM x on a and VM y on b.
fn fill(managed: &Managed) {
    managed.manager.state.change(|inventory| {
        put_host(inventory, host("a", None), &[], vec![vm("x", "a", None)]);
        put_host(inventory, host("b", None), &[], vec![vm("y", "b", None)]);
        put_host(inventory, host("c", None), &[], vec![]);
        None
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_created_listed_shown_and_deleted() {
    let managed = Managed::begin().await;
    fill(&managed);
    for name in ["r1", "r2", "r3"] {
        let made = managed.root(Method::POST, RULES, Some(apart(name))).await;
        assert_eq!(made.status, StatusCode::CREATED, "{}", made.body);
    }
    let again = managed.root(Method::POST, RULES, Some(apart("r1"))).await;
    assert_eq!(again.problem(), ProblemCode::AlreadyExists);
    let on = json!({
        "name": "on-c", "kind": "on", "strength": "should", "vms": ["x"],
        "hosts": { "names": ["c"] }
    });
    let made: RuleInfo = managed.root(Method::POST, RULES, Some(on)).await.read();
    assert_eq!((made.state, made.broken_by[0].vm.as_str()), (RuleState::Broken, "x"));
    let page: Page<RuleInfo> =
        managed.root(Method::GET, "/api/v1/rules?limit=3", None).await.read();
    assert_eq!((page.total, page.next.as_deref(), page.items.len()), (4, Some("r2"), 3));
    let page: Page<RuleInfo> =
        managed.root(Method::GET, "/api/v1/rules?state=broken&vm=x", None).await.read();
    assert_eq!((page.total, page.items[0].name.as_str()), (1, "on-c"));
    let shown: RuleInfo = managed.root(Method::GET, "/api/v1/rules/r2", None).await.read();
    assert_eq!(shown.state, RuleState::Kept);
    let gone = managed.root(Method::DELETE, "/api/v1/rules/r2", None).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    let missing = managed.root(Method::GET, "/api/v1/rules/r2", None).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_and_preflight_apply_rules_at_once() {
    let managed = Managed::begin().await;
    fill(&managed);
    let path = "/api/v1/vms/x/preflight";
    let fits = |ranking: &PreflightRanking| {
        ranking.fits.iter().map(|one| one.host.clone()).collect::<Vec<_>>()
    };
    let before: PreflightRanking = managed.root(Method::GET, path, None).await.read();
    assert_eq!(fits(&before), ["b", "c"]);
    managed.root(Method::POST, RULES, Some(apart("r1"))).await;
    let after: PreflightRanking = managed.root(Method::GET, path, None).await.read();
    assert_eq!(fits(&after), ["c"]);
    let moved = managed.root(Method::POST, "/api/v1/vms/x/moves", Some(json!({ "to": "b" }))).await;
    assert_eq!(moved.problem(), ProblemCode::Preflight);
    managed.root(Method::DELETE, "/api/v1/rules/r1", None).await;
    let again: PreflightRanking = managed.root(Method::GET, path, None).await.read();
    assert_eq!(fits(&again), ["b", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_creates_rules_and_each_request_is_audited() {
    let managed = Managed::begin().await;
    let operator = managed.token(Role::Operator).await.token;
    let admin = managed.token(Role::Admin).await.token;
    let refused = managed.ask(Method::POST, RULES, Some(&operator), Some(apart("r1"))).await;
    assert_eq!(refused.problem(), ProblemCode::Forbidden);
    assert_eq!(managed.ask(Method::GET, RULES, Some(&operator), None).await.status, StatusCode::OK);
    let made = managed.ask(Method::POST, RULES, Some(&admin), Some(apart("r1"))).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let contradicts = json!({ "name": "r2", "kind": "together", "vms": ["y", "x"] });
    let refused = managed.ask(Method::POST, RULES, Some(&admin), Some(contradicts)).await;
    assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
    let none_made: Page<RuleInfo> = managed.root(Method::GET, RULES, None).await.read();
    assert_eq!(none_made.total, 1);
    let entries = noted(&managed, 5).await;
    let entries: Vec<_> = entries.iter().map(|entry| (entry.what.as_str(), entry.status)).collect();
    let post = "POST /api/v1/rules";
    assert_eq!(entries[..3], [(post, 400), (post, 201), (post, 403)]);
}
