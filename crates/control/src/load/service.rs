//! Service of the load: takes samples from the hosts' agents, and answers requests.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};

use godwit_api::control::{
    LoadCapacity, LoadHistory, LoadResolution, LoadTop, Problem, ProblemCode, TopBy,
};
use godwit_api::{LoadSample, VmLoad};
use godwit_qemu::Uuid;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::archive::{self, Read, Work, holds};
use super::figures::Object;
use super::latest::Latest;
use super::span::Span;
use crate::agents::following::LoadSink;
use crate::clock::now_unix_ms;
use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;

/// Request for the load of an object.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadQuery {
    /// `vm:NAME`, `vm:UUID`, `host:NAME`, `datastore:NAME` or `cluster`.
    pub(crate) object: String,
    pub(crate) from_ms: Option<u64>,
    pub(crate) to_ms: Option<u64>,
    pub(crate) resolution: Option<LoadResolution>,
}

/// Latest load of the cluster, and its history.
#[derive(Debug)]
pub(crate) struct Loads {
    state: Arc<State>,
    latest: Mutex<Latest>,
    /// Queue of the thread that keeps the history.
    archive: OnceLock<SyncSender<Work>>,
    /// Whether the thread is behind, which is logged once.
    is_behind: AtomicBool,
}

impl Loads {
    /// Returns a service that keeps no history yet.
    pub(crate) fn new(state: Arc<State>) -> Arc<Loads> {
        Arc::new(Loads {
            state,
            latest: Mutex::default(),
            archive: OnceLock::new(),
            is_behind: AtomicBool::new(false),
        })
    }

    /// Keeps the history in a directory from now on.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub(crate) fn keep_in(&self, dir: &Path) -> io::Result<()> {
        let queue = archive::begin(dir, Arc::clone(&self.state))?;
        let _ = self.archive.set(queue);
        Ok(())
    }

    /// Writes the history that is in memory.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        let queued = self.archive.get().is_some_and(|queue| {
            // A full queue is a thread that is far behind: the end does not wait for it.
            queue.try_send(Work::Flush(done)).is_ok()
        });
        if queued {
            let _ = written.await;
        }
    }

    /// Returns the load of an object over time.
    ///
    /// # Errors
    /// The object is unknown, the times are no span, or the history is unreadable.
    pub(crate) async fn history(&self, query: &LoadQuery) -> Result<LoadHistory, Problem> {
        let (object, capacity) = find(&self.state.inventory(), &query.object)?;
        let now_ms = now_unix_ms();
        let span = Span::of(now_ms, query.from_ms, query.to_ms, query.resolution)?;
        let Span { resolution, first, end, .. } = span;
        let read = Read { object: object.clone(), resolution, first, end, now_ms };
        let (answer, rows) = oneshot::channel();
        let queue = self.archive.get().ok_or_else(|| unreadable("it is not kept"))?;
        queue.try_send(Work::Read(read, answer)).map_err(|error| match error {
            TrySendError::Full(_) => Problem::new(
                ProblemCode::TooManyRequests,
                "the history of load is busy",
                "try again in a second",
            ),
            TrySendError::Disconnected(_) => unreadable("its thread has ended"),
        })?;
        let rows = rows.await.map_err(|_| unreadable("its thread has ended"))?;
        let rows = rows.map_err(|error| unreadable(&error.to_string()))?;
        Ok(span.shown(&query.object, &object, capacity, &rows))
    }

    /// Returns the VMs and hosts that use most at present.
    pub(crate) fn top(&self, by: TopBy, limit: usize) -> LoadTop {
        let inventory = self.state.inventory();
        let has = |host: &str, load: &VmLoad| holds(&inventory, host, load);
        self.latest.lock().top(by, limit, now_unix_ms(), has)
    }
}

impl LoadSink for Loads {
    fn take(&self, host: &str, sample: Box<LoadSample>) {
        let (sample, at_ms) = (Arc::<LoadSample>::from(sample), now_unix_ms());
        if !self.latest.lock().put(host, at_ms, Arc::clone(&sample)) {
            return;
        }
        let Some(queue) = self.archive.get() else { return };
        let work = Work::Sample { host: host.to_owned(), at_ms, sample };
        let is_behind = queue.try_send(work).is_err();
        if is_behind && !self.is_behind.swap(true, Ordering::Relaxed) {
            tracing::warn!("the history of load has a gap: its disk is too slow for the samples");
        } else if !is_behind {
            self.is_behind.store(false, Ordering::Relaxed);
        }
    }
}

fn unreadable(why: &str) -> Problem {
    let detail = format!("cannot read the history of load: {why}");
    let remedy = "check the file system of the manager's `state_dir` and its log";
    Problem::new(ProblemCode::ManagerFailed, detail, remedy)
}

/// Finds the object of a request, and its present limits.
fn find(inventory: &Inventory, named: &str) -> Result<(Object, LoadCapacity), Problem> {
    match named.split_once(':') {
        None if named == "cluster" => Ok((Object::Cluster, of_hosts(inventory, None))),
        Some(("vm", name)) => find_vm(inventory, name),
        Some(("host", name)) if inventory.host_plan(name).is_some() => {
            Ok((Object::Host(name.to_owned()), of_hosts(inventory, Some(name))))
        }
        Some(("host", name)) => {
            let detail = format!("host {name} is unknown");
            let remedy = "`godwit control host list` lists the hosts";
            Err(Problem::new(ProblemCode::NotFound, detail, remedy))
        }
        Some(("datastore", name)) => {
            let found = inventory.find_datastore(name)?;
            let space_bytes = found.total_bytes;
            let capacity = LoadCapacity { space_bytes, ..LoadCapacity::default() };
            Ok((Object::Datastore(found.id), capacity))
        }
        _ => {
            let detail = format!("\"{named}\" is no object with a load");
            let remedy = "use vm:NAME, host:NAME, datastore:NAME or cluster";
            Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
        }
    }
}

