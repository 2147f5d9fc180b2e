//! Disks and CD-ROM drives in QEMU: block nodes and devices as JSON, the same on the command line
//! and over QMP. Pure. Names and addresses come from the definition, so both ends of a migration
//! build the same devices, also after a disk was attached to a running VM.

use serde_json::{Value, json};

use crate::rbd::RbdAccess;
use crate::slots;
use crate::spec::{Cdrom, DiskBus, DiskCache, DiskFormat, ResolvedDisk, ResolvedSpec};

/// ID of the SCSI controller.
const SCSI: &str = "scsi0";
/// ID of the SATA controller.
const SATA: &str = "sata0";

/// What QEMU is given for a disk or a medium, in the order in which it is added.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DriveParts {
    /// Group of its limits.
    pub(crate) limits: Option<Value>,
    /// Block nodes, the lowest first. A node refers only to earlier ones.
    pub(crate) nodes: Vec<Value>,
    /// Node that the device uses.
    pub(crate) top: String,
}

/// An open image, or a backing file of one, as QEMU has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PassedLayer {
    /// Descriptor set of the file; of an image in a pool of Ceph the descriptor of the
    /// configuration.
    pub(crate) number: i64,
    pub(crate) format: DiskFormat,
    pub(crate) rbd: Option<RbdAccess>,
    /// Whether it is a block device.
    pub(crate) is_device: bool,
}

impl PassedLayer {
    /// Returns a file in a descriptor set.
    pub(crate) fn file(set: i64, format: DiskFormat) -> PassedLayer {
        PassedLayer { number: set, format, rbd: None, is_device: false }
    }

    /// Returns the node without its name and the options that all nodes have.
    fn protocol(&self) -> Value {
        match &self.rbd {
            // QEMU's driver `file` refuses what is no regular file (QEMU 6.0 and later).
            None => json!({"driver": if self.is_device { "host_device" } else { "file" },
                "filename": format!("/dev/fdset/{}", self.number), "locking": "on"}),
            Some(access) => {
                let mut node = access.location(self.number);
                node["driver"] = "rbd".into();
                node
            }
        }
    }
}

/// Returns the name of the node of the disk at `index`. A disk of a controller is named by its
/// unit, one in a slot by that. Others are named by their position among each other, because they
/// stay while QEMU runs. So
/// no name changes when another disk is attached or detached.
pub(crate) fn disk_name(disks: &[ResolvedDisk], index: usize) -> String {
    let number = |disks: &[ResolvedDisk]| disks.iter().filter(|disk| !has_unit(disk)).count();
    match disks.get(index) {
        Some(disk) if has_unit(disk) => unit_name(disk),
        _ => format!("disk{}", number(disks.get(..index).unwrap_or(disks))),
    }
}

/// Returns the name of the node of a disk of a controller or in a slot.
pub(crate) fn unit_name(disk: &ResolvedDisk) -> String {
    match disk.slot {
        Some(slot) => format!("plugged{slot}"),
        None => format!("{}{}", disk.bus.name(), disk.unit.unwrap_or_default()),
    }
}

/// Returns the name of the node of a disk's image. It differs from the disk's name once the image
/// was exchanged while QEMU ran: the old and the new one are both there for a while.
pub(crate) fn image_name(name: &str, disk: &ResolvedDisk) -> String {
    match disk.image_generation {
        0 => name.to_owned(),
        times => format!("{name}-m{times}"),
    }
}

/// Whether a disk is named by its slot or its unit, so that it can come and go while QEMU runs.
pub(crate) fn has_unit(disk: &ResolvedDisk) -> bool {
    disk.slot.is_some() || (disk.bus.units().is_some() && disk.unit.is_some())
}

/// Whether a disk can be detached while the VM runs: it is in a slot, or on the SCSI controller.
pub(crate) fn is_detachable(disk: &ResolvedDisk) -> bool {
    disk.slot.is_some() || (disk.bus == DiskBus::Scsi && disk.unit.is_some())
}

