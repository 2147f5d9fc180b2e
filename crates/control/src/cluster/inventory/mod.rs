//! Which hosts and VMs there are: what is planned, and beside it what the agents tell. In memory;
//! no I/O and no clock.
//!
//! What runs on a host is what that host reports: names are unique there. In the cluster a name is
//! a label, and
//! [`bindings`] says which host holds it; the others that report it are shown beside it.

#[cfg(test)]
mod binding_tests;
mod bindings;
mod cluster;
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
pub use move_limits::LimitsPlan;
pub(crate) use seen::{SeenHost, SeenVm};
pub use select::{Cursor, HostFilter, VmFilter};
pub use tally::Tally;

/// What is planned of a host: what the store keeps of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPlan {
    pub address: String,
    /// What rules may name it by.
    pub labels: BTreeMap<String, String>,
    /// What its link carries, bits per second; none: nobody said.
    pub link_bits_per_s: Option<u64>,
    /// Moves out of it and into it at a time; none: by the link.
    pub most_moves: Option<u32>,
    /// Whether it takes no VMs.
    pub maintenance: bool,
}

/// What is planned of a VM: what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmPlan {
    /// Whether it shall run.
    pub power: PlannedPower,
    /// By what VMs are listed.
    pub labels: BTreeMap<String, String>,
}

/// All hosts and VMs.
#[derive(Debug, Default)]
pub struct Inventory {
    hosts: BTreeMap<String, Host>,
    vms: BTreeMap<String, Vm>,
    cluster: cluster::ClusterPlan,
    limits: move_limits::KnownLimits,
    /// Bindings of names as the store has them.
    stored: BTreeMap<String, Binding>,
    /// Names whose binding is another one than the store has.
    unstored: BTreeSet<String>,
}

#[derive(Debug)]
struct Host {
    plan: HostPlan,
    state: HostState,
    /// Why it is away.
    reason: Option<String>,
    /// What it reported that no agent reports.
    fault: Option<String>,
    info: Option<Arc<HostInfo>>,
    /// What it lacks of the cluster's baseline, by `info`.
    lacks: CpuFeatures,
    /// Of the other hosts that its agent knows; `info` has none of them, as each host would have
    /// all.
    peers_digest: Option<u64>,
    heard_unix_ms: Option<u64>,
    /// VMs that it told of last, and the bytes of each.
    vms: BTreeMap<String, usize>,
    /// Whether it reported what no agent reports since its agent was reached.
    has_lied: bool,
    refused_reports: u64,
    /// Those that it has told of since its agent was reached; none: it has told of all.
    told: Option<BTreeSet<String>>,
    moves_out: u64,
    moves_in: u64,
}

#[derive(Debug, Default)]
struct Vm {
    plan: Option<VmPlan>,
    /// As each host tells it that has something of it.
    at: BTreeMap<String, Arc<VmInfo>>,
    /// The host that holds the name.
    bound: bindings::Bound,
    /// Hosts that claim the name, as was told last, and nothing explains it.
    shown_conflicts: Vec<String>,
    /// The move that has it, or waits.
    planned_move: Option<String>,
    /// Where that move takes it, once it has begun.
    move_target: Option<String>,
    /// As everybody was told of it last; none: nobody was, or that it is gone.
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
            lacks: CpuFeatures::new(),
            peers_digest: None,
            heard_unix_ms: None,
            vms: BTreeMap::new(),
            has_lied: false,
            refused_reports: 0,
            told: None,
            moves_out: 0,
            moves_in: 0,
        }
    }

    /// Counts a VM of so many bytes, where it has room for it.
    fn make_room(&mut self, vm: &str, bytes: usize) -> Result<(), Misreport> {
        let others = self.vms.iter().filter(|(name, _)| name.as_str() != vm);
        let (count, sum) =
            others.fold((1, bytes), |(count, sum), (_, bytes)| (count + 1, sum + bytes));
        if count > MOST_VMS {
            return Err(Misreport::new(format!("it reports more than {MOST_VMS} VMs")));
        }
        if sum > MOST_VM_BYTES_OF_HOST {
            let most = MOST_VM_BYTES_OF_HOST >> 20;
            return Err(Misreport::new(format!("its VMs take more than {most} MiB")));
        }
        self.vms.insert(vm.to_owned(), bytes);
        Ok(())
    }

    /// Whether it has not been heard since this manager began, and nothing says that it is away.
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

    /// Compares what it gives to guests with the cluster's baseline; whether that came out
    /// otherwise than before.
    fn compare(&mut self, baseline: Option<&Baseline>) -> bool {
        let cpu = self.info.as_ref().and_then(|info| info.cpu.as_ref());
        let lacks =
            cpu.zip(baseline).map(|(cpu, baseline)| cpu.lacks_of(baseline)).unwrap_or_default();
        let is_news = self.lacks != lacks;
        self.lacks = lacks;
        is_news
    }
}

