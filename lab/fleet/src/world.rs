//! Hosts, their VMs and migrations between them. No I/O and no clock: the caller passes the time.

mod disks;
mod load;
mod migrating;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsStr;
use std::path::Path;

use godwit_api::{
    ApiError, ChangeVm, CloneVm, CreateVm, ErrorCode, HostEvent, HostInfo, MigrationStatus,
    RenameVm, SetPeers, SetRevocations, VmInfo, VmState,
};
use godwit_qemu::{DiskFormat, SpecError, Uuid, VmSpec, is_rbd};
use tokio::sync::mpsc;

use crate::{Counts, FleetPlan};

/// Interval of a host's reports, if something changed, in milliseconds.
const HOST_INTERVAL_MS: u64 = 2_000;

/// Capacity of a watcher's queue, in addition to the host's present state.
const WAITING_EVENTS: usize = 4_096;

/// Fault of a VM's next migrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// The host refuses to start it, with this code.
    Refuse(ErrorCode),
    /// The link breaks half-way.
    FailHalfWay,
}

#[derive(Debug)]
pub(crate) struct World {
    plan: FleetPlan,
    hosts: Vec<Host>,
    by_name: HashMap<String, usize>,
    running: Vec<migrating::Running>,
    stepped_ms: u64,
    pub(crate) counts: Counts,
    faults: HashMap<String, (InjectedFault, u32)>,
}

/// Host, as its agent reports it.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) info: HostInfo,
    pub(crate) vms: BTreeMap<String, VmInfo>,
    /// Oldest first.
    pub(crate) migrations: VecDeque<MigrationStatus>,
    watchers: Vec<mpsc::Sender<HostEvent>>,
    /// Whether the agent hangs: earlier watchers receive nothing, and their connections stay open.
    silent: bool,
    changed: bool,
    reported_ms: u64,
    /// Time of the latest sample of its load.
    sampled_ms: Option<u64>,
    /// Latest list of revoked certificates.
    pub(crate) revoked: Option<String>,
}

impl Host {
    fn publish(&mut self, event: &HostEvent) {
        if !self.silent {
            // A watcher that reads too slowly has to reconnect.
            self.watchers.retain(|watcher| watcher.try_send(event.clone()).is_ok());
        }
    }

    pub(crate) fn report_vm(&mut self, name: &str) {
        if let Some(vm) = self.vms.get(name).cloned() {
            self.publish(&HostEvent::Vm(Box::new(vm)));
        }
    }

    fn recount(&mut self) {
        let is_active = |vm: &&VmInfo| !matches!(vm.state, VmState::Stopped | VmState::Failed);
        let committed: u64 = self.vms.values().filter(is_active).map(|vm| vm.memory_bytes).sum();
        self.info.vms = self.vms.len();
        self.info.memory_committed_bytes = committed;
        self.info.memory_available_bytes = self.info.memory_total_bytes.saturating_sub(committed);
        self.changed = true;
    }

    fn no_vm(&self, name: &str) -> ApiError {
        let message = format!("no VM \"{name}\" on host {}", self.info.name);
        ApiError::new(ErrorCode::NotFound, message, "see `godwit vm list`")
    }
}

impl World {
    pub(crate) fn new(plan: FleetPlan) -> Result<World, serde_json::Error> {
        let mut hosts = Vec::new();
        for number in 0..plan.hosts {
            let info = plan.host(number)?;
            hosts.push(Host {
                info,
                vms: BTreeMap::new(),
                migrations: VecDeque::new(),
                watchers: Vec::new(),
                silent: false,
                changed: false,
                reported_ms: 0,
                sampled_ms: None,
                revoked: None,
            });
        }
        for number in 0..plan.vms {
            if let Some(host) = hosts.get_mut(plan.host_of(number)) {
                let vm = plan.vm(number, &host.info.name)?;
                host.vms.insert(vm.name.clone(), vm);
            }
        }
        hosts.iter_mut().for_each(Host::recount);
        let by_name =
            hosts.iter().enumerate().map(|(at, host)| (host.info.name.clone(), at)).collect();
        Ok(World {
            plan,
            hosts,
            by_name,
            running: Vec::new(),
            stepped_ms: 0,
            counts: Counts::default(),
            faults: HashMap::new(),
        })
    }

    pub(crate) fn host(&self, at: usize) -> Option<&Host> {
        self.hosts.get(at)
    }

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn fault(&mut self, vm: &str, fault: InjectedFault, times: u32) {
        self.faults.insert(vm.to_owned(), (fault, times));
    }

    /// Takes a fault that is due.
    fn take_fault(
        &mut self,
        vm: &str,
        is_it: impl Fn(InjectedFault) -> bool,
    ) -> Option<InjectedFault> {
        let (fault, times) =
            self.faults.get_mut(vm).filter(|(fault, times)| *times > 0 && is_it(*fault))?;
        *times -= 1;
        Some(*fault)
    }

