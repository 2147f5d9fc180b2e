//! The agent: its VMs, each with its condition, and what the host offers them.
//!
//! Every operation on a VM takes three steps. It calls [`Condition::admit`] under the table's lock.
//! It runs without the lock in its own task, so that a client that disconnects leaves nothing half
//! done. It writes the outcome back under the lock.

mod adoption;
mod autostart;
mod change;
mod clone;
mod conflicts;
mod cpu;
mod crashes;
mod doubt;
mod drives;
pub(crate) mod ended;
mod filters;
mod firmware;
mod growth;
mod guest;
mod ha;
mod heartbeats;
mod host;
mod images;
mod jobs;
pub(crate) mod kept_pages;
mod kvm_probe;
pub(crate) mod lifecycle;
mod link;
mod load;
mod moving;
mod nics;
mod own;
mod plug;
mod recovery;
mod released;
mod rename;
mod screen;
mod snapshots;
mod suspend;
mod template;
mod tpm;
mod vm_files;
mod watching;
#[cfg(test)]
mod writes_fail;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use godwit_api::{
    Adoption, ApiError, Client, ErrorCode, RevocationsTaken, SetPeers, SetRevocations, VmInfo,
};
use godwit_pki::Serial;
use godwit_qemu::{AccelProbe, MOST_SERIAL_PORTS, QemuInfo, ResolvedSpec, VmName};
use godwit_ram::RamDir;
use godwit_types::Ownership;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::claims::Claims;
use crate::config::Config;
use crate::crashes::Crashes;
use crate::datastores::{Datastores, Pools, ThinPools};
use crate::disk_arrivals::DiskArrivals;
use crate::ha::HaGuard;
use crate::ha::heartbeats::Heartbeats;
use crate::ha::own::OwnVms;
use crate::incoming_migrations::IncomingMigrations;
use crate::jobs::Jobs;
use crate::lanes_seen::LanesSeen;
use crate::limits::HostLimits;
use crate::load::NewestLoad;
use crate::metrics::Metrics;
use crate::migrations::Migrations;
use crate::network::filter::Filters;
use crate::page_ins::PageIns;
use crate::peers::Peers;
use crate::probes::Probes;
use crate::protection::Protection;
use crate::real_paths::RealPaths;
use crate::references::References;
use crate::snapshots::Snapshots;
use crate::store::{Desired, Role, SavedVm, Store};
use crate::vm::{Condition, Operation, Places, Vm, VmFiles};

/// Longest answer of another agent that is read. The longest valid one reports a minute of a
/// probe's readings, 0.1 MB.
const PEER_ANSWER_BYTES: usize = 1 << 20;

/// Number of known hosts that the error about an unknown host lists.
const MOST_NAMED: usize = 20;

/// The host agent. One for each host, shared by everything that serves it.
#[derive(Debug)]
pub struct Agent {
    config: Config,
    store: Store,
    peers: Peers,
    ram: RamDir,
    places: Places,
    slots: Mutex<BTreeMap<VmName, Slot>>,
    migrations: Migrations,
    incoming: IncomingMigrations,
    arrivals: DiskArrivals,
    page_ins: Arc<PageIns>,
    probes: Probes,
    limits: HostLimits,
    lanes_seen: LanesSeen,
    datastores: Datastores,
    real_paths: RealPaths,
    pools: Pools,
    thin_pools: ThinPools,
    heartbeats: Heartbeats,
    load: NewestLoad,
    ha: Arc<HaGuard>,
    /// VMs that agents restart among themselves.
    own: Arc<OwnVms>,
    /// Whether the VMs that earlier agents left are known.
    knows_vms: watch::Sender<bool>,
    /// `None`: this host is insecure, or communicates with no other host.
    protection: Option<Protection>,
    references: Arc<References>,
    filters: Filters,
    screens: screen::Screens,
    claims: Claims,
    jobs: Jobs,
    adoptions: Jobs<Adoption>,
    /// QEMU programs already queried, with their modification time; a changed program is queried
    /// again.
    qemus: tokio::sync::Mutex<HashMap<PathBuf, (std::time::SystemTime, QemuInfo)>>,
    accels: tokio::sync::Mutex<HashMap<PathBuf, AccelProbe>>,
    /// The version of swtpm, with the program that said it and its modification time.
    swtpm: tokio::sync::Mutex<Option<(PathBuf, std::time::SystemTime, Option<String>)>>,
    /// CPU models that each program offers; a changed program is queried again.
    cpus: tokio::sync::Mutex<cpu::KnownCpus>,
}