/// A disk in a running QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundDisk {
    /// Node that its device uses.
    pub(crate) top: String,
    /// Its size as QEMU sees it.
    pub(crate) bytes: u64,
}

/// Finds the disk at `index` of a definition in a running QEMU. `blocks`: what `query-block`
/// returns.
pub(crate) fn find_disk(blocks: &Value, disks: &[ResolvedDisk], index: usize) -> Option<FoundDisk> {
    let wanted = disk_parts(&disk_name(disks, index), disks.get(index)?, &[]).top;
    blocks.as_array()?.iter().find_map(|block| {
        let inserted = &block["inserted"];
        let top = inserted["node-name"].as_str().filter(|top| *top == wanted)?;
        let bytes = inserted["image"]["virtual-size"].as_u64()?;
        Some(FoundDisk { top: top.to_owned(), bytes })
    })
}

/// Returns the ID of a disk's device.
pub(crate) fn disk_device_id(name: &str, disk: &ResolvedDisk) -> String {
    match disk.bus {
        DiskBus::Virtio => format!("virtio-{name}"),
        _ => format!("drive-{name}"),
    }
}

/// Returns the ID of a CD-ROM drive's device.
pub(crate) fn cdrom_id(drive: &Cdrom) -> String {
    format!("cd-{}{}", drive.bus.name(), drive.unit.unwrap_or_default())
}

/// Returns the name of the node of a CD-ROM drive's medium.
pub(crate) fn medium_name(drive: &Cdrom) -> String {
    format!("{}-medium", cdrom_id(drive))
}

/// Returns the nodes of a disk's image and its backing files, the lowest first. `layers`: each of
/// them in QEMU. QEMU opens no file that an image names.
pub(crate) fn image_nodes(name: &str, disk: &ResolvedDisk, layers: &[PassedLayer]) -> Vec<Value> {
    // Not direct: O_DIRECT writes into guest pages that the kernel has pinned, which dirty tracking
    // does not see; nor io_uring, whose kernel threads do the same. For a shared disk, QEMU flushes
    // one host's cache before the other host gets the disk, and drops it afterwards (file driver,
    // drop-cache=on). locking: the lock passes on with the VM.
    let cache = json!({"direct": false, "no-flush": false});
    let discard = if disk.discard { "unmap" } else { "ignore" };
    let image = image_name(name, disk);
    let node = |depth: usize| match depth {
        0 => image.clone(),
        depth => format!("{image}-back{depth}"),
    };
    let mut nodes = Vec::new();
    for (depth, layer) in layers.iter().enumerate().rev() {
        let file = format!("{}-file", node(depth));
        let readonly = disk.readonly || depth > 0;
        let mut protocol = layer.protocol();
        protocol["node-name"] = file.as_str().into();
        protocol["cache"] = cache.clone();
        protocol["read-only"] = readonly.into();
        protocol["discard"] = discard.into();
        nodes.push(protocol);
        let driver = layer.format.name();
        let mut image = json!({"driver": driver, "node-name": node(depth), "file": file,
            "cache": cache, "read-only": readonly, "discard": discard});
        if depth == 0 && disk.detect_zeroes {
            image["detect-zeroes"] = if disk.discard { "unmap" } else { "on" }.into();
        }
        if layer.format == DiskFormat::Qcow2 {
            image["backing"] =
                layers.get(depth + 1).map_or(Value::Null, |_| node(depth + 1).into());
        }
        nodes.push(image);
    }
    nodes
}

/// Returns the nodes of a disk, as [`image_nodes`] does, and its limits.
pub(crate) fn disk_parts(name: &str, disk: &ResolvedDisk, layers: &[PassedLayer]) -> DriveParts {
    let (image, mut nodes) = (image_name(name, disk), image_nodes(name, disk, layers));
    let mut limits = json!({});
    if let Some(iops) = disk.iops {
        limits["iops-total"] = iops.into();
    }
    if let Some(bytes) = disk.bytes_per_second {
        limits["bps-total"] = bytes.bytes().into();
    }
    if limits.as_object().is_none_or(serde_json::Map::is_empty) {
        return DriveParts { limits: None, nodes, top: image };
    }
    let (group, top) = (format!("{name}-limits"), format!("{name}-limited"));
    nodes.push(json!({"driver": "throttle", "node-name": top, "throttle-group": group,
        "file": image, "read-only": disk.readonly}));
    let limits = json!({"qom-type": "throttle-group", "id": group, "limits": limits});
    DriveParts { limits: Some(limits), nodes, top }
}