    /// Makes an agent hang or continue.
    pub(crate) fn silence(&mut self, at: usize, silent: bool) {
        if let Some(host) = self.hosts.get_mut(at) {
            host.silent = silent;
            if !silent {
                // The watchers missed events and have to reconnect.
                host.watchers.clear();
            }
        }
    }

    pub(crate) fn is_silent(&self, at: usize) -> bool {
        self.hosts.get(at).is_some_and(|host| host.silent)
    }

    /// Returns the host's present state, followed by each change.
    pub(crate) fn watch(&mut self, at: usize) -> Option<mpsc::Receiver<HostEvent>> {
        let host = self.hosts.get_mut(at)?;
        let room = host.vms.len() + host.migrations.len() + WAITING_EVENTS;
        let (events, watcher) = mpsc::channel(room);
        let everything = std::iter::once(HostEvent::Host(Box::new(host.info.clone())))
            .chain(host.vms.values().map(|vm| HostEvent::Vm(Box::new(vm.clone()))))
            .chain(
                host.migrations
                    .iter()
                    .filter(|one| one.report.is_none())
                    .map(|one| HostEvent::Migration(Box::new(one.clone()))),
            )
            .chain([HostEvent::Known]);
        for event in everything {
            // The receiver still exists.
            let _ = events.try_send(event);
        }
        host.watchers.push(events);
        Some(watcher)
    }

    pub(crate) fn set_peers(&mut self, at: usize, mut peers: SetPeers) -> SetPeers {
        if let Some(host) = self.hosts.get_mut(at) {
            peers.peers.remove(&host.info.name);
            host.info.peers.clone_from(&peers.peers);
            host.changed = true;
        }
        peers
    }

    pub(crate) fn set_revocations(&mut self, at: usize, sent: SetRevocations) {
        if let Some(host) = self.hosts.get_mut(at) {
            host.revoked = Some(sent.list);
        }
    }

    pub(crate) fn create_vm(&mut self, at: usize, request: CreateVm) -> Result<VmInfo, ApiError> {
        let failed = |error: String| ApiError::new(ErrorCode::HostFailed, error, "");
        let template =
            self.plan.vm(0, &self.plan.host_name(at)).map_err(|error| failed(error.to_string()))?;
        let host = self.hosts.get_mut(at).ok_or_else(|| failed("unknown host".to_owned()))?;
        let name = request.spec.name.clone();
        if host.vms.contains_key(&name) {
            let message = format!("VM \"{name}\" is on host {} already", host.info.name);
            return Err(ApiError::new(ErrorCode::AlreadyExists, message, "take another name"));
        }
        // As a host does.
        let uuid = request.spec.uuid.filter(|uuid| !uuid.is_nil()).unwrap_or_else(Uuid::new_v4);
        let spec = VmSpec { uuid: Some(uuid), ..request.spec };
        let memory_bytes = spec.memory.iter().map(|block| block.size.bytes()).sum();
        let vm = VmInfo {
            name: name.clone(),
            state: if request.start { VmState::Running } else { VmState::Stopped },
            memory_bytes,
            vcpus: spec.vcpus,
            addresses: Vec::new(),
            spec: spec.without_secrets(),
            ..template
        };
        host.vms.insert(name.clone(), vm.clone());
        host.recount();
        host.report_vm(&name);
        if request.vm_dirs_only {
            self.counts.held_to_vm_dirs.insert(name);
        }
        Ok(vm)
    }

    /// Gives a disk of a VM another image.
    pub(crate) fn move_disk(&mut self, at: usize, name: &str, from: &Path, to: &Path) {
        let Some(host) = self.hosts.get_mut(at) else { return };
        let disks = host.vms.get_mut(name).into_iter().flat_map(|vm| &mut vm.spec.disks);
        for disk in disks.filter(|disk| disk.path == from) {
            disk.path = to.to_owned();
            disk.format = match to.extension().and_then(OsStr::to_str) {
                _ if is_rbd(to) => DiskFormat::Raw,
                Some("raw") => DiskFormat::Raw,
                Some("qcow2") => DiskFormat::Qcow2,
                _ => disk.format,
            };
        }
        host.report_vm(name);
    }

    /// Starts or stops a VM.
    pub(crate) fn power(
        &mut self,
        at: usize,
        name: &str,
        state: VmState,
    ) -> Result<VmInfo, ApiError> {
        let host = self
            .hosts
            .get_mut(at)
            .ok_or_else(|| ApiError::new(ErrorCode::HostFailed, "unknown host", ""))?;
        let missing = host.no_vm(name);
        let vm = host.vms.get_mut(name).ok_or(missing)?;
        if matches!(vm.state, VmState::MigratingIn | VmState::MigratingOut) {
            let message = format!("VM \"{name}\" is on its way to another host");
            return Err(ApiError::new(
                ErrorCode::Busy,
                message,
                "wait for the end of its migration",
            ));
        }
        vm.state = state;
        vm.reason = None;
        let now = vm.clone();
        host.recount();
        host.report_vm(name);
        Ok(now)
    }

