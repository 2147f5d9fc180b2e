//! Disks and drives of a libvirt domain.

use std::path::PathBuf;

use godwit_qemu::{ByteSize, Cdrom, Disk, DiskBus, DiskCache, DiskFormat, VmSpec};
use roxmltree::Node;

use crate::definition::{DiskSource, SourceDisk, SourceFormat};
use crate::finding::Findings;
use crate::xml::Walk;

/// Reads disks and CD-ROM drives into the specification. `kinds`: the kinds of devices that the
/// firmware tries, if devices have no place of their own.
pub(super) fn read(
    devices: Node,
    kinds: &[String],
    spec: &mut VmSpec,
    notes: &mut Findings,
) -> Vec<SourceDisk> {
    let mut sources = Vec::new();
    for disk in devices.children_named("disk") {
        let target = disk.child_attr("target", "dev").unwrap_or("disk").to_owned();
        match disk.attr("device").unwrap_or("disk") {
            "disk" => {
                if let Some((found, source)) = read_disk(disk, &target, sources.len(), notes) {
                    spec.disks.push(found);
                    sources.push(source);
                }
            }
            "cdrom" => spec.cdroms.push(read_cdrom(disk, &target, notes)),
            "floppy" => notes.note(target, "floppy disks are left out"),
            "lun" => notes.refuse(target, "the guest talks to a SCSI device of the host directly"),
            other => notes.refuse(target, format!("a disk of kind {other} cannot be imported")),
        }
    }
    order(spec, kinds);
    sources
}

/// Gives places in the boot order by the kinds of devices, if no device has its own.
fn order(spec: &mut VmSpec, kinds: &[String]) {
    let has_own = spec.disks.iter().any(|disk| disk.boot_order.is_some())
        || spec.cdroms.iter().any(|drive| drive.boot_order.is_some());
    // Disks before drives is the order without any places.
    if has_own || kinds.first().is_none_or(|kind| kind != "cdrom") {
        return;
    }
    let mut place = 0;
    let mut next = || {
        place += 1;
        Some(place)
    };
    spec.cdroms.iter_mut().for_each(|drive| drive.boot_order = next());
    spec.disks.iter_mut().for_each(|disk| disk.boot_order = next());
}

fn read_disk(
    node: Node,
    target: &str,
    index: usize,
    notes: &mut Findings,
) -> Option<(Disk, SourceDisk)> {
    if node.child("encryption").is_some() || node.at(&["source", "encryption"]).is_some() {
        notes.refuse(target, "its image is encrypted: decrypt it first with `qemu-img convert`");
        return None;
    }
    let bus = bus_of(node, target, notes)?;
    let source = source_of(node, target, notes)?;
    let driver = node.child("driver");
    let named = driver.and_then(|driver| driver.attr("type"));
    let format = match named.map(|name| (name, SourceFormat::named(name))) {
        Some((name, None)) => {
            notes.refuse(target, format!("its format {name} cannot be imported"));
            return None;
        }
        Some((_, format)) => format,
        None => Some(SourceFormat::Raw),
    };
    let mut disk = Disk { bus, ..Disk::new(format!("/imported/{index}"), DiskFormat::Qcow2) };
    disk.readonly = node.child("readonly").is_some();
    if disk.readonly && matches!(bus, DiskBus::Sata | DiskBus::Nvme) {
        notes.note(target, "a disk of this bus cannot be readonly: the guest may write its copy");
        disk.readonly = false;
    }
    if node.child("shareable").is_some() {
        notes.note(target, "several VMs share it: this VM gets a copy of its own");
    }
    if node.child("transient").is_some() {
        notes.note(target, "what the guest writes is kept, where it was discarded at each stop");
    }
    let serial = node.child_text("serial");
    disk.serial = serial.filter(|text| is_serial(text)).map(str::to_owned);
    if let Some(text) = serial.filter(|_| disk.serial.is_none()) {
        notes.note(target, format!("its serial number \"{text}\" is left out: too long, or odd"));
    }
    disk.boot_order = boot_place(node);
    if let Some(driver) = driver {
        set_options(&mut disk, driver, target, notes);
    }
    set_limits(&mut disk, node, target, notes);
    Some((disk, SourceDisk { name: target.to_owned(), source, format, bytes: None }))
}

