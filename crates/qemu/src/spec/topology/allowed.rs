//! What of another program's QEMU a VM of Godwit may have: devices, options and options of the
//! machine. Everything else is refused by its name.

use crate::spec::topology::properties::Properties;

/// Devices that have no part outside of QEMU except those that a topology names. Each has been
/// checked for properties that name a resource of the host ([`RESOURCES`]).
const DEVICES: &[&str] = &[
    "AC97",
    "ES1370",
    "VGA",
    "ahci",
    "bochs-display",
    "cirrus-vga",
    "dmi-to-pci-bridge",
    "e1000",
    "e1000-82545em",
    "e1000e",
    "hda-duplex",
    "hda-micro",
    "hda-output",
    "i6300esb",
    "i82801b11-bridge",
    "ib700",
    "ich9-ahci",
    "ich9-intel-hda",
    "ich9-usb-ehci1",
    "ich9-usb-ehci2",
    "ich9-usb-uhci1",
    "ich9-usb-uhci2",
    "ich9-usb-uhci3",
    "ide-cd",
    "ide-hd",
    "intel-hda",
    "ioh3420",
    "isa-serial",
    "nec-usb-xhci",
    "pci-bridge",
    "pci-serial",
    "pcie-pci-bridge",
    "pcie-root-port",
    "piix3-usb-uhci",
    "piix4-usb-uhci",
    "pvpanic",
    "pvpanic-pci",
    "pxb-pcie",
    "qemu-xhci",
    "rtl8139",
    "scsi-cd",
    "scsi-hd",
    "usb-ehci",
    "usb-hub",
    "usb-kbd",
    "usb-mouse",
    "usb-tablet",
    "virtconsole",
    "virtio-balloon-pci",
    "virtio-blk-pci",
    "virtio-gpu-pci",
    "virtio-keyboard-pci",
    "virtio-mouse-pci",
    "virtio-net-pci",
    "virtio-rng-pci",
    "virtio-scsi-pci",
    "virtio-serial",
    "virtio-serial-pci",
    "virtio-tablet-pci",
    "virtio-vga",
    "virtserialport",
    "vmgenid",
    "x3130-upstream",
    "xio3130-downstream",
];
/// Suffixes of the names of virtio devices by their version of the standard.
const VARIANTS: [&str; 2] = ["-non-transitional", "-transitional"];

/// Properties of these devices that name something outside of QEMU.
const RESOURCES: &[&str] = &[
    "fd",
    "fds",
    "filename",
    "host",
    "hostdev",
    "memdev",
    "path",
    "romfile",
    "sysfsdev",
    "tpmdev",
    "vhostfd",
    "vhostfds",
    "failover_pair_id",
    "loadparm",
    "logfile",
];

/// Options of `-machine` that a topology may have.
const MACHINE_OPTIONS: &[&str] = &[
    "acpi",
    "default-bus-bypass-iommu",
    "default_bus_bypass_iommu",
    "dump-guest-core",
    "graphics",
    "hmat",
    "hpet",
    "i8042",
    "kernel-irqchip",
    "kernel_irqchip",
    "max-ram-below-4g",
    "mem-merge",
    "pic",
    "pit",
    "sata",
    "smbios-entry-point-type",
    "smbus",
    "smm",
    "suppress-vmdesc",
    "usb",
    "vmport",
    "x-south-bridge",
];

/// Options without a value.
const FLAGS: &[&str] = &["-usb", "-no-hpet", "-no-acpi"];
/// Options with a value that names no file.
const OPTIONS: &[&str] = &[
    "-smp",
    "-numa",
    "-global",
    "-rtc",
    "-boot",
    "-vga",
    "-smbios",
    "-action",
    "-watchdog-action",
];
/// Values of `-vga`.
const ADAPTERS: [&str; 4] = ["none", "std", "cirrus", "virtio"];

/// Returns the driver without the suffix of its version.
pub(crate) fn base_driver(driver: &str) -> &str {
    let suffix = VARIANTS.iter().find_map(|suffix| driver.strip_suffix(suffix));
    suffix.unwrap_or(driver)
}

/// Checks a device, except for what it refers to.
///
/// # Errors
/// Why a VM of Godwit cannot have it.
pub(crate) fn check_device(device: &Properties) -> Result<(), String> {
    let Some(driver) = device.get("driver") else { return Err("a device has no driver".into()) };
    if !DEVICES.contains(&base_driver(&driver)) {
        return Err(format!("device {driver} {}", why_not(&driver)));
    }
    let names_one = |(key, value): &(String, String)| {
        RESOURCES.contains(&key.as_str()) && !(key == "romfile" && value.is_empty())
    };
    match device.fields().iter().find(|field| names_one(field)) {
        Some((key, _)) => Err(format!("device {driver} has property {key}, a part of the host")),
        None => Ok(()),
    }
}

/// Checks the device of a disk. Its image must be locked against another QEMU that writes it.
///
/// # Errors
/// Why a VM of Godwit cannot have it.
pub(crate) fn check_disk(device: &Properties) -> Result<(), String> {
    check_device(device)?;
    let is_off = |value: String| matches!(value.as_str(), "off" | "false" | "no" | "n");
    if device.get("share-rw").is_none_or(is_off) {
        return Ok(());
    }
    let driver = device.get("driver").unwrap_or_default();
    Err(format!("device {driver} has share-rw: several QEMUs could write the disk at once"))
}

