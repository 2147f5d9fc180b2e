//! Devices of a libvirt domain beside its disks.

use godwit_qemu::{Nic, NicLink, NicModel, Video, VmSpec, Watchdog};
use roxmltree::Node;

use super::disks::boot_place;
use crate::finding::Findings;
use crate::xml::Walk;

/// Devices that every machine has, or that the guest does not notice to be absent.
const IGNORED: [&str; 5] = ["disk", "emulator", "input", "panic", "graphics"];

/// Reads what is not a disk.
pub(super) fn read(devices: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let mut serial_ports = 0;
    for device in devices.children().filter(Node::is_element) {
        let name = device.tag_name().name();
        match name {
            "interface" => read_nic(device, spec, notes),
            "video" => read_video(device, spec, notes),
            "tpm" => read_tpm(device, spec, notes),
            "rng" => spec.rng = true,
            "watchdog" => read_watchdog(device, spec, notes),
            "serial" => serial_ports += 1,
            "channel" => read_channel(device, spec, notes),
            "controller" => read_controller(device, spec, notes),
            "console" => {
                if device.child_attr("target", "type").is_some_and(|kind| kind != "serial") {
                    notes.note("console", "a virtio console is left out: use the serial port");
                }
            }
            "memballoon" => {
                if device.attr("model") != Some("none") {
                    notes.note("memballoon", "ballooning is not available: it is left out");
                }
            }
            "hostdev" => {
                let kind = device.attr("type").unwrap_or("device");
                notes.refuse(
                    format!("hostdev ({kind}{})", address_of(device)),
                    "a device of the host is passed through: detach it, or give the guest an \
                     emulated one",
                );
            }
            "redirdev" | "smartcard" | "sound" | "audio" | "hub" | "iommu" | "vsock" | "crypto" => {
                notes.note(name, "left out: there is no such device");
            }
            "filesystem" | "shmem" | "parallel" | "pstore" => {
                notes.note(name, "left out: it is a file or a device of the host");
            }
            "memory" => notes.refuse("memory module", "add its size to <memory>, and remove it"),
            "lease" => notes.note("lease", "left out: Godwit's own records prevent a second start"),
            name if IGNORED.contains(&name) => {}
            other => notes.note(other, "left out: it is not known"),
        }
    }
    spec.serial_ports = serial_ports.clamp(1, godwit_qemu::MOST_SERIAL_PORTS);
    if serial_ports > spec.serial_ports {
        notes.note("serial ports", "a VM has at most 4: the rest is left out");
    }
}

fn address_of(device: Node) -> String {
    let Some(address) = device.at(&["source", "address"]) else { return String::new() };
    let parts = ["domain", "bus", "slot", "function", "uuid"];
    let parts: Vec<&str> = parts.into_iter().filter_map(|part| address.attr(part)).collect();
    format!(" {}", parts.join(":"))
}

fn read_nic(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let mac = node.child_attr("mac", "address");
    let what = format!("interface {}", mac.unwrap_or("(no address)"));
    let kind = node.attr("type").unwrap_or_default();
    let source = |name: &str| node.child_attr("source", name);
    let network = match kind {
        "bridge" => source("bridge"),
        "network" => source("network"),
        "direct" => source("dev"),
        "user" | "ethernet" | "internal" => Some(kind),
        "hostdev" | "vdpa" => {
            return notes.refuse(what, "a network device of the host is passed through");
        }
        other => {
            let why = format!("an interface of type {other} cannot be imported: use a bridge");
            return notes.refuse(what, why);
        }
    };
    if !matches!(kind, "bridge" | "network") {
        notes.note(&what, format!("type {kind} becomes a port of a bridge: see --network"));
    }
    let model = match node.child_attr("model", "type") {
        Some("virtio") => NicModel::Virtio,
        Some("e1000e") => NicModel::E1000e,
        other => {
            let old = other.unwrap_or("(default)");
            notes.note(&what, format!("model {old} becomes e1000e: the guest needs its driver"));
            NicModel::E1000e
        }
    };
    let mut nic = Nic {
        network: network.unwrap_or_default().to_owned(),
        mac: mac.map(str::to_owned),
        model,
        boot_order: boot_place(node),
        ..Nic::default()
    };
    if node.child_attr("link", "state") == Some("down") {
        nic.link = NicLink::Down;
    }
    if model == NicModel::Virtio {
        let number = |child, name| node.child_attr(child, name)?.parse::<u32>().ok();
        nic.queues = number("driver", "queues").filter(|queues| (1..=16).contains(queues));
        let mtu = number("mtu", "size").and_then(|mtu| u16::try_from(mtu).ok());
        nic.mtu = mtu.filter(|mtu| (576..=9216).contains(mtu));
    }
    read_vlans(node, &mut nic, &what, notes);
    for (name, why) in [
        ("bandwidth", "limits of an interface are left out"),
        ("filterref", "its filter is left out: see filter of `vm set --nic`"),
        ("virtualport", "the port of its switch is left out"),
    ] {
        if node.child(name).is_some() {
            notes.note(&what, why);
        }
    }
    spec.nics.push(nic);
}

