//! QEMU's command line. Pure: a specification gives the same arguments on every host except for
//! paths and descriptor numbers. Devices have the same order, so that the stream of one QEMU loads
//! in another.
//!
//! Objects, devices and disks are given as JSON (QEMU 7.2 accepts it for all three), in which a
//! comma in a path is literal.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::RawFd;

use serde_json::{Value, json};

use super::{CONSOLE_LOG, Launch};
use crate::accel::Accelerator;
use crate::drives::{self, DriveParts, PassedLayer};
use crate::firmware;
use crate::guest_agent::GUEST_AGENT_PORT;
use crate::nics::{netdev_id, nic_device};
use crate::process::{SANDBOX, path_in_qemu};
use crate::rbd::RbdAccess;
use crate::screen;
use crate::slots;
use crate::spec::{
    Backing, Cdrom, DIMM_SLOTS, DiskFormat, MemoryBlock, ResolvedDisk, ResolvedSpec, Topology,
};
use crate::tpm;

/// Most queues of a disk of a machine whose vCPUs may become more.
const MOST_DISK_QUEUES: u32 = 16;

/// Alignment in QEMU's address space of blocks of at least this size. Without it the file's huge
/// pages cannot be mapped as such.
pub(super) const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Descriptor set of the console's log.
const CONSOLE_SET: RawFd = 1;
/// Descriptor set of a disk's file, less the number of its descriptor.
pub(super) const FIRST_FILE_SET: RawFd = 2;

/// Numbers, in QEMU, of the inherited descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inherited {
    /// Listening socket of the monitor.
    pub qmp: RawFd,
    /// Listening socket of the console.
    pub serial: RawFd,
    /// Log of the console, opened to append.
    pub console_log: RawFd,
    /// Listening socket and log of each further serial port.
    pub further_serial: Vec<(RawFd, RawFd)>,
    /// Files of the shared memory blocks, in the order of the blocks.
    pub ram: Vec<RawFd>,
    pub kernel: Option<RawFd>,
    /// Initial RAM disk of the kernel.
    pub initrd: Option<RawFd>,
    /// For each disk its image and backing files, with their formats.
    pub disks: Vec<Vec<(RawFd, DiskFormat)>>,
    /// Those of `disks` that are no files, but configurations for images in pools of Ceph.
    pub rbd: BTreeMap<RawFd, RbdAccess>,
    /// Those of `disks` that are block devices.
    pub devices: BTreeSet<RawFd>,
    /// Disk with settings for cloud-init.
    pub seed: Option<RawFd>,
    /// Listening socket of the guest agent's port.
    pub guest_agent: Option<RawFd>,
    /// Connection to the TPM.
    pub tpm: Option<RawFd>,
    /// For each CD-ROM drive the image in it.
    pub cdroms: Vec<Option<RawFd>>,
    /// Code and variables of a firmware in flash.
    pub firmware: Option<(RawFd, RawFd)>,
    /// For each NIC the queues of its tap, and as many of the kernel's vhost-net devices if those
    /// serve it.
    pub taps: Vec<(Vec<RawFd>, Vec<RawFd>)>,
}

/// Returns the ID of memory block `index`. It is also the name of the block in a migration stream:
/// never change it.
#[must_use]
pub fn memory_id(index: usize) -> String {
    format!("ram{index}")
}

/// Returns the object of memory block `index`. `path`: that of its file in QEMU, if it is shared.
pub(crate) fn memory_object(index: usize, block: &MemoryBlock, path: Option<String>) -> Value {
    let mut object = json!({
        "id": memory_id(index), "size": block.size.bytes(), "merge": false, "dump": false,
    });
    match block.backing {
        Backing::Shared => {
            object["qom-type"] = "memory-backend-file".into();
            object["mem-path"] = path.into();
            object["share"] = true.into();
            object["prealloc"] = false.into();
            if block.size.bytes() >= HUGE_PAGE_BYTES {
                object["align"] = HUGE_PAGE_BYTES.into();
            }
        }
        Backing::Private => {
            object["qom-type"] = "memory-backend-ram".into();
            object["share"] = false.into();
        }
    }
    object
}

/// Returns the module that memory block `index` is in, if it has an address.
pub(crate) fn dimm_device(spec: &ResolvedSpec, index: usize, block: &MemoryBlock) -> Value {
    let slot = spec.dimms().take_while(|(of, _)| *of < index).count();
    json!({"driver": "pc-dimm", "id": format!("dimm{slot}"), "memdev": memory_id(index),
        "slot": slot, "addr": block.address})
}

