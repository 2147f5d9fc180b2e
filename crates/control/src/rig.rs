//! Managers and clusters for tests. There are no agents: tests put the agents' reports in.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use godwit_api::{HostEvent, HostInfo, VmInfo};
use godwit_pki::Identity;
use godwit_qemu::Baseline;
use godwit_store::records::Record;
use godwit_store::{
    Candidate, Item, Leader, Leadership, MemoryStore, Page, Revision, Snapshot, SqliteStore, Store,
    StoreError, Transaction, Watch,
};
use serde_json::{Value, json};

use crate::cluster::inventory::{BaselinePlan, HostPlan, Inventory};
use crate::cluster::state::State;
use crate::journal::entries::SavedEntry;
use crate::leadership::standby::Standby;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;

fn candidate(name: &str) -> Candidate {
    Candidate { name: name.to_owned(), address: format!("http://{name}:7800") }
}

pub(crate) async fn leader(store: Arc<dyn Store>) -> Arc<Manager> {
    lead(store, None).await
}

/// Returns a manager that leads and has a certificate.
pub(crate) async fn secure_leader(store: Arc<dyn Store>, identity: Identity) -> Arc<Manager> {
    lead(store, Some(identity)).await
}

async fn lead(store: Arc<dyn Store>, identity: Option<Identity>) -> Arc<Manager> {
    let candidate = candidate("m1");
    let leadership = Arc::new(store.lead(&candidate).await.unwrap());
    let keeper = Keeper::new(store, leadership, candidate);
    Manager::open(keeper, Arc::<State>::default(), identity).await.unwrap()
}

/// Returns a manager that does not lead. It follows the store until the `Standby` is dropped.
pub(crate) fn follower(store: &Arc<dyn Store>) -> (Arc<Manager>, Standby) {
    let manager = Manager::new(candidate("m2"), Arc::clone(store), Arc::<State>::default(), None);
    let standby = Standby::begin(&manager, store);
    (manager, standby)
}

/// Runs `lives` with a manager that leads and whose store is a file. All of the manager's tasks end
/// with `lives`, so that a later manager can open the file.
pub(crate) fn over_file(path: &Path, lives: impl AsyncFnOnce(Arc<Manager>)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = SqliteStore::open(path).unwrap();
        lives(leader(Arc::new(store)).await).await;
    });
}

/// Store that answers a commit some time after it has made it, as a store across a network does.
#[derive(Default)]
pub(crate) struct LateStore(MemoryStore);

#[async_trait]
impl Store for LateStore {
    async fn read(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.0.read(prefix).await
    }

    async fn read_page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, StoreError> {
        self.0.read_page(prefix, after, limit).await
    }

    async fn commit(
        &self,
        leads: &Leadership,
        transaction: Transaction,
    ) -> Result<Revision, StoreError> {
        let revision = self.0.commit(leads, transaction).await;
        tokio::task::yield_now().await;
        revision
    }

    async fn lead(&self, candidate: &Candidate) -> Result<Leadership, StoreError> {
        self.0.lead(candidate).await
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        self.0.leader().await
    }

    async fn watch(&self, prefix: &str, since: Revision) -> Result<Watch, StoreError> {
        self.0.watch(prefix, since).await
    }
}

/// Polls a request for a change, and drops it once the change is in the store.
pub(crate) async fn ask_and_go<T>(store: &dyn Store, asked: impl Future<Output = T>) {
    let mut asked = std::pin::pin!(asked);
    let before = records(store).await;
    while records(store).await == before && futures::poll!(&mut asked).is_pending() {
        tokio::task::yield_now().await;
    }
}

/// Returns all items but those of the journal, which has entries about other things, too.
async fn records(store: &dyn Store) -> Vec<Item> {
    let all = store.read("").await.unwrap().items;
    all.into_iter().filter(|item| !item.key.starts_with(SavedEntry::PREFIX)).collect()
}