fn read_vlans(node: Node, nic: &mut Nic, what: &str, notes: &mut Findings) {
    let Some(vlan) = node.child("vlan") else { return };
    let tags = vlan.children_named("tag");
    let tags: Vec<_> = tags
        .into_iter()
        .filter_map(|tag| {
            let id = tag.attr("id")?.parse::<u16>().ok().filter(|id| (1..=4094).contains(id))?;
            Some((id, tag.attr("nativeMode").is_some()))
        })
        .collect();
    if vlan.attr("trunk") != Some("yes") && tags.len() == 1 {
        nic.vlan = tags.first().map(|(id, _)| *id);
        return;
    }
    nic.vlan = tags.iter().find(|(_, native)| *native).map(|(id, _)| *id);
    nic.trunk = tags.iter().filter(|(_, native)| !native).map(|(id, _)| *id).collect();
    if let Some(vlan) = nic.vlan.filter(|vlan| nic.trunk.remove(vlan)) {
        notes.note(what, format!("VLAN {vlan} is untagged (native mode)"));
    }
}

fn read_video(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    if !spec.video.is_none() {
        return notes.note("second video device", "left out: a VM has one");
    }
    spec.video = match node.child_attr("model", "type") {
        Some("none") => Video::None,
        Some("virtio") => Video::Virtio,
        Some("vga") => Video::Vga,
        other => {
            let old = other.unwrap_or("(default)");
            notes.note("video", format!("model {old} becomes vga"));
            Video::Vga
        }
    };
}

fn read_tpm(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    match node.child_attr("backend", "type") {
        Some("emulator") => {
            spec.tpm = true;
            notes.note("TPM", "its state is not imported: secrets sealed to it cannot be unsealed");
        }
        other => {
            let why = format!("backend {} is the host's own TPM", other.unwrap_or("(none)"));
            notes.refuse("TPM", why);
        }
    }
}

fn read_watchdog(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let action = match node.attr("action") {
        Some("poweroff" | "shutdown") => Watchdog::Poweroff,
        Some("pause") => Watchdog::Pause,
        Some("none") => Watchdog::None,
        _ => Watchdog::Reset,
    };
    match node.attr("model") {
        Some("i6300esb") => spec.watchdog = Some(action),
        // libvirt 9.1 lists the one that is part of q35.
        Some("itco") => {}
        other => {
            let old = other.unwrap_or("(none)");
            notes.note("watchdog", format!("model {old} becomes i6300esb"));
            spec.watchdog = Some(action);
        }
    }
}

fn read_channel(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    match node.child_attr("target", "name") {
        Some("org.qemu.guest_agent.0") => spec.guest_agent = true,
        other => notes.note(
            format!("channel {}", other.unwrap_or("(unnamed)")),
            "left out: only that of the guest agent is known",
        ),
    }
}

fn read_controller(node: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let model = node.attr("model");
    if node.attr("type") != Some("scsi") {
        return;
    }
    match model {
        None | Some("virtio-scsi" | "auto") => spec.scsi_controller = true,
        Some(old) => {
            spec.scsi_controller = true;
            let why = format!("model {old} becomes virtio-scsi: the guest needs its driver");
            notes.note("SCSI controller", why);
        }
    }
}