/// Returns an option with one descriptor, or its plural with several.
fn listed(option: &str, numbers: &[RawFd]) -> String {
    let text = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(":");
    let plural = if numbers.len() > 1 { "s" } else { "" };
    format!("{option}{plural}={text}")
}

/// A list of arguments.
#[derive(Default)]
pub(super) struct Arguments(Vec<OsString>);

impl Arguments {
    pub(super) fn add(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }

    pub(super) fn add_flag(&mut self, option: &str) {
        self.0.push(option.into());
    }

    pub(super) fn add_json(&mut self, option: &str, value: &Value) {
        self.add(option, value.to_string());
    }
}

impl Launch {
    /// Returns the arguments without the binary itself.
    #[must_use]
    pub fn command_line(&self, fds: &Inherited) -> Vec<OsString> {
        let spec = &self.spec;
        let mut arguments = Arguments::default();
        for flag in ["-nodefaults", "-no-user-config"] {
            arguments.0.push(flag.into());
        }
        arguments.add("-display", "none");
        arguments.add("-name", format!("guest={},debug-threads=on", spec.name));
        if !spec.uuid.is_nil() {
            arguments.add("-uuid", spec.uuid.to_string());
        }
        if self.sandbox {
            arguments.add("-sandbox", SANDBOX);
        }
        if let Some(topology) = &spec.topology {
            self.add_topology(&mut arguments, topology, fds);
            self.add_start(&mut arguments);
            return arguments.0;
        }
        add_machine(&mut arguments, spec);
        add_disk_queues(&mut arguments, spec);
        for (option, value) in fds
            .firmware
            .iter()
            .flat_map(|numbers| firmware::arguments(spec, *numbers, FIRST_FILE_SET))
        {
            arguments.add(option, value);
        }
        self.add_memory(&mut arguments, fds);
        self.add_consoles(&mut arguments, fds);
        for port in slots::ports(spec) {
            arguments.add_json("-device", &port);
        }
        add_boot(&mut arguments, spec, fds);
        for thread in drives::iothreads(spec) {
            arguments.add_json("-object", &thread);
        }
        // Devices of their own first, as in earlier releases: an added controller moves no disk and
        // no NIC to another address.
        self.add_disks(&mut arguments, fds, false);
        if let Some(number) = fds.seed {
            add_seed(&mut arguments, number);
        }
        self.add_nics(&mut arguments, fds);
        add_helpers(&mut arguments, spec, fds);
        for (option, value) in fds.tpm.iter().flat_map(|number| tpm::arguments(*number)) {
            arguments.add(option, value);
        }
        for (option, value) in screen::arguments(spec.video) {
            arguments.add(option, value);
        }
        for controller in drives::controllers(spec) {
            arguments.add_json("-device", &controller);
        }
        self.add_disks(&mut arguments, fds, true);
        let boot_indexes = drives::boot_indexes(spec).cdroms;
        let mut media = fds.cdroms.iter();
        for (drive, boot_index) in spec.cdroms.iter().zip(boot_indexes) {
            add_cdrom(&mut arguments, (drive, media.next().copied().flatten()), boot_index);
        }
        for device in &spec.extra_devices {
            arguments.add("-device", device);
        }
        self.add_start(&mut arguments);
        arguments.0
    }

    fn add_start(&self, arguments: &mut Arguments) {
        if self.incoming {
            arguments.add("-incoming", "defer");
        }
        if self.paused {
            arguments.0.push("-S".into());
        }
    }

    fn add_memory(&self, arguments: &mut Arguments, fds: &Inherited) {
        let spec = &self.spec;
        let base_bytes = spec.base_memory_bytes();
        let most = spec.max_memory.filter(|most| most.bytes() > base_bytes);
        let most = most
            .map_or(String::new(), |most| format!(",slots={DIMM_SLOTS},maxmem={}B", most.bytes()));
        arguments.add("-m", format!("{base_bytes}B{most}"));
        let mut files = fds.ram.iter();
        for (index, block) in spec.memory.iter().enumerate() {
            let path = match block.backing {
                Backing::Shared => files.next().map(|number| path_in_qemu(*number)),
                Backing::Private => None,
            };
            arguments.add_json("-object", &memory_object(index, block, path));
        }
        for (index, block) in spec.dimms() {
            arguments.add_json("-device", &dimm_device(spec, index, block));
        }
        let nodes = spec.memory.len() - spec.dimms().count();
        if nodes < 2 {
            return;
        }
        for (index, cpus) in cpus_of_nodes(spec.most_vcpus(), nodes).into_iter().enumerate() {
            let cpus = cpus.map_or(String::new(), |(first, last)| format!(",cpus={first}-{last}"));
            arguments
                .add("-numa", format!("node,nodeid={index}{cpus},memdev={}", memory_id(index)));
        }
    }

