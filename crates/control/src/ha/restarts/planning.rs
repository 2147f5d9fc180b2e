//! Input of the planner about protected VMs, and where each VM of an ended term may start. Pure.

use std::collections::{BTreeMap, BTreeSet};

use godwit_api::control::Role;
use godwit_planner::failover::{Failover, ProtectedVm, failover, unprotectable};
use godwit_planner::placement::{self, Host, Obstacle, Obstacles, Rule};
use godwit_qemu::VmSpec;

use super::following::{images_missing_at, running};
use super::record::{ReleaseKey, SavedVm};
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::inventory::Inventory;
use crate::cluster::planner_input::{Arriving, placement_hosts, reference_group_of};
use crate::cluster::text::beginning;
use crate::ha::terms::Terms;
use crate::preflight::obstacles_to_start;

/// Returns the hosts as the planner needs them. `starting` are VMs that are being started, with
/// their hosts, which do not report them yet.
pub(super) fn hosts<'a>(
    inventory: &Inventory,
    starting: impl Iterator<Item = (&'a str, &'a SavedVm)>,
) -> Vec<Host> {
    let mut hosts = placement_hosts(&Arriving::new(), &inventory.limits(), inventory);
    for (target, vm) in starting {
        let of_target = hosts.iter_mut().find(|host| host.facts.name == target);
        if let Some(host) = of_target {
            promise(host, &vm.spec);
        }
    }
    hosts
}

/// Counts a VM that will run on a host.
pub(crate) fn promise(host: &mut Host, spec: &VmSpec) {
    let promised = host.facts.memory_promised_bytes.saturating_add(memory_bytes(spec));
    host.facts.memory_promised_bytes = promised;
    if !host.vms.contains(&spec.name) {
        host.vcpus_placed = host.vcpus_placed.saturating_add(spec.vcpus);
        host.vms.push(spec.name.clone());
    }
}

pub(super) fn memory_bytes(spec: &VmSpec) -> u64 {
    spec.memory.iter().map(|block| block.size.bytes()).fold(0, u64::saturating_add)
}

/// Returns a VM that runs on a host as the planner needs it.
pub(crate) fn protected_from(spec: &VmSpec, host: &str, inventory: &Inventory) -> ProtectedVm {
    protected_vm(&running(spec, host, inventory), inventory)
}

/// Returns a protected VM as the planner needs it.
pub(super) fn protected_vm(vm: &SavedVm, inventory: &Inventory) -> ProtectedVm {
    let spec = &vm.spec;
    let mut obstacles = obstacles_to_start(inventory, spec, Role::Admin);
    let mut nowhere: Option<BTreeSet<String>> = None;
    for (host, _) in inventory.plans().filter(|(host, _)| *host != vm.host) {
        let missing = images_missing_at(host, vm, inventory);
        if !missing.is_empty() {
            let message = format!("it does not have {}", missing.join(", "));
            add(&mut obstacles, host, "disks", message);
        }
        let missing: BTreeSet<String> = missing.into_iter().collect();
        nowhere = Some(match nowhere {
            Some(before) => before.intersection(&missing).cloned().collect(),
            None => missing,
        });
    }
    ProtectedVm {
        vm: placement::Vm {
            name: spec.name.clone(),
            memory_bytes: memory_bytes(spec),
            vcpus: spec.vcpus,
            busy_cores: None,
            reference_group: reference_group_of(spec),
        },
        host: vm.host.clone(),
        priority: spec.protect.unwrap_or_default(),
        local_disks: nowhere.unwrap_or_default().into_iter().collect(),
        host_devices: host_devices(spec),
        obstacles,
    }
}

/// Returns what a VM has of its host.
fn host_devices(spec: &VmSpec) -> Vec<String> {
    let driver = |device: &String| device.split(',').next().unwrap_or_default().to_owned();
    let drivers = spec.extra_devices.iter().map(driver);
    let of_host = drivers.filter(|driver| driver.contains("vfio") || driver.contains("host"));
    of_host.chain(spec.tpm.then(|| "the TPM".to_owned())).collect()
}

fn add(obstacles: &mut Obstacles, host: &str, code: &str, message: String) {
    let obstacle = Obstacle { code: code.to_owned(), message };
    obstacles.entry(host.to_owned()).or_default().push(obstacle);
}

/// A VM that waits for a start.
pub(super) struct Waiting<'a> {
    pub(super) vm: &'a SavedVm,
    /// Hosts that refused to start it lately, and why.
    pub(super) refused: &'a BTreeMap<String, String>,
}

/// Places the VMs that wait, in the order of their restart.
pub(super) fn place(
    waiting: &[Waiting<'_>],
    hosts: &[Host],
    terms: &Terms,
    to_release: &BTreeSet<ReleaseKey>,
    inventory: &Inventory,
) -> Failover {
    let as_protected = |waiting: &Waiting<'_>| {
        let mut protected = protected_vm(waiting.vm, inventory);
        for host in hosts.iter().map(|host| host.facts.name.as_str()) {
            if terms.open(host).is_none() {
                add(&mut protected.obstacles, host, "term", "it holds no term".to_owned());
            }
            if to_release.contains(&ReleaseKey::new(host, &waiting.vm.spec.name)) {
                let message = "it has a former definition of the VM".to_owned();
                add(&mut protected.obstacles, host, "release", message);
            }
            if let Some(why) = waiting.refused.get(host) {
                add(&mut protected.obstacles, host, "refused", format!("it refused: {why}"));
            }
        }
        protected
    };
    let vms: Vec<ProtectedVm> = waiting.iter().map(as_protected).collect();
    let failed: BTreeSet<&str> = waiting.iter().map(|waiting| waiting.vm.host.as_str()).collect();
    let failed: Vec<&str> = failed.into_iter().collect();
    let mut plan = failover(hosts, &inventory.rules(), &vms, &failed);
    // A host that holds a term again starts what it has itself, whatever else was planned.
    for of in waiting {
        let (name, host) = (&of.vm.spec.name, &of.vm.host);
        let returns = inventory.is_up(host)
            && terms.open(host).is_some()
            && inventory.vm_at(host, name).is_some();
        if returns {
            plan.unplaced.retain(|unplaced| unplaced.vm != *name);
            plan.restarts.retain(|restart| restart.vm != *name);
            plan.restarts.push(godwit_planner::failover::Restart {
                vm: name.clone(),
                host: host.clone(),
                why: "its host is back".to_owned(),
            });
        }
    }
    plan
}

/// Returns why each VM could not restart elsewhere, by name.
pub(super) fn problems(
    vms: &[ProtectedVm],
    hosts: &[Host],
    rules: &[Rule],
) -> BTreeMap<String, String> {
    let of = |vm: &ProtectedVm| {
        let why = unprotectable(hosts, rules, vm)?;
        Some((vm.vm.name.clone(), beginning(&why.to_string(), MOST_REASON_BYTES)))
    };
    vms.iter().filter_map(of).collect()
}
