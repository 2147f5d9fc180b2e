//! Restarts of protected VMs after hosts have failed, and whether all of them would fit elsewhere
//! (docs/ha.md). When a host counts as failed is decided by `godwit-ha`.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fmt;

use godwit_qemu::RestartPriority;
use serde::{Deserialize, Serialize};

use crate::placement::{Exclusion, Host, Judge, Obstacles, Rule, RuledOut, Unit, Vm, ruled_out};
use crate::words::Names;

/// Most combinations of failing hosts that are tried.
const MOST_COMBINATIONS: usize = 1000;

/// A VM that is to restart elsewhere when its host has failed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProtectedVm {
    pub vm: Vm,
    /// The host that runs it.
    pub host: String,
    pub priority: RestartPriority,
    /// Disks that no other host has.
    pub local_disks: Vec<String>,
    /// Devices of the host that it uses.
    pub host_devices: Vec<String>,
    /// Results of preflight that prevent a start on other hosts.
    pub obstacles: Obstacles,
}

/// Why a VM cannot be protected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Unprotectable {
    LocalDisks {
        disks: Vec<String>,
    },
    HostDevices {
        devices: Vec<String>,
    },
    /// Rules and preflight leave no other host, whatever memory is free.
    NoOtherHost {
        ruled_out: Vec<RuledOut>,
    },
}

/// A restart, in its turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    pub vm: String,
    pub host: String,
    /// Why this host.
    pub why: String,
}

/// A VM that has no place now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unplaced {
    pub vm: String,
    /// The hosts that were left, with all their reasons.
    pub ruled_out: Vec<RuledOut>,
}

/// Restarts in their order, and VMs without a place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failover {
    pub restarts: Vec<Restart>,
    pub unplaced: Vec<Unplaced>,
}

/// Hosts whose failure leaves VMs without a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortfall {
    /// The hosts that fail at once.
    pub hosts: Vec<String>,
    /// VMs that do not fit elsewhere then.
    pub vms: Vec<String>,
    pub memory_bytes: u64,
}

/// Result of a search for the worst failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The worst failure of those that were tried.
    pub worst: Option<Shortfall>,
    /// Whether it ended before all were tried.
    pub is_cut_short: bool,
}

/// Places the protected VMs of failed hosts on the others.
#[must_use]
pub fn failover(hosts: &[Host], rules: &[Rule], vms: &[ProtectedVm], failed: &[&str]) -> Failover {
    Restarts::new(hosts, rules, vms, failed).plan()
}

/// Returns why a VM cannot be protected; `None` if it can.
#[must_use]
pub fn unprotectable(hosts: &[Host], rules: &[Rule], vm: &ProtectedVm) -> Option<Unprotectable> {
    if !vm.local_disks.is_empty() {
        return Some(Unprotectable::LocalDisks { disks: vm.local_disks.clone() });
    }
    if !vm.host_devices.is_empty() {
        return Some(Unprotectable::HostDevices { devices: vm.host_devices.clone() });
    }
    other_host(&Judge::new(hosts, rules), hosts, vm)
}

/// Returns why no other host may run a VM; `None` if one may.
fn other_host(judge: &Judge<'_>, hosts: &[Host], vm: &ProtectedVm) -> Option<Unprotectable> {
    let unit = Unit { vms: vec![&vm.vm], obstacles: vec![Some(&vm.obstacles)] };
    let mut excluded = Vec::new();
    for (index, host) in hosts.iter().enumerate().filter(|(_, host)| host.facts.name != vm.host) {
        // Partners of the VM may start elsewhere as well.
        let mut reasons = judge.exclusions(&unit, &|_| true, index);
        reasons.retain(is_lasting);
        if reasons.is_empty() {
            return None;
        }
        excluded.push(ruled_out(&host.facts.name, reasons));
    }
    Some(Unprotectable::NoOtherHost { ruled_out: excluded })
}

/// Whether a host stays excluded whatever moves or becomes free.
fn is_lasting(exclusion: &Exclusion) -> bool {
    use crate::placement::RuleBreach::{Forbidden, NotAllowed};
    matches!(
        exclusion,
        Exclusion::Preflight { .. }
            | Exclusion::Rule { breach: Forbidden { .. } | NotAllowed { .. } }
    )
}