fn set_options(disk: &mut Disk, driver: Node, target: &str, notes: &mut Findings) {
    match driver.attr("cache") {
        Some("writethrough" | "directsync") => disk.cache = DiskCache::Writethrough,
        Some(mode @ ("none" | "unsafe")) => {
            notes.note(target, format!("cache mode {mode} becomes writeback"));
        }
        _ => {}
    }
    disk.discard = driver.attr("discard") != Some("ignore");
    disk.detect_zeroes = driver.attr("detect_zeroes").is_some_and(|value| value != "off");
    disk.iothread =
        driver.attr("iothread").is_some() && matches!(disk.bus, DiskBus::Virtio | DiskBus::Scsi);
}

fn set_limits(disk: &mut Disk, node: Node, target: &str, notes: &mut Findings) {
    let Some(limits) = node.child("iotune") else { return };
    let number = |name: &str| {
        limits.child_text(name).and_then(|text| text.parse::<u64>().ok()).filter(|value| *value > 0)
    };
    disk.iops = number("total_iops_sec");
    disk.bytes_per_second = number("total_bytes_sec").map(ByteSize::from_bytes);
    let known = ["total_iops_sec", "total_bytes_sec"];
    let others = limits.children().filter(Node::is_element);
    if others.into_iter().any(|limit| !known.contains(&limit.tag_name().name())) {
        notes.note(target, "limits other than the totals of requests and bytes are left out");
    }
}

fn bus_of(node: Node, target: &str, notes: &mut Findings) -> Option<DiskBus> {
    Some(match node.child_attr("target", "bus") {
        Some("virtio") => DiskBus::Virtio,
        Some("scsi") => DiskBus::Scsi,
        Some("sata") => DiskBus::Sata,
        Some("nvme") => DiskBus::Nvme,
        Some("ide") | None
            if node.child_attr("target", "bus").is_some() || target.starts_with("hd") =>
        {
            notes.note(target, "bus ide becomes sata (AHCI): the guest needs its driver");
            DiskBus::Sata
        }
        None if target.starts_with("vd") => DiskBus::Virtio,
        None if target.starts_with("sd") => DiskBus::Scsi,
        other => {
            let bus = other.unwrap_or("(none)");
            notes.refuse(target, format!("bus {bus} is unknown: use virtio, scsi or sata"));
            return None;
        }
    })
}

fn source_of(node: Node, target: &str, notes: &mut Findings) -> Option<DiskSource> {
    let attr = |name: &str| node.child_attr("source", name);
    let path = |path: &str| DiskSource::Path(PathBuf::from(path));
    let kind = node.attr("type").unwrap_or("file");
    let found = match kind {
        "file" => attr("file").map(path),
        "block" => attr("dev").map(path),
        "volume" => attr("pool").zip(attr("volume")).map(|(pool, volume)| DiskSource::Volume {
            storage: pool.to_owned(),
            name: volume.to_owned(),
        }),
        other => {
            let why = format!(
                "its source is of type {other}: copy it to a file first (`qemu-img convert`)"
            );
            notes.refuse(target, why);
            return None;
        }
    };
    let is_good = |source: &DiskSource| match source {
        DiskSource::Path(path) => path.is_absolute(),
        _ => true,
    };
    let found = found.filter(is_good);
    if found.is_none() {
        notes.refuse(target, "its source has no absolute path");
    }
    found
}

fn read_cdrom(node: Node, target: &str, notes: &mut Findings) -> Cdrom {
    let image = node.child_attr("source", "file").map(PathBuf::from);
    if image.is_none() && node.child("source").is_some() {
        notes.note(target, "the drive of the host is not imported: the VM's drive is empty");
    }
    let bus = match node.child_attr("target", "bus") {
        Some("scsi") => DiskBus::Scsi,
        Some("ide") => {
            notes.note(target, "bus ide becomes sata (AHCI)");
            DiskBus::Sata
        }
        _ => DiskBus::Sata,
    };
    Cdrom {
        image: image.filter(|path| path.is_absolute()),
        bus,
        unit: None,
        boot_order: boot_place(node),
    }
}

/// Returns the place of a device in the boot order.
pub(super) fn boot_place(node: Node) -> Option<u32> {
    node.child_attr("boot", "order")?.parse().ok().filter(|order| *order > 0)
}

/// Whether a serial number can be that of a disk.
pub(crate) fn is_serial(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=20).contains(&text.len()) && text.chars().all(good)
}
