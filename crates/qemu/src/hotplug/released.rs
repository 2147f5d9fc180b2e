//! Devices that a guest has released: late, after the command that detached them has given up, or
//! while no agent ran.

use std::collections::BTreeSet;

use serde_json::json;

use crate::drives;
use crate::nics::nic_id;
use crate::qmp::{Qmp, QmpError};
use crate::spec::{ResolvedDisk, ResolvedSpec};

/// Whether a device is one that the definition has and that can be detached while the VM runs.
#[must_use]
pub fn is_detachable_device(spec: &ResolvedSpec, device: &str) -> bool {
    let slotted = |index: &usize| spec.nics[*index].slot.is_some();
    let mut nics = (0..spec.nics.len()).filter(slotted).map(|index| nic_id(&spec.nics, index));
    let mut disks = spec.disks.iter().filter(|disk| is_detachable(spec, disk));
    nics.any(|id| id == device) || disks.any(|disk| disk_id(disk) == device)
}

/// Whether a disk can come and go. The devices of a VM that was adopted are those that another
/// program has named.
fn is_detachable(spec: &ResolvedSpec, disk: &ResolvedDisk) -> bool {
    spec.topology.is_none() && drives::is_detachable(disk)
}

fn disk_id(disk: &ResolvedDisk) -> String {
    drives::disk_device_id(&drives::unit_name(disk), disk)
}

/// Returns the definition without the NICs and disks that can be detached while the VM runs and
/// whose devices are not among these; `None` if all are.
fn without_missing(spec: &ResolvedSpec, devices: &BTreeSet<String>) -> Option<ResolvedSpec> {
    let mut real = spec.clone();
    let mut index = 0;
    real.nics.retain(|nic| {
        index += 1;
        nic.slot.is_none() || devices.contains(&nic_id(&spec.nics, index - 1))
    });
    real.disks.retain(|disk| !is_detachable(spec, disk) || devices.contains(&disk_id(disk)));
    (real != *spec).then_some(real)
}

impl Qmp {
    /// Returns the definition without what the guest has released; `None` if all of it is there.
    ///
    /// # Errors
    /// Those of [`Qmp::execute`].
    pub async fn without_released(
        &self,
        spec: &ResolvedSpec,
    ) -> Result<Option<ResolvedSpec>, QmpError> {
        let nics = spec.nics.iter().any(|nic| nic.slot.is_some());
        if !nics && !spec.disks.iter().any(|disk| is_detachable(spec, disk)) {
            return Ok(None);
        }
        let named = self.execute("qom-list", json!({"path": "/machine/peripheral"})).await?;
        let named = named.as_array().ok_or_else(|| {
            let why = "the response to qom-list is no list".to_owned();
            QmpError::Protocol { why }
        })?;
        let names = named.iter().filter_map(|device| device["name"].as_str().map(str::to_owned));
        Ok(without_missing(spec, &names.collect()))
    }

    /// Removes what is left of released devices, such as the images of disks: what `spec` has and
    /// `real` does not.
    pub async fn remove_released(&self, spec: &ResolvedSpec, real: &ResolvedSpec) {
        for disk in spec.disks.iter().filter(|disk| !real.disks.contains(disk)) {
            let layers = disk.backing.as_ref().map_or(1, |backing| backing.len() + 1);
            self.remove_disk_parts(disk, layers).await;
        }
        for (index, _) in spec.nics.iter().enumerate().filter(|(_, nic)| !real.nics.contains(nic)) {
            self.remove_nic_parts(&crate::nics::netdev_id(&spec.nics, index), None).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_has_released_leaves_the_definition() {
        let spec: ResolvedSpec = serde_json::from_value(json!({
            "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz",
            "hotplug_slots": 4, "scsi_controller": true,
            "disks": [
                {"path": "/first", "format": "raw"},
                {"path": "/slot", "format": "raw", "slot": 1},
                {"path": "/scsi", "format": "raw", "bus": "scsi", "unit": 2},
                {"path": "/sata", "format": "raw", "bus": "sata", "unit": 0},
            ],
            "nics": [
                {"network": "lan", "mac": "52:54:00:00:00:01"},
                {"network": "lan", "mac": "52:54:00:00:00:02", "slot": 0},
            ],
        }))
        .unwrap();
        for (device, is_one) in [
            ("virtio-plugged1", true),
            ("drive-scsi2", true),
            ("nic50", true),
            ("nic0", false),
            ("drive-sata0", false),
            ("virtio-plugged0", false),
            ("", false),
        ] {
            assert_eq!(is_detachable_device(&spec, device), is_one, "{device}");
        }
        let adopted = ResolvedSpec {
            nics: Vec::new(),
            topology: Some(crate::spec::Topology::default()),
            ..spec.clone()
        };
        assert!(!is_detachable_device(&adopted, "drive-scsi2"));
        assert_eq!(without_missing(&adopted, &BTreeSet::new()), None);
        let real = |devices: &[&str]| {
            let devices = devices.iter().map(|id| (*id).to_owned()).collect();
            without_missing(&spec, &devices).map(|real| {
                let disks: Vec<_> =
                    real.disks.iter().map(|disk| disk.path.display().to_string()).collect();
                (disks.join(" "), real.nics.len())
            })
        };
        assert_eq!(real(&["virtio-plugged1", "drive-scsi2", "nic50"]), None);
        assert_eq!(
            real(&["virtio-plugged1", "drive-scsi2"]),
            Some(("/first /slot /scsi /sata".into(), 1))
        );
        assert_eq!(real(&["drive-scsi2", "nic50"]), Some(("/first /scsi /sata".into(), 2)));
        assert_eq!(real(&["nic50"]), Some(("/first /sata".into(), 2)));
    }
}
