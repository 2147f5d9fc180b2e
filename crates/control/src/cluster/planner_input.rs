//! Conversion of the inventory's hosts and VMs to the input of the queue and of placement.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::sync::Arc;

use godwit_api::control::HostState;
use godwit_api::{VmInfo, VmState};
use godwit_planner::placement;
use godwit_planner::queue::{HostFacts, Limits, Presence, RunningMove};
use godwit_qemu::VmSpec;

use crate::cluster::inventory::Inventory;
use crate::cluster::inventory::shares::datastores_of;

/// Assumed speed of a link without a configured speed. Used for estimates only.
const ASSUMED_BITS_PER_S: u64 = 1_000_000_000;

/// VMs that go to a host, by host: their moves run, or wait for that host and no other.
pub(crate) type Arriving = BTreeMap<String, BTreeSet<String>>;

/// Returns the time that a VM's memory takes over its host's link, if nothing else uses the link.
pub(crate) fn estimate_ms(memory_bytes: u64, host: &str, inventory: &Inventory) -> u64 {
    let link = inventory.host_plan(host).and_then(|plan| plan.link_bits_per_s);
    memory_bytes.saturating_mul(8_000) / link.unwrap_or(ASSUMED_BITS_PER_S).max(1)
}

/// Returns the directories of a VM's disks. VMs with disks in one directory share what is mounted
/// there.
pub(crate) fn datastores(vm: &str, inventory: &Inventory) -> Vec<String> {
    let Some(info) = inventory.vm_info(vm) else { return Vec::new() };
    datastores_of(&info.spec).into_iter().collect()
}

/// Returns the group of VMs whose pages can serve as references for a VM's pages: those with the
/// same kernel and initramfs. VMs that boot from disks have none, because the origin of a disk is
/// unknown.
pub(crate) fn reference_group(info: &VmInfo) -> Option<String> {
    reference_group_of(&info.spec)
}

/// Returns the reference group of a VM that does not exist yet.
pub(crate) fn reference_group_of(spec: &VmSpec) -> Option<String> {
    image(spec).map(group_of)
}

/// Returns the kernel and the initramfs, which is empty if there is none.
fn image(spec: &VmSpec) -> Option<(&OsStr, &OsStr)> {
    let initrd = spec.initrd.as_ref().map_or(OsStr::new(""), |initrd| initrd.as_os_str());
    Some((spec.kernel.as_ref()?.as_os_str(), initrd))
}

fn group_of((kernel, initrd): (&OsStr, &OsStr)) -> String {
    format!("{} {}", kernel.display(), initrd.display())
}

/// Placeholder for the other end of a migration if no agent reports that end. It is not a valid
/// host name.
const ANOTHER_HOST: &str = "another host";

/// Returns migrations that were started directly at an agent, according to the agents' reports of
/// VMs. `is_own` returns whether a migration belongs to one of the manager's moves. Reports of
/// unreachable hosts are ignored.
pub(crate) fn begun_at_agents(
    is_own: impl Fn(&str) -> bool,
    inventory: &Inventory,
) -> Vec<RunningMove> {
    let of = |(name, reports): (&str, &BTreeMap<String, Arc<VmInfo>>)| {
        let holder = inventory.holder(name);
        let is_holder = |host: &String| holder.is_none_or(|holder| holder == host);
        let current = || reports.iter().filter(|(host, _)| inventory.is_up(host));
        // Other hosts' reports of a migration count only if the holder's report does not
        // contradict.
        let (source, leaving) = current()
            .find(|(host, info)| is_holder(host) && info.state == VmState::MigratingOut)
            .unzip();
        let stays =
            current().any(|(host, info)| is_holder(host) && info.state != VmState::MigratingIn);
        // During page-in, the guest already runs on its target.
        let arrives = |host: &String, info: &VmInfo| match info.state {
            VmState::MigratingIn => leaving.is_some() || !stays,
            _ => is_holder(host) && info.page_in.is_some(),
        };
        let (target, arriving) = current().find(|(host, info)| arrives(host, info)).unzip();
        let info = leaving.or(arriving)?;
        let migration = info.migration.as_deref().unwrap_or("without a reported name");
        let named = |host: Option<&String>| host.map_or(ANOTHER_HOST, String::as_str).to_owned();
        let is_under_way =
            source.is_some() || arriving.is_some_and(|info| info.state == VmState::MigratingIn);
        (is_under_way && !is_own(migration)).then(|| RunningMove {
            migration: migration.to_owned(),
            vm: name.to_owned(),
            source: named(source),
            target: named(target),
            group: None,
            datastores: datastores_of(&info.spec).into_iter().collect(),
            reference_group: reference_group(info),
        })
    };
    inventory.reports().filter_map(of).collect()
}

