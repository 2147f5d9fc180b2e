//! OVF descriptors (DMTF DSP0243, versions 1 and 2), as VMware and VirtualBox write them.

mod hardware;
mod write;

use std::collections::BTreeMap;

use godwit_qemu::{Disk, DiskFormat, Firmware, Nic, VmSpec};
use roxmltree::Node;

use crate::definition::{DiskSource, ImportError, Imported, SourceDisk, SourceFormat};
use crate::finding::Findings;
use crate::names;
use crate::xml::{self, Walk};

pub use write::ovf_changes;
pub(crate) use write::{ExportedDisk, write_ovf};

/// A disk of the package.
struct PackageDisk<'a> {
    /// File of the package; `None`: the disk is empty.
    file: Option<&'a str>,
    bytes: Option<u64>,
    format: Option<SourceFormat>,
}

/// Reads a descriptor.
pub(crate) fn read(text: &str) -> Result<Imported, ImportError> {
    let document = xml::parse(text)?;
    let envelope = document.root_element();
    if envelope.tag_name().name() != "Envelope" {
        return Err(ImportError::Invalid("it has no <Envelope>".to_owned()));
    }
    let system = the_system(envelope)?;
    let mut notes = Findings::default();
    let name = system.child_text("Name").or(system.attr("id")).unwrap_or_default();
    let mut spec = VmSpec::new(name);
    spec.description = system
        .children_named("AnnotationSection")
        .first()
        .and_then(|section| section.child_text("Annotation"))
        .map(str::to_owned);
    let disks = package_disks(envelope, &mut notes)?;
    let hardware = system.children_named("VirtualHardwareSection");
    let hardware = hardware
        .first()
        .copied()
        .ok_or_else(|| ImportError::Invalid("its VM has no <VirtualHardwareSection>".to_owned()))?;
    let found = hardware::read(hardware, &mut spec, &mut notes)?;
    let sources = found
        .iter()
        .enumerate()
        .filter_map(|(index, disk)| {
            let source = source_of(&disk.id, &disk.name, &disks, &mut notes)?;
            let path = format!("/imported/{index}");
            spec.disks.push(Disk { bus: disk.bus, ..Disk::new(path, DiskFormat::Qcow2) });
            Some(source)
        })
        .collect();
    read_firmware(system, hardware, &mut spec, &mut notes);
    read_vbox_macs(system, &mut spec.nics);
    if system.child("ProductSection").is_some_and(|section| section.child("Property").is_some()) {
        notes.note("properties", "settings of the product are left out: give them in the guest");
    }
    Ok(Imported { spec, disks: sources, findings: notes.0 })
}

/// Returns the only VM of a package.
fn the_system<'a, 'i>(envelope: Node<'a, 'i>) -> Result<Node<'a, 'i>, ImportError> {
    let collection = envelope.child("VirtualSystemCollection").unwrap_or(envelope);
    match collection.children_named("VirtualSystem")[..] {
        [system] => Ok(system),
        [] => Err(ImportError::Invalid("it describes no VM".to_owned())),
        _ => Err(ImportError::Invalid(
            "it describes several VMs: export each one on its own".to_owned(),
        )),
    }
}

