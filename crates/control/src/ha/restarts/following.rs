//! The record of a protected VM, from its host's report. Pure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use godwit_api::{VmInfo, VmState};
use godwit_qemu::{HIDDEN, VmSpec, is_rbd};
use godwit_types::Incarnation;

use super::record::SavedVm;
use crate::cluster::inventory::Inventory;

/// Returns the record that follows from the report of the host that has a VM. `None`: it is not
/// protected.
pub(super) fn followed(
    known: Option<&SavedVm>,
    info: &VmInfo,
    inventory: &Inventory,
) -> Option<SavedVm> {
    info.spec.protect?;
    let runs = match info.state {
        VmState::Stopped | VmState::Suspended | VmState::Template | VmState::Stopping => false,
        // What ran when its guard ended it, when its host lost its power, or when it crashed.
        VmState::Failed | VmState::MigratingIn => known.is_some_and(|known| known.runs),
        VmState::Starting | VmState::Running | VmState::Paused | VmState::MigratingOut => true,
    };
    let incarnation = info.incarnation;
    Some(SavedVm { runs, incarnation, ..running(&info.spec, &info.host, inventory) })
}

/// Returns the record of a VM that runs on a host.
pub(super) fn running(spec: &VmSpec, host: &str, inventory: &Inventory) -> SavedVm {
    SavedVm {
        spec: spec_elsewhere(spec),
        incarnation: Incarnation::UNRECORDED,
        host: host.to_owned(),
        runs: true,
        datastores: datastores(spec, host, inventory),
        restart: None,
    }
}

/// Returns a reported specification with which another host can start the VM: it reads the chains
/// of disks itself. Secrets for cloud-init, which are not reported, were used at the first boot.
fn spec_elsewhere(spec: &VmSpec) -> VmSpec {
    let mut spec = spec.clone();
    if let Some(seed) = &mut spec.cloud_init {
        for secret in [&mut seed.password_hash, &mut seed.user_data] {
            if secret.as_deref() == Some(HIDDEN) {
                *secret = None;
            }
        }
    }
    spec
}

fn datastores(spec: &VmSpec, host: &str, inventory: &Inventory) -> BTreeMap<PathBuf, String> {
    let of = |image: &Path| {
        let dir = image.parent()?;
        let is_known = !is_rbd(image) || is_described(inventory, host, dir);
        is_known.then(|| (image.to_owned(), inventory.datastore_at(host, dir)))
    };
    spec.images().filter_map(of).collect()
}

/// Whether a host has reported which cluster has a pool of this name.
fn is_described(inventory: &Inventory, host: &str, pool: &Path) -> bool {
    inventory.datastore_info(host, pool).is_some_and(|info| info.identity.is_some())
}

/// Returns the images of a VM that a host does not have.
pub(super) fn images_missing_at(host: &str, vm: &SavedVm, inventory: &Inventory) -> Vec<String> {
    let dirs = inventory.host_info(host).map(|info| info.vm_dirs.as_slice()).unwrap_or_default();
    let has = |image: &Path| {
        let dir = image.parent().unwrap_or(image);
        let at_host = inventory.datastore_at(host, dir);
        if is_rbd(image) {
            // A pool of that name may be in another cluster. Older agents do not say.
            let recorded = vm.datastores.get(image);
            let is_other = recorded.is_some_and(|recorded| *recorded != at_host);
            let is_same = !is_other || !is_described(inventory, host, dir);
            return dirs.iter().any(|own| own == dir) && is_same;
        }
        dirs.contains(&inventory.datastore_dir(host, dir))
            && vm.datastores.get(image) == Some(&at_host)
    };
    let missing = vm.spec.images().filter(|image| !has(image));
    missing.map(|image| image.display().to_string()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rig;

    /// Returns hosts with pool `vms`, each with the identity that it reports of it, if any.
    fn inventory(hosts: &[(&str, Option<&str>)]) -> Inventory {
        let mut inventory = Inventory::default();
        for (host, identity) in hosts {
            let mut info = rig::host(host, None);
            info.vm_dirs = vec!["rbd:vms".into()];
            if let Some(identity) = identity {
                let found = json!({ "total_bytes": 9, "free_bytes": 9, "identity": identity });
                info.datastores.insert("rbd:vms".into(), serde_json::from_value(found).unwrap());
            }
            rig::put_host(&mut inventory, info, &[], Vec::new());
        }
        inventory
    }

    #[test]
    fn an_image_in_a_pool_is_at_hosts_with_the_same_pool() {
        let one = Some("1f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10");
        let other = Some("2f0c4f9a-7f2c-4d7e-9c1e-5b8a8e3d2a10");
        let missing = |image: &str, (at_a, at_b): (Option<&str>, Option<&str>)| {
            let inventory = inventory(&[("a", at_a), ("b", at_b)]);
            let mut spec = rig::vm("web", "a", None).spec;
            let disks = json!([{ "path": image, "format": "raw" }]);
            spec.disks = serde_json::from_value(disks).unwrap();
            images_missing_at("b", &running(&spec, "a", &inventory), &inventory).len()
        };
        for at in [(one, one), (None, None), (one, None), (None, one)] {
            assert_eq!(missing("rbd:vms/web", at), 0, "{at:?}");
        }
        assert_eq!(missing("rbd:vms/web", (one, other)), 1);
        // A namespace is a place of its own.
        assert_eq!(missing("rbd:vms/shop/web", (one, one)), 1);
    }
}
