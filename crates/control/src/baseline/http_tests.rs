//! Tests of the CPU baseline over the API.

use godwit_api::control::{
    BaselineFit, BaselineVm, CpuBaselineChange, CpuBaselineInfo, Page, ProblemCode, Role,
};
use godwit_fleet::{Fleet, FleetPlan};
use http::{Method, StatusCode};
use serde_json::json;

use crate::http::tests::*;
use crate::rig::{baseline, cpu, host, put_host, vm};

const BASELINE: &str = "/api/v1/cpu-baseline";

#[tokio::test(flavor = "multi_thread")]
async fn the_baseline_is_shown_planned_set_and_cleared() {
    let managed = Managed::begin().await;
    managed.manager.state.change(|inventory| {
        let vms =
            (0..5).map(|number| vm(&format!("vm{number}"), "a", Some("Nehalem-v1"))).collect();
        put_host(inventory, host("a", Some(&cpu(&["aes", "avx2"]))), &[], vms);
        put_host(inventory, host("b", Some(&cpu(&["aes"]))), &[], vec![]);
        None
    });
    let info: CpuBaselineInfo = managed.root(Method::GET, BASELINE, None).await.read();
    assert_eq!(info.baseline, None);
    let higher = json!({ "model": "Haswell-v4" });
    let path = "/api/v1/cpu-baseline?plan=true";
    let plan: CpuBaselineChange =
        managed.root(Method::PUT, path, Some(higher.clone())).await.read();
    assert!(!plan.set && plan.refused.is_some() && plan.must_restart_count == 5);
    let refused = managed.root(Method::PUT, BASELINE, Some(higher)).await;
    assert_eq!(refused.body["checks"][0]["name"], "cpu-baseline");
    assert_eq!(refused.problem(), ProblemCode::BaselineUnmet);
    let set = json!({ "model": "Haswell-v4", "without": ["b"] });
    let set: CpuBaselineChange = managed.root(Method::PUT, BASELINE, Some(set)).await.read();
    assert!(set.set && set.baseline.set_by == "root");
    let info: CpuBaselineInfo = managed.root(Method::GET, BASELINE, None).await.read();
    assert_eq!((info.must_restart_count, info.hosts[1].fit), (5, Some(BaselineFit::FallsShort)));
    let path = "/api/v1/cpu-baseline/vms?limit=2&cursor=vm1";
    let page: Page<BaselineVm> = managed.root(Method::GET, path, None).await.read();
    assert_eq!(
        (page.total, page.items[0].vm.as_str(), page.next.as_deref()),
        (5, "vm2", Some("vm3"))
    );
    let cleared = managed.root(Method::DELETE, BASELINE, None).await;
    assert_eq!(cleared.status, StatusCode::NO_CONTENT);
    for (method, path, body, code) in [
        (Method::DELETE, BASELINE, None, ProblemCode::NotFound),
        (Method::PUT, BASELINE, Some(json!({})), ProblemCode::InvalidRequest),
        (
            Method::PUT,
            BASELINE,
            Some(json!({ "model": "x", "also": 1 })),
            ProblemCode::InvalidRequest,
        ),
        (
            Method::PUT,
            "/api/v1/cpu-baseline?dry=1",
            Some(json!({ "model": "x" })),
            ProblemCode::InvalidRequest,
        ),
        (Method::POST, BASELINE, Some(json!({ "model": "x" })), ProblemCode::MethodNotAllowed),
    ] {
        assert_eq!(managed.root(method, path, body).await.problem(), code, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_an_admin_sets_it_and_a_dry_run_is_not_in_the_audit_log() {
    let managed = Managed::begin().await;
    managed.manager.state.change(|inventory| {
        put_host(inventory, host("a", Some(&cpu(&[]))), &[], vec![]);
        None
    });
    let operator = managed.token(Role::Operator).await.token;
    let admin = managed.token(Role::Admin).await.token;
    let computed = || Some(json!({ "model": "computed" }));
    let refused = managed.ask(Method::PUT, BASELINE, Some(&operator), computed()).await;
    assert_eq!(refused.problem(), ProblemCode::Forbidden);
    assert_eq!(
        managed.ask(Method::GET, BASELINE, Some(&operator), None).await.status,
        StatusCode::OK
    );
    let plan =
        managed.ask(Method::PUT, "/api/v1/cpu-baseline?plan=true", Some(&admin), computed()).await;
    assert_eq!(plan.status, StatusCode::OK);
    let set = managed.ask(Method::PUT, BASELINE, Some(&admin), computed()).await;
    assert_eq!((set.status, &set.body["baseline"]["set_by"]), (StatusCode::OK, &json!("admin")));
    let entries = noted(&managed, 4).await;
    let entries: Vec<_> = entries.iter().map(|entry| (entry.what.as_str(), entry.status)).collect();
    let put = "PUT /api/v1/cpu-baseline";
    assert_eq!((&entries[..2], entries.len()), (&[(put, 200), (put, 403)][..], 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_reports_too_few_features_is_not_added() {
    let managed = Managed::begin().await;
    let plan = FleetPlan { hosts: 1, vms: 0, hosts_with_vms: 0, ..FleetPlan::default() };
    let fleet = Fleet::begin(plan).await.unwrap();
    let (name, address) = fleet.agents().first_key_value().unwrap();
    let request = || Some(json!({ "name": name, "address": address }));
    managed
        .manager
        .state
        .change(|inventory| inventory.plan_baseline(Some(baseline("Westmere-v1", &["warp"]))));
    let refused = managed.root(Method::POST, "/api/v1/hosts", request()).await;
    assert!(refused.body["detail"].as_str().unwrap().contains("warp"), "{}", refused.body);
    assert_eq!(refused.problem(), ProblemCode::BaselineUnmet);
    let missing = managed.root(Method::GET, &format!("/api/v1/hosts/{name}"), None).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
    // An unreachable host is added, and compared when it reports.
    let away = managed.root(Method::POST, "/api/v1/hosts", Some(host_a())).await;
    assert_eq!(away.status, StatusCode::CREATED, "{}", away.body);
    managed
        .manager
        .state
        .change(|inventory| inventory.plan_baseline(Some(baseline("Westmere-v1", &["aes"]))));
    let taken = managed.root(Method::POST, "/api/v1/hosts", request()).await;
    assert_eq!(taken.status, StatusCode::CREATED, "{}", taken.body);
}
