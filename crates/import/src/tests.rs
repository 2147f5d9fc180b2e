//! Documents of the six shapes, those that are refused, and round trips.

use std::path::Path;

use godwit_qemu::{DiskBus, DiskFormat, Firmware, NicModel, VmSpec};
use proptest::prelude::*;

use crate::ovf::{ExportedDisk, write_ovf};
use crate::*;

/// As `virsh dumpxml` of libvirt 9.0 prints it.
const LIBVIRT_Q35: &str = include_str!("tests/libvirt-q35.xml");
const LIBVIRT_PC: &str = include_str!("tests/libvirt-pc.xml");
const PROXMOX_UEFI: &str = include_str!("tests/proxmox-101.conf");
const PROXMOX_OLD: &str = include_str!("tests/proxmox-204.conf");
/// Written by hand, after what VirtualBox 7.0 and ovftool 4.4 write.
const VIRTUALBOX: &str = include_str!("tests/virtualbox.ovf");
const VMWARE: &str = include_str!("tests/vmware.ovf");
const ALL: [&str; 6] = [LIBVIRT_Q35, LIBVIRT_PC, PROXMOX_UEFI, PROXMOX_OLD, VIRTUALBOX, VMWARE];

fn import(text: &str) -> Imported {
    let kind = kind_of(text.as_bytes()).unwrap();
    let imported = read(kind, text.as_bytes()).unwrap();
    assert_eq!(imported.spec.disks.len(), imported.disks.len());
    imported
}

fn macs(spec: &VmSpec) -> Vec<&str> {
    spec.nics.iter().filter_map(|nic| nic.mac.as_deref()).collect()
}

fn has(imported: &Imported, what: &str, why: &str) {
    let found = imported
        .findings
        .iter()
        .any(|finding| finding.what.contains(what) && finding.why.contains(why));
    assert!(found, "no \"{what}: {why}\" among {:#?}", imported.findings);
}

fn refused(text: &str) -> Vec<String> {
    let found = import(text).findings.into_iter().filter(|finding| finding.refuses);
    found.map(|finding| format!("{}: {}", finding.what, finding.why)).collect()
}

/// Checks what the agent checks too, with a network that exists.
fn check(imported: &Imported) {
    assert_eq!(imported.findings.iter().filter(|finding| finding.refuses).count(), 0);
    let mut spec = imported.spec.clone();
    spec.nics.iter_mut().for_each(|nic| "lan".clone_into(&mut nic.network));
    spec.validate().unwrap();
}

#[test]
fn a_libvirt_domain_with_uefi_is_read() {
    let imported = import(LIBVIRT_Q35);
    check(&imported);
    let spec = &imported.spec;
    assert_eq!((spec.name.as_str(), spec.vcpus), ("shop-db", 2));
    assert_eq!(spec.memory[0].size.bytes(), 4 << 30);
    assert_eq!(spec.machine.as_deref(), Some("pc-q35-7.2"));
    assert_eq!(spec.firmware, Firmware::Uefi);
    assert_eq!(spec.cpu_model.as_deref(), Some("Westmere,-aes"));
    assert!(spec.tpm && spec.rng && spec.guest_agent && spec.watchdog.is_some());
    assert_eq!(spec.description.as_deref(), Some("PostgreSQL of the shop & its replica"));
    assert!(spec.uuid.is_some());
    assert_eq!(macs(spec), ["52:54:00:6b:3c:58", "52:54:00:11:22:33"]);
    assert_eq!(
        (spec.nics[0].network.as_str(), spec.nics[1].network.as_str()),
        ("br-lan", "default")
    );
    assert_eq!((spec.disks[0].bus, spec.disks[1].bus), (DiskBus::Virtio, DiskBus::Scsi));
    assert_eq!(spec.disks[1].serial.as_deref(), Some("DATA-1"));
    assert_eq!(imported.disks[0].format, Some(SourceFormat::Qcow2));
    assert_eq!(imported.disks[1].source, DiskSource::Path("/tmp/lvs/shop-data.img".into()));
    assert_eq!(spec.cdroms.len(), 1);
    has(&imported, "TPM", "state is not imported");
    has(&imported, "sda", "none becomes writeback");
    has(&imported, "memballoon", "left out");
}