/// Returns the device of a disk of a machine of type `machine`. `boot_index`: its place in the boot
/// order.
pub(crate) fn disk_device(
    machine: &str,
    (name, top): (&str, &str),
    disk: &ResolvedDisk,
    boot_index: Option<usize>,
) -> Value {
    let mut device = json!({"id": disk_device_id(name, disk), "drive": top});
    let unit = disk.unit.unwrap_or_default();
    let driver = match disk.bus {
        DiskBus::Virtio => "virtio-blk-pci",
        DiskBus::Nvme => {
            // It has no default.
            device["serial"] = name.into();
            "nvme"
        }
        DiskBus::Scsi => {
            device["bus"] = format!("{SCSI}.0").into();
            device["scsi-id"] = unit.into();
            device["lun"] = 0.into();
            // Otherwise it is the name of the drive, if there is one.
            device["device_id"] = name.into();
            "scsi-hd"
        }
        DiskBus::Sata => {
            device["bus"] = format!("{SATA}.{unit}").into();
            "ide-hd"
        }
    };
    device["driver"] = driver.into();
    if disk.iothread && disk.bus == DiskBus::Virtio {
        device["iothread"] = iothread_id(name).into();
    }
    if let Some(serial) = &disk.serial {
        device["serial"] = serial.as_str().into();
    }
    if disk.cache == DiskCache::Writethrough {
        device["write-cache"] = "off".into();
    }
    if let Some(index) = boot_index {
        device["bootindex"] = index.into();
    }
    if let Some(slot) = disk.slot {
        slots::place(&mut device, machine, slot);
    }
    device
}

/// Returns the nodes of a medium whose image is in a descriptor set.
pub(crate) fn medium_parts(name: &str, set: i64) -> DriveParts {
    let file = format!("{name}-file");
    let nodes = vec![
        json!({"driver": "file", "node-name": file, "filename": format!("/dev/fdset/{set}"),
            "locking": "on", "read-only": true}),
        json!({"driver": "raw", "node-name": name, "file": file, "read-only": true}),
    ];
    DriveParts { limits: None, nodes, top: name.to_owned() }
}

/// Returns the device of a CD-ROM drive. `medium`: the node of what is inserted.
pub(crate) fn cdrom_device(
    drive: &Cdrom,
    medium: Option<&str>,
    boot_index: Option<usize>,
) -> Value {
    let (id, unit) = (cdrom_id(drive), drive.unit.unwrap_or_default());
    let mut device = match drive.bus {
        DiskBus::Scsi => json!({"driver": "scsi-cd", "id": id, "bus": format!("{SCSI}.0"),
            "scsi-id": unit, "lun": 0, "device_id": id}),
        _ => json!({"driver": "ide-cd", "id": id, "bus": format!("{SATA}.{unit}")}),
    };
    if let Some(medium) = medium {
        device["drive"] = medium.into();
    }
    if let Some(index) = boot_index {
        device["bootindex"] = index.into();
    }
    device
}

/// Returns the ID of the thread of a disk or of a controller.
fn iothread_id(name: &str) -> String {
    format!("{name}-iothread")
}

/// Whether the SCSI controller has a thread of its own. The guest does not see it: the two ends of
/// a move may differ, after a disk was attached or detached.
fn has_scsi_iothread(spec: &ResolvedSpec) -> bool {
    spec.disks.iter().any(|disk| disk.iothread && disk.bus == DiskBus::Scsi)
}

