//! Saved settings: known as soon as they are written, and changed one after the other.

use godwit_store::Store;
use serde_json::json;

use crate::access::Caller;
use crate::rig::{LateStore, ask_and_go, leader, until};
use std::sync::Arc;

fn read<T: serde::de::DeserializeOwned>(request: serde_json::Value) -> T {
    serde_json::from_value(request).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saved_change_is_known_even_if_the_caller_has_disconnected() {
    let store: Arc<dyn Store> = Arc::new(LateStore::default());
    let manager = leader(Arc::clone(&store)).await;
    let limits = read(json!({ "in_all": 3 }));
    ask_and_go(&*store, manager.limits.update(limits)).await;
    until(&manager, |inventory| inventory.limits().in_all == Some(3)).await;
    let host = read(json!({ "name": "a", "address": "http://127.0.0.1:1" }));
    ask_and_go(&*store, manager.host_requests.add_host(host)).await;
    until(&manager, |inventory| inventory.host_plan("a").is_some()).await;
    let change = read(json!({ "maintenance": true }));
    ask_and_go(&*store, manager.host_requests.update_host("a", change)).await;
    until(&manager, |inventory| inventory.host_plan("a").is_some_and(|plan| plan.maintenance))
        .await;
    ask_and_go(&*store, manager.host_requests.forget_host("a", false)).await;
    until(&manager, |inventory| inventory.host_plan("a").is_none()).await;
    let token = read(json!({ "name": "t", "role": "viewer" }));
    ask_and_go(&*store, manager.access.create_token(token, &Caller::root())).await;
    while manager.tokens.infos().is_empty() {
        tokio::task::yield_now().await;
    }
    ask_and_go(&*store, manager.access.revoke_token(&manager.tokens.infos()[0].id)).await;
    while !manager.tokens.infos().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_changes_of_one_host_do_not_overwrite_each_other() {
    let manager = leader(Arc::new(LateStore::default())).await;
    let host = read(json!({ "name": "a", "address": "http://127.0.0.1:1" }));
    manager.host_requests.add_host(host).await.unwrap();
    let changes = [
        json!({ "maintenance": true }),
        json!({ "most_moves": 7 }),
        json!({ "labels": { "rack": "1" } }),
    ];
    let all = changes.map(|change| manager.host_requests.update_host("a", read(change)));
    for changed in futures::future::join_all(all).await {
        changed.unwrap();
    }
    let plan = manager.state.inventory().host_plan("a").cloned().unwrap();
    assert!(
        plan.maintenance && plan.most_moves == Some(7) && plan.labels["rack"] == "1",
        "{plan:?}"
    );
}