/// Finds a VM by its name, or by its UUID: one that is gone is in no list.
fn find_vm(inventory: &Inventory, name: &str) -> Result<(Object, LoadCapacity), Problem> {
    if let Some(info) = inventory.vm_info(name) {
        let capacity = LoadCapacity {
            cpu_millicores: Some(u64::from(info.vcpus) * 1_000),
            memory_bytes: Some(info.memory_bytes),
            space_bytes: None,
        };
        // One without a UUID, of an agent of an earlier version, has no history.
        return Ok((Object::Vm(info.spec.uuid.unwrap_or_default()), capacity));
    }
    let uuid = Uuid::parse_str(name).map_err(|_| {
        let detail = format!("VM {name} is unknown");
        let remedy = "`godwit control vms` lists the VMs; name one that is gone by its UUID";
        Problem::new(ProblemCode::NotFound, detail, remedy)
    })?;
    Ok((Object::Vm(uuid), LoadCapacity::default()))
}

/// Returns the limits of a host, or of all hosts; those that have not reported are left out.
fn of_hosts(inventory: &Inventory, host: Option<&str>) -> LoadCapacity {
    let infos = inventory
        .seen_hosts()
        .filter(|seen| host.is_none_or(|host| seen.name == host))
        .filter_map(|seen| seen.info);
    let (mut cores, mut memory) = (0_u64, 0_u64);
    for info in infos {
        cores = cores.saturating_add(u64::from(info.logical_cores));
        memory = memory.saturating_add(info.memory_total_bytes);
    }
    let known = |value: u64| (value > 0).then_some(value);
    LoadCapacity {
        cpu_millicores: known(cores.saturating_mul(1_000)),
        memory_bytes: known(memory),
        space_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::HostEvent;

    use super::*;
    use crate::rig;

    #[test]
    fn objects_are_found_by_name_and_their_limits_are_shown() {
        let state = State::default();
        state.change(|inventory| {
            let vms = vec![rig::vm("web", "a", None)];
            let mut host = rig::host("a", None);
            (host.logical_cores, host.memory_total_bytes) = (16, 64 << 30);
            rig::put_host(inventory, host, &[], vms);
            None
        });
        let inventory = state.inventory();
        let (object, capacity) = find(&inventory, "vm:web").unwrap();
        let uuid = inventory.vm_info("web").unwrap().spec.uuid;
        assert_eq!(object, Object::Vm(uuid.unwrap_or_default()));
        assert_eq!(capacity.cpu_millicores, Some(1_000));
        for named in ["host:a", "cluster"] {
            let (_, capacity) = find(&inventory, named).unwrap();
            assert_eq!(capacity.cpu_millicores, Some(16_000), "{named}");
            assert_eq!(capacity.memory_bytes, Some(64 << 30));
        }
        let gone = Uuid::from_u128(7);
        let (object, capacity) = find(&inventory, &format!("vm:{gone}")).unwrap();
        assert_eq!((object, capacity), (Object::Vm(gone), LoadCapacity::default()));
        for (named, code) in [
            ("vm:none", ProblemCode::NotFound),
            ("host:none", ProblemCode::NotFound),
            ("datastore:none", ProblemCode::NotFound),
            ("web", ProblemCode::InvalidRequest),
            ("cluster:x", ProblemCode::InvalidRequest),
            ("", ProblemCode::InvalidRequest),
        ] {
            assert_eq!(find(&inventory, named).unwrap_err().code, code, "{named}");
        }
    }

    #[tokio::test]
    async fn a_service_without_a_directory_has_no_history_but_shows_the_present() {
        let state = Arc::<State>::default();
        state.change(|inventory| {
            rig::put_host(inventory, rig::host("a", None), &[], Vec::new());
            None
        });
        state.apply("a", HostEvent::Known);
        let loads = Loads::new(state);
        loads.take("a", Box::default());
        assert_eq!(loads.top(TopBy::Cpu, 10).hosts_total, 1);
        let query = LoadQuery { object: "host:a".into(), ..LoadQuery::default() };
        let problem = loads.history(&query).await.unwrap_err();
        assert_eq!(problem.code, ProblemCode::ManagerFailed);
        loads.flush().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_sample_is_in_the_history_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let state = Arc::<State>::default();
        state.change(|inventory| {
            rig::put_host(inventory, rig::host("a", None), &[], Vec::new());
            None
        });
        let loads = Loads::new(state);
        loads.keep_in(&dir.path().join("load")).unwrap();
        let mut sample = LoadSample { interval_ms: 5_000, ..LoadSample::default() };
        sample.host.cpu_used_millicores = 700;
        loads.take("a", Box::new(sample));
        let query = LoadQuery {
            object: "host:a".into(),
            resolution: Some(LoadResolution::Minute),
            ..LoadQuery::default()
        };
        let history = loads.history(&query).await.unwrap();
        let cpu = &history.series[0];
        assert!(cpu.mean.contains(&Some(700)), "{history:?}");
        loads.flush().await;
        assert_eq!(std::fs::read_dir(dir.path().join("load")).unwrap().count(), 1);
    }
}