/// Returns the planner's facts about a host to which the VMs `arriving` go; none: the host is
/// unknown.
pub(crate) fn host_facts(
    name: &str,
    arriving: &[&str],
    inventory: &Inventory,
) -> Option<HostFacts> {
    let (summary, plan) = (inventory.host_summary(name)?, inventory.host_plan(name)?);
    // Memory that the target's agent has not subtracted from its free memory yet.
    let promised = arriving.iter().filter(|vm| !inventory.has_vm(name, vm));
    let promised = promised.filter_map(|vm| Some(inventory.vm_info(vm)?.memory_bytes));
    // Many VMs share few images: remove duplicates before formatting them.
    let images: BTreeSet<(&OsStr, &OsStr)> =
        inventory.vms_of(name).filter_map(|info| image(&info.spec)).collect();
    Some(HostFacts {
        presence: match summary.state {
            HostState::Up => Presence::Up,
            HostState::Away => Presence::Away,
            HostState::Unknown => Presence::Unknown,
        },
        maintenance: summary.maintenance,
        link_bits_per_s: plan.link_bits_per_s,
        memory_total_bytes: summary
            .memory_available_bytes
            .saturating_add(summary.memory_committed_bytes),
        memory_free_bytes: summary.memory_available_bytes,
        memory_promised_bytes: promised.fold(0, u64::saturating_add),
        reference_groups: images.into_iter().map(group_of).collect(),
        name: summary.name,
    })
}

/// Returns every host as placement needs it, by name. `arriving` has the VMs that already go to
/// each.
pub(crate) fn placement_hosts(
    arriving: &Arriving,
    limits: &Limits,
    inventory: &Inventory,
) -> Vec<placement::Host> {
    let of = |(name, plan): (&str, &crate::cluster::inventory::HostPlan)| {
        let arriving: Vec<&str> =
            arriving.get(name).into_iter().flatten().map(String::as_str).collect();
        let facts = host_facts(name, &arriving, inventory)?;
        let arrives = arriving.iter().filter(|vm| !inventory.has_vm(name, vm));
        let arriving_vcpus: u32 = arrives
            .clone()
            .filter_map(|vm| Some(inventory.vm_info(vm)?.vcpus))
            .fold(0, u32::saturating_add);
        let info = inventory.host_info(name);
        let vms = inventory.vms_of(name);
        Some(placement::Host {
            cores: info.map_or(0, |info| info.logical_cores),
            busy_cores: info.map_or(0.0, |info| info.load_average_1min),
            vcpus_placed: vms.clone().map(|vm| vm.vcpus).fold(arriving_vcpus, u32::saturating_add),
            arrivals: u32::try_from(arriving.len()).unwrap_or(u32::MAX),
            arrivals_limit: limits.into_host(name, facts.link_bits_per_s),
            labels: plan.labels.clone(),
            vms: vms.map(|vm| vm.name.clone()).chain(arrives.map(|vm| (*vm).to_owned())).collect(),
            facts,
        })
    };
    inventory.plans().filter_map(of).collect()
}

/// Returns a VM as placement needs it.
pub(crate) fn placement_vm(info: &VmInfo) -> placement::Vm {
    placement::Vm {
        name: info.name.clone(),
        memory_bytes: info.memory_bytes,
        vcpus: info.vcpus,
        busy_cores: None,
        reference_group: reference_group(info),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig;

    #[test]
    fn migrations_started_at_agents_are_found_at_both_ends() {
        let vm = |host: &str, state: VmState, migration: &str| VmInfo {
            state,
            migration: Some(migration.to_owned()),
            ..rig::vm(if migration == "v1-1-1" { "own" } else { "x" }, host, None)
        };
        let mut inventory = Inventory::default();
        let leaving =
            vec![vm("a", VmState::MigratingOut, "m-1"), vm("a", VmState::MigratingOut, "v1-1-1")];
        rig::put_host(&mut inventory, rig::host("a", None), &[], leaving);
        let seen =
            |inventory: &Inventory| begun_at_agents(|migration| migration == "v1-1-1", inventory);
        assert_eq!(seen(&inventory)[0].target, ANOTHER_HOST);
        let arriving = vec![vm("b", VmState::MigratingIn, "m-1")];
        rig::put_host(&mut inventory, rig::host("b", None), &[], arriving);
        let found = seen(&inventory);
        let ends: Vec<_> = found
            .iter()
            .map(|one| (one.vm.as_str(), one.source.as_str(), one.target.as_str()))
            .collect();
        assert_eq!((ends, &found[0].group), (vec![("x", "a", "b")], &None));
        inventory.lost("a", "silent");
        assert_eq!(seen(&inventory)[0].source, ANOTHER_HOST);
        inventory.lost("b", "silent");
        assert!(seen(&inventory).is_empty());
    }
}
