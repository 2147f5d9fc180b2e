//! Inventory of hosts and VMs: their plans, and what the agents report. In memory, without I/O and
//! clock.
//!
//! Each host reports which VMs run there; their names are unique on that host. In the cluster a
//! name is a label: [`bindings`] determines which host holds it. Other hosts that report the name
//! are shown with the VM.

#[cfg(test)]
mod binding_tests;
mod bindings;
mod cluster;
pub(crate) mod datastores;
pub(crate) mod disk_places;
mod move_limits;
mod seen;
mod select;
pub(crate) mod shares;
mod tally;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use godwit_api::control::{
    Change, HostState, HostSummary, ManagedHost, ManagedVm, PlannedPower, VmSummary,
};
use godwit_api::{HostEvent, HostInfo, VmInfo, VmState};
use godwit_qemu::{Baseline, CpuFeatures};

use crate::cluster::bounds::{self, MOST_VM_BYTES_OF_HOST, MOST_VMS};
use crate::cluster::text::beginning;

pub use crate::cluster::bounds::Misreport;
pub use bindings::{Binding, NoClaim};
pub use cluster::BaselinePlan;
pub(crate) use cluster::RuleFilter;
pub use datastores::DatastorePlan;
pub use move_limits::LimitsPlan;
pub(crate) use seen::{SeenHost, SeenVm};
pub use select::{Cursor, HostFilter, VmFilter};
pub use tally::Tally;

/// Plan of a host, which the store keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPlan {
    pub address: String,
    /// Labels by which rules select hosts.
    pub labels: BTreeMap<String, String>,
    /// Speed of the host's link, bits per second; none: not configured.
    pub link_bits_per_s: Option<u64>,
    /// Limit of concurrent moves from the host, and of those to it; none: derived from the link.
    pub most_moves: Option<u32>,
    /// Whether the host accepts no VMs.
    pub maintenance: bool,
}

/// Plan of a VM, which the store keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPlan {
    /// Whether the VM should run.
    pub power: PlannedPower,
    /// Labels by which lists of VMs are filtered.
    pub labels: BTreeMap<String, String>,
}

/// All hosts and VMs.
#[derive(Debug, Default)]
pub struct Inventory {
    hosts: BTreeMap<String, Host>,
    vms: BTreeMap<String, Vm>,
    cluster: cluster::ClusterPlan,
    limits: move_limits::KnownLimits,
    /// Settings of datastores, by ID.
    datastores: BTreeMap<String, DatastorePlan>,
    /// Bindings of names in the store.
    stored: BTreeMap<String, Binding>,
    /// Names whose binding differs from the store's.
    unstored: BTreeSet<String>,
}

/// Numbers of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmCounts {
    pub all: u64,
    /// VMs that run, according to reachable hosts.
    pub running: u64,
    /// VMs whose hosts are unreachable.
    pub unknown: u64,
}

#[derive(Debug)]
struct Host {
    plan: HostPlan,
    state: HostState,
    /// Reason why the host is away.
    reason: Option<String>,
    /// Last reason for which a report was refused.
    fault: Option<String>,
    info: Option<Arc<HostInfo>>,
    /// Identities of its directories.
    identities: datastores::Identities,
    /// Features of the cluster's baseline that the host lacks, according to `info`.
    lacks: CpuFeatures,
    /// Digest of the other hosts that the agent knows. `info` omits them, because every host would
    /// have the list of all hosts.
    peers_digest: Option<u64>,
    heard_unix_ms: Option<u64>,
    /// VMs in the host's last reports, and the bytes of each.
    vms: BTreeMap<String, usize>,
    /// Sum of these bytes.
    vm_bytes: usize,
    /// Whether a report was refused on the current connection.
    has_refused_report: bool,
    refused_reports: u64,
    /// VMs reported so far on the current connection; none: the host has reported all.
    reported: Option<BTreeSet<String>>,
    moves_out: u64,
    moves_in: u64,
}

