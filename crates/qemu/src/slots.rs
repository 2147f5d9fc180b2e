//! Slots for PCI devices that come while a VM runs. Pure: a slot has the same address at both ends
//! of a migration.
//!
//! On q35 a slot is a `pcie-root-port`, one function of the last devices of the root bus; devices
//! of the root complex itself cannot come or go. On pc (i440fx) it is one of the last devices of
//! the root bus. QEMU gives the other devices the lowest free addresses, so that a VM's slots move
//! none of them.

use serde_json::{Value, json};

use crate::spec::ResolvedSpec;

/// Functions of a PCI device.
const FUNCTIONS: u32 = 8;
/// Device of the root bus with the first root ports of q35; the next ones are below it. 31 is the
/// ICH9 itself.
const FIRST_PORTS: u32 = 30;
/// Device of the root bus of pc with slot 0; the next ones are below it.
const FIRST_DEVICE: u32 = 31;

/// Returns the devices that a VM's slots are.
pub(crate) fn ports(spec: &ResolvedSpec) -> Vec<Value> {
    if !is_q35(&spec.machine) {
        return Vec::new();
    }
    let port = |slot: u32| {
        let (device, function) = (FIRST_PORTS - slot / FUNCTIONS, slot % FUNCTIONS);
        let mut port = json!({
            "driver": "pcie-root-port", "id": port_id(slot), "bus": "pcie.0",
            "addr": format!("{device:x}.{function}"), "chassis": slot + 1, "slot": slot + 1,
            // Firmware would reserve 4 KiB of the 64 KiB of I/O ports for each.
            "io-reserve": 0,
        });
        if function == 0 && spec.hotplug_slots > slot + 1 {
            port["multifunction"] = true.into();
        }
        port
    };
    (0..spec.hotplug_slots).map(port).collect()
}

/// Puts a device into a slot.
pub(crate) fn place(device: &mut Value, machine: &str, slot: u32) {
    let (bus, address) = match is_q35(machine) {
        true => (port_id(slot), 0),
        false => ("pci.0".to_owned(), FIRST_DEVICE.saturating_sub(slot)),
    };
    device["bus"] = bus.into();
    device["addr"] = format!("{address:x}.0").into();
}

fn is_q35(machine: &str) -> bool {
    machine.starts_with("pc-q35")
}

fn port_id(slot: u32) -> String {
    format!("slot{slot}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_addresses_that_no_other_device_gets() {
        let mut spec: ResolvedSpec = serde_json::from_value(json!({
            "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "accel": "tcg",
            "cpu_model": "Westmere-v1", "machine": "pc-q35-7.2", "kernel": "/boot/vmlinuz",
        }))
        .unwrap();
        assert_eq!(ports(&spec), Vec::<Value>::new());
        spec.hotplug_slots = 10;
        let addresses: Vec<Value> = ports(&spec).iter().map(|port| port["addr"].clone()).collect();
        assert_eq!((&addresses[0], &addresses[7]), (&json!("1e.0"), &json!("1e.7")));
        assert_eq!(addresses[8..], [json!("1d.0"), json!("1d.1")]);
        assert_eq!(ports(&spec)[8]["multifunction"], true);
        let placed = |machine: &str| {
            let mut device = json!({});
            place(&mut device, machine, 3);
            device
        };
        assert_eq!(placed("pc-q35-7.2"), json!({"bus": "slot3", "addr": "0.0"}));
        assert_eq!(placed("pc-i440fx-7.2"), json!({"bus": "pci.0", "addr": "1c.0"}));
    }
}