/// How much of a VM a host has that tells this of it.
fn standing(info: &VmInfo) -> u8 {
    match info.state {
        VmState::MigratingIn => 0,
        VmState::Stopped | VmState::Failed => 1,
        VmState::Paused if info.in_doubt => 2,
        VmState::Starting | VmState::Stopping | VmState::Paused => 3,
        VmState::Running | VmState::MigratingOut => 4,
    }
}

impl Inventory {
    /// Takes a host in, or changes what is planned of it.
    pub fn plan_host(&mut self, name: &str, plan: HostPlan) -> Change {
        let host =
            self.hosts.entry(name.to_owned()).or_insert_with(|| Host::new(HostPlan::default()));
        if host.plan.address != plan.address {
            // It may be another agent.
            host.state = HostState::Unknown;
        }
        host.plan = plan;
        Change::Host(Box::new(host.summary(name)))
    }

    /// Forgets a host and what it told.
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

    /// Sets what is planned of a VM; none: nothing any more.
    pub fn plan_vm(&mut self, name: &str, plan: Option<VmPlan>) -> Vec<Change> {
        let vm = self.vms.entry(name.to_owned()).or_default();
        vm.plan = plan;
        let is_told = !vm.at.is_empty();
        let changes = self.vm_changed(name);
        // What no host tells of is not gone by that.
        if is_told { changes } else { Vec::new() }
    }

    /// The move that has a VM, or waits for its turn; `target`: where it goes, once it has begun.
    pub fn plan_move(
        &mut self,
        vm: &str,
        planned: Option<String>,
        target: Option<String>,
    ) -> Vec<Change> {
        if planned.is_none() && !self.vms.contains_key(vm) {
            return Vec::new();
        }
        // Its host may not have been heard yet.
        let entry = self.vms.entry(vm.to_owned()).or_default();
        (entry.planned_move, entry.move_target) = (planned, target);
        self.vm_changed(vm)
    }

    /// Moves that leave a host and arrive there now.
    pub fn count_moves(&mut self, host: &str, out: u64, arriving: u64) -> Option<Change> {
        let entry = self.hosts.get_mut(host)?;
        if (entry.moves_out, entry.moves_in) == (out, arriving) {
            return None;
        }
        (entry.moves_out, entry.moves_in) = (out, arriving);
        Some(Change::Host(Box::new(entry.summary(host))))
    }

    /// A host's agent was reached, and begins to tell.
    pub fn reached(&mut self, name: &str) {
        if let Some(host) = self.hosts.get_mut(name) {
            host.told = Some(BTreeSet::new());
            host.has_lied = false;
        }
    }

    /// A host's agent is heard no more.
    pub fn lost(&mut self, name: &str, reason: &str) -> Option<Change> {
        let host = self.hosts.get_mut(name)?;
        // What was never heard stays unknown; why is told all the same.
        let state = if host.heard_unix_ms.is_some() { HostState::Away } else { HostState::Unknown };
        let reason = &beginning(reason, bounds::MOST_REASON_BYTES);
        let is_news = host.state != state || host.reason.as_ref() != Some(reason);
        (host.state, host.reason) = (state, Some(reason.to_owned()));
        is_news.then(|| Change::Host(Box::new(host.summary(name))))
    }

    /// What a host's agent tells. Of a host that is not known, nothing is kept.
    pub fn heard(&mut self, name: &str, event: HostEvent, unix_ms: u64) -> Vec<Change> {
        match self.take(name, event, unix_ms) {
            Ok(changes) => changes,
            Err(fault) => self.blame(name, &fault).into_iter().collect(),
        }
    }

