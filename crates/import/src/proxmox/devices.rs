//! Devices of a Proxmox VE configuration beside its disks.

use std::collections::BTreeMap;

use godwit_qemu::{Nic, NicLink, NicModel, Video, VmSpec};

use super::{numbered, option};
use crate::finding::Findings;

/// Reads what is not a disk.
pub(super) fn read(
    settings: &BTreeMap<&str, &str>,
    order: &[String],
    spec: &mut VmSpec,
    notes: &mut Findings,
) {
    let of = |name: &str| {
        let mut found: Vec<_> = settings
            .iter()
            .filter_map(|(key, value)| {
                numbered(key, name).map(|(key, number)| (number, key, *value))
            })
            .collect();
        found.sort_unstable();
        found
    };
    for (_, key, value) in of("net") {
        read_nic(key, value, order, spec, notes);
    }
    for (_, key, value) in of("hostpci") {
        notes.refuse(key, format!("a device of the host is passed through: {value}"));
    }
    for (_, key, value) in of("usb") {
        match value.split(',').next() {
            Some("spice") => notes.note(key, "redirection of USB devices is left out"),
            _ => notes.refuse(key, format!("a device of the host is passed through: {value}")),
        }
    }
    for (_, key, value) in of("parallel") {
        notes.refuse(key, format!("a device of the host is passed through: {value}"));
    }
    let mut ports = 0;
    for (_, key, value) in of("serial") {
        if value == "socket" {
            ports += 1;
        } else {
            notes.refuse(key, format!("a device of the host is passed through: {value}"));
        }
    }
    spec.serial_ports = ports.clamp(1, godwit_qemu::MOST_SERIAL_PORTS);
    spec.rng = !of("rng").is_empty();
    if let Some((_, key, value)) = of("tpmstate").first() {
        spec.tpm = true;
        let why = "its state is not imported: secrets sealed to it cannot be unsealed";
        notes.note(*key, why);
        if option(value, "version") == Some("v1.2") {
            notes.note(*key, "the TPM is of version 2.0, where it was 1.2");
        }
    }
    for (_, key, _) in of("audio") {
        notes.note(key, "left out: there is no such device");
    }
    spec.video = video(settings.get("vga").copied(), notes);
}

fn video(vga: Option<&str>, notes: &mut Findings) -> Video {
    let Some(vga) = vga else { return Video::Vga };
    let kind = option(vga, "type").or(vga.split(',').next()).unwrap_or_default();
    match kind {
        "std" => Video::Vga,
        "virtio" => Video::Virtio,
        "none" => Video::None,
        serial if numbered(serial, "serial").is_some() => Video::None,
        other => {
            notes.note("vga", format!("{other} becomes vga"));
            Video::Vga
        }
    }
}

fn read_nic(key: &str, value: &str, order: &[String], spec: &mut VmSpec, notes: &mut Findings) {
    const MODELS: [&str; 9] = [
        "virtio", "e1000e", "e1000", "rtl8139", "vmxnet3", "pcnet", "i82551", "ne2k_pci",
        "ne2k_isa",
    ];
    let found = MODELS.iter().find_map(|model| option(value, model).map(|mac| (*model, Some(mac))));
    // `model=virtio,macaddr=…` is the long form.
    let (name, mac) = found.unwrap_or_else(|| {
        let name = option(value, "model").or(value.split(',').next()).unwrap_or_default();
        (name, option(value, "macaddr"))
    });
    let model = if name == "virtio" { NicModel::Virtio } else { NicModel::E1000e };
    if !matches!(name, "virtio" | "e1000e") {
        notes.note(key, format!("model {name} becomes e1000e: the guest needs its driver"));
    }
    let place = order.iter().position(|known| known == key);
    let bridge = option(value, "bridge");
    if bridge.is_none() {
        notes.note(key, "it has no bridge: see --network");
    }
    let vlan = |text: &str| text.parse::<u16>().ok().filter(|vlan| (1..=4094).contains(vlan));
    let mut nic = Nic {
        network: bridge.unwrap_or("user").to_owned(),
        mac: mac.map(str::to_owned),
        model,
        vlan: option(value, "tag").and_then(vlan),
        boot_order: place.and_then(|place| u32::try_from(place + 1).ok()),
        ..Nic::default()
    };
    if option(value, "link_down") == Some("1") {
        nic.link = NicLink::Down;
    }
    let trunks = option(value, "trunks").unwrap_or_default();
    nic.trunk = trunks.split(';').filter_map(vlan).filter(|id| Some(*id) != nic.vlan).collect();
    if trunks.contains('-') {
        notes.note(key, "ranges of trunks are left out: name each VLAN");
    }
    if model == NicModel::Virtio {
        let queues = option(value, "queues").and_then(|text| text.parse::<u32>().ok());
        nic.queues = queues.filter(|queues| (1..=16).contains(queues));
        let mtu = option(value, "mtu").and_then(|text| text.parse::<u16>().ok());
        nic.mtu = mtu.filter(|mtu| (576..=9216).contains(mtu));
    }
    if option(value, "firewall") == Some("1") {
        notes.note(key, "its firewall is left out: see filter of `vm set --nic`");
    }
    if option(value, "rate").is_some() {
        notes.note(key, "limits of an interface are left out");
    }
    spec.nics.push(nic);
}
