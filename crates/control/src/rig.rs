//! Managers and clusters for tests: no agent is asked, and what agents would tell is put in.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use godwit_api::{HostEvent, HostInfo, VmInfo};
use godwit_pki::Identity;
use godwit_qemu::Baseline;
use godwit_store::{
    Candidate, Leader, Leadership, MemoryStore, Page, Revision, Snapshot, SqliteStore, Store,
    StoreError, Transaction, Watch,
};
use serde_json::{Value, json};

use crate::cluster::inventory::{BaselinePlan, HostPlan, Inventory};
use crate::cluster::state::State;
use crate::leadership::standby::Standby;
use crate::manager::Manager;
use crate::storage::keeper::Keeper;

fn candidate(name: &str) -> Candidate {
    Candidate { name: name.to_owned(), address: format!("http://{name}:7800") }
}

pub(crate) async fn leader(store: Arc<dyn Store>) -> Arc<Manager> {
    lead(store, None).await
}

/// A manager that leads and has a certificate.
pub(crate) async fn secure_leader(store: Arc<dyn Store>, identity: Identity) -> Arc<Manager> {
    lead(store, Some(identity)).await
}

async fn lead(store: Arc<dyn Store>, identity: Option<Identity>) -> Arc<Manager> {
    let candidate = candidate("m1");
    let leadership = Arc::new(store.lead(&candidate).await.unwrap());
    let keeper = Keeper::new(store, leadership, candidate);
    Manager::open(keeper, Arc::<State>::default(), identity).await.unwrap()
}

/// A manager that does not lead, and follows the store as long as what comes with it is kept.
pub(crate) fn follower(store: &Arc<dyn Store>) -> (Arc<Manager>, Standby) {
    let manager = Manager::new(candidate("m2"), Arc::clone(store), Arc::<State>::default(), None);
    let standby = Standby::begin(&manager, store);
    (manager, standby)
}

/// A manager that leads over a file, for as long as `lives`: its end is that of all of its tasks, and the next one opens the file anew.
pub(crate) fn over_file(path: &Path, lives: impl AsyncFnOnce(Arc<Manager>)) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = SqliteStore::open(path).unwrap();
        lives(leader(Arc::new(store)).await).await;
    });
}

/// A store that answers a change later than it makes it, as those do that are asked over a network.
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

/// Asks for a change, and goes away as soon as it is in the store.
pub(crate) async fn ask_and_go<T>(store: &dyn Store, asked: impl Future<Output = T>) {
    let mut asked = std::pin::pin!(asked);
    let before = store.read("").await.unwrap().revision;
    while store.read("").await.unwrap().revision == before
        && futures::poll!(&mut asked).is_pending()
    {
        tokio::task::yield_now().await;
    }
}

/// Waits until a manager knows something: each of its events is a reason to look again.
pub(crate) async fn until(manager: &Manager, is_so: impl Fn(&Inventory) -> bool) {
    let mut events = manager.state.events().listen(None);
    while !is_so(&manager.state.inventory()) {
        events.next().await.unwrap();
    }
}

/// What the agent of a host tells of itself, with the CPU that it gives to guests; none: it does not say.
pub(crate) fn host(name: &str, cpu: Option<&Value>) -> HostInfo {
    serde_json::from_value(json!({
        "name": name, "version": "0.5.0", "kernel": "6.18", "cpu": cpu, "memory_available_bytes": 64_u64 << 30,
        "memory_committed_bytes": 0, "huge_pages": true, "migration_addresses": ["10.0.0.1"], "networks": {}, "peers": {}, "vms": 0,
    }))
    .unwrap()
}

/// What the agent of a host tells of a VM that runs there.
pub(crate) fn vm(name: &str, host: &str, cpu_model: Option<&str>) -> VmInfo {
    serde_json::from_value(json!({
        "name": name, "host": host, "state": "running", "epoch": 3, "memory_bytes": 1_u64 << 30, "vcpus": 1, "accel": "kvm",
        "machine": "pc-q35-10.0", "addresses": [], "spec": { "name": name, "kernel": "/k", "cpu_model": cpu_model },
    }))
    .unwrap()
}

/// Puts a host in that is heard, with these VMs and labels.
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
    inventory.heard(&name, HostEvent::Host(Box::new(info)), 1);
    for vm in vms {
        inventory.heard(&name, HostEvent::Vm(Box::new(vm)), 1);
    }
    inventory.heard(&name, HostEvent::Known, 1);
}

/// What guests can have beside `lm` and `pni`, as the agent of a host with a QEMU of two generations tells it.
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
        "vendor": "GenuineIntel", "name": "Xeon", "accel": "kvm", "features": has, "models": models,
        "generations": {
            "Nehalem-v1": { "features": nehalem, "missing": lacks_n },
            "Haswell-v4": { "features": haswell, "missing": lacks_h, "aliases": ["Haswell"] },
        },
    })
}

/// A baseline with these features beside `lm` and `pni`, as somebody set it.
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
