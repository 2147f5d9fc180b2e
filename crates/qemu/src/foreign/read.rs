//! Arguments of another program's QEMU, read one after the other; devices last, because they refer
//! to what may follow them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use godwit_types::Fault;
use uuid::Uuid;

use super::drives::{Drives, flash_path};
use super::{MOST_ARGUMENTS, MOST_ARGUMENTS_BYTES};
use crate::guest_agent::GUEST_AGENT_PORT;
use crate::size::ByteSize;
use crate::spec::{
    Accel, Cdrom, DiskBus, DiskFormat, Firmware, MOST_SERIAL_PORTS, MemoryBlock, Nic, NicModel,
    Part, Properties, Topology, Video, VmSpec, allowed,
};

/// Memory that QEMU makes itself if none is named (`default_ram_id` of the machine types pc and
/// q35, QEMU 7.2 to 10.0).
const DEFAULT_MEMORY: &str = "pc.ram";
/// Memory without `-m`.
const DEFAULT_MEMORY_BYTES: u64 = 128 << 20;

/// Options that say nothing of the machine: another program's monitors, logs and rights.
const LEFT_OUT: &[&str] = &[
    "-D",
    "-d",
    "-display",
    "-id",
    "-incoming",
    "-iscsi",
    "-k",
    "-mon",
    "-monitor",
    "-msg",
    "-overcommit",
    "-parallel",
    "-pidfile",
    "-qmp",
    "-runas",
    "-sandbox",
    "-spice",
    "-vnc",
    "-add-fd",
    "-chroot",
];
/// Those without a value.
const LEFT_OUT_FLAGS: &[&str] = &[
    "-S",
    "-daemonize",
    "-no-fd-bootchk",
    "-no-reboot",
    "-no-shutdown",
    "-no-user-config",
    "-nodefaults",
    "-mem-prealloc",
];

/// A VM of another program's QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignVm {
    /// Its specification. NICs have no network yet, see [`ForeignVm::nics`].
    pub spec: VmSpec,
    /// Its NICs, in the order of the specification.
    pub nics: Vec<ForeignNic>,
    pub firmware: Option<ForeignFirmware>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignNic {
    /// ID of its back end.
    pub id: String,
    pub tap: ForeignTap,
}

/// How a QEMU has a tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignTap {
    /// A descriptor of its process.
    Descriptor(i32),
    Name(String),
}

/// Images of its firmware in flash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignFirmware {
    pub code: PathBuf,
    pub variables: PathBuf,
}

/// Reads the arguments of a QEMU, without its program. `machine`: its versioned machine type, as
/// QEMU itself reports it. `name`: name of the VM at Godwit, if not the one in the arguments.
///
/// # Errors
/// Everything that prevents an adoption, at least one.
pub fn read_foreign(
    arguments: &[String],
    machine: &str,
    name: Option<&str>,
) -> Result<ForeignVm, Vec<Fault>> {
    let bytes: usize = arguments.iter().map(String::len).sum();
    if arguments.len() > MOST_ARGUMENTS || bytes > MOST_ARGUMENTS_BYTES {
        return Err(vec![finding("its QEMU has too many arguments".to_owned())]);
    }
    let mut reader = Reader::new(machine);
    reader.read(arguments);
    reader.finish(name)
}

fn finding(message: String) -> Fault {
    Fault::new(
        "adoption-part",
        message,
        "remove it from the VM, or shut the guest down and use `godwit vm import`",
    )
}

struct Reader {
    findings: Vec<Fault>,
    spec: VmSpec,
    name: Option<String>,
    machine_options: String,
    memory_id: Option<String>,
    memory_bytes: Option<u64>,
    memory: Vec<(String, u64, Option<bool>)>,
    /// Parts in their order, devices as they were read.
    parts: Vec<Part>,
    devices: Vec<Properties>,
    drives: Drives,
    netdevs: BTreeMap<String, Properties>,
    chardevs: BTreeSet<String>,
    /// Nodes of the machine's flash.
    flash_nodes: [Option<String>; 2],
    has_no_defaults: bool,
    is_secure: bool,
    nics: Vec<ForeignNic>,
    ports: u32,
    has_agent: bool,
}