/// Returns the worst failure of `failures` hosts at once that leaves protected VMs without a place;
/// `None` if all of them fit whichever hosts fail. Beyond [`MOST_COMBINATIONS`], only hosts with
/// the most protected memory are combined. VMs that cannot be protected do not count.
#[must_use]
pub fn shortfall(
    hosts: &[Host],
    rules: &[Rule],
    vms: &[ProtectedVm],
    failures: usize,
) -> Option<Shortfall> {
    search(hosts, rules, vms, failures, &mut || true).worst
}

/// Searches as [`shortfall`] does, for as long as `goes_on`, which is asked before each VM and each
/// combination of hosts.
#[must_use]
pub fn search(
    hosts: &[Host],
    rules: &[Rule],
    vms: &[ProtectedVm],
    failures: usize,
    goes_on: &mut dyn FnMut() -> bool,
) -> Search {
    let judge = Judge::new(hosts, rules);
    let mut counted: Vec<ProtectedVm> = Vec::new();
    for vm in vms {
        if !goes_on() {
            return Search { worst: None, is_cut_short: true };
        }
        let is_of_host = !vm.local_disks.is_empty() || !vm.host_devices.is_empty();
        if !is_of_host && other_host(&judge, hosts, vm).is_none() {
            counted.push(vm.clone());
        }
    }
    let vms = counted;
    let mut memory: HashMap<&str, u64> = HashMap::new();
    for vm in &vms {
        let of_host = memory.entry(&vm.host).or_default();
        *of_host = of_host.saturating_add(vm.vm.memory_bytes);
    }
    let mut names: Vec<&str> = hosts.iter().map(|host| host.facts.name.as_str()).collect();
    names.sort_by_key(|name| (std::cmp::Reverse(memory.get(name).copied()), *name));
    let mut worst: Option<Shortfall> = None;
    for failed in combinations(&names, failures) {
        if !goes_on() {
            return Search { worst, is_cut_short: true };
        }
        let plan = failover(hosts, rules, &vms, &failed);
        let unplaced: Vec<String> = plan.unplaced.into_iter().map(|of| of.vm).collect();
        let is_unplaced = |vm: &&ProtectedVm| unplaced.contains(&vm.vm.name);
        let sizes = vms.iter().filter(is_unplaced).map(|vm| vm.vm.memory_bytes);
        let memory_bytes = sizes.fold(0, u64::saturating_add);
        let is_worse = worst.as_ref().is_none_or(|worst| memory_bytes > worst.memory_bytes);
        if !unplaced.is_empty() && is_worse {
            let hosts = failed.into_iter().map(str::to_owned).collect();
            worst = Some(Shortfall { hosts, vms: unplaced, memory_bytes });
        }
    }
    Search { worst, is_cut_short: false }
}

/// Returns all combinations of `size` names, or those of as many of the first names as allowed.
fn combinations<'a>(names: &[&'a str], size: usize) -> Vec<Vec<&'a str>> {
    let mut all: Vec<Vec<&str>> = vec![Vec::new()];
    if size == 0 || size > names.len() {
        return Vec::new();
    }
    let fits = |of: &usize| number_of_combinations(*of, size) <= MOST_COMBINATIONS;
    let first = (size..=names.len()).rev().find(fits).unwrap_or(size);
    for (index, name) in names.iter().enumerate().take(first) {
        for at in 0..all.len() {
            // A combination that could not be completed is not continued.
            if all[at].len() < size && all[at].len() + first - index >= size {
                let mut longer = all[at].clone();
                longer.push(*name);
                all.push(longer);
            }
        }
    }
    all.retain(|combination| combination.len() == size);
    all
}

fn number_of_combinations(of: usize, size: usize) -> usize {
    let mut number: usize = 1;
    for step in 0..size.min(of - size) {
        number = number.saturating_mul(of - step) / (step + 1);
    }
    number
}

/// The restarts so far.
struct Restarts<'a> {
    hosts: &'a [Host],
    vms: Vec<&'a ProtectedVm>,
    judge: Judge<'a>,
    /// Hosts that are left.
    candidates: Vec<usize>,
    /// VMs of failed hosts that have no new place: rules do not bind others to their old ones.
    gone: HashSet<&'a str>,
    plan: Failover,
}