/// Returns the threads that serve disks. They write guest memory by the page tables of QEMU's
/// process, as its main thread does, and dirty tracking sees that.
pub(crate) fn iothreads(spec: &ResolvedSpec) -> Vec<Value> {
    let own = spec.disks.iter().enumerate();
    let own = own.filter(|(_, disk)| disk.iothread && disk.bus == DiskBus::Virtio);
    let names = own.map(|(index, _)| disk_name(&spec.disks, index));
    let names = names.chain(has_scsi_iothread(spec).then(|| SCSI.to_owned()));
    names.map(|name| json!({"qom-type": "iothread", "id": iothread_id(&name)})).collect()
}

/// Returns the controllers that a VM has.
pub(crate) fn controllers(spec: &ResolvedSpec) -> Vec<Value> {
    let has = |bus| {
        spec.disks.iter().any(|disk| disk.bus == bus)
            || spec.cdroms.iter().any(|drive| drive.bus == bus)
    };
    let mut controllers = Vec::new();
    if spec.scsi_controller || has(DiskBus::Scsi) {
        let mut controller = json!({"driver": "virtio-scsi-pci", "id": SCSI});
        if has_scsi_iothread(spec) {
            controller["iothread"] = iothread_id(SCSI).into();
        }
        controllers.push(controller);
    }
    if has(DiskBus::Sata) {
        controllers.push(json!({"driver": "ich9-ahci", "id": SATA}));
    }
    controllers
}

/// Places in the boot order, from 1; `None` for a device that the firmware does not boot from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootIndexes {
    pub(crate) disks: Vec<Option<usize>>,
    pub(crate) cdroms: Vec<Option<usize>>,
    pub(crate) nics: Vec<Option<usize>>,
}