#[derive(Debug, Default)]
struct Vm {
    plan: Option<VmPlan>,
    /// Report of each host that has the VM or a shadow of it.
    at: BTreeMap<String, Arc<VmInfo>>,
    /// Binding of the name.
    bound: bindings::Bound,
    /// Hosts whose claims were last published as conflicts.
    shown_conflicts: Vec<String>,
    /// Running or waiting move of the VM.
    planned_move: Option<String>,
    /// Target of that move, once it has begun.
    move_target: Option<String>,
    /// Summary that was last published; none: none was, or the VM was published as gone.
    shown: Option<Box<VmSummary>>,
}

impl Host {
    fn new(plan: HostPlan) -> Host {
        Host {
            plan,
            state: HostState::Unknown,
            reason: None,
            fault: None,
            info: None,
            identities: datastores::Identities::default(),
            lacks: CpuFeatures::new(),
            peers_digest: None,
            heard_unix_ms: None,
            vms: BTreeMap::new(),
            vm_bytes: 0,
            has_refused_report: false,
            refused_reports: 0,
            reported: None,
            moves_out: 0,
            moves_in: 0,
        }
    }

    /// Counts a VM of `bytes` bytes, unless the host's VMs exceed a limit with it.
    fn make_room(&mut self, vm: &str, bytes: usize) -> Result<(), Misreport> {
        let before = self.vms.get(vm).copied();
        let sum = self.vm_bytes - before.unwrap_or(0) + bytes;
        if before.is_none() && self.vms.len() >= MOST_VMS {
            return Err(Misreport::new(format!("it reports more than {MOST_VMS} VMs")));
        }
        if sum > MOST_VM_BYTES_OF_HOST {
            let most = MOST_VM_BYTES_OF_HOST >> 20;
            return Err(Misreport::new(format!("its reports of VMs take more than {most} MiB")));
        }
        self.vms.insert(vm.to_owned(), bytes);
        self.vm_bytes = sum;
        Ok(())
    }

    /// Removes a VM that the host no longer has.
    fn remove_vm(&mut self, vm: &str) {
        self.vm_bytes -= self.vms.remove(vm).unwrap_or(0);
    }

    /// Returns whether the host has not reported since this manager started, and no connection to
    /// it has failed.
    fn is_awaited(&self) -> bool {
        self.state == HostState::Unknown && self.reason.is_none()
    }

    fn summary(&self, name: &str) -> HostSummary {
        let info = self.info.as_deref();
        HostSummary {
            name: name.to_owned(),
            address: self.plan.address.clone(),
            state: self.state,
            reason: self.reason.clone(),
            fault: self.fault.clone(),
            maintenance: self.plan.maintenance,
            labels: self.plan.labels.clone(),
            vms: self.vms.len() as u64,
            memory_available_bytes: info.map_or(0, |info| info.memory_available_bytes),
            memory_committed_bytes: info.map_or(0, |info| info.memory_committed_bytes),
            memory_total_bytes: info.map_or(0, |info| info.memory_total_bytes),
            logical_cores: info.map_or(0, |info| info.logical_cores),
            load_average_1min: info.map_or(0.0, |info| info.load_average_1min),
            moves_out: self.moves_out,
            moves_in: self.moves_in,
            lacks_of_baseline: self.lacks.clone(),
        }
    }

    /// Compares the CPU that the host gives to guests with the cluster's baseline. Returns whether
    /// the missing features have changed.
    fn compare(&mut self, baseline: Option<&Baseline>) -> bool {
        let cpu = self.info.as_ref().and_then(|info| info.cpu.as_ref());
        let lacks =
            cpu.zip(baseline).map(|(cpu, baseline)| cpu.lacks_of(baseline)).unwrap_or_default();
        let is_news = self.lacks != lacks;
        self.lacks = lacks;
        is_news
    }
}

/// Rank of a report among several of one VM: how much of the VM the host has.
fn standing(info: &VmInfo) -> u8 {
    match info.state {
        VmState::MigratingIn => 0,
        VmState::Stopped | VmState::Failed | VmState::Suspended | VmState::Template => 1,
        VmState::Paused if info.in_doubt => 2,
        VmState::Starting | VmState::Stopping | VmState::Paused => 3,
        VmState::Running | VmState::MigratingOut => 4,
    }
}

