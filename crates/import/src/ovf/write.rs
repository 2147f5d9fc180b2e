//! An OVF descriptor, from a specification. It has the devices that VMware and VirtualBox both
//! offer; QEMU's own become these.

use std::fmt::Write;

use godwit_qemu::{ByteSize, Firmware, NicModel, VmSpec};
use godwit_types::ImportFinding;

use crate::finding::Findings;
use crate::xml::escaped;

/// A disk of a package: its file, and the size of the disk.
#[derive(Clone, Debug)]
pub(crate) struct ExportedDisk {
    /// Plain name of the file.
    pub(crate) file: String,
    pub(crate) file_bytes: u64,
    /// Size of the disk.
    pub(crate) bytes: u64,
}

const HEAD: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
 xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData"
 xmlns:vmw="http://www.vmware.com/schema/ovf">
"#;
const VMDK: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";

/// Returns what changes in a package, or is left out; one that refuses makes it impossible.
#[must_use]
pub fn ovf_changes(spec: &VmSpec) -> Vec<ImportFinding> {
    let mut notes = Findings::default();
    if spec.kernel.is_some() {
        notes.refuse("kernel", "a package has no place for it: install a boot loader in the guest");
    }
    if spec.disks.is_empty() {
        notes.refuse("disks", "a VM without disks has nothing to package");
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        if disk.bus != godwit_qemu::DiskBus::Sata {
            let bus = disk.bus.name();
            let why = format!("bus {bus} becomes sata (AHCI): the guest needs its driver");
            notes.note(format!("disk {index}"), why);
        }
    }
    for (index, nic) in spec.nics.iter().enumerate() {
        if nic.model == NicModel::Virtio {
            notes.note(
                format!("NIC {index}"),
                "model virtio becomes e1000e: the guest needs its driver",
            );
        }
        if nic.vlan.is_some() || !nic.trunk.is_empty() || nic.filter.is_some() {
            notes.note(format!("NIC {index}"), "VLANs and filters are left out");
        }
    }
    for (is, what) in [
        (spec.tpm, "TPM"),
        (spec.rng, "rng"),
        (spec.watchdog.is_some(), "watchdog"),
        (spec.panic_device == Some(true), "panic device"),
        (spec.guest_agent, "guest agent"),
        (spec.cloud_init.is_some(), "cloud-init"),
        (!spec.extra_devices.is_empty(), "devices"),
    ] {
        if is {
            notes.note(what, "left out");
        }
    }
    if spec.firmware != Firmware::Bios {
        notes.note("UEFI variables", "they stay here: the firmware finds the default boot loader");
    }
    notes.0
}

/// Writes the descriptor of a package of one VM.
pub(crate) fn write_ovf(spec: &VmSpec, disks: &[ExportedDisk]) -> String {
    let mut text = HEAD.to_owned();
    text.push_str(" <References>\n");
    for (index, disk) in disks.iter().enumerate() {
        let (href, size) = (escaped(&disk.file), disk.file_bytes);
        let _ = writeln!(
            text,
            "  <File ovf:id=\"file{index}\" ovf:href=\"{href}\" ovf:size=\"{size}\"/>"
        );
    }
    text.push_str(" </References>\n <DiskSection>\n  <Info>Virtual disks</Info>\n");
    for (index, disk) in disks.iter().enumerate() {
        let _ = writeln!(
            text,
            "  <Disk ovf:diskId=\"vmdisk{index}\" ovf:fileRef=\"file{index}\"\n   \
             ovf:capacity=\"{}\" ovf:capacityAllocationUnits=\"byte\"\n   ovf:format=\"{VMDK}\"/>",
            disk.bytes
        );
    }
    text.push_str(" </DiskSection>\n <NetworkSection>\n  <Info>Networks</Info>\n");
    let mut networks: Vec<&str> = spec.nics.iter().map(|nic| nic.network.as_str()).collect();
    networks.sort_unstable();
    networks.dedup();
    for network in networks {
        let _ = writeln!(text, "  <Network ovf:name=\"{}\"/>", escaped(network));
    }
    text.push_str(" </NetworkSection>\n");
    system(&mut text, spec, disks.len());
    text.push_str("</Envelope>\n");
    text
}