/// Returns the places in the boot order; all are `None` with a kernel, and those of NICs without
/// an order always.
pub(crate) fn boot_indexes(spec: &ResolvedSpec) -> BootIndexes {
    let disks = spec.disks.iter().map(|disk| disk.boot_order);
    let cdroms = spec.cdroms.iter().map(|drive| drive.boot_order);
    let nics = spec.nics.iter().map(|nic| nic.boot_order);
    let orders: Vec<Option<u32>> = disks.chain(cdroms).chain(nics).collect();
    let first_nic = spec.disks.len() + spec.cdroms.len();
    let mut places: Vec<usize> = (0..orders.len()).collect();
    // Stable: devices without an order stay in theirs, behind the others.
    places.sort_by_key(|place| orders[*place].unwrap_or(u32::MAX));
    let mut indexes = vec![None; orders.len()];
    places.retain(|place| *place < first_nic || orders[*place].is_some());
    for (index, place) in places.into_iter().enumerate().filter(|_| spec.kernel.is_none()) {
        indexes[place] = Some(index + 1);
    }
    let nics = indexes.split_off(first_nic);
    let cdroms = indexes.split_off(spec.disks.len());
    BootIndexes { disks: indexes, cdroms, nics }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Disk;

    fn disk(bus: DiskBus, unit: Option<u32>) -> ResolvedDisk {
        ResolvedDisk { bus, unit, ..Disk::new("/d", DiskFormat::Raw).into() }
    }

    fn block(node: &str, bytes: u64) -> Value {
        json!({"device": "", "qdev": node, "inserted": {
            "node-name": node, "image": {"virtual-size": bytes}}})
    }

    #[test]
    fn a_disk_has_its_name_also_after_an_earlier_one_was_detached() {
        let blocks = json!([
            block("disk0", 1024),
            block("disk1", 2048),
            block("scsi1-limited", 512),
            block("cd-scsi2-medium", 9),
            {"device": "", "qdev": "empty drive"},
        ]);
        let disks = [
            disk(DiskBus::Scsi, Some(0)),
            disk(DiskBus::Virtio, None),
            ResolvedDisk { iops: Some(100), ..disk(DiskBus::Scsi, Some(1)) },
            disk(DiskBus::Nvme, None),
            disk(DiskBus::Sata, Some(1)),
        ];
        let found = |disks: &[ResolvedDisk], index| {
            find_disk(&blocks, disks, index).map(|found| (found.top, found.bytes))
        };
        let is = |top: &str, bytes| Some((top.to_owned(), bytes));
        for (disks, index) in [(&disks[..], 1), (&disks[1..], 0)] {
            assert_eq!(found(disks, index), is("disk0", 1024));
            assert_eq!(found(disks, index + 1), is("scsi1-limited", 512));
            assert_eq!(found(disks, index + 2), is("disk1", 2048));
        }
        assert_eq!(found(&disks, 0), None);
        assert_eq!(found(&disks, 4), None);
        assert_eq!(found(&disks, 5), None);
        assert_eq!(find_disk(&json!([{"inserted": 7}, null]), &disks, 1), None);
    }

    #[test]
    fn an_exchanged_image_has_nodes_of_its_own_and_the_device_stays() {
        let old = ResolvedDisk { iops: Some(100), ..disk(DiskBus::Virtio, None) };
        let new = ResolvedDisk { image_generation: 2, format: DiskFormat::Qcow2, ..old.clone() };
        let layers = [(7, DiskFormat::Qcow2), (8, DiskFormat::Raw)];
        let layers = layers.map(|(set, format)| PassedLayer::file(set, format));
        let names = |disk: &ResolvedDisk| -> Vec<String> {
            let nodes = disk_parts("disk0", disk, &layers).nodes;
            nodes.iter().map(|node| node["node-name"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(
            names(&new),
            ["disk0-m2-back1-file", "disk0-m2-back1", "disk0-m2-file", "disk0-m2", "disk0-limited"]
        );
        assert!(
            names(&old).iter().all(|name| name == "disk0-limited" || !names(&new).contains(name))
        );
        let parts = disk_parts("disk0", &new, &layers);
        assert_eq!(parts.nodes[3]["backing"], "disk0-m2-back1");
        assert_eq!(
            (parts.nodes[4]["file"].as_str(), &*parts.top),
            (Some("disk0-m2"), "disk0-limited")
        );
        // QEMU has names of at most 31 bytes.
        let last = ResolvedDisk { image_generation: u16::MAX, slot: Some(15), ..new };
        let nodes = disk_parts("plugged15", &last, &layers).nodes;
        assert!(nodes.iter().all(|node| node["node-name"].as_str().unwrap().len() < 32));
        let device = |disk| disk_device("pc", ("disk0", "disk0-limited"), disk, None);
        assert_eq!(device(&old), device(&ResolvedDisk { slot: None, ..last }));
    }

    #[test]
    fn an_image_in_a_pool_is_below_a_raw_node() {
        let image = crate::rbd::RbdImage::of("rbd:vms/shop/web".as_ref()).unwrap();
        let rbd = Some(RbdAccess { image, fsid: uuid::Uuid::nil(), user: "vms".to_owned() });
        let layers = [PassedLayer { rbd, ..PassedLayer::file(9, DiskFormat::Raw) }];
        let disk = ResolvedDisk { detect_zeroes: true, ..disk(DiskBus::Virtio, None) };
        let parts = disk_parts("disk0", &disk, &layers);
        let cache = json!({"direct": false, "no-flush": false});
        assert_eq!(
            parts.nodes,
            [
                json!({"driver": "rbd", "node-name": "disk0-file", "pool": "vms",
                    "namespace": "shop", "image": "web", "user": "vms",
                    "conf": "/proc/self/fd/9", "cache": cache, "read-only": false,
                    "discard": "unmap"}),
                json!({"driver": "raw", "node-name": "disk0", "file": "disk0-file",
                    "cache": cache, "read-only": false, "discard": "unmap",
                    "detect-zeroes": "unmap"}),
            ]
        );
    }
    #[test]
    fn a_block_device_has_the_driver_for_devices() {
        let layers = [PassedLayer { is_device: true, ..PassedLayer::file(9, DiskFormat::Raw) }];
        let parts = disk_parts("disk0", &disk(DiskBus::Virtio, None), &layers);
        assert_eq!(parts.nodes[0]["driver"], "host_device");
        assert_eq!(parts.nodes[0]["filename"], "/dev/fdset/9");
        assert_eq!(parts.nodes[0]["locking"], "on");
        assert_eq!(parts.nodes[1]["driver"], "raw");
    }
}
