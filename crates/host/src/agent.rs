//! The agent: its VMs, each with its condition, and what the host offers them.
//!
//! Every operation on a VM asks [`Condition::admit`] under the table's lock, works without the lock in a task of its
//! own (so that a client that hangs up stops nothing half-way), and writes the outcome back under the lock.

mod cpu;
mod doubt;
mod ended;
mod host;
mod lifecycle;
mod moving;
mod recovery;
mod vm_files;
mod watching;
#[cfg(test)]
mod writes_fail;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_api::{ApiError, Client, ErrorCode, RevocationsTaken, SetPeers, SetRevocations, VmInfo};
use godwit_pki::Serial;
use godwit_qemu::{AccelProbe, QemuInfo, ResolvedSpec, VmName};
use godwit_ram::RamDir;
use godwit_types::Ownership;

use crate::config::Config;
use crate::datastores::Datastores;
use crate::lanes_seen::LanesSeen;
use crate::limits::HostLimits;
use crate::metrics::Metrics;
use crate::migration::{IncomingMigrations, PageIns};
use crate::migrations::Migrations;
use crate::peers::Peers;
use crate::probe::Probes;
use crate::protection::Protection;
use crate::references::References;
use crate::store::{Desired, Role, SavedVm, Store};
use crate::vm::{Condition, Operation, Places, Vm, VmFiles};

pub(crate) use ended::shut_down;

/// The longest answer of another agent that is read; the longest there is tells a minute of a probe's readings, 0.1 MB.
const PEER_ANSWER_BYTES: usize = 1 << 20;

/// As many hosts are told to who names one that is not known.
const MOST_NAMED: usize = 20;

/// The host agent. One a host; shared by everything that serves it.
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
    page_ins: PageIns,
    probes: Probes,
    limits: HostLimits,
    lanes_seen: LanesSeen,
    datastores: Datastores,
    /// None: this host is insecure, or speaks to nobody.
    protection: Option<Protection>,
    references: Arc<References>,
    /// QEMU binaries asked already, with the time of their last change: an upgraded one is asked again.
    qemus: tokio::sync::Mutex<HashMap<PathBuf, (std::time::SystemTime, QemuInfo)>>,
    accels: tokio::sync::Mutex<HashMap<PathBuf, AccelProbe>>,
    /// What CPU each of them can give; an upgraded one is asked again.
    cpus: tokio::sync::Mutex<cpu::KnownCpus>,
}

/// One VM in the agent's table.
#[derive(Debug)]
struct Slot {
    /// Tells it from another VM that has its name later.
    identity: Arc<()>,
    condition: Condition,
    /// What is known about how it came into that condition.
    reason: Option<String>,
    spec: Arc<ResolvedSpec>,
    ownership: Ownership,
    /// Its process, where there is one.
    vm: Option<Arc<Vm>>,
    /// Held by whoever reads the console: QEMU serves one at a time.
    console: Arc<tokio::sync::Mutex<()>>,
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
            console: Arc::default(),
        }
    }
}

impl Agent {
    /// The configuration it was started with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The migrations that run or ran from this host.
    #[must_use]
    pub fn migrations(&self) -> &Migrations {
        &self.migrations
    }

    /// What is measured of this host.
    pub(crate) fn metrics(&self) -> &Metrics {
        self.migrations.metrics()
    }

    /// The hosts that VMs can be moved to.
    pub(crate) fn peer_names(&self) -> impl Iterator<Item = String> {
        self.peers.all().into_keys()
    }

    /// The migrations that arrive or arrived at this host.
    #[must_use]
    pub fn incoming(&self) -> &IncomingMigrations {
        &self.incoming
    }

    /// The guests that run here while pages of them are elsewhere.
    pub(crate) fn page_ins(&self) -> &PageIns {
        &self.page_ins
    }

    /// The probe that this host takes part in, if any.
    pub(crate) fn probes(&self) -> &Probes {
        &self.probes
    }

