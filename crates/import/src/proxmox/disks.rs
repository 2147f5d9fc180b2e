//! Disks and drives of a Proxmox VE configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;

use godwit_qemu::{ByteSize, Cdrom, Disk, DiskBus, DiskCache, DiskFormat, VmSpec};

use super::{is_on, numbered, option};
use crate::definition::{DiskSource, SourceDisk, SourceFormat};
use crate::finding::Findings;
use crate::libvirt::is_serial;

/// Buses in the order in which a guest is most likely to find its disks.
const BUSES: [(&str, DiskBus); 4] = [
    ("virtio", DiskBus::Virtio),
    ("scsi", DiskBus::Scsi),
    ("sata", DiskBus::Sata),
    ("ide", DiskBus::Sata),
];

/// Returns the keys of the devices that the firmware tries, in order.
pub(super) fn boot_order<'a>(get: &impl Fn(&str) -> Option<&'a str>) -> Vec<String> {
    let boot = get("boot").unwrap_or_default();
    if let Some(order) = option(boot, "order") {
        return order.split(';').filter(|key| !key.is_empty()).map(str::to_owned).collect();
    }
    // Until version 6.3: letters of kinds, and the disk.
    get("bootdisk").map(str::to_owned).into_iter().collect()
}

/// Reads disks and CD-ROM drives into the specification.
pub(super) fn read(
    settings: &BTreeMap<&str, &str>,
    order: &[String],
    spec: &mut VmSpec,
    notes: &mut Findings,
) -> Vec<SourceDisk> {
    let mut sources = Vec::new();
    for (name, bus) in BUSES {
        let mut of_bus: Vec<_> = settings
            .iter()
            .filter_map(|(key, value)| {
                numbered(key, name).map(|(key, number)| (number, key, *value))
            })
            .collect();
        of_bus.sort_unstable();
        for (_, key, value) in of_bus {
            let place = order.iter().position(|known| known == key);
            let place = place.and_then(|place| u32::try_from(place + 1).ok());
            if option(value, "media") == Some("cdrom") {
                read_cdrom(key, value, place, spec, notes);
                continue;
            }
            if name == "ide" {
                notes.note(key, "bus ide becomes sata (AHCI): the guest needs its driver");
            }
            if let Some((disk, source)) = read_disk(key, value, bus, sources.len(), notes) {
                spec.disks.push(Disk { boot_order: place, ..disk });
                sources.push(source);
            }
        }
    }
    match settings.get("scsihw").copied() {
        Some("virtio-scsi-pci" | "virtio-scsi-single") => spec.scsi_controller = true,
        other if spec.disks.iter().any(|disk| disk.bus == DiskBus::Scsi) => {
            let old = other.unwrap_or("lsi");
            let why = format!("{old} becomes virtio-scsi: the guest needs its driver");
            notes.note("SCSI controller", why);
        }
        _ => {}
    }
    for key in settings.keys().filter(|key| numbered(key, "unused").is_some()) {
        notes.note(*key, "a disk that is not attached is not imported");
    }
    sources
}

/// Returns the volume of a value: its first part, or `file=`.
fn volume(value: &str) -> &str {
    let first = value.split(',').next().unwrap_or_default();
    option(value, "file").unwrap_or(first)
}

fn read_cdrom(key: &str, value: &str, place: Option<u32>, spec: &mut VmSpec, notes: &mut Findings) {
    let volume = volume(value);
    if volume.ends_with("cloudinit") || volume.contains("-cloudinit.") {
        return notes
            .note(key, "the disk for cloud-init is left out: see --cloud-init of `vm set`");
    }
    if volume != "none" {
        let why = format!("the drive is empty: insert {volume} with `vm cdrom insert`");
        notes.note(key, why);
    }
    spec.cdroms.push(Cdrom { boot_order: place, ..Cdrom::default() });
}

fn read_disk(
    key: &str,
    value: &str,
    bus: DiskBus,
    index: usize,
    notes: &mut Findings,
) -> Option<(Disk, SourceDisk)> {
    let volume = volume(value);
    let source = if volume.starts_with('/') {
        DiskSource::Path(PathBuf::from(volume))
    } else {
        let (storage, name) = volume.split_once(':').unwrap_or_default();
        if storage.is_empty() || name.is_empty() {
            notes.refuse(key, format!("\"{volume}\" is not a volume"));
            return None;
        }
        DiskSource::Volume { storage: storage.to_owned(), name: name.to_owned() }
    };
    let ending = volume.rsplit_once('.').map(|(_, ending)| ending);
    let named = option(value, "format").or(ending.filter(|ending| ending.len() <= 5));
    // A volume of LVM, ZFS or Ceph has no ending, and is raw.
    let format = named.map_or(Some(SourceFormat::Raw), SourceFormat::named);
    if format.is_none() {
        notes.note(key, "its format is found by its header");
    }
    let mut disk = Disk { bus, ..Disk::new(format!("/imported/{index}"), DiskFormat::Qcow2) };
    match option(value, "cache") {
        Some("writethrough" | "directsync") => disk.cache = DiskCache::Writethrough,
        Some("unsafe") => notes.note(key, "cache mode unsafe becomes writeback"),
        _ => {}
    }
    disk.detect_zeroes = is_on(option(value, "detect_zeroes"));
    disk.iothread =
        is_on(option(value, "iothread")) && matches!(bus, DiskBus::Virtio | DiskBus::Scsi);
    disk.readonly = is_on(option(value, "ro")) && matches!(bus, DiskBus::Virtio | DiskBus::Scsi);
    let serial = option(value, "serial");
    disk.serial = serial.filter(|text| is_serial(text)).map(str::to_owned);
    if serial.is_some() && disk.serial.is_none() {
        notes.note(key, "its serial number is left out: too long, or odd");
    }
    set_limits(&mut disk, key, value, notes);
    if option(value, "shared").is_some() {
        notes.note(key, "several VMs may share it: this VM gets a copy of its own");
    }
    let bytes = option(value, "size").and_then(|text| text.parse::<ByteSize>().ok());
    let bytes = bytes.map(ByteSize::bytes);
    Some((disk, SourceDisk { name: key.to_owned(), source, format, bytes }))
}

fn set_limits(disk: &mut Disk, key: &str, value: &str, notes: &mut Findings) {
    disk.iops = option(value, "iops").and_then(|text| text.parse().ok()).filter(|iops| *iops > 0);
    let mbps = option(value, "mbps").and_then(|text| text.parse::<u64>().ok());
    disk.bytes_per_second = mbps.filter(|mbps| *mbps > 0).map(ByteSize::from_mib);
    let others = ["mbps_rd", "mbps_wr", "iops_rd", "iops_wr"];
    if others.iter().any(|name| option(value, name).is_some()) {
        notes.note(key, "limits of reads or writes alone are left out");
    }
}