impl Reader {
    fn new(machine: &str) -> Reader {
        let spec = VmSpec {
            machine: Some(machine.to_owned()),
            accel: Accel::Tcg,
            memory: Vec::new(),
            cpu_model: Some("qemu64".to_owned()),
            ..VmSpec::new("")
        };
        Reader {
            spec,
            findings: Vec::new(),
            name: None,
            machine_options: String::new(),
            memory_id: None,
            memory_bytes: None,
            memory: Vec::new(),
            parts: Vec::new(),
            devices: Vec::new(),
            drives: Drives::default(),
            netdevs: BTreeMap::new(),
            chardevs: BTreeSet::new(),
            flash_nodes: [None, None],
            has_no_defaults: false,
            is_secure: false,
            nics: Vec::new(),
            ports: 0,
            has_agent: false,
        }
    }

    fn refuse(&mut self, why: impl Into<String>) {
        self.findings.push(finding(why.into()));
    }

    fn note(&mut self, read: Result<(), String>) {
        if let Err(why) = read {
            self.refuse(why);
        }
    }

    fn read(&mut self, arguments: &[String]) {
        let mut left = arguments.iter();
        while let Some(option) = left.next() {
            // QEMU takes two dashes for one.
            let option = match option.strip_prefix("--") {
                Some(name) => format!("-{name}"),
                None => option.clone(),
            };
            if self.read_flag(&option) {
                continue;
            }
            let Some(value) = left.next() else {
                return self.refuse(format!("option {option} is not one that Godwit takes over"));
            };
            let read = self.read_option(&option, value);
            self.note(read);
        }
    }

    /// Reads an option without a value; returns whether it is one.
    fn read_flag(&mut self, option: &str) -> bool {
        match option {
            "-nodefaults" => self.has_no_defaults = true,
            "-enable-kvm" => self.spec.accel = Accel::Kvm,
            "-usb" | "-no-hpet" | "-no-acpi" => self.keep(option, None),
            "-nographic" => self.refuse("option -nographic makes devices of QEMU's choice"),
            _ => return LEFT_OUT_FLAGS.contains(&option),
        }
        true
    }

    fn keep(&mut self, name: &str, value: Option<String>) {
        self.parts.push(Part::Option { name: name.to_owned(), value });
    }

    fn read_option(&mut self, option: &str, value: &str) -> Result<(), String> {
        let parse = |implied: &str| {
            Properties::parse(value, implied).map_err(|why| format!("option {option}: {why}"))
        };
        match option {
            "-name" => self.name = parse("guest")?.get("guest"),
            "-uuid" => {
                self.spec.uuid = Some(Uuid::parse_str(value).map_err(|_| "its UUID is invalid")?);
            }
            "-machine" | "-M" => self.read_machine(&parse("type")?)?,
            "-accel" => self.read_accel(&parse("accel")?)?,
            "-cpu" => self.spec.cpu_model = Some(value.to_owned()),
            "-m" => self.read_memory_size(&parse("size")?)?,
            "-smp" => self.read_smp(value)?,
            "-kernel" => self.spec.kernel = Some(value.into()),
            "-initrd" => self.spec.initrd = Some(value.into()),
            "-append" => self.spec.cmdline = Some(value.to_owned()),
            "-object" => self.read_object(parse("qom-type")?)?,
            "-blockdev" => self.drives.add_node(parse("driver")?)?,
            "-drive" => self.drives.add_drive(parse("file")?)?,
            "-netdev" => {
                let netdev = parse("type")?;
                let id = netdev.get("id").ok_or("a network has no id")?;
                self.netdevs.insert(id, netdev);
            }
            "-chardev" => self.chardevs.extend(parse("backend")?.get("id")),
            "-device" => self.devices.push(parse("driver")?),
            "-serial" if value == "none" => {}
            "-serial" => {
                let id = format!("serial{}", self.ports);
                self.add_port(id, true)?;
            }
            "-audiodev" => {
                let id = parse("driver")?.get("id").ok_or("a sound back end has no id")?;
                self.parts.push(Part::Audio { id });
            }
            "-net" | "-nic" | "-vga" if value == "none" => {}
            "-vga" => {
                allowed::check_option(option, Some(value))?;
                self.spec.video = if value == "virtio" { Video::Virtio } else { Video::Vga };
                self.keep(option, Some(value.to_owned()));
            }
            "-global" => self.read_global(value, &parse("")?)?,
            "-boot" => {
                let mut boot = parse("order")?;
                boot.remove("splash");
                let boot = boot.argument();
                if !boot.is_empty() {
                    allowed::check_option(option, Some(&boot))?;
                    self.keep(option, Some(boot));
                }
            }
            _ if LEFT_OUT.contains(&option) => {}
            _ => {
                allowed::check_option(option, Some(value))?;
                self.keep(option, Some(value.to_owned()));
            }
        }
        Ok(())
    }

