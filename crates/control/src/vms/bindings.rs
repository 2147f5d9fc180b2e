//! Bindings in the store: which host holds a VM's name. The module of
//! [`crate::cluster::inventory::Binding`] decides.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{ManagedVm, Problem, ProblemCode};
use godwit_qemu::Uuid;
use godwit_store::records::{Record, Table};
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};
use tokio::time::{MissedTickBehavior, interval};

use super::Vms;
use crate::cluster::inventory::{Binding, Inventory};
use crate::cluster::state::State;
use crate::problems::no_host;
use crate::storage::keeper::{Keeper, Writes};
use crate::storage::planned::Planned;

pub(crate) const BINDINGS: Table<SavedBinding> = Table::new();

/// Interval at which changed bindings are written. A binding is written once it has stayed the same
/// for an interval.
const WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// Most bindings that are written or removed in an interval, so that a host that reports new names
/// all the time cannot fill the store.
const MOST_WRITES: usize = 1_000;

/// The guest that has a name, and the host that holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedBinding {
    uuid: Option<Uuid>,
    incarnation: Incarnation,
    host: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    by_agents: bool,
}

impl Record for SavedBinding {
    const KIND: &'static str = "binding";
    const PREFIX: &'static str = "bindings/";
    const VERSION: u32 = 1;
}

impl From<&Binding> for SavedBinding {
    fn from(binding: &Binding) -> SavedBinding {
        let Binding { uuid, incarnation, host, by_agents } = binding.clone();
        SavedBinding { uuid, incarnation, host, by_agents }
    }
}

impl From<SavedBinding> for Binding {
    fn from(saved: SavedBinding) -> Binding {
        let SavedBinding { uuid, incarnation, host, by_agents } = saved;
        Binding { uuid, incarnation, host, by_agents }
    }
}

impl Planned<State> for SavedBinding {
    fn known(state: &State) -> BTreeSet<String> {
        state.inventory().stored_bindings().map(str::to_owned).collect()
    }

    fn set(state: &State, id: &str, record: Option<SavedBinding>) {
        let stored = record.map(Into::into);
        state.change(|inventory: &mut Inventory| inventory.know_binding(id, stored));
    }
}