#[test]
fn an_old_libvirt_domain_is_read() {
    let imported = import(LIBVIRT_PC);
    check(&imported);
    let spec = &imported.spec;
    assert_eq!(spec.name, "Old-Print-Server--2");
    assert_eq!((spec.vcpus, spec.max_cpus), (1, Some(2)));
    assert_eq!(spec.machine.as_deref(), Some("pc-i440fx-7.2"));
    assert_eq!(spec.cpu_model, None);
    assert_eq!(spec.nics[0].model, NicModel::E1000e);
    assert_eq!(macs(spec), ["52:54:00:aa:bb:cc"]);
    assert_eq!(spec.disks[0].bus, DiskBus::Sata);
    assert_eq!((spec.cdroms[0].boot_order, spec.disks[0].boot_order), (Some(1), Some(2)));
    assert_eq!(imported.disks[0].format, Some(SourceFormat::Vmdk));
    for (what, why) in [
        ("name", "becomes"),
        ("hda", "becomes sata"),
        ("interface", "rtl8139 becomes e1000e"),
        ("video", "qxl becomes vga"),
        ("sound", "left out"),
        ("CPU host-model", "differs from host to host"),
        ("currentMemory", "balloon"),
    ] {
        has(&imported, what, why);
    }
}

#[test]
fn a_proxmox_configuration_is_read() {
    let imported = import(PROXMOX_UEFI);
    check(&imported);
    let spec = &imported.spec;
    assert_eq!((spec.name.as_str(), spec.vcpus), ("shop-web", 4));
    assert_eq!((spec.firmware, spec.tpm), (Firmware::UefiSecure, true));
    assert_eq!(spec.memory[0].size.bytes(), 4 << 30);
    let description = spec.description.as_deref().unwrap();
    assert!(description.ends_with("restart: it is busy."), "{description}");
    assert_eq!(macs(spec), ["bc:24:11:6a:1b:2c", "bc:24:11:6a:1b:2d"]);
    assert_eq!((spec.nics[0].vlan, spec.nics[0].queues), (Some(20), Some(4)));
    assert_eq!(spec.tags.iter().collect::<Vec<_>>(), ["prod", "shop"]);
    assert_eq!(spec.autostart.as_ref().unwrap().order, Some(2));
    assert_eq!(spec.disks.iter().map(|disk| disk.bus).collect::<Vec<_>>(), [DiskBus::Scsi; 2]);
    assert_eq!((spec.disks[0].boot_order, spec.cdroms[0].boot_order), (Some(1), Some(2)));
    assert!(spec.disks[0].iothread && spec.uuid.is_some());
    let volume = |storage: &str, name: &str| DiskSource::Volume {
        storage: storage.to_owned(),
        name: name.to_owned(),
    };
    assert_eq!(imported.disks[0].source, volume("local-lvm", "vm-101-disk-1"));
    assert_eq!(imported.disks[0].format, Some(SourceFormat::Raw));
    assert_eq!(imported.disks[1].source, volume("local", "101/vm-101-disk-2.qcow2"));
    assert_eq!(imported.disks[1].bytes, Some(8 << 30));
    has(&imported, "snapshots", "not imported");
    has(&imported, "x86-64-v2-AES", "only Proxmox VE");
    has(&imported, "net0", "firewall");

    let old = import(PROXMOX_OLD);
    check(&old);
    assert_eq!((old.spec.name.as_str(), old.spec.vcpus), ("legacy.erp", 2));
    assert_eq!(old.spec.machine.as_deref(), Some("pc-i440fx-7.2"));
    assert_eq!(macs(&old.spec), ["52:54:00:0e:0f:10"]);
    assert!(!old.spec.nics[0].link.is_up());
    assert_eq!(old.disks[0].format, Some(SourceFormat::Vmdk));
    assert_eq!(old.spec.disks[0].boot_order, Some(1));
}

#[test]
fn packages_of_virtualbox_and_vmware_are_read() {
    let imported = import(VIRTUALBOX);
    check(&imported);
    assert_eq!((imported.spec.name.as_str(), imported.spec.vcpus), ("wiki", 2));
    assert_eq!(macs(&imported.spec), ["08:00:27:a1:b2:c3"]);
    assert_eq!(imported.disks[0].source, DiskSource::Member("wiki-disk001.vmdk".to_owned()));
    assert_eq!(imported.disks[0].bytes, Some(64 << 20));
    has(&imported, "Ethernet adapter", "E1000 becomes e1000e");

    let imported = import(VMWARE);
    check(&imported);
    let spec = &imported.spec;
    assert_eq!((spec.name.as_str(), spec.vcpus, spec.firmware), ("erp", 4, Firmware::Uefi));
    assert_eq!(macs(spec), ["00:50:56:8a:01:02"]);
    assert_eq!(spec.nics[0].network, "VM Network");
    assert_eq!(spec.description.as_deref(), Some("ERP of the shop"));
    let member = |name: &str| DiskSource::Member(name.to_owned());
    let found: Vec<_> = imported.disks.iter().map(|disk| disk.source.clone()).collect();
    assert_eq!(found, [member("erp-disk1.vmdk"), member("erp-disk2.vmdk"), DiskSource::Empty]);
    assert_eq!(imported.disks[2].bytes, Some(4 << 30));
    has(&imported, "SCSI Controller 0", "becomes sata");
}