    pub(super) fn add_consoles(&self, arguments: &mut Arguments, fds: &Inherited) {
        // The name of the set is the whole path, which QEMU ignores. By it an agent recognizes the
        // process of a VM.
        let log = self.run_dir.join(CONSOLE_LOG).to_string_lossy().replace(',', ",,");
        arguments.add("-add-fd", format!("fd={},set={CONSOLE_SET},opaque={log}", fds.console_log));
        arguments.add("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", fds.qmp));
        arguments.add("-mon", "chardev=qmp,mode=control");
        let log = format!("logfile=/dev/fdset/{CONSOLE_SET},logappend=on");
        let adopted = self.spec.topology.as_ref().map(Topology::serial_ports);
        let place = |index: usize| match adopted.as_ref().and_then(|ports| ports.get(index)) {
            Some((id, implied)) => ((*id).to_owned(), *implied),
            None => (format!("serial{index}"), adopted.is_none()),
        };
        let (id, implied) = place(0);
        arguments
            .add("-chardev", format!("socket,id={id},fd={},server=on,wait=off,{log}", fds.serial));
        if implied {
            arguments.add("-serial", format!("chardev:{id}"));
        }
        for (index, (socket, log)) in fds.further_serial.iter().enumerate() {
            let ((id, implied), set) = (place(index + 1), log + FIRST_FILE_SET);
            arguments.add("-add-fd", format!("fd={log},set={set}"));
            let log = format!("logfile=/dev/fdset/{set},logappend=on");
            let socket = format!("socket,id={id},fd={socket},server=on,wait=off,{log}");
            arguments.add("-chardev", socket);
            if implied {
                arguments.add("-serial", format!("chardev:{id}"));
            }
        }
    }

    /// Adds the disks of controllers, or the others.
    fn add_disks(&self, arguments: &mut Arguments, fds: &Inherited, of_controllers: bool) {
        let boot_indexes = drives::boot_indexes(&self.spec).disks;
        let disks = self.spec.disks.iter().zip(&fds.disks).zip(boot_indexes).enumerate();
        for (index, ((disk, layers), boot_index)) in disks {
            if disk.bus.units().is_some() == of_controllers {
                let name = drives::disk_name(&self.spec.disks, index);
                let top = add_image(arguments, &name, (disk, layers), fds);
                let named = (name.as_str(), top.as_str());
                let device = drives::disk_device(&self.spec.machine, named, disk, boot_index);
                arguments.add_json("-device", &device);
            }
        }
    }

    fn add_nics(&self, arguments: &mut Arguments, fds: &Inherited) {
        let nics = &self.spec.nics;
        let boot_indexes = drives::boot_indexes(&self.spec).nics;
        for (index, ((queues, vhosts), boot_index)) in fds.taps.iter().zip(boot_indexes).enumerate()
        {
            add_netdev(arguments, &netdev_id(nics, index), (queues, vhosts));
            let mut device = nic_device(&self.spec.machine, nics, index);
            if let Some(index) = boot_index {
                device["bootindex"] = index.into();
            }
            arguments.add_json("-device", &device);
        }
    }
}

fn add_machine(arguments: &mut Arguments, spec: &ResolvedSpec) {
    // A PC without the devices that no guest of Godwit needs: each omitted device saves device
    // state in a switchover. suppress-vmdesc: the stream carries no description of itself, which is
    // half of its bytes after the stop.
    let mut machine =
        format!("{},suppress-vmdesc=on,dump-guest-core=off,mem-merge=off", spec.machine);
    if spec.machine.starts_with("pc-") {
        machine.push_str(",usb=off,vmport=off,hpet=off,smbus=off");
        // With a screen, the firmware and its boot menus appear there too.
        machine.push_str(if spec.video.is_none() { ",graphics=off" } else { "" });
        if spec.machine.starts_with("pc-q35") {
            machine.push_str(",sata=off");
        }
    }
    if spec.memory.len() - spec.dimms().count() == 1 {
        machine.push_str(&format!(",memory-backend={}", memory_id(0)));
    }
    machine.push_str(&firmware::machine_options(spec.firmware));
    arguments.add("-machine", machine);
    add_cpu(arguments, spec);
    // QEMU derives the topology from the maximum, by rules of the versioned machine type.
    let most = spec.max_cpus.map_or(String::new(), |most| format!(",maxcpus={most}"));
    arguments.add("-smp", format!("{}{most}", spec.vcpus));
}