    /// Changes the specification of a stopped VM, or the settings of a running one.
    pub(crate) fn change_vm(
        &mut self,
        at: usize,
        name: &str,
        request: &ChangeVm,
    ) -> Result<VmInfo, ApiError> {
        let host = self
            .hosts
            .get_mut(at)
            .ok_or_else(|| ApiError::new(ErrorCode::HostFailed, "unknown host", ""))?;
        let missing = host.no_vm(name);
        let vm = host.vms.get_mut(name).ok_or(missing)?;
        let wrong = |why| ApiError::new(ErrorCode::InvalidRequest, why, "see docs/cli.md");
        let wanted = request.spec.apply_or_replace(&vm.spec, request.replace).map_err(wrong)?;
        let is_change = *request != ChangeVm::default();
        if vm.state != VmState::Stopped
            && !(is_change && wanted.differs_in_settings_alone(&vm.spec))
        {
            let message = format!("VM \"{name}\" is {}", vm.state);
            return Err(ApiError::new(ErrorCode::WrongState, message, "stop it first"));
        }
        vm.spec = wanted;
        vm.vcpus = vm.spec.vcpus;
        let now = vm.clone();
        host.report_vm(name);
        if request.vm_dirs_only {
            self.counts.held_to_vm_dirs.insert(name.to_owned());
        }
        Ok(now)
    }

    /// Gives a stopped VM another name.
    pub(crate) fn rename_vm(
        &mut self,
        at: usize,
        name: &str,
        request: &RenameVm,
    ) -> Result<VmInfo, ApiError> {
        let mut info = self.change_vm(at, name, &ChangeVm::default())?;
        self.delete_vm(at, name)?;
        info.name.clone_from(&request.name);
        info.spec.name.clone_from(&request.name);
        if let Some(host) = self.hosts.get_mut(at) {
            host.vms.insert(info.name.clone(), info.clone());
            host.recount();
            host.report_vm(&info.name);
        }
        Ok(info)
    }

    /// Clones a VM.
    pub(crate) fn clone_vm(
        &mut self,
        at: usize,
        source: &str,
        request: CloneVm,
    ) -> Result<VmInfo, ApiError> {
        let host = self
            .hosts
            .get(at)
            .ok_or_else(|| ApiError::new(ErrorCode::HostFailed, "unknown host", ""))?;
        let source = host.vms.get(source).ok_or_else(|| host.no_vm(source))?;
        let CloneVm { name, addresses, uuid, start, vm_dirs_only, .. } = request;
        let spec = source.spec.cloned(&name, uuid.unwrap_or_default(), &addresses);
        let wrong = |error: SpecError| {
            ApiError::new(ErrorCode::InvalidRequest, error.to_string(), error.remedy())
        };
        let spec = spec.map_err(wrong)?;
        self.create_vm(at, CreateVm { start, vm_dirs_only, ..CreateVm::new(spec, start) })
    }

    pub(crate) fn delete_vm(&mut self, at: usize, name: &str) -> Result<(), ApiError> {
        let host = self
            .hosts
            .get_mut(at)
            .ok_or_else(|| ApiError::new(ErrorCode::HostFailed, "unknown host", ""))?;
        let state = host.vms.get(name).map(|vm| vm.state).ok_or_else(|| host.no_vm(name))?;
        if !matches!(state, VmState::Stopped | VmState::Template) {
            let message = format!("VM \"{name}\" is {state}");
            return Err(ApiError::new(ErrorCode::WrongState, message, "stop it first"));
        }
        host.vms.remove(name);
        host.recount();
        host.publish(&HostEvent::VmGone(name.to_owned()));
        Ok(())
    }

    /// Reports the hosts that have changed, if their report is due.
    fn report_hosts(&mut self, now_ms: u64) {
        for host in &mut self.hosts {
            if host.changed && now_ms.saturating_sub(host.reported_ms) >= HOST_INTERVAL_MS {
                (host.changed, host.reported_ms) = (false, now_ms);
                let event = HostEvent::Host(Box::new(host.info.clone()));
                host.publish(&event);
            }
        }
    }

    /// Makes one small change: the load of a host, or a VM that pauses or continues. `turn` selects
    /// the host or VM.
    pub(crate) fn disturb(&mut self, turn: usize) {
        let hosts = self.hosts.len().max(1);
        let Some(host) = self.hosts.get_mut((turn / 2) % hosts) else { return };
        // Twice for each VM, so that it continues as soon as it has paused.
        let vm = (turn / (2 * hosts)) % host.vms.len().max(1);
        if turn.is_multiple_of(2) {
            host.info.load_average_1min = f64::from(u16::try_from(turn % 640).unwrap_or(0)) / 20.0;
            host.changed = true;
        }
        let Some(vm) = host.vms.values_mut().nth(vm) else { return };
        (vm.state, vm.reason) = match vm.state {
            VmState::Running if turn.is_multiple_of(2) => {
                (VmState::Paused, Some("its vCPUs were stopped".to_owned()))
            }
            VmState::Paused => (VmState::Running, None),
            state => (state, vm.reason.take()),
        };
        let name = vm.name.clone();
        host.report_vm(&name);
    }
}
