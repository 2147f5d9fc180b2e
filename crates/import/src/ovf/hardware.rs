//! The items of a VM's hardware. They are of the CIM's resource allocation (DMTF DSP1041); their
//! kinds are numbers.

use std::collections::BTreeMap;

use godwit_qemu::{Cdrom, DiskBus, MemoryBlock, Nic, NicModel, Video, VmSpec};
use roxmltree::Node;

use crate::definition::{ImportError, MOST_DEVICES};
use crate::finding::Findings;
use crate::names;
use crate::xml::Walk;

/// A disk of the VM: where it is attached, and which one it is.
#[derive(Debug)]
pub(super) struct HardDisk {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) bus: DiskBus,
    place: (u32, u32, usize),
}

const CPU: u32 = 3;
const MEMORY: u32 = 4;
const IDE: u32 = 5;
const SCSI: u32 = 6;
const NIC: u32 = 10;
const CDROM: [u32; 2] = [15, 16];
const DISK: u32 = 17;
const SATA: u32 = 20;

/// Controllers by their instance: their bus, and their order.
type Controllers = BTreeMap<String, (DiskBus, u32)>;

/// Reads the items; returns the disks in the order of their controllers and addresses.
pub(super) fn read(
    hardware: Node,
    spec: &mut VmSpec,
    notes: &mut Findings,
) -> Result<Vec<HardDisk>, ImportError> {
    let is_item =
        |node: &Node| matches!(node.tag_name().name(), "Item" | "StorageItem" | "EthernetPortItem");
    let items: Vec<Node> = hardware.children().filter(is_item).collect();
    if items.len() > MOST_DEVICES {
        return Err(ImportError::TooManyDevices);
    }
    let mut controllers = Controllers::new();
    let mut has_memory = false;
    for item in &items {
        match kind(*item) {
            CPU => spec.vcpus = number(*item, "VirtualQuantity").unwrap_or(0),
            MEMORY => {
                let unit = item.child_text("AllocationUnits").unwrap_or("byte * 2^20");
                let bytes = item.child_text("VirtualQuantity");
                let bytes = bytes.and_then(|number| names::bytes_of(number, unit));
                let bytes = bytes
                    .ok_or_else(|| ImportError::Invalid("its memory is invalid".to_owned()))?;
                spec.memory = vec![MemoryBlock::shared(names::whole_mib(bytes, notes))];
                has_memory = true;
            }
            IDE | SCSI | SATA => add_controller(*item, &mut controllers, notes),
            _ => {}
        }
    }
    if spec.vcpus == 0 || !has_memory {
        return Err(ImportError::Invalid("its VM has no vCPUs or no memory".to_owned()));
    }
    spec.machine = Some("pc".to_owned());
    spec.video = Video::Vga;
    let mut disks = Vec::new();
    for (index, item) in items.iter().enumerate() {
        match kind(*item) {
            CPU | MEMORY | IDE | SCSI | SATA => {}
            NIC => read_nic(*item, spec, notes),
            of if CDROM.contains(&of) => {
                spec.cdroms.push(Cdrom::default());
                if item.child("HostResource").is_some() {
                    notes.note(
                        name(*item),
                        "the drive is empty: insert a CD with `vm cdrom insert`",
                    );
                }
            }
            DISK => disks.extend(read_disk(*item, index, &controllers, notes)),
            other => read_other(*item, other, notes),
        }
    }
    disks.sort_by_key(|disk| disk.place);
    Ok(disks)
}

fn kind(item: Node) -> u32 {
    number(item, "ResourceType").unwrap_or(0)
}

fn number(item: Node, child: &str) -> Option<u32> {
    item.child_text(child)?.parse().ok()
}

fn name(item: Node) -> String {
    item.child_text("ElementName").or(item.child_text("Caption")).unwrap_or("device").to_owned()
}

fn add_controller(item: Node, controllers: &mut Controllers, notes: &mut Findings) {
    let subtype = item.child_text("ResourceSubType").unwrap_or_default();
    let what = name(item);
    let bus = match kind(item) {
        IDE => DiskBus::Sata,
        SATA if subtype.eq_ignore_ascii_case("virtio") => DiskBus::Virtio,
        SATA => DiskBus::Sata,
        _ if subtype.eq_ignore_ascii_case("virtioscsi") => DiskBus::Scsi,
        // Its driver is not in every guest, and AHCI is.
        _ => {
            let why = format!(
                "SCSI controller {subtype} becomes sata (AHCI): the guest needs its driver"
            );
            notes.note(&what, why);
            DiskBus::Sata
        }
    };
    let order = u32::try_from(controllers.len()).unwrap_or(u32::MAX);
    if let Some(instance) = item.child_text("InstanceID").or(item.child_text("InstanceId")) {
        controllers.insert(instance.to_owned(), (bus, order));
    }
}

fn read_disk(
    item: Node,
    index: usize,
    controllers: &Controllers,
    notes: &mut Findings,
) -> Option<HardDisk> {
    let name = name(item);
    let resource = item.child_text("HostResource").unwrap_or_default();
    let id = resource.rsplit_once("/disk/").map(|(_, id)| id).filter(|id| !id.is_empty());
    let Some(id) = id else {
        notes.refuse(name, format!("\"{resource}\" is not a disk of the package"));
        return None;
    };
    let parent = item.child_text("Parent").unwrap_or_default();
    let Some((bus, order)) = controllers.get(parent).copied() else {
        notes.refuse(name, "its controller is missing or of an unknown kind");
        return None;
    };
    let address = number(item, "AddressOnParent").unwrap_or(0);
    Some(HardDisk { id: id.to_owned(), name, bus, place: (order, address, index) })
}

fn read_nic(item: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let what = name(item);
    let subtype = item.child_text("ResourceSubType").unwrap_or_default();
    let model = match subtype.to_ascii_lowercase().as_str() {
        "virtio" | "virtionet" => NicModel::Virtio,
        "e1000e" => NicModel::E1000e,
        other => {
            let old = if other.is_empty() { "(default)" } else { subtype };
            notes.note(&what, format!("model {old} becomes e1000e: the guest needs its driver"));
            NicModel::E1000e
        }
    };
    spec.nics.push(Nic {
        network: item.child_text("Connection").unwrap_or_default().to_owned(),
        mac: item.child_text("Address").map(str::to_owned),
        model,
        ..Nic::default()
    });
}

fn read_other(item: Node, kind: u32, notes: &mut Findings) {
    let subtype = item.child_text("ResourceSubType").unwrap_or_default().to_ascii_lowercase();
    let what = name(item);
    match kind {
        // USB controllers, displays, and VMware's own channel to its host.
        23 | 24 => {}
        1 if subtype.contains("vmci") => {}
        1 if subtype.contains("passthrough") => {
            notes.refuse(what, "a device of the host is passed through");
        }
        14 => notes.note(what, "floppy disks are left out"),
        35 => notes.note(what, "sound is left out"),
        21 | 22 => notes.note(what, "serial and parallel ports of a file or device are left out"),
        other => notes.note(what, format!("left out: a device of kind {other} is not known")),
    }
}