/// Waits until a manager's inventory meets a condition, which is checked at each event.
pub(crate) async fn until(manager: &Manager, is_so: impl Fn(&Inventory) -> bool) {
    let mut events = manager.state.events().listen(None);
    while !is_so(&manager.state.inventory()) {
        events.next().await.unwrap();
    }
}

/// Returns an agent's report of its host, with the CPU that guests can have; none: the agent does
/// not report it.
pub(crate) fn host(name: &str, cpu: Option<&Value>) -> HostInfo {
    serde_json::from_value(json!({
        "name": name, "version": "0.5.0", "kernel": "6.18", "cpu": cpu,
        "memory_available_bytes": 64_u64 << 30, "memory_committed_bytes": 0, "huge_pages": true,
        "migration_addresses": ["10.0.0.1"], "networks": {}, "peers": {}, "vms": 0,
    }))
    .unwrap()
}

/// Returns an agent's report of a VM that runs on its host.
pub(crate) fn vm(name: &str, host: &str, cpu_model: Option<&str>) -> VmInfo {
    serde_json::from_value(json!({
        "name": name, "host": host, "state": "running", "epoch": 3,
        "memory_bytes": 1_u64 << 30, "vcpus": 1, "accel": "kvm",
        "machine": "pc-q35-10.0", "addresses": [],
        "spec": { "name": name, "kernel": "/k", "cpu_model": cpu_model },
    }))
    .unwrap()
}

/// Adds a reachable host with these VMs and labels.
pub(crate) fn put_host(
    inventory: &mut Inventory,
    info: HostInfo,
    labels: &[(&str, &str)],
    vms: Vec<VmInfo>,
) {
    let name = info.name.clone();
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let address = format!("http://{name}:7700");
    inventory
        .plan_host(&name, HostPlan { address, labels: labels.collect(), ..HostPlan::default() });
    inventory.reached(&name);
    inventory.apply(&name, HostEvent::Host(Box::new(info)), 1);
    for vm in vms {
        inventory.apply(&name, HostEvent::Vm(Box::new(vm)), 1);
    }
    inventory.apply(&name, HostEvent::Known, 1);
}

/// Returns the report of a CPU with the features `lm`, `pni` and `more`, from a host whose QEMU
/// knows two generations of CPU models.
pub(crate) fn cpu(more: &[&str]) -> Value {
    let has: BTreeSet<&str> = ["lm", "pni"].into_iter().chain(more.iter().copied()).collect();
    let of = |holds: &[&'static str]| -> (Vec<&'static str>, Vec<&'static str>) {
        (holds.to_vec(), holds.iter().copied().filter(|name| !has.contains(name)).collect())
    };
    let ((nehalem, lacks_n), (haswell, lacks_h)) =
        (of(&["lm", "pni"]), of(&["lm", "pni", "aes", "avx2"]));
    let mut models = vec!["Nehalem-v1", "max"];
    models.extend(lacks_h.is_empty().then_some("Haswell-v4"));
    json!({
        "vendor": "GenuineIntel", "name": "Xeon", "accel": "kvm",
        "features": has, "models": models,
        "generations": {
            "Nehalem-v1": { "features": nehalem, "missing": lacks_n },
            "Haswell-v4": {
                "features": haswell, "missing": lacks_h, "aliases": ["Haswell"],
            },
        },
    })
}

/// Returns a baseline with the features `lm`, `pni` and `more`, as an operator sets it.
pub(crate) fn baseline(cpu_model: &str, more: &[&str]) -> BaselinePlan {
    let features = ["lm", "pni"].iter().chain(more).map(|name| (*name).to_owned()).collect();
    BaselinePlan {
        baseline: Baseline { cpu_model: cpu_model.to_owned(), features },
        asked: cpu_model.to_owned(),
        without: Vec::new(),
        set_unix_ms: 1,
        set_by: "ada".to_owned(),
    }
}