#[test]
fn what_cannot_be_imported_is_refused_by_name() {
    let with = |device: &str| LIBVIRT_Q35.replace("<rng ", &format!("{device}<rng "));
    let disk = |attributes: &str, parts: &str| with(&format!("<disk {attributes}>{parts}</disk>"));
    let file = "type='file' device='disk'";
    let source = "<source file='/a'/><target dev='vdz' bus='virtio'/>";
    let pci = "<hostdev mode='subsystem' type='pci'><source>\
               <address domain='0x0000' bus='0x03' slot='0x00' function='0x0'/></source></hostdev>";
    let gzip = "ovf:href=\"erp-disk1.vmdk\" ovf:compression=\"gzip\"";
    let nic = "<interface type='hostdev'><mac address='52:54:00:00:00:01'/></interface>";
    for (text, word) in [
        (with(pci), "0x03"),
        (with(nic), "passed through"),
        (disk(file, &source.replace("virtio", "xen")), "vdz: bus xen"),
        (
            disk(file, &format!("{source}<encryption format='luks'/>")),
            "vdz: its image is encrypted",
        ),
        (disk("type='network' device='disk'", source), "type network"),
        (disk("type='block' device='lun'", source), "vdz"),
        (with("<tpm><backend type='passthrough'/></tpm>"), "TPM"),
        (LIBVIRT_Q35.replace("<features>", "<launchSecurity/><features>"), "launchSecurity"),
        (LIBVIRT_Q35.replace("type='kvm'", "type='xen'"), "xen"),
        (LIBVIRT_Q35.replace("x86_64", "aarch64"), "aarch64"),
        (PROXMOX_UEFI.replace("numa: 0", "hostpci0: 0000:01:00.0,pcie=1"), "hostpci0"),
        (PROXMOX_UEFI.replace("numa: 0", "usb0: host=1234:5678"), "usb0"),
        (PROXMOX_UEFI.replace("numa: 0", "lock: backup"), "lock backup"),
        (VMWARE.replace("<rasd:Parent>3<", "<rasd:Parent>77<"), "controller"),
        (VMWARE.replace("ovf:href=\"erp-disk1.vmdk\"", gzip), "compressed"),
    ] {
        let refused = refused(&text);
        assert!(refused.iter().any(|refused| refused.contains(word)), "{word}: {refused:?}");
    }
}

#[test]
fn documents_that_reach_out_are_refused() {
    let entity = "<!DOCTYPE x [<!ENTITY e SYSTEM \"file:///etc/shadow\">]>";
    for text in [LIBVIRT_Q35, VIRTUALBOX] {
        let body = text.split_once("?>").map_or(text, |(_, body)| body);
        let text = format!("{entity}{body}");
        let error = read(Kind::Libvirt, text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("document type"), "{error}");
        assert!(kind_of(text.as_bytes()).is_err());
    }
    for href in ["../wiki.vmdk", "/etc/shadow", "file:///etc/shadow", "a/b.vmdk", ".", "a\\b"] {
        let text = VIRTUALBOX.replace("wiki-disk001.vmdk", href);
        let error = read(Kind::Ovf, text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("not the plain name"), "{href}: {error}");
    }
    let deep = format!("<domain>{}", "<a>".repeat(100_000));
    assert!(read(Kind::Libvirt, deep.as_bytes()).unwrap_err().to_string().contains("deeper"));
    let many = "<interface type='user'/>".repeat(600);
    let many = LIBVIRT_Q35.replace("<rng ", &format!("{many}<rng "));
    assert_eq!(read(Kind::Libvirt, many.as_bytes()), Err(ImportError::TooManyDevices));
    let long = vec![b' '; MOST_TEXT_BYTES + 1];
    assert_eq!(read(Kind::Proxmox, &long), Err(ImportError::TooLong));
    assert_eq!(kind_of(b"hello"), Err(ImportError::UnknownKind));
    assert_eq!(kind_of(b"<html/>"), Err(ImportError::UnknownKind));
}

fn domain_of(spec: &VmSpec) -> String {
    let disks: Vec<_> = spec
        .disks
        .iter()
        .map(|_| DomainDisk { path: Path::new("/srv/a&b.qcow2"), format: DiskFormat::Qcow2 })
        .collect();
    write_domain(spec, &disks, &|network| Some(format!("br-{network}"))).0
}