impl<'a> Restarts<'a> {
    fn new(hosts: &'a [Host], rules: &'a [Rule], vms: &'a [ProtectedVm], failed: &[&str]) -> Self {
        let is_failed = |host: &Host| failed.contains(&host.facts.name.as_str());
        let left = |(index, host): (usize, &Host)| (!is_failed(host)).then_some(index);
        let on_failed = hosts.iter().filter(|host| is_failed(host)).flat_map(|host| &host.vms);
        let mut vms: Vec<&ProtectedVm> =
            vms.iter().filter(|vm| failed.contains(&vm.host.as_str())).collect();
        vms.sort_by_key(|vm| {
            (vm.priority, std::cmp::Reverse(vm.vm.memory_bytes), vm.vm.name.as_str())
        });
        Restarts {
            hosts,
            vms,
            judge: Judge::new(hosts, rules),
            candidates: hosts.iter().enumerate().filter_map(left).collect(),
            gone: on_failed.map(String::as_str).collect(),
            plan: Failover::default(),
        }
    }

    fn plan(mut self) -> Failover {
        let mut seen = HashSet::new();
        for vm in self.vms.clone() {
            let unit = self.unit(vm, &mut seen);
            if !unit.is_empty() {
                self.place(&unit);
            }
        }
        self.plan
    }

    /// Returns a VM with those that a `must` rule keeps with it, unless they have had their turn.
    fn unit(&self, vm: &'a ProtectedVm, seen: &mut HashSet<&'a str>) -> Vec<&'a ProtectedVm> {
        let (mut unit, mut open) = (Vec::new(), vec![vm]);
        while let Some(next) = open.pop() {
            if seen.insert(next.vm.name.as_str()) {
                unit.push(next);
                let partners: Vec<&str> = self.judge.must_be_with(&next.vm.name).collect();
                let is_partner = |vm: &&&ProtectedVm| partners.contains(&vm.vm.name.as_str());
                open.extend(self.vms.iter().filter(is_partner).copied());
            }
        }
        unit.sort_by_key(|vm| (vm.priority, vm.vm.name.as_str()));
        unit
    }

    fn place(&mut self, of: &[&'a ProtectedVm]) {
        let vms: Vec<&'a Vm> = of.iter().map(|vm| &vm.vm).collect();
        let obstacles = of.iter().map(|vm| Some(&vm.obstacles)).collect();
        let unit = Unit { vms: vms.clone(), obstacles };
        let gone = |vm: &str| self.gone.contains(vm);
        let Some((index, why)) = self.judge.best(&unit, &gone, &self.candidates) else {
            let exclusions = |index: &usize| {
                let reasons = self.judge.exclusions(&unit, &gone, *index);
                ruled_out(&self.hosts[*index].facts.name, reasons)
            };
            let excluded: Vec<RuledOut> = self.candidates.iter().map(exclusions).collect();
            let unplaced =
                vms.iter().map(|vm| Unplaced { vm: vm.name.clone(), ruled_out: excluded.clone() });
            self.plan.unplaced.extend(unplaced);
            return;
        };
        self.judge.put(&vms, index);
        let host = &self.hosts[index].facts.name;
        for vm in vms {
            self.gone.remove(vm.name.as_str());
            let restart = Restart { vm: vm.name.clone(), host: host.clone(), why: why.clone() };
            self.plan.restarts.push(restart);
        }
    }
}

impl fmt::Display for Unprotectable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unprotectable::LocalDisks { disks } => {
                write!(f, "no other host has {}", Names(disks, disks.len()))
            }
            Unprotectable::HostDevices { devices } => {
                write!(f, "it uses {} of its host", Names(devices, devices.len()))
            }
            Unprotectable::NoOtherHost { ruled_out } if ruled_out.is_empty() => {
                f.write_str("there is no other host")
            }
            Unprotectable::NoOtherHost { ruled_out } => {
                let hosts = ruled_out.iter().map(|of| format!("{}: {}", of.host, of.text));
                write!(f, "no other host may run it: {}", hosts.collect::<Vec<_>>().join("; "))
            }
        }
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hosts, vms) = (&self.hosts, &self.vms);
        let (fail, fit) = (
            if hosts.len() == 1 { "fails" } else { "fail" },
            if vms.len() == 1 { "does" } else { "do" },
        );
        let (hosts, vms) = (Names(hosts, hosts.len()), Names(vms, vms.len()));
        write!(f, "if {hosts} {fail}, {vms} {fit} not fit elsewhere")
    }
}