pub(super) fn add_cpu(arguments: &mut Arguments, spec: &ResolvedSpec) {
    let accel = match spec.accel {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg => "tcg,thread=multi",
    };
    arguments.add("-accel", accel);
    // A missing feature must be reported now, not by a guest that fails after a migration. A model
    // with its own `enforce` is left alone.
    let enforce = if spec.cpu_model.contains("enforce") { "" } else { ",enforce=on" };
    arguments.add("-cpu", format!("{}{enforce}", spec.cpu_model));
}

pub(super) fn add_boot(arguments: &mut Arguments, spec: &ResolvedSpec, fds: &Inherited) {
    for (option, number) in [("-kernel", fds.kernel), ("-initrd", fds.initrd)] {
        if let Some(number) = number {
            arguments.add(option, path_in_qemu(number));
        }
    }
    if let Some(cmdline) = &spec.cmdline {
        arguments.add("-append", cmdline);
    }
}

/// Adds the nodes of a disk, its image and backing files; returns the one that its device uses. One
/// set per file, numbered by the descriptor, so that no two files share one.
pub(super) fn add_image(
    arguments: &mut Arguments,
    name: &str,
    (disk, layers): (&ResolvedDisk, &[(RawFd, DiskFormat)]),
    fds: &Inherited,
) -> String {
    let image = drives::image_name(name, disk);
    let mut passed = Vec::new();
    for (number, format) in layers.iter().rev() {
        let layer = match fds.rbd.get(number) {
            // QEMU opens the inherited descriptor by its number.
            Some(access) => PassedLayer {
                rbd: Some(access.clone()),
                ..PassedLayer::file((*number).into(), *format)
            },
            None => {
                add_file(arguments, *number, drives::has_unit(disk).then_some(image.as_str()));
                let file = PassedLayer::file(i64::from(number + FIRST_FILE_SET), *format);
                PassedLayer { is_device: fds.devices.contains(number), ..file }
            }
        };
        passed.push(layer);
    }
    passed.reverse();
    let parts = drives::disk_parts(name, disk, &passed);
    add_parts(arguments, &parts);
    parts.top
}

/// Adds a tap by its descriptors and those of the kernel's vhost-net.
pub(super) fn add_netdev(
    arguments: &mut Arguments,
    id: &str,
    (queues, vhosts): (&[RawFd], &[RawFd]),
) {
    // Writes of the kernel for vhost-net go through QEMU's page tables, and are tracked
    // (`ram::tracking`).
    let served = match vhosts {
        [] => "vhost=off".to_owned(),
        vhosts => format!("vhost=on,{}", listed("vhostfd", vhosts)),
    };
    arguments.add("-netdev", format!("tap,id={id},{},{served}", listed("fd", queues)));
}

/// Adds a CD-ROM drive with what is inserted.
fn add_cdrom(
    arguments: &mut Arguments,
    (drive, medium): (&Cdrom, Option<RawFd>),
    boot_index: Option<usize>,
) {
    let name = medium.map(|number| add_medium(arguments, drive, number));
    arguments.add_json("-device", &drives::cdrom_device(drive, name.as_deref(), boot_index));
}

/// Adds the node of a medium; returns its name.
pub(super) fn add_medium(arguments: &mut Arguments, drive: &Cdrom, number: RawFd) -> String {
    let name = drives::medium_name(drive);
    add_file(arguments, number, Some(&name));
    add_parts(arguments, &drives::medium_parts(&name, i64::from(number + FIRST_FILE_SET)));
    name
}

/// Adds the descriptor set of a file. `owner`: the disk or medium, if it can be removed while QEMU
/// runs.
fn add_file(arguments: &mut Arguments, number: RawFd, owner: Option<&str>) {
    let opaque = owner.map_or(String::new(), |owner| format!(",opaque={owner}"));
    arguments.add("-add-fd", format!("fd={number},set={}{opaque}", number + FIRST_FILE_SET));
}

fn add_parts(arguments: &mut Arguments, parts: &DriveParts) {
    if let Some(limits) = &parts.limits {
        arguments.add_json("-object", limits);
    }
    for node in &parts.nodes {
        arguments.add_json("-blockdev", node);
    }
}