    /// How fast the pages of guests may leave this host.
    #[must_use]
    pub fn limits(&self) -> &HostLimits {
        &self.limits
    }

    /// What was lately seen of the lanes to other hosts.
    pub(crate) fn lanes_seen(&self) -> &LanesSeen {
        &self.lanes_seen
    }

    /// Memory that arriving guests' pages may be made of.
    pub(crate) fn references(&self) -> &Arc<References> {
        &self.references
    }

    /// What this host shows to others and expects of them; none where it is insecure.
    #[must_use]
    pub fn identity(&self) -> Option<godwit_pki::Identity> {
        self.protection.as_ref().map(Protection::identity)
    }

    /// A client of another host's agent, by the name that the configuration gives it.
    pub fn peer(&self, name: &str) -> Result<Client, ApiError> {
        if name == self.config.name {
            let message = format!("host {name} is the host the VM is on");
            return Err(ApiError::new(ErrorCode::InvalidRequest, message, "name another host"));
        }
        let Some(url) = self.peers.find(name) else {
            let known: Vec<String> = self.peers.all().into_keys().take(MOST_NAMED).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(ApiError::new(
                ErrorCode::NotFound,
                format!("host {} knows no host \"{name}\"", self.config.name),
                format!("its configuration's [peers], or its manager, names: {known}"),
            ));
        };
        let endpoint = url.parse()?;
        Ok(match &self.protection {
            Some(protection) => Client::secure(endpoint, &protection.identity(), name),
            None => Client::new(endpoint),
        }
        .with_answers_of_at_most(PEER_ANSWER_BYTES))
    }

    /// Names hosts that VMs can be moved to, in the place of those named before; gives those that there are now.
    ///
    /// # Errors
    /// One of them can't be an agent's address here, or the disk is full: those named before stay.
    pub fn set_peers(&self, peers: SetPeers) -> Result<SetPeers, ApiError> {
        tokio::task::block_in_place(|| self.peers.set(&self.config, &self.store, peers))?;
        Ok(SetPeers { peers: self.peers.all() })
    }

    /// Takes a list of revoked certificates in the place of the one before.
    ///
    /// # Errors
    /// It is not good, or an older one; this host has no certificate; the disk is full.
    pub fn set_revocations(&self, list: &SetRevocations) -> Result<RevocationsTaken, ApiError> {
        let Some(protection) = &self.protection else {
            let message = format!("host {} has no certificate, and checks none", self.config.name);
            return Err(ApiError::new(ErrorCode::WrongState, message, "give the host [tls]"));
        };
        tokio::task::block_in_place(|| protection.revoke(&list.list))
    }

    /// Waits until a certificate is revoked: for ever, where this host checks none.
    pub(crate) async fn until_revoked(&self, serial: &Serial) {
        match &self.protection {
            Some(protection) => protection.until_revoked(serial).await,
            None => std::future::pending().await,
        }
    }

    /// Every VM, by name.
    #[must_use]
    pub fn vms(&self) -> Vec<VmInfo> {
        self.table().iter().map(|(name, slot)| self.describe(name, slot)).collect()
    }

    pub fn vm_info(&self, name: &str) -> Result<VmInfo, ApiError> {
        let table = self.table();
        let (name, slot) = table.get_key_value(name).ok_or_else(|| self.no_vm(name))?;
        Ok(self.describe(name, slot))
    }

    /// The process of a VM; none while it has none.
    pub fn vm(&self, name: &str) -> Result<Option<Arc<Vm>>, ApiError> {
        Ok(self.table().get(name).ok_or_else(|| self.no_vm(name))?.vm.clone())
    }

    /// The files of a VM, whether or not it has a process.
    pub fn files(&self, name: &VmName) -> Result<VmFiles, ApiError> {
        self.vm(name)?;
        Ok(self.places.vm(name))
    }

