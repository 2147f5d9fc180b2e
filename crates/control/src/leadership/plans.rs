//! What every manager knows of what the store keeps, whether it leads or not: hosts, VMs, rules, the baseline, limits and tokens. Each is set
//! as a whole where the store was read, and one by one where it changes.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;

use godwit_api::control::Problem;
use godwit_store::records::Record;

use crate::access::record::SavedToken;
use crate::baseline::{ID, SavedBaseline};
use crate::cluster::inventory::Inventory;
use crate::hosts::record::SavedHost;
use crate::leadership::leading::Leading;
use crate::manager::Manager;
use crate::rules::SavedRule;
use crate::vms::record::SavedVm;
use crate::vms::whole;

impl Manager {
    /// Changes what is planned, by whoever leads: one change after the other, and each to its end, also where who asked has gone. So what the
    /// store has and what is known never differ.
    pub(crate) async fn planning<T: Send + 'static, F>(
        self: &Arc<Self>,
        change: impl FnOnce(Arc<Manager>, Arc<Leading>) -> F + Send + 'static,
    ) -> Result<T, Problem>
    where
        F: Future<Output = Result<T, Problem>> + Send,
    {
        let manager = Arc::clone(self);
        whole(async move {
            let _turn = manager.state.planning().await;
            let leading = manager.leading()?;
            change(Arc::clone(&manager), leading).await
        })
        .await
    }
}

/// A kind of records that every manager knows.
pub(crate) trait Planned: Record {
    /// The ids of those that are known.
    fn known(manager: &Manager) -> BTreeSet<String>;
    /// Knows one from now on as this; none: it is not kept any more.
    fn set(manager: &Manager, id: &str, record: Option<Self>);

    /// Knows these from now on, and no others.
    fn set_all(manager: &Manager, records: impl IntoIterator<Item = (String, Self)>) {
        let mut gone = Self::known(manager);
        for (id, record) in records {
            gone.remove(&id);
            Self::set(manager, &id, Some(record));
        }
        for id in gone {
            Self::set(manager, &id, None);
        }
    }
}

impl Planned for SavedHost {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().plans().map(|(name, _)| name.to_owned()).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedHost>) {
        match record {
            Some(saved) => manager.plan_host(id, saved.into()),
            None => manager.leave_host(id),
        }
    }
}

impl Planned for SavedVm {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().planned_vms().map(str::to_owned).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedVm>) {
        manager.state.change(|inventory: &mut Inventory| inventory.plan_vm(id, record.map(Into::into)));
    }
}

impl Planned for SavedBaseline {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().baseline().map(|_| ID.to_owned()).into_iter().collect()
    }

    fn set(manager: &Manager, _: &str, record: Option<SavedBaseline>) {
        manager.state.change(|inventory: &mut Inventory| inventory.plan_baseline(record.map(Into::into)));
    }
}

impl Planned for SavedRule {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.state.inventory().rules().into_iter().map(|rule| rule.name).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedRule>) {
        let rule = record.map(|saved| saved.rule(id));
        manager.state.change(|inventory: &mut Inventory| inventory.plan_rule(id, rule));
    }
}

impl Planned for SavedToken {
    fn known(manager: &Manager) -> BTreeSet<String> {
        manager.tokens().into_iter().map(|token| token.id).collect()
    }

    fn set(manager: &Manager, id: &str, record: Option<SavedToken>) {
        match record {
            Some(saved) => manager.know_token(saved.record(id)),
            None => manager.forget_token(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_store::Store;
    use serde_json::json;

    use super::*;
    use crate::access::Caller;
    use crate::rig::{LateStore, ask_and_go, leader, until};

    fn read<T: serde::de::DeserializeOwned>(request: serde_json::Value) -> T {
        serde_json::from_value(request).unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_in_the_store_is_known_also_where_who_asked_has_gone() {
        let store: Arc<dyn Store> = Arc::new(LateStore::default());
        let manager = leader(Arc::clone(&store)).await;
        let limits = read(json!({ "in_all": 3 }));
        ask_and_go(&*store, manager.update_limits(limits)).await;
        until(&manager, |inventory| inventory.limits().total == Some(3)).await;
        let host = read(json!({ "name": "a", "address": "http://127.0.0.1:1" }));
        ask_and_go(&*store, manager.add_host(host)).await;
        until(&manager, |inventory| inventory.host_plan("a").is_some()).await;
        let change = read(json!({ "maintenance": true }));
        ask_and_go(&*store, manager.update_host("a", change)).await;
        until(&manager, |inventory| inventory.host_plan("a").is_some_and(|plan| plan.maintenance)).await;
        ask_and_go(&*store, manager.forget_host("a", false)).await;
        until(&manager, |inventory| inventory.host_plan("a").is_none()).await;
        let token = read(json!({ "name": "t", "role": "viewer" }));
        ask_and_go(&*store, manager.create_token(token, &Caller::root())).await;
        while manager.tokens().is_empty() {
            tokio::task::yield_now().await;
        }
        ask_and_go(&*store, manager.revoke_token(&manager.tokens()[0].id)).await;
        while !manager.tokens().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn changes_of_one_host_at_a_time_lose_nothing_of_each_other() {
        let manager = leader(Arc::new(LateStore::default())).await;
        let host = read(json!({ "name": "a", "address": "http://127.0.0.1:1" }));
        manager.add_host(host).await.unwrap();
        let changes = [
            json!({ "maintenance": true }),
            json!({ "most_moves": 7 }),
            json!({ "labels": { "rack": "1" } }),
        ];
        let all = changes.map(|change| manager.update_host("a", read(change)));
        for changed in futures::future::join_all(all).await {
            changed.unwrap();
        }
        let plan = manager.state.inventory().host_plan("a").cloned().unwrap();
        assert!(plan.maintenance && plan.most_moves == Some(7) && plan.labels["rack"] == "1", "{plan:?}");
    }
}