impl Inventory {
    /// Adds a host or replaces its plan.
    pub fn plan_host(&mut self, name: &str, plan: HostPlan) -> Change {
        let host =
            self.hosts.entry(name.to_owned()).or_insert_with(|| Host::new(HostPlan::default()));
        if host.plan.address != plan.address {
            // Another agent may answer at the new address.
            host.state = HostState::Unknown;
        }
        host.plan = plan;
        Change::Host(Box::new(host.summary(name)))
    }

    /// Forgets a host and its reports.
    pub fn forget_host(&mut self, name: &str) -> Vec<Change> {
        let Some(host) = self.hosts.remove(name) else { return Vec::new() };
        let mut changes: Vec<Change> =
            host.vms.keys().flat_map(|vm| self.vm_gone(name, vm)).collect();
        for vm in self.held_unreported(name) {
            changes.extend(self.vm_gone(name, &vm));
        }
        changes.push(Change::HostGone(name.to_owned()));
        changes
    }

    /// Sets or removes the plan of a VM.
    pub fn plan_vm(&mut self, name: &str, plan: Option<VmPlan>) -> Vec<Change> {
        let vm = self.vms.entry(name.to_owned()).or_default();
        vm.plan = plan;
        let is_reported = !vm.at.is_empty();
        let changes = self.vm_changed(name);
        // A VM that no host reports was never published, so it is not gone now.
        if is_reported { changes } else { Vec::new() }
    }

    /// Sets or removes the running or waiting move of a VM. `target` is its target, once it has
    /// begun.
    pub fn plan_move(
        &mut self,
        vm: &str,
        planned: Option<String>,
        target: Option<String>,
    ) -> Vec<Change> {
        if planned.is_none() && !self.vms.contains_key(vm) {
            return Vec::new();
        }
        // The VM's host may not have reported yet.
        let entry = self.vms.entry(vm.to_owned()).or_default();
        (entry.planned_move, entry.move_target) = (planned, target);
        self.vm_changed(vm)
    }

    /// Sets the numbers of moves that run from a host and to it.
    pub fn count_moves(&mut self, host: &str, out: u64, arriving: u64) -> Option<Change> {
        let entry = self.hosts.get_mut(host)?;
        if (entry.moves_out, entry.moves_in) == (out, arriving) {
            return None;
        }
        (entry.moves_out, entry.moves_in) = (out, arriving);
        Some(Change::Host(Box::new(entry.summary(host))))
    }

    /// Notes a new connection to a host's agent, which begins to report everything.
    pub fn reached(&mut self, name: &str) {
        if let Some(host) = self.hosts.get_mut(name) {
            host.reported = Some(BTreeSet::new());
            host.has_refused_report = false;
        }
    }

    /// Notes the loss of the connection to a host's agent.
    pub fn lost(&mut self, name: &str, reason: &str) -> Option<Change> {
        let host = self.hosts.get_mut(name)?;
        // A host that has never reported stays unknown, but shows the reason.
        let state = if host.heard_unix_ms.is_some() { HostState::Away } else { HostState::Unknown };
        let reason = &beginning(reason, bounds::MOST_REASON_BYTES);
        let is_news = host.state != state || host.reason.as_ref() != Some(reason);
        (host.state, host.reason) = (state, Some(reason.to_owned()));
        is_news.then(|| Change::Host(Box::new(host.summary(name))))
    }

    /// Applies an event from a host's agent, or notes why it is refused. Events of unknown hosts
    /// are ignored.
    pub fn apply(&mut self, name: &str, event: HostEvent, unix_ms: u64) -> Vec<Change> {
        match self.try_apply(name, event, unix_ms) {
            Ok(changes) => changes,
            Err(fault) => self.blame(name, &fault).into_iter().collect(),
        }
    }

    /// Notes a refused report of a host.
    pub fn blame(&mut self, name: &str, fault: &Misreport) -> Option<Change> {
        let host = self.hosts.get_mut(name)?;
        host.has_refused_report = true;
        host.refused_reports += 1;
        let is_news = host.fault.as_ref() != Some(&fault.0);
        host.fault = Some(fault.0.clone());
        is_news.then(|| Change::Host(Box::new(host.summary(name))))
    }

