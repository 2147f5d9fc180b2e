//! NICs in QEMU: their names and devices, the same on the command line and over QMP. Pure. A NIC in
//! a slot is named by it. Others are named by their position among each other, because they stay
//! while QEMU runs. So no name changes when another NIC comes or goes.

use serde_json::{Value, json};

use crate::slots;
use crate::spec::{NicModel, ResolvedNic};

/// Number of the NIC in slot 0, above those of NICs without a slot.
const FIRST_SLOTTED: usize = 50;

/// Returns the number of the NIC at `index`, below 100, which is the same while its VM runs.
#[must_use]
pub fn nic_number(nics: &[ResolvedNic], index: usize) -> usize {
    match nics.get(index).and_then(|nic| nic.slot) {
        Some(slot) => FIRST_SLOTTED + slot as usize,
        None => nics.iter().take(index).filter(|nic| nic.slot.is_none()).count(),
    }
}

/// Returns the ID of the device of the NIC at `index`.
#[must_use]
pub fn nic_id(nics: &[ResolvedNic], index: usize) -> String {
    format!("nic{}", nic_number(nics, index))
}

/// Returns the ID of the back end of the NIC at `index`.
pub(crate) fn netdev_id(nics: &[ResolvedNic], index: usize) -> String {
    format!("net{}", nic_number(nics, index))
}

/// Returns the device of the NIC at `index`. A NIC in a slot has no place in the boot order.
pub(crate) fn nic_device(machine: &str, nics: &[ResolvedNic], index: usize) -> Value {
    // QEMU announces the address itself (RARP), before the guest runs. A guest that did so too
    // would spend its first milliseconds at the destination on that instead of on its clients.
    let mut device = json!({ "id": nic_id(nics, index), "netdev": netdev_id(nics, index) });
    let Some(nic) = nics.get(index) else { return device };
    device["mac"] = nic.mac.to_string().into();
    if nic.boot_order.is_none() {
        // No boot ROM: 256 KiB less in QEMU's own stream.
        device["romfile"] = "".into();
    }
    match nic.model {
        NicModel::E1000e => device["driver"] = "e1000e".into(),
        NicModel::Virtio => {
            device["driver"] = "virtio-net-pci".into();
            device["guest_announce"] = false.into();
            if nic.queues() > 1 {
                device["mq"] = true.into();
                // Two for each queue, one for control and one for the configuration.
                device["vectors"] = (2 * nic.queues() + 2).into();
            }
            if let Some(mtu) = nic.mtu {
                device["host_mtu"] = mtu.into();
            }
        }
    }
    if let Some(slot) = nic.slot {
        slots::place(&mut device, machine, slot);
    }
    device
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_has_its_name_also_after_another_one_was_detached() {
        let nic = |slot: Option<u32>| -> ResolvedNic {
            let mac = format!("52:54:00:00:00:{:02x}", slot.unwrap_or(99));
            serde_json::from_value(json!({"network": "lan", "mac": mac, "slot": slot})).unwrap()
        };
        let nics = [nic(None), nic(Some(1)), nic(None), nic(Some(0))];
        let ids = |nics: &[ResolvedNic]| -> Vec<String> {
            (0..nics.len()).map(|index| nic_id(nics, index)).collect()
        };
        assert_eq!(ids(&nics), ["nic0", "nic51", "nic1", "nic50"]);
        assert_eq!(ids(&[&nics[..1], &nics[2..]].concat()), ["nic0", "nic1", "nic50"]);
        let device = nic_device("pc-q35-7.2", &nics, 1);
        assert_eq!((&device["bus"], &device["netdev"]), (&json!("slot1"), &json!("net51")));
        assert_eq!(nic_device("pc-q35-7.2", &nics, 0).get("bus"), None);
    }
}
