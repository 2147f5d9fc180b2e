//! Disks that travel with a VM: whether they must, and the check of their places at the target.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_api::{HostInfo, TravellingDisks, VmInfo};
use godwit_planner::words::Bytes;
use godwit_qemu::{Disk, VmSpec, is_rbd, is_thin_pool};

use super::Subject;
use super::cpu::unreported;
use super::found::Found;
use crate::cluster::inventory::{Inventory, SeenHost};

/// Returns how the disks of a VM travel to a target. `None`: they stay where they are, because
/// nobody requested it, or because the target shares their directories and no other was requested.
pub(crate) fn travelling(
    inventory: &Inventory,
    info: &VmInfo,
    to: &str,
    wanted: Option<&TravellingDisks>,
) -> Option<TravellingDisks> {
    let wanted = wanted?;
    (wanted.to.is_some() || !shares(inventory, info, to)).then(|| wanted.clone())
}

/// Checks the directories at the target for disks that travel.
pub(super) fn disks(subject: &Subject<'_>, to: SeenHost<'_>, wanted: &TravellingDisks) -> Found {
    let Some(info) = to.info else { return unreported(to.name) };
    let written = written_dirs(&subject.vm.info.spec);
    let all: Vec<String> = written.iter().map(|dir| dir.display().to_string()).collect();
    if wanted.to.is_none() && shares(subject.inventory, subject.vm.info, to.name) {
        let evidence =
            format!("host {} shares {}: the disks stay where they are", to.name, all.join(", "));
        return Found::pass(evidence);
    }
    let dirs = match &wanted.to {
        Some(dir) => BTreeSet::from([dir.as_path()]),
        None => written,
    };
    let is_in = |dir: &Path, of_vms: &Path| match is_rbd(dir) {
        // A pool and its namespaces are places of their own.
        true => dir == of_vms,
        false => dir.starts_with(of_vms),
    };
    // A directory of devices is an entry itself, or has one.
    let has_devices = |dir: &Path| {
        info.block_devices.iter().any(|device| dir == device || device.parent() == Some(dir))
    };
    let is_outside =
        |dir: &&&Path| !has_devices(dir) && !info.vm_dirs.iter().any(|of_vms| is_in(dir, of_vms));
    if let Some(outside) = dirs.iter().find(is_outside).filter(|_| !info.vm_dirs.is_empty()) {
        let (dir, host) = (outside.display(), to.name);
        if is_rbd(outside) {
            let evidence =
                format!("host {host} has no pool {dir} of Ceph for VMs, where its disks would be");
            let remedy = "choose another place for the disks, or add [[ceph]] with that pool to \
                          that host's configuration";
            return Found::fail(evidence, remedy);
        }
        if is_thin_pool(outside) {
            let evidence =
                format!("host {host} has no thin pool {dir} for VMs, where its disks would be");
            let remedy = "choose another place for the disks, or add [[thin_pools]] with that pool \
                          to that host's configuration";
            return Found::fail(evidence, remedy);
        }
        let evidence =
            format!("{dir} is below none of the vm_dirs of host {host}, where its disks would be");
        let remedy = "choose another directory for the disks, or add this one to vm_dirs, or to \
                      block_devices if it has devices, in that host's configuration";
        return Found::fail(evidence, remedy);
    }
    let refused = |dir: &&Path| subject.inventory.check_takes_disks(to.name, dir).err();
    if let Some(problem) = dirs.iter().find_map(refused) {
        return Found::fail(problem.detail, problem.remedy);
    }
    let rooms: Vec<String> = dirs.iter().map(|dir| room(info, dir)).collect();
    let evidence = format!("its disks travel to host {}: {}", to.name, rooms.join(", "));
    Found::unknown(evidence, "request a prediction, which compares the room with their use")
}

/// Whether a path is for VMs of a host: below one of its directories for them, in one of its pools
/// of Ceph, whose namespaces are places of their own, or a block device that VMs may use.
pub(super) fn is_for_vms(info: &HostInfo, path: &Path) -> bool {
    let is_in = |place: &PathBuf| match is_rbd(path) {
        true => path.parent() == Some(place.as_path()),
        false => path.starts_with(place),
    };
    let is_device = |entry: &PathBuf| path == entry || path.parent() == Some(entry.as_path());
    info.vm_dirs.iter().any(is_in) || info.block_devices.iter().any(is_device)
}

/// Describes the room in a directory of a host.
fn room(info: &HostInfo, dir: &Path) -> String {
    let store = dir.ancestors().find_map(|dir| info.datastores.get(dir));
    match store.filter(|store| store.total_bytes > 0) {
        Some(store) => format!("{} has {} left", dir.display(), Bytes(store.free_bytes)),
        None => dir.display().to_string(),
    }
}

/// Returns the directories of the disks that a VM writes.
fn written_dirs(spec: &VmSpec) -> BTreeSet<&Path> {
    let travels = |disk: &&Disk| !disk.readonly && !is_rbd(&disk.path);
    spec.disks.iter().filter(travels).filter_map(|disk| disk.path.parent()).collect()
}

/// Returns whether a target has the same directories for the disks that a VM writes, by the
/// identities that agents report. A directory without an identity is not shared.
fn shares(inventory: &Inventory, info: &VmInfo, to: &str) -> bool {
    let (Some(from), Some(to)) = (inventory.host_info(&info.host), inventory.host_info(to)) else {
        return false;
    };
    written_dirs(&info.spec).into_iter().all(|dir| is_shared(from, to, dir))
}

/// Returns whether two hosts share a directory. Only the host with a VM's disk reports a directory
/// that is deep below its `vm_dirs`: the nearest directory that both report counts.
fn is_shared(from: &HostInfo, to: &HostInfo, dir: &Path) -> bool {
    let identities = dir.ancestors().find_map(|dir| {
        let identity = |info: &HostInfo| info.datastores.get(dir)?.identity.clone();
        identity(from).zip(identity(to))
    });
    identities.is_some_and(|(from, to)| from == to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig;

    #[test]
    fn a_namespace_is_another_place_than_its_pool() {
        let mut info = rig::host("a", None);
        info.vm_dirs = ["/srv", "rbd:vms", "rbd:db/shop"].map(PathBuf::from).to_vec();
        info.block_devices = vec!["/dev/vg0".into()];
        let is_it = |path: &str| is_for_vms(&info, Path::new(path));
        for path in ["/srv/a/web.raw", "rbd:vms/web", "rbd:db/shop/web", "/dev/vg0/web"] {
            assert!(is_it(path), "{path}");
        }
        for path in ["/srv2/web.raw", "rbd:vms/shop/web", "rbd:db/web", "/dev/vg1/web"] {
            assert!(!is_it(path), "{path}");
        }
    }
}