    /// The socket of a VM's console and the right to be its only reader, given back when dropped.
    pub fn console(
        &self,
        name: &str,
    ) -> Result<(PathBuf, tokio::sync::OwnedMutexGuard<()>), ApiError> {
        let table = self.table();
        let slot = table.get(name).ok_or_else(|| self.no_vm(name))?;
        let Some(vm) = &slot.vm else { return Err(slot.condition.without_console(name)) };
        let alone = slot.console.clone().try_lock_owned().map_err(|_| {
            let message = format!("somebody else has the console of VM \"{name}\" open");
            ApiError::new(
                ErrorCode::Busy,
                message,
                "wait for them to leave, or read along with `godwit vm logs -f`",
            )
        })?;
        Ok((vm.files.console_socket(), alone))
    }

    fn describe(&self, name: &VmName, slot: &Slot) -> VmInfo {
        let condition = slot.condition.shown();
        let migration = match condition {
            Condition::MigratingOut { migration } => Some(migration.clone()),
            _ => None,
        };
        let reason = match condition {
            Condition::MigratingIn { from } if slot.reason.is_none() => {
                Some(format!("arriving from host {from}, which runs it"))
            }
            _ => slot.reason.clone(),
        };
        VmInfo {
            name: name.to_string(),
            host: self.config.name.clone(),
            state: condition.state(),
            reason,
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
            addresses: slot.spec.nics.iter().filter_map(|nic| nic.address).collect(),
            spec: slot.spec.to_vm_spec(),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<VmName, Slot>> {
        // A panic while it was held can't leave it half changed: every change is one assignment or insertion.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation: the condition changes to "under way" or the reason why not is returned.
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

    /// Writes an operation's outcome back.
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

    /// Notes with which specification a VM's process was started: backing chains may have been
    /// recorded in it.
    fn know_spec(&self, vm: &Vm) {
        if let Some(slot) = self.table().get_mut(&vm.name) {
            slot.spec = Arc::new(vm.spec.clone());
        }
    }

    /// Saves a VM's record off the async threads: it waits for the disk.
    async fn save(
        &self,
        spec: &ResolvedSpec,
        role: Role,
        desired: Desired,
        ownership: Ownership,
    ) -> Result<(), ApiError> {
        let record = SavedVm::new(spec.clone(), role, desired, ownership);
        Ok(tokio::task::block_in_place(|| self.store.save(&record))?)
    }

    /// Saves a record off the async threads.
    async fn save_record(&self, record: &SavedVm) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save(record))?)
    }

    /// Saves a record in the place of `stale`; none: there was none to read. Where another has been saved since, that one stays: whoever
    /// saved it knew more.
    async fn save_over(&self, stale: Option<&SavedVm>, record: &SavedVm) -> Result<(), ApiError> {
        let Some(stale) = stale else { return self.save_record(record).await };
        let saved = tokio::task::block_in_place(|| self.store.save_over(stale, record))?;
        if !saved {
            tracing::debug!(
                vm = record.spec.name.as_str(),
                "its record is newer than what was to be saved"
            );
        }
        Ok(())
    }

    /// Reads a VM's record; none: there is none.
    ///
    /// # Errors
    /// It can't be read: what it says is not known, and nothing may be done that depends on it.
    fn read_record(&self, name: &VmName) -> Result<Option<SavedVm>, ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.read(name))?)
    }

    /// A VM's record, as it is on disk.
    fn record(&self, name: &VmName) -> Option<SavedVm> {
        tokio::task::block_in_place(|| self.store.load(name))
    }

    /// The generation of a VM's ownership has changed.
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

/// What an operation works on once it has been admitted.
#[derive(Debug)]
struct Begun {
    before: Condition,
    spec: Arc<ResolvedSpec>,
    ownership: Ownership,
    vm: Option<Arc<Vm>>,
    reason: Option<String>,
}

impl Begun {
    /// Lets go of a process that the operation has ended: nothing is kept there any more.
    fn lose_what_ended(&mut self) {
        if self.vm.take_if(|vm| vm.process.exit().is_some()).is_some() && self.before.is_in_doubt()
        {
            self.before = Condition::InDoubt { keeps_pages_for: None };
        }
    }
}