    /// Applies an event from a host's agent.
    ///
    /// # Errors
    /// [`Misreport`]: the event is invalid or exceeds a limit. Nothing of it is kept.
    pub fn try_apply(
        &mut self,
        name: &str,
        event: HostEvent,
        unix_ms: u64,
    ) -> Result<Vec<Change>, Misreport> {
        let Some(host) = self.hosts.get_mut(name) else { return Ok(Vec::new()) };
        host.heard_unix_ms = Some(unix_ms);
        Ok(match event {
            HostEvent::Host(mut info) => {
                bounds::check_host(&mut info)?;
                let peers = std::mem::take(&mut info.peers);
                let peers = peers.iter().map(|(name, address)| (name.as_str(), address.as_str()));
                host.peers_digest = Some(crate::cluster::peers_digest::digest(peers));
                let same_cpu = host.info.as_ref().is_some_and(|before| before.cpu == info.cpu);
                host.identities.note(&info);
                host.info = Some(Arc::from(info));
                if !same_cpu {
                    host.compare(self.cluster.baseline());
                }
                vec![Change::Host(Box::new(host.summary(name)))]
            }
            HostEvent::Vm(mut info) => {
                let bytes = bounds::check_vm(&mut info)?;
                host.make_room(&info.name, bytes)?;
                if let Some(reported) = &mut host.reported {
                    reported.insert(info.name.clone());
                }
                let vm = info.name.clone();
                let entry = self.vms.entry(vm.clone()).or_default();
                // The connection identifies the reporting host, not the report's content.
                entry
                    .at
                    .insert(name.to_owned(), Arc::new(VmInfo { host: name.to_owned(), ..*info }));
                self.vm_changed(&vm)
            }
            HostEvent::VmGone(vm) => {
                bounds::check_reported_name(&vm)?;
                host.remove_vm(&vm);
                self.vm_gone(name, &vm)
            }
            HostEvent::Migration(status) => {
                bounds::check_migration(name, &status)?;
                self.note_handing(name, &status)
            }
            HostEvent::Load(sample) => {
                // Not a part of the cluster's state: the history of load has it.
                bounds::check_load(&sample)?;
                Vec::new()
            }
            HostEvent::Known => self.all_reported(name),
        })
    }

    /// Notes that a host has reported everything: VMs that it did not report are gone.
    fn all_reported(&mut self, name: &str) -> Vec<Change> {
        let Some(host) = self.hosts.get_mut(name) else { return Vec::new() };
        if host.has_refused_report {
            // After a refused report, the list of the host's VMs is incomplete.
            host.reported = None;
            return Vec::new();
        }
        (host.state, host.reason, host.fault) = (HostState::Up, None, None);
        let reported = host.reported.take().unwrap_or_default();
        let gone: Vec<String> =
            host.vms.keys().filter(|vm| !reported.contains(*vm)).cloned().collect();
        gone.iter().for_each(|vm| host.remove_vm(vm));
        let mut changes = vec![Change::Host(Box::new(host.summary(name)))];
        changes.extend(gone.iter().flat_map(|vm| self.vm_gone(name, vm)));
        for vm in self.held_unreported(name) {
            changes.extend(self.vm_gone(name, &vm));
        }
        // Some claims count only if their host is reachable.
        for vm in self.reported_unheld(name) {
            changes.extend(self.vm_changed(&vm));
        }
        changes
    }

    fn vm_gone(&mut self, host: &str, vm: &str) -> Vec<Change> {
        match self.vms.get_mut(vm) {
            Some(entry) => drop(entry.at.remove(host)),
            None => return Vec::new(),
        }
        self.release(host, vm);
        self.vm_changed(vm)
    }

    fn vm_changed(&mut self, name: &str) -> Vec<Change> {
        let conflict = self.settle(name);
        let Some(vm) = self.vms.get(name) else { return Vec::new() };
        let summary = self.vm_summary(name, vm).map(Box::new);
        let Some(vm) = self.vms.get_mut(name) else { return Vec::new() };
        let is_news = vm.shown != summary;
        vm.shown.clone_from(&summary);
        let is_known = vm.plan.is_some() || vm.planned_move.is_some() || vm.bound.is_kept();
        if summary.is_none() && vm.at.is_empty() && !is_known {
            self.vms.remove(name);
        }
        // A change that the summary does not show is not published.
        let change = summary.map_or_else(|| Change::VmGone(name.to_owned()), Change::Vm);
        is_news.then_some(change).into_iter().chain(conflict).collect()
    }