/// Writes changed bindings while this manager leads.
pub(crate) async fn keep_bindings(keeper: Arc<Keeper>, state: Arc<State>) {
    let mut ticks = interval(WRITE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = BTreeMap::new();
    loop {
        ticks.tick().await;
        let unstored = state.inventory().unstored_bindings();
        let is_settled =
            |(name, binding): &(&String, &Option<Binding>)| before.get(*name) == Some(*binding);
        let due: Vec<_> = unstored.iter().filter(is_settled).take(MOST_WRITES).collect();
        if let Err(problem) = write(&keeper, &state, &due).await {
            tracing::warn!(%problem, "cannot write the bindings of VM names; retrying");
        }
        before = unstored;
    }
}

async fn write(
    keeper: &Keeper,
    state: &State,
    due: &[(&String, &Option<Binding>)],
) -> Result<(), Problem> {
    let mut writes = Writes::default();
    let mut batch = Vec::new();
    for (name, binding) in due {
        let Some(binding) = binding else {
            keeper.remove(BINDINGS, name).await?;
            know_stored(state, vec![((*name).clone(), None)]);
            continue;
        };
        let one = keeper.put(Writes::default(), BINDINGS, name, &binding.into()).await?;
        if !writes.has_room_for(&one) {
            keeper.write(std::mem::take(&mut writes)).await?;
            know_stored(state, std::mem::take(&mut batch));
        }
        writes.add(one);
        batch.push(((*name).clone(), Some(binding.clone())));
    }
    if !batch.is_empty() {
        keeper.write(writes).await?;
        know_stored(state, batch);
    }
    Ok(())
}

fn know_stored(state: &State, stored: Vec<(String, Option<Binding>)>) {
    state.change(|inventory| {
        stored.into_iter().for_each(|(name, binding)| inventory.binding_stored(&name, binding));
        None
    });
}

impl Vms {
    /// Binds a VM's name to the guest that a host reports, on an operator's request.
    pub(crate) async fn bind_vm(&self, vm: &str, host: &str) -> Result<ManagedVm, Problem> {
        let (vm, host) = (vm.to_owned(), host.to_owned());
        let vms = self.clone();
        self.planning
            .change(move |keeper| async move {
                vms.state.inventory().host(&host).ok_or_else(|| no_host(&host))?;
                let no_claim = |_| {
                    let detail =
                        format!("cannot bind VM \"{vm}\": host {host} does not report having it");
                    Problem::new(ProblemCode::WrongState, detail, "see `godwit control conflicts`")
                };
                let binding = vms.state.inventory().claim_of(&vm, &host).map_err(no_claim)?;
                let writes =
                    keeper.put(Writes::default(), BINDINGS, &vm, &(&binding).into()).await?;
                keeper.write(writes).await?;
                let mut bound = Ok(());
                vms.state.change(|inventory| {
                    inventory.binding_stored(&vm, Some(binding));
                    let changes = inventory.bind(&vm, &host);
                    bound = changes.as_ref().map(drop).map_err(|error| *error);
                    changes.unwrap_or_default()
                });
                bound.map_err(no_claim)?;
                let found = vms.state.inventory().vm(&vm);
                found.ok_or_else(|| no_claim(crate::cluster::inventory::NoClaim))
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{ProblemCode, Role};
    use godwit_api::{HostEvent, VmInfo};
    use godwit_store::MemoryStore;
    use http::{Method, StatusCode};
    use serde_json::json;

    use super::*;
    use crate::agents::record::{HOSTS, SavedHost};
    use crate::cluster::inventory::HostPlan;
    use crate::http::tests::Managed;
    use crate::rig::{self, leader, until};

    fn claim(state: &State, host: &str, epoch: u64) {
        state.apply(host, HostEvent::Vm(Box::new(VmInfo { epoch, ..rig::vm("web", host, None) })));
    }

    fn hosts(state: &State, names: &[&str]) {
        for name in names {
            state.change(|inventory| {
                rig::put_host(inventory, rig::host(name, None), &[], vec![]);
                None
            });
        }
    }

    async fn stored(store: &MemoryStore) -> Vec<SavedBinding> {
        let all = BINDINGS.read_all(store).await.unwrap().records;
        all.into_iter().map(|kept| kept.record).collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_next_leader_does_not_trust_the_first_claim_it_hears() {
        let store = MemoryStore::new();
        let manager = leader(Arc::new(store.clone())).await;
        hosts(&manager.state, &["a"]);
        let plan = HostPlan { address: "http://a:7700".to_owned(), ..HostPlan::default() };
        let keeper = &manager.leading().unwrap().keeper;
        keeper.insert(HOSTS, "a", &SavedHost::from(&plan)).await.unwrap();
        claim(&manager.state, "a", 3);
        while stored(&store).await.is_empty() {
            tokio::task::yield_now().await;
        }
        drop(manager);
        store.end_leadership_silently();
        let next = leader(Arc::new(store.clone())).await;
        hosts(&next.state, &["liar"]);
        claim(&next.state, "liar", 90);
        {
            let inventory = next.state.inventory();
            assert_eq!((inventory.holder("web"), inventory.conflict_count()), (Some("a"), 1));
        }
        // Removing the host removes its bindings.
        next.state.change(|inventory| inventory.forget_host("a"));
        until(&next, |inventory| inventory.holder("web") == Some("liar")).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_operator_binds_a_name_to_the_vm_of_another_host() {
        let managed = Managed::begin().await;
        let state = &managed.manager.state;
        hosts(state, &["a", "b"]);
        claim(state, "a", 3);
        claim(state, "b", 1);
        let token = managed.token(Role::Operator).await.token;
        let ask = async |path: &str, body: Option<serde_json::Value>| {
            let method = if body.is_some() { Method::POST } else { Method::GET };
            managed.ask(method, path, Some(&token), body).await
        };
        let listed = ask("/api/v1/name-conflicts", None).await;
        assert_eq!(listed.body["items"][0]["holder"]["host"], "a", "{}", listed.body);
        assert_eq!(listed.body["items"][0]["claims"][0]["host"], "b");
        let path = "/api/v1/vms/web/binding";
        let refused = ask(path, Some(json!({ "host": "nobody" }))).await;
        assert_eq!(refused.problem(), ProblemCode::NotFound);
        let bound = ask(path, Some(json!({ "host": "b" }))).await;
        assert_eq!(
            (bound.status, &bound.body["host"]),
            (StatusCode::OK, &json!("b")),
            "{}",
            bound.body
        );
        assert_eq!(bound.body["conflicts"], json!(["a"]));
        let saved = stored(&managed.store).await;
        assert_eq!(saved.iter().map(|saved| saved.host.as_str()).collect::<Vec<_>>(), ["b"]);
        let refused = managed.ask(
            Method::POST,
            "/api/v1/vms/db/binding",
            Some(&token),
            Some(json!({ "host": "a" })),
        );
        assert_eq!(refused.await.problem(), ProblemCode::WrongState);
    }
}
