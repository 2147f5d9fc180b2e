//! Warnings and refusals as requests get them, with simulated hosts.

use godwit_api::control::{AdmissionPolicy, ChangedVm, HaSettings, HostedVm, ProblemCode};
use godwit_fleet::FleetPlan;
use http::Method;
use serde_json::{Value, json};

use crate::vms::tests::Cluster;

const VMS: &str = "/api/v1/vms";
/// Of a host with 256 GiB: it takes no second VM of this size.
const MEMORY: &str = "160GiB";

async fn cluster() -> Cluster {
    let plan = FleetPlan { hosts: 2, vms: 0, datastores: true, ..FleetPlan::default() };
    let cluster = Cluster::of(plan).await;
    let settings = HaSettings { enabled: true, ..HaSettings::default() };
    cluster.managed.manager.ha.admission.set(settings);
    cluster
}

fn protected(name: &str, host: usize, start: bool) -> Value {
    let disk = format!("/srv/shared/{name}.qcow2");
    let spec = json!({
        "name": name, "memory": MEMORY, "protect": "high",
        "disks": [{ "path": disk, "format": "qcow2" }],
    });
    json!({ "spec": spec, "host": FleetPlan::default().host_name(host), "start": start })
}

/// Waits until a host has reported that its memory is in use.
async fn until_full(cluster: &Cluster, host: usize) {
    let host = FleetPlan::default().host_name(host);
    let is_full = |cluster: &Cluster| {
        let inventory = cluster.managed.manager.state.inventory();
        let info = inventory.host_info(&host);
        info.is_some_and(|info| info.memory_available_bytes < 160 << 30)
    };
    cluster.until(is_full).await;
}

async fn hosted(cluster: &Cluster, path: &str, body: Option<Value>) -> HostedVm {
    let answer = cluster.root(Method::POST, path, body).await;
    assert!(answer.status.is_success(), "{path}: {}", answer.body);
    answer.read()
}

#[tokio::test(flavor = "multi_thread")]
async fn creations_starts_and_changes_have_their_warning() {
    let cluster = cluster().await;
    let web = hosted(&cluster, VMS, Some(protected("web", 0, true))).await;
    assert_eq!(web.warning, None, "the other host takes it");
    let db = hosted(&cluster, VMS, Some(protected("db", 1, false))).await;
    assert_eq!(db.warning, None, "it does not run");
    let db = hosted(&cluster, "/api/v1/vms/db/start", None).await;
    let warning = db.warning.unwrap();
    assert!(warning.contains("VM \"db\"") && warning.contains("not fit"), "{warning}");

    hosted(&cluster, "/api/v1/vms/db/stop", Some(json!({ "force": true }))).await;
    let change = async |change: Value| {
        let change = json!({ "spec": change });
        cluster.root(Method::PATCH, "/api/v1/vms/db", Some(change)).await
    };
    assert_eq!(change(json!({ "protect": null })).await.status, 200);
    let db = hosted(&cluster, "/api/v1/vms/db/start", None).await;
    assert_eq!(db.warning, None, "it is not protected");
    until_full(&cluster, 0).await;
    until_full(&cluster, 1).await;
    let changed = change(json!({ "protect": "low" })).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    let changed: ChangedVm = changed.read();
    assert!(changed.warning.is_some_and(|warning| warning.contains("not fit")));
    let again: ChangedVm = change(json!({ "protect": "high" })).await.read();
    assert_eq!(again.warning, None, "it was protected before");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_start_changes_nothing() {
    let cluster = cluster().await;
    let settings = HaSettings { enabled: true, ..HaSettings::default() };
    let refuse = HaSettings { admission: AdmissionPolicy::Refuse, ..settings };
    hosted(&cluster, VMS, Some(protected("web", 0, true))).await;
    hosted(&cluster, VMS, Some(protected("db", 1, false))).await;
    cluster.managed.manager.ha.admission.set(refuse);
    let refused = cluster.root(Method::POST, "/api/v1/vms/db/start", None).await;
    assert_eq!(refused.problem(), ProblemCode::Conflict);
    let created = cluster.root(Method::POST, VMS, Some(protected("log", 1, true))).await;
    assert_eq!(created.problem(), ProblemCode::Conflict);
    let shown = cluster.root(Method::GET, "/api/v1/vms/db", None).await;
    assert_eq!((&shown.body["state"], &shown.body["planned"]), (&json!("stopped"), &json!("off")));
    assert_eq!(cluster.root(Method::GET, "/api/v1/vms/log", None).await.status, 404);
}