    /// Notes what a host reported that no agent reports.
    pub fn blame(&mut self, name: &str, fault: &Misreport) -> Option<Change> {
        let host = self.hosts.get_mut(name)?;
        host.has_lied = true;
        host.refused_reports += 1;
        let is_news = host.fault.as_ref() != Some(&fault.0);
        host.fault = Some(fault.0.clone());
        is_news.then(|| Change::Host(Box::new(host.summary(name))))
    }

    /// Takes what a host's agent tells, as far as it is what agents tell.
    ///
    /// # Errors
    /// [`Misreport`]: it is not, or more than the manager takes. Nothing of it is kept.
    pub fn take(
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
                host.info = Some(Arc::from(info));
                if !same_cpu {
                    host.compare(self.cluster.baseline());
                }
                vec![Change::Host(Box::new(host.summary(name)))]
            }
            HostEvent::Vm(mut info) => {
                let bytes = bounds::check_vm(&mut info)?;
                host.make_room(&info.name, bytes)?;
                if let Some(told) = &mut host.told {
                    told.insert(info.name.clone());
                }
                let vm = info.name.clone();
                let entry = self.vms.entry(vm.clone()).or_default();
                // Who tells it is known by its connection, not by what it says.
                entry
                    .at
                    .insert(name.to_owned(), Arc::new(VmInfo { host: name.to_owned(), ..*info }));
                self.vm_changed(&vm)
            }
            HostEvent::VmGone(vm) => {
                bounds::check_reported_name(&vm)?;
                host.vms.remove(&vm);
                self.vm_gone(name, &vm)
            }
            HostEvent::Migration(status) => {
                bounds::check_migration(name, &status)?;
                self.note_handing(name, &status)
            }
            HostEvent::Known => self.all_told(name),
        })
    }

    /// A host has told of everything: what it did not tell of is gone.
    fn all_told(&mut self, name: &str) -> Vec<Change> {
        let Some(host) = self.hosts.get_mut(name) else { return Vec::new() };
        if host.has_lied {
            // What it has in truth is not known.
            host.told = None;
            return Vec::new();
        }
        (host.state, host.reason, host.fault) = (HostState::Up, None, None);
        let told = host.told.take().unwrap_or_default();
        let gone: Vec<String> = host.vms.keys().filter(|vm| !told.contains(*vm)).cloned().collect();
        host.vms.retain(|vm, _| told.contains(vm));
        let mut changes = vec![Change::Host(Box::new(host.summary(name)))];
        changes.extend(gone.iter().flat_map(|vm| self.vm_gone(name, vm)));
        for vm in self.held_unreported(name) {
            changes.extend(self.vm_gone(name, &vm));
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
        // What nobody sees of it is no news.
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
        })
    }

    /// Where else a VM runs, by what hosts tell that are heard: it was made anew while its old host
    /// was away, and that is back with the old one.
    fn also_runs_at(&self, vm: &Vm, main: &VmInfo) -> Vec<String> {
        // A host that keeps pages for a guest that was handed over has it paused.
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

    /// A host; none: it is not known.
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

    /// A host as in a list; none: it is not known.
    #[must_use]
    pub fn host_summary(&self, name: &str) -> Option<HostSummary> {
        self.hosts.get(name).map(|host| host.summary(name))
    }

    /// What a host's agent told last; none: it has not been heard.
    #[must_use]
    pub fn host_info(&self, name: &str) -> Option<&Arc<HostInfo>> {
        self.hosts.get(name)?.info.as_ref()
    }

    /// A VM as the host tells it that holds its name; none: no host tells of it.
    #[must_use]
    pub fn vm_info(&self, name: &str) -> Option<&Arc<VmInfo>> {
        self.vms.get(name)?.main()
    }

    /// The move that has a VM, or waits for its turn; none: there is none.
    #[must_use]
    pub fn planned_move(&self, vm: &str) -> Option<&str> {
        self.vms.get(vm)?.planned_move.as_deref()
    }

    /// Whether a host's agent has told of everything that it has, and is heard.
    #[must_use]
    pub fn is_heard(&self, host: &str) -> bool {
        self.hosts.get(host).is_some_and(|host| host.state == HostState::Up)
    }

    /// Whether a host tells of a VM, be it as a shadow.
    #[must_use]
    pub fn has_vm(&self, host: &str, vm: &str) -> bool {
        self.vms.get(vm).is_some_and(|vm| vm.at.contains_key(host))
    }

    /// What is planned of a host; none: it is not known.
    #[must_use]
    pub fn host_plan(&self, name: &str) -> Option<&HostPlan> {
        self.hosts.get(name).map(|host| &host.plan)
    }

    /// What is planned of every host, by name.
    pub fn plans(&self) -> impl Iterator<Item = (&str, &HostPlan)> {
        self.hosts.iter().map(|(name, host)| (name.as_str(), &host.plan))
    }

    /// VMs of which something is planned, by name.
    pub fn planned_vms(&self) -> impl Iterator<Item = &str> {
        self.vms.iter().filter(|(_, vm)| vm.plan.is_some()).map(|(name, _)| name.as_str())
    }

    /// What is planned of a VM; none: nothing.
    #[must_use]
    pub fn vm_plan(&self, name: &str) -> Option<&VmPlan> {
        self.vms.get(name)?.plan.as_ref()
    }

    /// Other hosts than `host` that tell of a VM.
    #[must_use]
    pub fn others_with(&self, vm: &str, host: &str) -> Vec<String> {
        let at = self.vms.get(vm).into_iter().flat_map(|vm| vm.at.keys());
        at.filter(|other| *other != host).cloned().collect()
    }

    /// A host that is not heard: it may have VMs that nobody tells of; none: all are.
    #[must_use]
    pub fn unheard_host(&self) -> Option<&str> {
        let mut hosts = self.hosts.iter();
        hosts.find(|(_, host)| host.state != HostState::Up).map(|(name, _)| name.as_str())
    }

    /// A host that has not been heard since this manager began, and of which nothing says that it
    /// is away; none: there is none.
    #[must_use]
    pub fn awaited_host(&self) -> Option<&str> {
        self.hosts.iter().find(|(_, host)| host.is_awaited()).map(|(name, _)| name.as_str())
    }

    /// A VM; none: no host tells of it.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<ManagedVm> {
        let vm = self.vms.get(name)?;
        let summary = self.vm_summary(name, vm)?;
        let info = VmInfo::clone(vm.main()?);
        let also_at = vm.at.keys().filter(|host| **host != info.host).cloned().collect();
        Some(ManagedVm { summary, planned: vm.plan.as_ref().map(|plan| plan.power), info, also_at })
    }

    /// Every VM that a host tells of, as the host tells it that holds its name.
    pub fn all_vms(&self) -> impl Iterator<Item = &Arc<VmInfo>> {
        self.vms.values().filter_map(Vm::main)
    }

    /// Returns all VMs that a host reports, also those whose names other hosts hold.
    pub fn vms_of<'a>(&'a self, host: &'a str) -> impl Iterator<Item = &'a Arc<VmInfo>> + Clone {
        let names = self.hosts.get(host).into_iter().flat_map(|host| host.vms.keys());
        names.filter_map(move |name| self.vms.get(name)?.at.get(host))
    }

    /// How many hosts there are, and how many of them are heard.
    #[must_use]
    pub fn host_counts(&self) -> (u64, u64) {
        let up = self.hosts.values().filter(|host| host.state == HostState::Up).count();
        (self.hosts.len() as u64, up as u64)
    }

    /// How many hosts report what no agent reports.
    #[must_use]
    pub fn faulty_hosts(&self) -> u64 {
        self.hosts.values().filter(|host| host.fault.is_some()).count() as u64
    }

    /// How many VMs hosts tell of, and how many of them run.
    #[must_use]
    pub fn vm_counts(&self) -> (u64, u64) {
        let mut counts = (0, 0);
        for info in self.vms.values().filter_map(Vm::main) {
            counts.0 += 1;
            counts.1 += u64::from(matches!(info.state, VmState::Running | VmState::MigratingOut));
        }
        counts
    }
}
