//! The thread that keeps the history of load: it gets every sample, owns the files, and answers
//! requests for what it has. It is the only one that reads and writes them, so handlers never wait
//! for a disk, and its queue has a bound.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use godwit_api::control::LoadResolution;
use godwit_api::{LOAD_INTERVAL_MS, LoadSample, VmLoad};
use godwit_qemu::Uuid;
use tokio::sync::oneshot;

use super::figures::{Figures, Object, Row};
use super::files::{Files, file_name};
use super::latest::Latest;
use super::measured::{DatastoreTotal, add, add_datastores, of_host, of_vm};
use super::rings::{FAST, HOURS, MINUTES};
use super::series::Series;
use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;

/// Capacity of the queue: samples and requests.
const QUEUE: usize = 256;
/// Most objects in memory. Objects beyond have no history.
const MOST_OBJECTS: usize = 20_000;
/// Time without a sample after which an object leaves the memory. Its file stays.
const IDLE: Duration = Duration::from_secs(600);
/// Interval of looking for idle objects.
const IDLE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval of removing files.
const REMOVAL_INTERVAL: Duration = Duration::from_secs(3_600);
/// Time for which the history of an object is kept that is gone.
const KEPT_AFTER_END: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Age up to which a host's sample counts for the datastores and the cluster.
const COUNTED_MS: u64 = 3 * LOAD_INTERVAL_MS;

/// Something for the thread to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Note a sample of a host, which arrived at `at_ms`.
    Sample { host: String, at_ms: u64, sample: Arc<LoadSample> },
    /// Read rows.
    Read(Read, oneshot::Sender<io::Result<BTreeMap<u64, Row>>>),
    /// Write everything that is in memory.
    Flush(oneshot::Sender<()>),
}

/// Rows to read: periods from `first` to the one before `end`.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) object: Object,
    pub(crate) resolution: LoadResolution,
    pub(crate) first: u64,
    pub(crate) end: u64,
    pub(crate) now_ms: u64,
}

struct Kept {
    series: Series,
    used: Instant,
}

/// State of the thread.
struct Archive {
    state: Arc<State>,
    files: Files,
    kept: BTreeMap<Object, Kept>,
    /// Name of the VM whose samples count for a UUID.
    names: BTreeMap<Uuid, String>,
    latest: Latest,
    /// Period of five seconds in which samples arrive.
    period: u64,
    looked: Instant,
    removed: Instant,
    /// Whether the last write or read failed, which is logged once.
    is_failing: bool,
}

/// Starts the thread with the files in a directory. When the sender is dropped, it writes
/// everything and ends.
pub(crate) fn begin(dir: &Path, state: Arc<State>) -> io::Result<SyncSender<Work>> {
    let archive = Archive::new(Files::open(dir)?, state);
    let (sender, receiver) = sync_channel(QUEUE);
    thread::Builder::new().name("load".to_owned()).spawn(move || archive.run(&receiver))?;
    Ok(sender)
}

/// Returns whether a host holds this VM: its samples of other VMs do not count.
pub(crate) fn holds(inventory: &Inventory, host: &str, load: &VmLoad) -> bool {
    let found = inventory.vm_info(&load.name).filter(|info| info.host == host);
    !load.uuid.is_nil() && found.is_some_and(|info| info.spec.uuid == Some(load.uuid))
}

impl Archive {
    fn new(files: Files, state: Arc<State>) -> Archive {
        let now = Instant::now();
        Archive {
            state,
            files,
            kept: BTreeMap::new(),
            names: BTreeMap::new(),
            latest: Latest::default(),
            period: 0,
            looked: now,
            removed: now,
            is_failing: false,
        }
    }