/// Fixes the number of queues of virtio's disks for a machine whose vCPUs may become more. By
/// default it follows the vCPUs that QEMU starts with, and those may be more at the destination of
/// a move, which then refuses the state of the disk.
fn add_disk_queues(arguments: &mut Arguments, spec: &ResolvedSpec) {
    let Some(most) = spec.max_cpus else { return };
    let queues = most.clamp(1, MOST_DISK_QUEUES);
    arguments.add("-global", format!("virtio-blk-device.num-queues={queues}"));
    arguments.add("-global", format!("virtio-scsi-device.num_queues={queues}"));
}

/// Adds the disk with settings for cloud-init, which is never booted from.
fn add_seed(arguments: &mut Arguments, number: RawFd) {
    let set = number + FIRST_FILE_SET;
    arguments.add("-add-fd", format!("fd={number},set={set}"));
    arguments.add_json(
        "-blockdev",
        &json!({"driver": "raw", "node-name": "seed", "read-only": true, "file": {
            "driver": "file", "filename": format!("/dev/fdset/{set}"), "locking": "off",
            "read-only": true,
        }}),
    );
    let device = json!({"driver": "virtio-blk-pci", "id": "virtio-seed", "drive": "seed"});
    arguments.add_json("-device", &device);
}

/// Adds the small devices that a specification asks for. They follow all others of its parts, so
/// that a VM without them has the addresses that it always had.
fn add_helpers(arguments: &mut Arguments, spec: &ResolvedSpec, fds: &Inherited) {
    if let Some(number) = fds.guest_agent {
        arguments.add("-chardev", format!("socket,id=guest-agent,fd={number},server=on,wait=off"));
        let bus = json!({"driver": "virtio-serial-pci", "id": "guest-agent-bus", "max_ports": 2});
        arguments.add_json("-device", &bus);
        let port = json!({
            "driver": "virtserialport", "id": "guest-agent-port", "bus": "guest-agent-bus.0",
            "nr": 1, "chardev": "guest-agent", "name": GUEST_AGENT_PORT,
        });
        arguments.add_json("-device", &port);
    }
    if spec.rng {
        // The kernel's generator, by a system call: QEMU opens no file for it.
        arguments.add_json("-object", &json!({"qom-type": "rng-builtin", "id": "rng0"}));
        let device = json!({"driver": "virtio-rng-pci", "id": "virtio-rng0", "rng": "rng0"});
        arguments.add_json("-device", &device);
    }
    if let Some(action) = spec.watchdog {
        arguments.add_json("-device", &json!({"driver": "i6300esb", "id": "watchdog0"}));
        arguments.add("-action", format!("watchdog={action}"));
    }
    if spec.panic_device {
        // On the ISA bus: no PCI device gets another address, and it has no state that moves. The
        // process ends after a panic, and the agent decides what follows.
        arguments.add_json("-device", &json!({"driver": "pvpanic"}));
        arguments.add("-action", "panic=shutdown");
    }
    if spec.free_page_reporting {
        // What the guest reports is a hole in its memory's file; `ram::tracking` has what that
        // means for a migration.
        let device = json!({
            "driver": "virtio-balloon-pci", "id": "balloon0", "free-page-reporting": true,
        });
        arguments.add_json("-device", &device);
    }
}

/// Distributes vCPUs over NUMA nodes in contiguous runs, as evenly as possible; `None` for a node
/// without vCPUs.
fn cpus_of_nodes(vcpus: u32, nodes: usize) -> Vec<Option<(u32, u32)>> {
    let nodes_u64 = nodes as u64;
    let first = |node: u64| u64::from(vcpus) * node / nodes_u64;
    (0..nodes_u64)
        .map(|node| {
            let (first, end) = (first(node), first(node + 1));
            let last = u32::try_from(end.checked_sub(1)?).ok()?;
            let first = u32::try_from(first).ok()?;
            (first <= last).then_some((first, last))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vcpu_has_one_node() {
        for (vcpus, nodes) in [(1, 2), (2, 2), (7, 3), (3, 8), (64, 5)] {
            let shares = cpus_of_nodes(vcpus, nodes);
            assert_eq!(shares.len(), nodes);
            let all: Vec<u32> =
                shares.into_iter().flatten().flat_map(|(first, last)| first..=last).collect();
            assert_eq!(all, (0..vcpus).collect::<Vec<_>>(), "{vcpus} vCPUs, {nodes} nodes");
        }
    }
}