fn system(text: &mut String, spec: &VmSpec, disks: usize) {
    let name = escaped(&spec.name);
    let _ = writeln!(text, " <VirtualSystem ovf:id=\"{name}\">\n  <Info>A virtual machine</Info>");
    let _ = writeln!(text, "  <Name>{name}</Name>");
    if let Some(description) = &spec.description {
        let _ = writeln!(
            text,
            "  <AnnotationSection>\n   <Info>Description</Info>\n   \
             <Annotation>{}</Annotation>\n  </AnnotationSection>",
            escaped(description)
        );
    }
    text.push_str("  <OperatingSystemSection ovf:id=\"102\">\n   <Info>The guest</Info>\n");
    text.push_str("   <Description>Other 64-bit</Description>\n  </OperatingSystemSection>\n");
    text.push_str("  <VirtualHardwareSection>\n   <Info>Virtual hardware</Info>\n   <System>\n");
    text.push_str("    <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>\n");
    text.push_str("    <vssd:InstanceID>0</vssd:InstanceID>\n");
    let _ = writeln!(
        text,
        "    <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>\n    \
         <vssd:VirtualSystemType>vmx-13</vssd:VirtualSystemType>\n   </System>"
    );
    let mut items = Items { text, instance: 0 };
    items.add(3, "vCPUs", &[("VirtualQuantity", &spec.vcpus.to_string())]);
    let bytes: u64 = spec.memory.iter().map(|block| block.size.bytes()).sum();
    let mib = (ByteSize::from_bytes(bytes).bytes() >> 20).to_string();
    let memory = [("AllocationUnits", "byte * 2^20"), ("VirtualQuantity", mib.as_str())];
    items.add(4, "Memory", &memory);
    let controller = (disks > 0 || !spec.cdroms.is_empty()).then(|| {
        items.add(20, "SATA controller", &[("Address", "0"), ("ResourceSubType", "AHCI")])
    });
    let controller = controller.unwrap_or_default().to_string();
    for index in 0..disks {
        let (place, resource) = (index.to_string(), format!("ovf:/disk/vmdisk{index}"));
        let values = [
            ("AddressOnParent", place.as_str()),
            ("HostResource", &resource),
            ("Parent", &controller),
        ];
        items.add(17, &format!("Hard disk {index}"), &values);
    }
    for index in 0..spec.cdroms.len() {
        let place = (disks + index).to_string();
        let values = [("AddressOnParent", place.as_str()), ("Parent", &controller)];
        items.add(15, &format!("CD drive {index}"), &values);
    }
    for (index, nic) in spec.nics.iter().enumerate() {
        let mac = nic.mac.as_deref().unwrap_or_default();
        let place = index.to_string();
        let values = [
            ("Address", mac),
            ("AddressOnParent", &place),
            ("AutomaticAllocation", "true"),
            ("Connection", &nic.network),
            ("ResourceSubType", "E1000e"),
        ];
        let values: Vec<_> = values.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        items.add(10, &format!("Network adapter {index}"), &values);
    }
    if spec.firmware != Firmware::Bios {
        text.push_str(
            "   <vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"efi\"/>\n",
        );
    }
    if spec.firmware == Firmware::UefiSecure {
        text.push_str("   <vmw:Config ovf:required=\"false\"\n    ");
        text.push_str("vmw:key=\"bootOptions.efiSecureBootEnabled\" vmw:value=\"true\"/>\n");
    }
    text.push_str("  </VirtualHardwareSection>\n </VirtualSystem>\n");
}

struct Items<'a> {
    text: &'a mut String,
    instance: u32,
}

impl Items<'_> {
    /// Adds an item; returns its instance. The elements of an item are in alphabetical order.
    fn add(&mut self, kind: u32, name: &str, values: &[(&str, &str)]) -> u32 {
        self.instance += 1;
        let (instance, kind) = (self.instance.to_string(), kind.to_string());
        let own = [("ElementName", name), ("InstanceID", &instance), ("ResourceType", &kind)];
        let mut all: Vec<(&str, &str)> = values.iter().copied().chain(own).collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        self.text.push_str("   <Item>\n");
        for (key, value) in all {
            let _ = writeln!(self.text, "    <rasd:{key}>{}</rasd:{key}>", escaped(value));
        }
        self.text.push_str("   </Item>\n");
        self.instance
    }
}