    fn run(mut self, work: &Receiver<Work>) {
        loop {
            match work.recv_timeout(IDLE_INTERVAL) {
                Ok(work) => self.carry_out(work),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.looked.elapsed() >= IDLE_INTERVAL {
                self.looked = Instant::now();
                self.forget(IDLE);
            }
            if self.removed.elapsed() >= REMOVAL_INTERVAL {
                self.removed = Instant::now();
                self.remove_files();
            }
        }
        self.forget(Duration::ZERO);
    }

    fn carry_out(&mut self, work: Work) {
        match work {
            Work::Sample { host, at_ms, sample } => self.take(&host, at_ms, &sample),
            // The receiver is gone if the caller no longer waits.
            Work::Read(read, answer) => drop(answer.send(self.read(&read))),
            Work::Flush(done) => {
                self.forget(Duration::ZERO);
                let _ = done.send(());
            }
        }
    }

    fn take(&mut self, host: &str, at_ms: u64, sample: &Arc<LoadSample>) {
        let period = at_ms / LOAD_INTERVAL_MS;
        if period != self.period {
            self.take_totals((self.period + 1) * LOAD_INTERVAL_MS);
            self.period = period;
        }
        self.latest.put(host, at_ms, Arc::clone(sample));
        let own: Vec<&VmLoad> = {
            let inventory = self.state.inventory();
            let vms = sample.vms.iter().filter(|load| holds(&inventory, host, load));
            vms.filter(|load| self.has_name(&inventory, load)).collect()
        };
        let interval_ms = sample.interval_ms;
        for load in own {
            self.names.insert(load.uuid, load.name.clone());
            self.note(&Object::Vm(load.uuid), at_ms, interval_ms, &of_vm(load));
        }
        self.note(&Object::Host(host.to_owned()), at_ms, interval_ms, &of_host(sample));
    }

    /// Returns whether no other VM has this one's UUID: a second one would spoil its history.
    fn has_name(&self, inventory: &Inventory, load: &VmLoad) -> bool {
        let other = self.names.get(&load.uuid).filter(|name| **name != load.name);
        let other = other.and_then(|name| inventory.vm_info(name));
        other.is_none_or(|other| other.spec.uuid != Some(load.uuid))
    }

    /// Notes the load of the datastores and the cluster in the period that ended at `at_ms`.
    fn take_totals(&mut self, at_ms: u64) {
        let mut cluster: Option<Figures> = None;
        let mut datastores = BTreeMap::<String, DatastoreTotal>::new();
        {
            let inventory = self.state.inventory();
            for (host, sample) in self.latest.within(COUNTED_MS, at_ms) {
                let figures = of_host(sample);
                cluster = Some(cluster.map_or(figures, |sum| add(&sum, &figures)));
                if let Some(info) = inventory.host_info(host) {
                    let id_of = |dir: &Path| inventory.datastore_at(host, dir);
                    add_datastores(&mut datastores, sample, info, id_of);
                }
            }
        }
        if let Some(figures) = cluster {
            self.note(&Object::Cluster, at_ms, LOAD_INTERVAL_MS, &figures);
        }
        for (id, total) in datastores {
            self.note(&Object::Datastore(id), at_ms, LOAD_INTERVAL_MS, &total.figures());
        }
    }

    fn note(&mut self, object: &Object, at_ms: u64, interval_ms: u64, figures: &Figures) {
        if !self.open(object, at_ms) {
            return;
        }
        let Some(kept) = self.kept.get_mut(object) else { return };
        kept.used = Instant::now();
        if kept.series.take(at_ms, interval_ms, &Row::of(figures)) {
            self.write(object);
        }
    }

    /// Makes sure that an object is in memory. Returns false if there is no room.
    fn open(&mut self, object: &Object, now_ms: u64) -> bool {
        if self.kept.contains_key(object) {
            return true;
        }
        if self.kept.len() >= MOST_OBJECTS {
            return false;
        }
        let newest = now_ms / LoadResolution::Minute.period_ms();
        let minutes = self.files.ring(object, MINUTES, newest);
        let minutes = minutes.unwrap_or_else(|error| {
            self.complain("read", object, &error);
            BTreeMap::new()
        });
        let kept = Kept { series: Series::resume(&minutes), used: Instant::now() };
        self.kept.insert(object.clone(), kept);
        true
    }

    /// Writes what an object has in memory and not in its file.
    fn write(&mut self, object: &Object) {
        let Some(kept) = self.kept.get_mut(object) else { return };
        let writes = kept.series.take_unwritten();
        if writes.is_empty() {
            return;
        }
        match self.files.write(object, &writes) {
            Ok(()) => self.is_failing = false,
            Err(error) => self.complain("write", object, &error),
        }
    }

    fn complain(&mut self, verb: &str, object: &Object, error: &io::Error) {
        if !std::mem::replace(&mut self.is_failing, true) {
            let object = object.label();
            tracing::warn!(object, %error, "cannot {verb} the history of load; it has a gap");
        }
    }

    fn read(&mut self, read: &Read) -> io::Result<BTreeMap<u64, Row>> {
        let Read { object, resolution, first, end, now_ms } = read;
        let newest = now_ms / resolution.period_ms();
        let mut rows = match resolution {
            LoadResolution::FiveSeconds => self.files.ring(object, FAST, newest)?,
            LoadResolution::Minute => self.files.ring(object, MINUTES, newest)?,
            LoadResolution::Hour => {
                self.files.hours(object, first / HOURS, end.saturating_sub(1) / HOURS)?
            }
        };
        // The hours of the day in progress are in memory alone.
        let is_known = self.kept.contains_key(object) || self.files.has(object);
        if is_known
            && self.open(object, *now_ms)
            && let Some(kept) = self.kept.get(object)
        {
            rows.extend(kept.series.rows(*resolution));
        }
        rows.retain(|period, _| (*first..*end).contains(period));
        Ok(rows)
    }

    /// Writes the objects that got no sample for a time, and drops them from memory.
    fn forget(&mut self, idle: Duration) {
        let is_idle = |kept: &Kept| kept.used.elapsed() >= idle;
        let idle: Vec<Object> = self
            .kept
            .iter()
            .filter(|(_, kept)| is_idle(kept))
            .map(|(object, _)| object.clone())
            .collect();
        for object in idle {
            if let Some(kept) = self.kept.get_mut(&object) {
                kept.series.end_minute();
            }
            self.write(&object);
            self.kept.remove(&object);
        }
        self.names.retain(|uuid, _| self.kept.contains_key(&Object::Vm(*uuid)));
    }

    /// Removes the files of objects that no host has reported for a time.
    fn remove_files(&mut self) {
        let mut known: BTreeSet<String> = self.kept.keys().map(file_name).collect();
        {
            let inventory = self.state.inventory();
            known.insert(file_name(&Object::Cluster));
            let uuids = inventory.all_vms().filter_map(|vm| vm.spec.uuid);
            known.extend(uuids.map(|uuid| file_name(&Object::Vm(uuid))));
            let hosts = inventory.plans().map(|(name, _)| Object::Host(name.to_owned()));
            known.extend(hosts.map(|host| file_name(&host)));
            let datastores = inventory.all_datastores().into_iter();
            known.extend(datastores.map(|one| file_name(&Object::Datastore(one.id))));
        }
        match self.files.remove_idle(&known, KEPT_AFTER_END, SystemTime::now()) {
            Ok(0) => {}
            Ok(files) => tracing::info!(files, "removed the load of objects that are gone"),
            Err(error) => tracing::warn!(%error, "cannot remove old history of load"),
        }
    }
}

#[cfg(test)]
mod tests;