    fn vm_summary(&self, name: &str, vm: &Vm) -> Option<VmSummary> {
        let info = vm.main()?;
        Some(VmSummary {
            name: name.to_owned(),
            host: info.host.clone(),
            state: info.state,
            reason: info.reason.clone(),
            in_doubt: vm.in_doubt(),
            also_runs_at: self.also_runs_at(vm, info),
            conflicts: vm.conflicting(&self.hosts).map(|(host, _)| host.clone()).collect(),
            memory_bytes: info.memory_bytes,
            vcpus: info.vcpus,
            is_current: self.hosts.get(&info.host).is_some_and(|host| host.state == HostState::Up),
            r#move: vm.planned_move.clone(),
            labels: vm.plan.as_ref().map(|plan| plan.labels.clone()).unwrap_or_default(),
            tags: info.spec.tags.clone(),
        })
    }

    /// Returns the other hosts where a VM runs, according to reachable hosts. That happens if the
    /// VM was created anew while its old host was away, and that host returns with the old VM.
    fn also_runs_at(&self, vm: &Vm, main: &VmInfo) -> Vec<String> {
        // A source that keeps pages for a guest that it has handed over reports it as paused.
        let runs = |info: &VmInfo| {
            info.state == VmState::Running
                && !info.in_doubt
                && self.hosts.get(&info.host).is_some_and(|host| host.state == HostState::Up)
        };
        if !runs(main) {
            return Vec::new();
        }
        let others = vm.at.values().filter(|info| info.host != main.host && runs(info));
        others.map(|info| info.host.clone()).collect()
    }

    /// Returns a host; none: unknown host.
    #[must_use]
    pub fn host(&self, name: &str) -> Option<ManagedHost> {
        let host = self.hosts.get(name)?;
        Some(ManagedHost {
            summary: host.summary(name),
            link_bits_per_s: host.plan.link_bits_per_s,
            most_moves: host.plan.most_moves,
            info: host.info.as_deref().cloned(),
            heard_unix_ms: host.heard_unix_ms,
            refused_reports: host.refused_reports,
        })
    }

    /// Returns a host's entry for lists; none: unknown host.
    #[must_use]
    pub fn host_summary(&self, name: &str) -> Option<HostSummary> {
        self.hosts.get(name).map(|host| host.summary(name))
    }

    /// Returns the last report of a host's agent about the host; none: there is no report.
    #[must_use]
    pub fn host_info(&self, name: &str) -> Option<&Arc<HostInfo>> {
        self.hosts.get(name)?.info.as_ref()
    }

    /// Returns the report of a VM by the host that holds its name; none: there is no report.
    #[must_use]
    pub fn vm_info(&self, name: &str) -> Option<&Arc<VmInfo>> {
        self.vms.get(name)?.main()
    }

    /// Returns the running or waiting move of a VM.
    #[must_use]
    pub fn planned_move(&self, vm: &str) -> Option<&str> {
        self.vms.get(vm)?.planned_move.as_deref()
    }