    fn read_machine(&mut self, machine: &Properties) -> Result<(), String> {
        let mut options = Vec::new();
        for (key, value) in machine.fields() {
            match key.as_str() {
                "type" => {}
                "accel" => {
                    let accel = Properties::Text(vec![("accel".to_owned(), value)]);
                    self.read_accel(&accel)?;
                }
                "memory-backend" => self.memory_id = Some(value),
                "pflash0" => self.flash_nodes[0] = Some(value),
                "pflash1" => self.flash_nodes[1] = Some(value),
                "nvdimm" if value == "off" => {}
                _ => options.push((key, value)),
            }
        }
        let options = Properties::Text(options).argument();
        allowed::check_machine(&options)?;
        match (self.machine_options.is_empty(), options.is_empty()) {
            (_, true) => {}
            (true, false) => self.machine_options = options,
            (false, false) => self.machine_options = format!("{},{options}", self.machine_options),
        }
        Ok(())
    }

    fn read_accel(&mut self, accel: &Properties) -> Result<(), String> {
        for (key, value) in accel.fields() {
            match (key.as_str(), value.as_str()) {
                ("accel", "kvm") => self.spec.accel = Accel::Kvm,
                ("accel", "tcg") => self.spec.accel = Accel::Tcg,
                ("thread" | "tb-size" | "split-wx", _) => {}
                (key, value) => return Err(format!("accelerator option {key}={value}")),
            }
        }
        Ok(())
    }

    fn read_memory_size(&mut self, memory: &Properties) -> Result<(), String> {
        if memory.get("maxmem").is_some() || memory.get("slots").is_some() {
            return Err(
                "its memory may grow (slots, maxmem): hot-plugged memory cannot be adopted".into(),
            );
        }
        let size = memory.get("size").unwrap_or_default();
        self.memory_bytes = Some(bytes_of(&size).ok_or("option -m has an invalid size")?);
        Ok(())
    }

    fn read_smp(&mut self, value: &str) -> Result<(), String> {
        allowed::check_option("-smp", Some(value))?;
        let smp = Properties::parse(value, "cpus")?;
        let number = |key: &str| smp.get(key).and_then(|value| value.parse::<u32>().ok());
        let product = || {
            let parts = ["sockets", "dies", "clusters", "cores", "threads"].iter();
            parts.filter_map(|part| number(part)).try_fold(1_u32, u32::checked_mul)
        };
        let vcpus = number("cpus").or_else(|| number("maxcpus")).or_else(product);
        self.spec.vcpus = vcpus.ok_or("option -smp has an invalid number")?;
        self.keep("-smp", Some(value.to_owned()));
        Ok(())
    }