/// Says why a device cannot come.
fn why_not(driver: &str) -> &'static str {
    let has = |part: &str| driver.contains(part);
    if driver.starts_with("vfio") || driver == "usb-host" {
        "passes hardware of the host through"
    } else if has("vhost-user") || has("vdpa") || driver.starts_with("vhost-") {
        "is served outside of QEMU"
    } else if driver.starts_with("tpm") {
        "has its state in a process of its own"
    } else if driver.starts_with("qxl") || driver == "usb-redir" || has("spice") {
        "needs SPICE, which Godwit does not have"
    } else if ["pc-dimm", "nvdimm", "virtio-mem", "virtio-pmem"].contains(&base_driver(driver)) {
        "adds memory, which Godwit takes over as a block from the start only"
    } else {
        "is not one that Godwit takes over"
    }
}

/// Checks an option that a topology has verbatim.
///
/// # Errors
/// Why a VM of Godwit cannot have it.
pub(crate) fn check_option(name: &str, value: Option<&str>) -> Result<(), String> {
    let wrong = |why: &str| Err(format!("option {name} {why}"));
    match value {
        None if FLAGS.contains(&name) => Ok(()),
        Some(value) if OPTIONS.contains(&name) => match name {
            "-vga" if !ADAPTERS.contains(&value) => wrong("names an unknown adapter"),
            "-smbios" => match Properties::parse(value, "file")?.get("file") {
                Some(_) => wrong("names a file"),
                None if value.split(',').any(|part| part.starts_with("path=")) => {
                    wrong("names a file")
                }
                None => Ok(()),
            },
            "-global" if value.contains("share-rw") => wrong("lets several QEMUs write a disk"),
            "-numa" if value.contains("mem=") => wrong("has memory without an ID"),
            _ if value.contains('/') || value.chars().any(char::is_control) => {
                wrong("names a file")
            }
            _ => Ok(()),
        },
        _ => wrong("is not one that Godwit takes over"),
    }
}

/// Checks the options of `-machine` behind its type.
///
/// # Errors
/// Why a VM of Godwit cannot have them.
pub(crate) fn check_machine(options: &str) -> Result<(), String> {
    for (key, value) in Properties::parse(options, "")?.fields() {
        let is_plain = value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if !MACHINE_OPTIONS.contains(&key.as_str()) || !is_plain {
            return Err(format!("machine option {key} is not one that Godwit takes over"));
        }
    }
    Ok(())
}

/// Whether an object may be in a topology as it is, with properties that name nothing of the host.
///
/// # Errors
/// Why it may not.
pub(crate) fn check_object(object: &Properties) -> Result<(), String> {
    let kind = object.get("qom-type").unwrap_or_default();
    let keys: &[&str] = match kind.as_str() {
        "iothread" => &[
            "qom-type",
            "id",
            "poll-max-ns",
            "poll-grow",
            "poll-shrink",
            "aio-max-batch",
            "thread-pool-min",
            "thread-pool-max",
        ],
        "rng-builtin" => &["qom-type", "id"],
        _ => return Err(format!("object {kind} is not one that Godwit takes over")),
    };
    match object.fields().iter().find(|(key, _)| !keys.contains(&key.as_str())) {
        Some((key, _)) => Err(format!("object {kind} has property {key}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> Result<(), String> {
        check_device(&Properties::parse(text, "driver").unwrap())
    }

    #[test]
    fn a_device_with_a_part_of_the_host_is_refused_by_name() {
        device("virtio-net-pci,netdev=n,romfile=").unwrap();
        device("virtio-blk-pci-non-transitional,drive=d").unwrap();
        for (text, words) in [
            ("vfio-pci,host=01:00.0", "device vfio-pci passes hardware"),
            ("usb-host,vendorid=1", "device usb-host passes hardware"),
            ("tpm-crb,tpmdev=t", "device tpm-crb has its state"),
            ("qxl-vga", "SPICE"),
            ("vhost-user-fs-pci,chardev=c", "served outside"),
            ("nvme,drive=d,serial=1", "device nvme is not"),
            ("e1000,romfile=/etc/shadow", "property romfile"),
            ("id=x", "no driver"),
        ] {
            let why = device(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
    }

    #[test]
    fn a_disk_that_several_may_write_is_refused() {
        let disk = |text: &str| check_disk(&Properties::parse(text, "driver").unwrap());
        disk("scsi-hd,id=d").unwrap();
        disk("scsi-hd,id=d,share-rw=off").unwrap();
        assert!(disk("scsi-hd,id=d,share-rw=on").unwrap_err().contains("share-rw"));
        disk(r#"{"driver":"virtio-blk-pci","share-rw":true}"#).unwrap_err();
    }

    #[test]
    fn options_that_name_files_are_refused() {
        check_option("-smp", Some("2,sockets=1,cores=2,threads=1")).unwrap();
        check_option("-smbios", Some("type=1,manufacturer=A/B")).unwrap();
        check_option("-usb", None).unwrap();
        for (name, value) in [
            ("-smbios", Some("file=/etc/shadow")),
            ("-smbios", Some("/etc/shadow")),
            ("-smbios", Some("type=11,path=/etc/shadow")),
            ("-global", Some("virtio-net-pci.romfile=/etc/shadow")),
            ("-global", Some("scsi-hd.share-rw=on")),
            ("-readconfig", Some("x")),
            ("-fw_cfg", Some("name=x,string=y")),
            ("-vga", Some("qxl")),
            ("-usb", Some("on")),
            ("-smp", None),
        ] {
            assert!(check_option(name, value).is_err(), "{name} {value:?}");
        }
        check_machine("usb=off,dump-guest-core=off,smm=on").unwrap();
        check_machine("memory-encryption=sev0").unwrap_err();
        check_machine("firmware=/etc/shadow").unwrap_err();
    }
}
