//! Datastores over the API.

use godwit_api::control::{DatastoreDetails, ManagedDatastore, Page, ProblemCode, Role};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::http::tests::*;
use crate::rig::{host, put_host, vm};

const LIST: &str = "/api/v1/datastores";
const FAST: &str = "1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10";

/// Adds hosts a and b, which share `/srv`, and VM x on a.
fn fill(managed: &Managed) {
    managed.manager.state.change(|inventory| {
        for name in ["a", "b"] {
            let mut info = host(name, None);
            info.vm_dirs = vec!["/srv".into()];
            let found = json!({ "/srv": {
                "total_bytes": 100, "free_bytes": 40, "identity": FAST, "kind": "nfs",
            } });
            info.datastores = serde_json::from_value(found).unwrap();
            let mut x = vm("x", name, None);
            let disks = json!([{ "path": "/srv/x.raw", "format": "raw" }]);
            x.spec.disks = serde_json::from_value(disks).unwrap();
            put_host(inventory, info, &[], if name == "a" { vec![x] } else { vec![] });
        }
        None
    });
}

async fn set(managed: &Managed, named: &str, change: Value) -> Answer {
    managed.root(Method::PATCH, &format!("{LIST}/{named}"), Some(change)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_changed_listed_and_kept() {
    let managed = Managed::begin().await;
    fill(&managed);
    let change = json!({ "name": "fast", "tags": ["ssd"], "description": "flash" });
    let set_by_path: ManagedDatastore = set(&managed, "%2Fsrv", change).await.read();
    assert_eq!((set_by_path.id.as_str(), set_by_path.name.as_str()), (FAST, "fast"));
    let changed: ManagedDatastore =
        set(&managed, "fast", json!({ "maintenance": true })).await.read();
    assert!(changed.maintenance && changed.tags.contains("ssd") && changed.hosts.len() == 2);
    let list = async |query: &str| -> Page<ManagedDatastore> {
        managed.root(Method::GET, &format!("{LIST}?{query}"), None).await.read()
    };
    assert_eq!(list("tag=ssd&maintenance=true&host=b").await.total, 1);
    assert_eq!(list("maintenance=false").await.total, 0);
    let shown: DatastoreDetails =
        managed.root(Method::GET, &format!("{LIST}/{FAST}"), None).await.read();
    assert_eq!((shown.used_by.len(), shown.used_by[0].path.as_str()), (1, "/srv/x.raw"));
    // The next leader knows them.
    let next = Managed::with(std::sync::Arc::clone(&managed.store)).await;
    let kept = next.manager.state.inventory().datastore_plans()[FAST].clone();
    assert!(kept.maintenance && kept.name.as_deref() == Some("fast"));
    let reset = json!({ "name": "", "tags": [], "description": "", "maintenance": false });
    let reset = set(&next, FAST, reset).await;
    assert_eq!(reset.status, StatusCode::OK, "{}", reset.body);
    assert!(next.manager.state.inventory().datastore_plans().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_and_low_roles_are_refused() {
    let managed = Managed::begin().await;
    fill(&managed);
    for (change, code) in [
        (json!({ "name": "../x" }), ProblemCode::InvalidRequest),
        (json!({ "name": "auto" }), ProblemCode::InvalidRequest),
        (json!({ "name": FAST }), ProblemCode::InvalidRequest),
        (json!({ "tags": ["a b"] }), ProblemCode::InvalidRequest),
        (json!({ "description": "\u{7}" }), ProblemCode::InvalidRequest),
        (json!({ "unknown": 1 }), ProblemCode::InvalidRequest),
    ] {
        assert_eq!(set(&managed, FAST, change.clone()).await.problem(), code, "{change}");
    }
    let missing = set(&managed, "none", json!({ "maintenance": true })).await;
    assert_eq!(missing.problem(), ProblemCode::NotFound);
    let operator = managed.token(Role::Operator).await.token;
    let asks = async |change: Value| {
        let path = format!("{LIST}/{FAST}");
        managed.ask(Method::PATCH, &path, Some(&operator), Some(change)).await
    };
    assert_eq!(asks(json!({ "name": "fast" })).await.problem(), ProblemCode::Forbidden);
    assert_eq!(asks(json!({ "maintenance": true })).await.status, StatusCode::OK);
    // It takes no new disks now, wherever they come from.
    let create = json!({ "path": "/srv/new.qcow2", "size": "1GiB" });
    let create = managed.root(Method::POST, "/api/v1/hosts/a/disks", Some(create)).await;
    assert_eq!(create.problem(), ProblemCode::WrongState);
    let moved = json!({ "disk": "/srv/x.raw", "to": "/srv", "format": "qcow2" });
    let moved = managed.root(Method::POST, "/api/v1/vms/x/drives/move", Some(moved)).await;
    assert_eq!(moved.problem(), ProblemCode::WrongState);
    let import = json!({ "from": { "file": "/srv/wiki.ova" } });
    let import = managed.root(Method::POST, "/api/v1/hosts/a/imports", Some(import)).await;
    assert_eq!(import.problem(), ProblemCode::NoHost);
}