    fn read_global(&mut self, value: &str, global: &Properties) -> Result<(), String> {
        let of_flash = (global.get("driver").as_deref() == Some("cfi.pflash01")
            && global.get("property").as_deref() == Some("secure"))
            || value.starts_with("cfi.pflash01.secure=");
        if of_flash {
            self.is_secure |= global.is_on("value") || global.is_on("cfi.pflash01.secure");
            return Ok(());
        }
        allowed::check_option("-global", Some(value))?;
        self.keep("-global", Some(value.to_owned()));
        Ok(())
    }

    fn read_object(&mut self, object: Properties) -> Result<(), String> {
        let kind = object.get("qom-type").unwrap_or_default();
        let id = object.get("id").ok_or("an object has no id")?;
        match kind.as_str() {
            "secret" | "tls-creds-x509" | "authz-simple" | "authz-list" => Ok(()),
            "memory-backend-ram" | "memory-backend-file" | "memory-backend-memfd" => {
                self.read_memory(&kind, id, &object)
            }
            // The state of a source of random numbers is not part of the guest's.
            "rng-random" | "rng-egd" | "rng-builtin" => {
                let rng = [("qom-type", "rng-builtin"), ("id", &id)];
                let rng = rng.map(|(key, value)| (key.to_owned(), value.to_owned()));
                self.parts.push(Part::Object(Properties::Text(rng.to_vec())));
                Ok(())
            }
            _ => {
                allowed::check_object(&object)?;
                self.parts.push(Part::Object(object));
                Ok(())
            }
        }
    }

    fn read_memory(&mut self, kind: &str, id: String, object: &Properties) -> Result<(), String> {
        let path = object.get("mem-path").unwrap_or_default();
        if object.is_on("hugetlb") || path.contains("hugepages") {
            return Err(format!("memory {id} is in huge pages, which Godwit's memory cannot be"));
        }
        let known = [
            "qom-type",
            "id",
            "size",
            "mem-path",
            "share",
            "prealloc",
            "merge",
            "dump",
            "discard-data",
            "x-use-canonical-path-for-ramblock-id",
            "prealloc-threads",
            "reserve",
            "hugetlb",
            "seal",
        ];
        if let Some((key, _)) = object.fields().iter().find(|(key, _)| !known.contains(&&key[..])) {
            return Err(format!("memory {id} ({kind}) has property {key}"));
        }
        let size = object.get("size").and_then(|size| bytes_of_object(&size));
        let size = size.ok_or_else(|| format!("memory {id} has no size"))?;
        let canonical = object.get("x-use-canonical-path-for-ramblock-id");
        let canonical = canonical.map(|value| matches!(value.as_str(), "on" | "true"));
        self.memory.push((id, size, canonical));
        Ok(())
    }

    fn add_port(&mut self, id: String, implied: bool) -> Result<(), String> {
        self.ports += 1;
        if self.ports > MOST_SERIAL_PORTS {
            return Err(format!("it has more than {MOST_SERIAL_PORTS} serial ports"));
        }
        self.parts.push(Part::Serial { port: self.ports, id, implied });
        Ok(())
    }

    fn read_device(&mut self, mut device: Properties) -> Result<(), String> {
        allowed::check_device(&device)?;
        let driver = device.get("driver").unwrap_or_default();
        match allowed::base_driver(&driver) {
            "virtio-blk-pci" | "scsi-hd" | "ide-hd" => return self.read_disk(&driver, device),
            "scsi-cd" | "ide-cd" => return self.read_cdrom(&driver, device),
            "virtio-net-pci" | "e1000" | "e1000e" | "e1000-82545em" | "rtl8139" => {
                self.read_nic(&driver, &mut device)?;
            }
            "isa-serial" | "pci-serial" | "virtconsole" => {
                let id = self.chardev_of(&device)?;
                self.add_port(id, false)?;
            }
            "virtserialport" => {
                let id = self.chardev_of(&device)?;
                let is_agent = device.get("name").as_deref() == Some(GUEST_AGENT_PORT);
                let part = match is_agent && !self.has_agent {
                    true => Part::GuestAgent { id },
                    false => Part::Silent { id },
                };
                self.has_agent |= is_agent;
                self.parts.push(part);
            }
            "VGA" | "cirrus-vga" | "bochs-display" => self.spec.video = Video::Vga,
            "virtio-vga" | "virtio-gpu-pci" => self.spec.video = Video::Virtio,
            "virtio-rng-pci" if device.get("rng").is_none() => {
                return Err("device virtio-rng-pci has no source".to_owned());
            }
            _ => {}
        }
        self.parts.push(Part::Device(device));
        Ok(())
    }