/// One VM in the agent's table.
#[derive(Debug)]
struct Slot {
    /// Distinguishes this VM from a later one of the same name.
    identity: Arc<()>,
    condition: Condition,
    /// Why the VM is in that condition, if known.
    reason: Option<String>,
    spec: Arc<ResolvedSpec>,
    ownership: Ownership,
    /// The VM's process, if any.
    vm: Option<Arc<Vm>>,
    snapshots: Arc<Snapshots>,
    /// Its crashes on this host; `None` until it is in the table.
    crashes: Option<Crashes>,
    /// Whether its process ended in this boot of the host while no agent ran.
    ended_unseen: bool,
    /// Whether it is suspended only until its snapshot is taken: its memory stays reserved.
    resumes: bool,
    /// Each held by the reader of a serial port: QEMU serves one reader of each at a time.
    serial_ports: [Arc<tokio::sync::Mutex<()>>; MOST_SERIAL_PORTS as usize],
    /// Places for viewers of the screen.
    viewers: Arc<tokio::sync::Semaphore>,
}

impl Slot {
    fn new(spec: ResolvedSpec, ownership: Ownership, condition: Condition) -> Self {
        Slot {
            identity: Arc::default(),
            condition,
            reason: None,
            spec: Arc::new(spec),
            ownership,
            vm: None,
            snapshots: Arc::default(),
            crashes: None,
            ended_unseen: false,
            resumes: false,
            serial_ports: Default::default(),
            viewers: Arc::new(tokio::sync::Semaphore::new(screen::MOST_VIEWERS_OF_VM)),
        }
    }
}

impl Agent {
    /// Returns the configuration that the agent started with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the outgoing migrations of this host, running and ended.
    #[must_use]
    pub fn migrations(&self) -> &Migrations {
        &self.migrations
    }

    /// Returns the host's metrics.
    pub(crate) fn metrics(&self) -> &Metrics {
        self.migrations.metrics()
    }

    /// Returns the names of the hosts that VMs can move to.
    pub(crate) fn peer_names(&self) -> impl Iterator<Item = String> {
        self.peers.all().into_keys()
    }

    /// Returns the incoming migrations of this host, running and ended.
    #[must_use]
    pub fn incoming(&self) -> &IncomingMigrations {
        &self.incoming
    }

    /// Returns the page-ins: guests that run here while some of their pages are still on the
    /// source.
    pub(crate) fn page_ins(&self) -> &Arc<PageIns> {
        &self.page_ins
    }

    /// Returns the probes of lanes that this host takes part in.
    pub(crate) fn probes(&self) -> &Probes {
        &self.probes
    }

    /// Returns the bandwidth limits of outgoing migrations.
    #[must_use]
    pub fn limits(&self) -> &HostLimits {
        &self.limits
    }

    /// Returns recent measurements of the lanes to other hosts.
    pub(crate) fn lanes_seen(&self) -> &LanesSeen {
        &self.lanes_seen
    }

    /// Returns the guard that decides whether protected VMs may run here.
    pub(crate) fn ha(&self) -> &Arc<HaGuard> {
        &self.ha
    }

    /// Returns the memory from which pages of arriving guests may be restored.
    pub(crate) fn references(&self) -> &Arc<References> {
        &self.references
    }

    /// Returns this host's certificate and the authority it trusts; `None` on an insecure host.
    #[must_use]
    pub fn identity(&self) -> Option<godwit_pki::Identity> {
        self.protection.as_ref().map(Protection::identity)
    }