fn package_disks<'a>(
    envelope: Node<'a, '_>,
    notes: &mut Findings,
) -> Result<BTreeMap<&'a str, PackageDisk<'a>>, ImportError> {
    let mut files = BTreeMap::new();
    let references = envelope.child("References");
    for file in references.map(|node| node.children_named("File")).unwrap_or_default() {
        let (Some(id), Some(href)) = (file.attr("id"), file.attr("href")) else { continue };
        check_member(href)?;
        if file.attr("compression").is_some_and(|kind| kind != "identity") {
            notes.refuse(href, "the file is compressed as a whole: uncompress it first");
        }
        if file.attr("chunkSize").is_some() {
            notes.refuse(href, "the file is in pieces: join them first");
        }
        files.insert(id, href);
    }
    let mut disks = BTreeMap::new();
    let section = envelope.child("DiskSection");
    for disk in section.map(|node| node.children_named("Disk")).unwrap_or_default() {
        let Some(id) = disk.attr("diskId") else { continue };
        if disk.attr("parentRef").is_some() {
            notes.refuse(id, "it is a delta of another disk: export the VM without snapshots");
        }
        let unit = disk.attr("capacityAllocationUnits").unwrap_or("byte");
        let bytes = disk.attr("capacity").and_then(|number| names::bytes_of(number, unit));
        let file = match disk.attr("fileRef") {
            Some(reference) => Some(*files.get(reference).ok_or_else(|| {
                ImportError::Invalid(format!("disk {} has no file", crate::shown::shown(id)))
            })?),
            None => None,
        };
        let format = disk.attr("format").unwrap_or_default().to_ascii_lowercase();
        let known = ["vmdk", "vdi", "vhdx", "qcow2", "raw"];
        let format = known.into_iter().find(|name| format.contains(name));
        let format = format.and_then(SourceFormat::named);
        disks.insert(id, PackageDisk { file, bytes, format });
    }
    Ok(disks)
}

/// Checks that a reference is the plain name of a file of the package.
pub(crate) fn check_member(href: &str) -> Result<(), ImportError> {
    let is_plain = !href.is_empty()
        && href.len() <= 255
        && !href.starts_with('.')
        && !href.contains(['/', '\\', ':'])
        && !href.chars().any(char::is_control);
    if is_plain {
        return Ok(());
    }
    Err(ImportError::Invalid(format!(
        "it refers to \"{}\", which is not the plain name of a file beside it",
        crate::shown::shown(href)
    )))
}

fn source_of(
    id: &str,
    name: &str,
    disks: &BTreeMap<&str, PackageDisk<'_>>,
    notes: &mut Findings,
) -> Option<SourceDisk> {
    let Some(disk) = disks.get(id) else {
        notes.refuse(name, format!("the package has no disk \"{id}\""));
        return None;
    };
    let source = match disk.file {
        Some(file) => DiskSource::Member(file.to_owned()),
        None => DiskSource::Empty,
    };
    if disk.bytes.is_none() {
        notes.refuse(name, "its capacity is missing or invalid");
    }
    Some(SourceDisk { name: name.to_owned(), source, format: disk.format, bytes: disk.bytes })
}

/// Reads the firmware as VMware (`vmw:Config`) and VirtualBox (`vbox:Machine`) name it.
fn read_firmware(system: Node, hardware: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let config = |key: &str| {
        let all = hardware.children_named("Config");
        let found = all.into_iter().find(|config| config.attr("key") == Some(key));
        found.and_then(|config| config.attr("value"))
    };
    let vbox = system.child("Machine").and_then(|machine| machine.child("Hardware"));
    let vbox = vbox.and_then(|hardware| hardware.child_attr("Firmware", "type"));
    if config("firmware") == Some("efi") || vbox.is_some_and(|kind| kind.starts_with("EFI")) {
        let secure = config("bootOptions.efiSecureBootEnabled") == Some("true");
        spec.firmware = if secure { Firmware::UefiSecure } else { Firmware::Uefi };
        notes.note(
            "UEFI variables",
            "they are not imported: the firmware finds the boot loader at its default path",
        );
    }
}

/// Gives NICs the addresses that VirtualBox keeps beside the standard's items.
fn read_vbox_macs(system: Node, nics: &mut [Nic]) {
    let machine = system.child("Machine");
    let network = machine.and_then(|machine| machine.at(&["Hardware", "Network"]));
    let Some(network) = network else { return };
    let adapters = network.children_named("Adapter");
    let enabled = adapters.into_iter().filter(|adapter| adapter.attr("enabled") == Some("true"));
    for (nic, adapter) in nics.iter_mut().zip(enabled) {
        let mac = adapter.attr("MACAddress").filter(|mac| mac.len() == 12 && mac.is_ascii());
        if let Some(mac) = mac.filter(|_| nic.mac.is_none()) {
            let pairs: Vec<&str> = (0..6).map(|at| &mac[2 * at..2 * at + 2]).collect();
            nic.mac = Some(pairs.join(":"));
        }
    }
}