    /// Returns whether a host is reachable and has reported everything that it has.
    #[must_use]
    pub fn is_up(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.state == HostState::Up)
    }

    /// Returns the reason why a host is away. `None`: it is reachable or unknown, or it has not
    /// reported since this manager started and no connection to it has failed.
    #[must_use]
    pub fn why_away(&self, host: &str) -> Option<&str> {
        let host = self.hosts.get(host).filter(|host| host.state != HostState::Up)?;
        host.reason.as_deref().or((host.state == HostState::Away).then_some("no reason is known"))
    }

    /// Returns whether a host reports a VM or a shadow of it.
    #[must_use]
    pub fn has_vm(&self, host: &str, vm: &str) -> bool {
        self.vms.get(vm).is_some_and(|vm| vm.at.contains_key(host))
    }

    /// Returns the plan of a host; none: unknown host.
    #[must_use]
    pub fn host_plan(&self, name: &str) -> Option<&HostPlan> {
        self.hosts.get(name).map(|host| &host.plan)
    }

    /// Returns the plans of all hosts, by name.
    pub fn plans(&self) -> impl Iterator<Item = (&str, &HostPlan)> {
        self.hosts.iter().map(|(name, host)| (name.as_str(), &host.plan))
    }

    /// Returns the names of the VMs with a plan, in order.
    pub fn planned_vms(&self) -> impl Iterator<Item = &str> {
        self.vms.iter().filter(|(_, vm)| vm.plan.is_some()).map(|(name, _)| name.as_str())
    }

    /// Returns the plan of a VM, if it has one.
    #[must_use]
    pub fn vm_plan(&self, name: &str) -> Option<&VmPlan> {
        self.vms.get(name)?.plan.as_ref()
    }

    /// Returns the hosts other than `host` that report a VM.
    #[must_use]
    pub fn others_with(&self, vm: &str, host: &str) -> Vec<String> {
        let at = self.vms.get(vm).into_iter().flat_map(|vm| vm.at.keys());
        at.filter(|other| *other != host).cloned().collect()
    }

    /// Returns an unreachable host, which may have unreported VMs; none: all hosts are reachable.
    #[must_use]
    pub fn unreachable_host(&self) -> Option<&str> {
        let mut hosts = self.hosts.iter();
        hosts.find(|(_, host)| host.state != HostState::Up).map(|(name, _)| name.as_str())
    }

    /// Returns a host that has not reported since this manager started although no connection to it
    /// has failed, if there is one.
    #[must_use]
    pub fn awaited_host(&self) -> Option<&str> {
        self.hosts.iter().find(|(_, host)| host.is_awaited()).map(|(name, _)| name.as_str())
    }

    /// Returns a VM; none: no host reports it.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<ManagedVm> {
        let vm = self.vms.get(name)?;
        let summary = self.vm_summary(name, vm)?;
        let info = VmInfo::clone(vm.main()?);
        let also_at = vm.at.keys().filter(|host| **host != info.host).cloned().collect();
        Some(ManagedVm { summary, planned: vm.plan.as_ref().map(|plan| plan.power), info, also_at })
    }

    /// Returns the report of each VM by the host that holds its name.
    pub fn all_vms(&self) -> impl Iterator<Item = &Arc<VmInfo>> {
        self.vms.values().filter_map(Vm::main)
    }

    /// Returns all VMs that a host reports, including those whose names another host holds.
    pub fn vms_of<'a>(&'a self, host: &'a str) -> impl Iterator<Item = &'a Arc<VmInfo>> + Clone {
        let names = self.hosts.get(host).into_iter().flat_map(|host| host.vms.keys());
        names.filter_map(move |name| self.vms.get(name)?.at.get(host))
    }

    /// Returns the number of hosts, and of reachable hosts.
    #[must_use]
    pub fn host_counts(&self) -> (u64, u64) {
        let up = self.hosts.values().filter(|host| host.state == HostState::Up).count();
        (self.hosts.len() as u64, up as u64)
    }

    /// Returns the number of faulty hosts, whose last reports were refused.
    #[must_use]
    pub fn faulty_hosts(&self) -> u64 {
        self.hosts.values().filter(|host| host.fault.is_some()).count() as u64
    }

    /// Returns the numbers of reported VMs.
    #[must_use]
    pub fn vm_counts(&self) -> VmCounts {
        let mut counts = VmCounts::default();
        for info in self.vms.values().filter_map(Vm::main) {
            let is_running = matches!(info.state, VmState::Running | VmState::MigratingOut);
            counts.all += 1;
            if !self.is_up(&info.host) {
                counts.unknown += 1;
            } else if is_running {
                counts.running += 1;
            }
        }
        counts
    }

    /// Returns the names of the hosts that are away, up to `most`.
    #[must_use]
    pub fn away_hosts(&self, most: usize) -> Vec<String> {
        let away = self.hosts.keys().filter(|name| self.why_away(name).is_some());
        away.take(most).cloned().collect()
    }
}