    /// Creates a client for the agent of another host, by the host's name in the configuration.
    pub fn peer(&self, name: &str) -> Result<Client, ApiError> {
        if name == self.config.name {
            let message = format!("cannot migrate to host {name}: the VM is on that host");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, "name another host"));
        }
        let Some(url) = self.peers.find(name) else {
            let known: Vec<String> = self.peers.all().into_keys().take(MOST_NAMED).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("host {} does not know a host \"{name}\"", self.config.name),
                format!("name a host of its [peers], or one its manager added: {known}"),
            ));
        };
        let endpoint = url.parse()?;
        Ok(match &self.protection {
            Some(protection) => Client::secure(endpoint, &protection.identity(), name),
            None => Client::new(endpoint),
        }
        .with_answers_of_at_most(PEER_ANSWER_BYTES))
    }

    /// Replaces the peers that a manager named; returns all current peers.
    ///
    /// # Errors
    /// An address is not valid for this host, or the disk is full; the earlier peers then stay.
    pub fn set_peers(&self, peers: SetPeers) -> Result<SetPeers, ApiError> {
        tokio::task::block_in_place(|| self.peers.set(&self.config, &self.store, peers))?;
        Ok(SetPeers { peers: self.peers.all() })
    }

    /// Replaces the list of revoked certificates.
    ///
    /// # Errors
    /// The list is invalid or older than the current one; this host has no certificate; the disk is
    /// full.
    pub fn set_revocations(&self, list: &SetRevocations) -> Result<RevocationsTaken, ApiError> {
        let Some(protection) = &self.protection else {
            let message = format!("host {} has no certificate and checks none", self.config.name);
            return Err(ApiError::new(ErrorCode::WrongState, message, "set [tls] on the host"));
        };
        tokio::task::block_in_place(|| protection.revoke(&list.list))
    }

    /// Waits until a certificate is revoked; never returns on a host that checks none.
    pub(crate) async fn until_revoked(&self, serial: &Serial) {
        match &self.protection {
            Some(protection) => protection.until_revoked(serial).await,
            None => std::future::pending().await,
        }
    }

    /// Returns every VM, by name.
    #[must_use]
    pub fn vms(&self) -> Vec<VmInfo> {
        self.table().iter().map(|(name, slot)| self.describe(name, slot)).collect()
    }

    pub fn vm_info(&self, name: &str) -> Result<VmInfo, ApiError> {
        let table = self.table();
        let (name, slot) = table.get_key_value(name).ok_or_else(|| self.no_vm(name))?;
        Ok(self.describe(name, slot))
    }

    /// Returns the process of a VM; `None` if it has none.
    pub fn vm(&self, name: &str) -> Result<Option<Arc<Vm>>, ApiError> {
        Ok(self.table().get(name).ok_or_else(|| self.no_vm(name))?.vm.clone())
    }

    /// Returns the files of a VM, whether or not it has a process.
    pub fn files(&self, name: &VmName) -> Result<VmFiles, ApiError> {
        self.vm(name)?;
        Ok(self.places.vm(name))
    }

    /// Returns the socket of a VM's serial port, counted from 1, and the exclusive right to read
    /// it, released when dropped.
    pub fn console(
        &self,
        name: &str,
        port: u32,
    ) -> Result<(PathBuf, tokio::sync::OwnedMutexGuard<()>), ApiError> {
        let table = self.table();
        let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
        let Some(vm) = &slot.vm else { return Err(slot.condition.without("console", name)) };
        let lock = port.checked_sub(1).and_then(|index| slot.serial_ports.get(index as usize));
        let Some(lock) = lock.filter(|_| port <= slot.spec.serial_ports) else {
            return Err(no_serial_port(name, port, slot.spec.serial_ports));
        };
        let alone = lock.clone().try_lock_owned().map_err(|_| {
            let message = format!("cannot open the console of VM \"{name}\": it is in use");
            ApiError::new(
                ErrorCode::Busy,
                message,
                "wait until it is free, or follow it with `godwit vm logs -f`",
            )
        })?;
        Ok((vm.files.serial_socket(port), alone))
    }

    fn describe(&self, name: &VmName, slot: &Slot) -> VmInfo {
        let condition = slot.condition.shown();
        let migration = match condition {
            Condition::MigratingOut { migration } => Some(migration.clone()),
            _ => None,
        };
        let reason = match condition {
            Condition::MigratingIn { from } if slot.reason.is_none() => {
                Some(format!("arriving from host {from}, where it still runs"))
            }
            _ => slot.reason.clone(),
        };
        let losses = slot.vm.as_ref().map(|vm| vm.losses()).unwrap_or_default();
        let reasons: Vec<String> =
            reason.into_iter().chain(losses.tpm).chain(losses.filter).collect();
        VmInfo {
            name: name.to_string(),
            host: self.config.name.clone(),
            state: condition.state(),
            reason: (!reasons.is_empty()).then(|| reasons.join("; ")),
            in_doubt: condition.is_in_doubt(),
            incarnation: slot.ownership.incarnation,
            epoch: slot.ownership.epoch,
            pid: slot.vm.as_ref().map(|vm| vm.process.pid),
            memory_bytes: slot.spec.memory_bytes(),
            vcpus: slot.spec.vcpus,
            accel: slot.spec.accel.to_string(),
            machine: slot.spec.machine.clone(),
            migration,
            page_in: self.page_ins.state(name),
            last_crash: slot.crashes.as_ref().and_then(Crashes::shown),
            snapshots: slot.snapshots.all.len(),
            frozen_until_ms: slot.vm.as_ref().and_then(|vm| vm.guest.frozen_until_ms()),
            addresses: slot.spec.nics.iter().filter_map(|nic| nic.address).collect(),
            spec: slot.spec.to_vm_spec().without_secrets(),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<VmName, Slot>> {
        self.slots.lock()
    }

    /// Begins an operation: changes the condition to "under way", or returns why the operation is
    /// not admitted.
    fn begin(&self, name: &str, operation: &Operation) -> Result<Begun, ApiError> {
        let mut table = self.table();
        let slot = table.get_mut(name).ok_or_else(|| self.no_vm(name))?;
        let next = slot.condition.admit(name, operation)?;
        let before = std::mem::replace(&mut slot.condition, next);
        Ok(Begun {
            before,
            spec: slot.spec.clone(),
            ownership: slot.ownership,
            vm: slot.vm.clone(),
            reason: slot.reason.clone(),
        })
    }

    /// Records an operation's outcome.
    fn settle(
        &self,
        name: &VmName,
        condition: Condition,
        vm: Option<Arc<Vm>>,
        reason: Option<String>,
    ) {
        if let Some(slot) = self.table().get_mut(name) {
            tracing::info!(vm = name.as_str(), state = %condition.state(), reason, "state changed");
            slot.condition = condition;
            slot.vm = vm;
            slot.reason = reason;
        }
    }

    /// Records the specification that a VM's process was started with; it may contain backing
    /// chains recorded at the start.
    fn know_spec(&self, vm: &Vm) {
        if let Some(slot) = self.table().get_mut(&vm.name) {
            slot.spec = vm.spec();
        }
    }

    /// Saves a VM's record with a blocking write.
    fn save(
        &self,
        spec: &ResolvedSpec,
        role: Role,
        desired: Desired,
        ownership: Ownership,
    ) -> Result<(), ApiError> {
        let record = SavedVm::new(spec.clone(), role, desired, ownership);
        Ok(tokio::task::block_in_place(|| self.store.save(&record))?)
    }

    /// Saves a record with a blocking write.
    fn save_record(&self, record: &SavedVm) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save(record))?)
    }

    /// Saves a record in place of `stale` (`None`: there was no record). If another record has been
    /// saved since, that one stays, because it is newer.
    fn save_over(&self, stale: Option<&SavedVm>, record: &SavedVm) -> Result<(), ApiError> {
        let Some(stale) = stale else { return self.save_record(record) };
        let saved = tokio::task::block_in_place(|| self.store.save_over(stale, record))?;
        if !saved {
            tracing::debug!(vm = record.spec.name.as_str(), "record not saved: a newer one exists");
        }
        Ok(())
    }

    /// Reads a VM's record; `None` if there is none.
    ///
    /// # Errors
    /// The record cannot be read. Its content is then unknown, and nothing that depends on it may
    /// be done.
    fn read_record(&self, name: &VmName) -> Result<Option<SavedVm>, ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.read(name))?)
    }

    /// Returns a VM's record on disk, if it can be read.
    fn record(&self, name: &VmName) -> Option<SavedVm> {
        tokio::task::block_in_place(|| self.store.load(name))
    }

    /// Records a new epoch of a VM's ownership.
    fn new_epoch(&self, vm: &Vm, epoch: u64) {
        vm.set_epoch(epoch);
        if let Some(slot) = self.table().get_mut(&vm.name) {
            slot.ownership.epoch = epoch;
        }
    }

    fn no_vm(&self, name: &str) -> ApiError {
        ApiError::new(
            ErrorCode::NotFound,
            format!("no VM \"{name}\" on host {}", self.config.name),
            "see `godwit vm list`",
        )
    }
}

/// Input of an operation that has been admitted.
#[derive(Debug)]
struct Begun {
    before: Condition,
    spec: Arc<ResolvedSpec>,
    ownership: Ownership,
    vm: Option<Arc<Vm>>,
    reason: Option<String>,
}

impl Begun {
    /// Drops a process that the operation has ended; such a process retains nothing.
    fn lose_what_ended(&mut self) {
        if self.vm.take_if(|vm| vm.process.exit().is_some()).is_some() && self.before.is_in_doubt()
        {
            self.before = Condition::InDoubt { keeps_pages_for: None };
        }
    }
}

/// Error of a request for a serial port that a VM does not have.
pub(crate) fn no_serial_port(name: &str, port: u32, ports: u32) -> ApiError {
    let message = format!("cannot open serial port {port} of VM \"{name}\": it has {ports}");
    ApiError::new(ErrorCode::NotFound, message, "see serial_ports of `godwit vm show`")
}