    fn chardev_of(&self, device: &Properties) -> Result<String, String> {
        let id = device.get("chardev").unwrap_or_default();
        self.chardevs.contains(&id).then(|| id.clone()).ok_or_else(|| {
            let driver = device.get("driver").unwrap_or_default();
            format!("device {driver} has an unknown channel \"{id}\"")
        })
    }

    fn read_disk(&mut self, driver: &str, mut device: Properties) -> Result<(), String> {
        let drive = device.get("drive").ok_or_else(|| format!("device {driver} has no image"))?;
        let mut disk = self.drives.image(&drive)?.disk();
        disk.bus = match driver {
            "scsi-hd" => DiskBus::Scsi,
            "ide-hd" => DiskBus::Sata,
            _ => DiskBus::Virtio,
        };
        device.remove("drive");
        if disk.readonly {
            // It is no guest's to see, and matters only to those who write.
            device.remove("share-rw");
        }
        allowed::check_disk(&device)?;
        self.parts.push(Part::Disk { disk: self.spec.disks.len(), device });
        self.spec.disks.push(disk);
        Ok(())
    }

    fn read_cdrom(&mut self, driver: &str, mut device: Properties) -> Result<(), String> {
        let image = match device.get("drive") {
            Some(drive) if !self.drives.is_empty(&drive) => {
                let image = self.drives.image(&drive)?;
                if image.format != DiskFormat::Raw {
                    return Err(format!("device {driver} has an image that is not raw"));
                }
                Some(image.path)
            }
            _ => None,
        };
        let bus = if driver == "scsi-cd" { DiskBus::Scsi } else { DiskBus::Sata };
        device.remove("drive");
        self.parts.push(Part::Cdrom { drive: self.spec.cdroms.len(), device });
        self.spec.cdroms.push(Cdrom { image, bus, ..Cdrom::default() });
        Ok(())
    }

    fn read_nic(&mut self, driver: &str, device: &mut Properties) -> Result<(), String> {
        let id = device.get("netdev").ok_or_else(|| format!("device {driver} has no network"))?;
        let netdev = self.netdevs.get(&id).ok_or_else(|| format!("there is no network {id}"))?;
        let kind = netdev.get("type").unwrap_or_default();
        if kind != "tap" {
            return Err(format!("network {id} is of type {kind}, and not a tap of a bridge"));
        }
        let number = |text: &str| text.split(':').next().and_then(|fd| fd.parse().ok());
        let descriptor = netdev.get("fd").or_else(|| netdev.get("fds")).as_deref().and_then(number);
        let tap = match (descriptor, netdev.get("ifname")) {
            (Some(descriptor), _) => ForeignTap::Descriptor(descriptor),
            (None, Some(name)) => ForeignTap::Name(name),
            (None, None) => return Err(format!("network {id} names no tap")),
        };
        let mac = device.get("mac").ok_or_else(|| format!("device {driver} has no mac"))?;
        let queues = match netdev.get("fds").map(|fds| fds.split(':').count()) {
            Some(count) => u32::try_from(count).ok(),
            None => netdev.get("queues").and_then(|queues| queues.parse().ok()),
        };
        let is_virtio = driver.starts_with("virtio");
        self.spec.nics.push(Nic {
            mac: Some(mac),
            model: if is_virtio { NicModel::Virtio } else { NicModel::E1000e },
            queues: queues.filter(|queues| *queues > 1),
            ..Nic::default()
        });
        self.parts.push(Part::Netdev { nic: self.nics.len(), id: id.clone() });
        self.nics.push(ForeignNic { id, tap });
        Ok(())
    }