#[test]
fn a_definition_survives_its_export() {
    for text in ALL {
        let mut spec = import(text).spec;
        spec.nics.iter_mut().for_each(|nic| "lan".clone_into(&mut nic.network));
        let domain = domain_of(&spec);
        let again = import(&domain);
        assert_eq!(again.findings.iter().filter(|finding| finding.refuses).count(), 0, "{domain}");
        assert_eq!(
            again.disks.iter().map(|disk| &disk.source).collect::<Vec<_>>(),
            vec![&DiskSource::Path("/srv/a&b.qcow2".into()); spec.disks.len()]
        );
        let mut found = again.spec;
        found.nics.iter_mut().for_each(|nic| "lan".clone_into(&mut nic.network));
        // What a domain has no place for.
        let secure = spec.firmware == Firmware::UefiSecure;
        found.tags.clone_from(&spec.tags);
        found.autostart.clone_from(&spec.autostart);
        found.scsi_controller = spec.scsi_controller;
        for (found, disk) in found.disks.iter_mut().zip(&spec.disks) {
            found.iothread = disk.iothread;
        }
        for (found, nic) in found.nics.iter_mut().zip(&spec.nics) {
            found.vlan = nic.vlan;
        }
        assert_eq!(found, spec, "{domain}");
        assert_eq!(secure, domain.contains("enabled='yes' name='secure-boot'"));

        let disks: Vec<_> = (0..spec.disks.len())
            .map(|index| ExportedDisk {
                file: format!("web-disk{index}.vmdk"),
                file_bytes: 512,
                bytes: 1 << 30,
            })
            .collect();
        let package = import(&write_ovf(&spec, &disks));
        assert_eq!(package.findings.iter().filter(|finding| finding.refuses).count(), 0);
        assert_eq!(macs(&package.spec), macs(&spec));
        assert_eq!(package.spec.memory, spec.memory);
        assert_eq!((package.spec.vcpus, package.spec.firmware), (spec.vcpus, spec.firmware));
        assert_eq!(package.spec.description, spec.description);
        assert_eq!(package.disks.len(), spec.disks.len());
        assert!(package.disks.iter().all(|disk| disk.bytes == Some(1 << 30)));
        assert_eq!(package.spec.cdroms.len(), spec.cdroms.len());
    }
}

/// libvirt's own parser, without a daemon: its test driver.
#[test]
fn libvirt_accepts_what_is_written() {
    let virsh = |file: &Path| {
        let command = ["--connect", "test:///default", "define", "--validate"];
        std::process::Command::new("virsh").args(command).arg(file).output()
    };
    for (index, text) in ALL.into_iter().enumerate() {
        let mut spec = import(text).spec;
        spec.nics.iter_mut().for_each(|nic| "lan".clone_into(&mut nic.network));
        let file = std::env::temp_dir().join(format!("godwit-{}-{index}.xml", std::process::id()));
        // The test driver has domains of type test alone.
        let domain = domain_of(&spec).replacen("type='qemu'", "type='test'", 1);
        std::fs::write(&file, domain.replacen("type='kvm'", "type='test'", 1)).unwrap();
        let defined = virsh(&file);
        std::fs::remove_file(&file).unwrap();
        let Ok(defined) = defined else {
            eprintln!("skipped: no virsh (apt-get install libvirt-clients)");
            return;
        };
        assert!(defined.status.success(), "{domain}: {defined:?}");
    }
}

proptest! {
    #[test]
    fn no_change_of_a_document_panics(
        which in 0_usize..6,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
        end in any::<prop::sample::Index>(),
    ) {
        let mut bytes = ALL[which].as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1).max(1));
        if let Ok(kind) = kind_of(&bytes) {
            let _ = read(kind, &bytes);
        }
    }

    #[test]
    fn any_line_of_a_configuration_is_read_or_refused(
        lines in prop::collection::vec("[a-z]{1,8}[0-9]{0,3}: ?[ -~]{0,60}", 0..20),
    ) {
        let text = format!("memory: 512\n{}", lines.join("\n"));
        if let Ok(imported) = read(Kind::Proxmox, text.as_bytes()) {
            prop_assert_eq!(imported.spec.disks.len(), imported.disks.len());
        }
    }

    #[test]
    fn any_name_and_description_survives_xml(name in "[ -~]{0,60}", text in "\\PC{0,200}") {
        let spec = VmSpec {
            description: Some(text.clone()),
            ..VmSpec::new(vm_name(&name).unwrap_or_else(|| "x".to_owned()))
        };
        let again = import(&domain_of(&spec));
        let found = again.spec.description.unwrap_or_default();
        let wanted: String = text.chars().filter(|c| !c.is_control()).collect();
        prop_assert_eq!(found.trim(), wanted.trim());
    }
}
