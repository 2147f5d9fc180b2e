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
        let dir = image.parent().filter(|_| !is_rbd(image))?;
        Some((image.to_owned(), inventory.datastore_at(host, dir)))
    };
    spec.images().filter_map(of).collect()
}

/// Returns the images of a VM that a host does not have.
pub(super) fn images_missing_at(host: &str, vm: &SavedVm, inventory: &Inventory) -> Vec<String> {
    let dirs = inventory.host_info(host).map(|info| info.vm_dirs.as_slice()).unwrap_or_default();
    let has = |image: &Path| {
        let dir = image.parent().unwrap_or(image);
        if is_rbd(image) {
            return dirs.iter().any(|own| dir.starts_with(own));
        }
        let at_host = inventory.datastore_at(host, dir);
        dirs.contains(&inventory.datastore_dir(host, dir))
            && vm.datastores.get(image) == Some(&at_host)
    };
    let missing = vm.spec.images().filter(|image| !has(image));
    missing.map(|image| image.display().to_string()).collect()
}