    fn finish(mut self, name: Option<&str>) -> Result<ForeignVm, Vec<Fault>> {
        if !self.has_no_defaults {
            self.refuse(
                "its QEMU was started without -nodefaults: it has devices of QEMU's choice",
            );
        }
        for device in std::mem::take(&mut self.devices) {
            let read = self.read_device(device);
            self.note(read);
        }
        let read = self.place_memory();
        self.note(read);
        let firmware = self.firmware().unwrap_or_else(|why| {
            self.refuse(why);
            None
        });
        self.parts.insert(0, Part::Machine(std::mem::take(&mut self.machine_options)));
        self.spec.name = name.map(str::to_owned).or(self.name).unwrap_or_default();
        self.spec.serial_ports = self.ports.max(1);
        self.spec.guest_agent = self.has_agent;
        self.spec.topology = Some(Topology { parts: self.parts });
        if self.findings.is_empty() {
            return Ok(ForeignVm { spec: self.spec, nics: self.nics, firmware });
        }
        Err(self.findings)
    }

    /// Gives each memory block its place, in the order of the arguments.
    fn place_memory(&mut self) -> Result<(), String> {
        let total = self.memory_bytes.unwrap_or(DEFAULT_MEMORY_BYTES);
        if self.memory.is_empty() {
            self.memory.push((DEFAULT_MEMORY.to_owned(), total, Some(false)));
            self.memory_id = Some(DEFAULT_MEMORY.to_owned());
        }
        let sum = self.memory.iter().map(|(_, bytes, _)| *bytes).fold(0, u64::saturating_add);
        if sum != total {
            return Err(format!("its memory has {total} bytes, and the parts have {sum}"));
        }
        for (block, (id, bytes, canonical)) in
            std::mem::take(&mut self.memory).into_iter().enumerate()
        {
            let whole = self.memory_id.as_ref() == Some(&id);
            self.spec.memory.push(MemoryBlock::shared(ByteSize::from_bytes(bytes)));
            self.parts.push(Part::Memory { block, id, canonical, whole });
        }
        Ok(())
    }

    fn firmware(&mut self) -> Result<Option<ForeignFirmware>, String> {
        let paths = match &self.flash_nodes {
            [Some(code), Some(variables)] => {
                let raw = |name: &str| match self.drives.image(name)? {
                    image if image.format == DiskFormat::Raw => Ok(image.path),
                    _ => Err("its firmware is in an image of format qcow2".to_owned()),
                };
                Some((raw(code)?, raw(variables)?))
            }
            [None, None] => match (self.drives.flash.get(&0), self.drives.flash.get(&1)) {
                (Some(code), Some(variables)) => Some((flash_path(code)?, flash_path(variables)?)),
                (None, None) => None,
                _ => return Err("its firmware has no variables of its own".to_owned()),
            },
            _ => return Err("its firmware has no variables of its own".to_owned()),
        };
        let Some((code, variables)) = paths else { return Ok(None) };
        self.spec.firmware = if self.is_secure { Firmware::UefiSecure } else { Firmware::Uefi };
        Ok(Some(ForeignFirmware { code, variables }))
    }
}

/// Returns a size of `-m`: MiB without a suffix.
fn bytes_of(text: &str) -> Option<u64> {
    match text.parse::<u64>() {
        Ok(mib) => mib.checked_mul(1 << 20),
        Err(_) => bytes_of_object(text),
    }
}

/// Returns a size of an object: bytes without a suffix.
fn bytes_of_object(text: &str) -> Option<u64> {
    let text = text.strip_suffix(['B', 'b']).unwrap_or(text);
    let (digits, shift) = match text.chars().last()? {
        'k' | 'K' => (&text[..text.len() - 1], 10),
        'm' | 'M' => (&text[..text.len() - 1], 20),
        'g' | 'G' => (&text[..text.len() - 1], 30),
        't' | 'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests;
