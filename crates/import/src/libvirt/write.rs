//! A domain of libvirt, from a specification.

use std::fmt::Write;
use std::path::Path;

use godwit_qemu::{
    Accel, Cdrom, Disk, DiskBus, DiskFormat, Firmware, Nic, NicLink, NicModel, Video, VmSpec,
};
use godwit_types::ImportFinding;

use crate::finding::Findings;
use crate::xml::escaped;

/// A disk of a domain: where its image is now.
#[derive(Clone, Copy, Debug)]
pub struct DomainDisk<'a> {
    pub path: &'a Path,
    pub format: DiskFormat,
}

/// Writes a domain. `disks`: the images of its disks, in their order. `bridge`: the bridge of a
/// network on this host, if it is known. Returns the text, and what the domain lacks.
#[must_use]
pub fn write_domain(
    spec: &VmSpec,
    disks: &[DomainDisk<'_>],
    bridge: &dyn Fn(&str) -> Option<String>,
) -> (String, Vec<ImportFinding>) {
    let mut notes = Findings::default();
    let mut text = String::new();
    head(&mut text, spec, &mut notes);
    text.push_str("  <devices>\n");
    let mut letters = Letters::default();
    for (disk, image) in spec.disks.iter().zip(disks) {
        disk_of(&mut text, disk, *image, &mut letters);
    }
    for drive in &spec.cdroms {
        cdrom_of(&mut text, drive, &mut letters);
    }
    if spec.scsi_controller || spec.disks.iter().any(|disk| disk.bus == DiskBus::Scsi) {
        text.push_str("    <controller type='scsi' index='0' model='virtio-scsi'/>\n");
    }
    for nic in &spec.nics {
        nic_of(&mut text, nic, bridge, &mut notes);
    }
    others(&mut text, spec, &mut notes);
    text.push_str("  </devices>\n</domain>\n");
    (text, notes.0)
}

fn head(text: &mut String, spec: &VmSpec, notes: &mut Findings) {
    let kind = if spec.accel == Accel::Tcg { "qemu" } else { "kvm" };
    let line = |text: &mut String, name: &str, value: &str| {
        let _ = writeln!(text, "  <{name}>{}</{name}>", escaped(value));
    };
    let _ = writeln!(text, "<domain type='{kind}'>");
    line(text, "name", &spec.name);
    if let Some(uuid) = spec.uuid {
        line(text, "uuid", &uuid.to_string());
    }
    if let Some(description) = &spec.description {
        line(text, "description", description);
    }
    let bytes: u64 = spec.memory.iter().map(|block| block.size.bytes()).sum();
    let _ = writeln!(text, "  <memory unit='b'>{bytes}</memory>");
    if spec.memory.len() > 1 {
        notes.note("memory blocks", "the domain has one NUMA node");
    }
    match spec.max_cpus.filter(|most| *most > spec.vcpus) {
        Some(most) => {
            let _ = writeln!(text, "  <vcpu current='{}'>{most}</vcpu>", spec.vcpus);
        }
        None => line(text, "vcpu", &spec.vcpus.to_string()),
    }
    let firmware = if spec.firmware == Firmware::Bios { "" } else { " firmware='efi'" };
    let _ = writeln!(text, "  <os{firmware}>");
    let machine = spec.machine.as_deref().unwrap_or("q35");
    let _ = writeln!(text, "    <type arch='x86_64' machine='{}'>hvm</type>", escaped(machine));
    // Without a word libvirt takes the first firmware that it finds, which may trust no other boot
    // loaders than those with Microsoft's signature.
    if spec.firmware != Firmware::Bios {
        let word = if spec.firmware == Firmware::UefiSecure { "yes" } else { "no" };
        let feature = |name: &str| format!("<feature enabled='{word}' name='{name}'/>");
        let (keys, secure) = (feature("enrolled-keys"), feature("secure-boot"));
        let _ = writeln!(text, "    <firmware>{keys}{secure}</firmware>");
    }
    for (name, path) in [("kernel", &spec.kernel), ("initrd", &spec.initrd)] {
        if let Some(path) = path {
            let _ = writeln!(text, "    <{name}>{}</{name}>", escaped(&path.to_string_lossy()));
        }
    }
    if let Some(cmdline) = &spec.cmdline {
        let _ = writeln!(text, "    <cmdline>{}</cmdline>", escaped(cmdline));
    }
    let smm = if spec.firmware == Firmware::UefiSecure { "<smm state='on'/>" } else { "" };
    let _ = writeln!(text, "  </os>\n  <features><acpi/><apic/>{smm}</features>");
    cpu(text, spec, notes);
    text.push_str("  <clock offset='utc'/>\n  <on_reboot>restart</on_reboot>\n");
}

fn cpu(text: &mut String, spec: &VmSpec, notes: &mut Findings) {
    let Some(model) = &spec.cpu_model else { return };
    let mut parts = model.split(',');
    let name = parts.next().unwrap_or_default();
    match name {
        "host" => return text.push_str("  <cpu mode='host-passthrough'/>\n"),
        "max" => return text.push_str("  <cpu mode='maximum'/>\n"),
        _ => {}
    }
    // libvirt 9.0 knows no versions of models.
    let plain = name.rsplit_once("-v").filter(|(_, version)| version.parse::<u32>().is_ok());
    let plain = plain.map_or(name, |(plain, _)| plain);
    if plain != name {
        notes.note(format!("CPU {name}"), format!("libvirt calls it {plain}"));
    }
    let _ = writeln!(text, "  <cpu mode='custom' match='exact' check='none'>");
    let _ = writeln!(text, "    <model fallback='allow'>{}</model>", escaped(plain));
    for feature in parts {
        let (policy, name) = match (feature.strip_prefix('+'), feature.strip_prefix('-')) {
            (Some(name), _) => ("require", name),
            (_, Some(name)) => ("disable", name),
            _ => {
                notes.note(format!("CPU setting {feature}"), "left out");
                continue;
            }
        };
        let _ = writeln!(text, "    <feature policy='{policy}' name='{}'/>", escaped(name));
    }
    text.push_str("  </cpu>\n");
}

/// Names of disks that are not taken.
#[derive(Debug, Default)]
struct Letters {
    virtio: usize,
    /// SCSI and SATA disks and drives.
    others: usize,
}

impl Letters {
    /// Returns the next name with this prefix.
    fn next(&mut self, bus: DiskBus) -> String {
        let (prefix, count) = match bus {
            DiskBus::Virtio | DiskBus::Nvme => ("vd", &mut self.virtio),
            DiskBus::Scsi | DiskBus::Sata => ("sd", &mut self.others),
        };
        let mut number = *count;
        *count += 1;
        let mut letters = Vec::new();
        loop {
            letters.push(b'a' + u8::try_from(number % 26).unwrap_or(0));
            number /= 26;
            if number == 0 {
                break;
            }
            number -= 1;
        }
        letters.reverse();
        format!("{prefix}{}", String::from_utf8_lossy(&letters))
    }
}

fn disk_of(text: &mut String, disk: &Disk, image: DomainDisk<'_>, letters: &mut Letters) {
    let format = image.format.name();
    let _ = writeln!(text, "    <disk type='file' device='disk'>");
    let discard = if disk.discard { "unmap" } else { "ignore" };
    let cache = disk.cache == godwit_qemu::DiskCache::Writethrough;
    let cache = if cache { "writethrough" } else { "writeback" };
    let _ = writeln!(
        text,
        "      <driver name='qemu' type='{format}' cache='{cache}' discard='{discard}'/>"
    );
    let _ = writeln!(text, "      <source file='{}'/>", escaped(&image.path.to_string_lossy()));
    // libvirt 9.0 has no NVMe disks of files.
    let bus = if disk.bus == DiskBus::Nvme { DiskBus::Virtio } else { disk.bus };
    let _ = writeln!(text, "      <target dev='{}' bus='{}'/>", letters.next(bus), bus.name());
    if let Some(limits) = disk
        .iops
        .map(|iops| ("total_iops_sec", iops))
        .into_iter()
        .chain(disk.bytes_per_second.map(|bytes| ("total_bytes_sec", bytes.bytes())))
        .map(|(name, value)| format!("<{name}>{value}</{name}>"))
        .reduce(|a, b| a + &b)
    {
        let _ = writeln!(text, "      <iotune>{limits}</iotune>");
    }
    if disk.readonly {
        text.push_str("      <readonly/>\n");
    }
    if let Some(serial) = &disk.serial {
        let _ = writeln!(text, "      <serial>{}</serial>", escaped(serial));
    }
    if let Some(order) = disk.boot_order {
        let _ = writeln!(text, "      <boot order='{order}'/>");
    }
    unit(text, bus, disk.unit);
    text.push_str("    </disk>\n");
}

/// Writes the address of a disk of a controller, so that the guest finds it where it was.
fn unit(text: &mut String, bus: DiskBus, unit: Option<u32>) {
    let Some(unit) = unit else { return };
    let (target, unit) = match bus {
        DiskBus::Scsi => (unit, 0),
        DiskBus::Sata => (0, unit),
        _ => return,
    };
    let _ = writeln!(
        text,
        "      <address type='drive' controller='0' bus='0' target='{target}' unit='{unit}'/>"
    );
}

fn cdrom_of(text: &mut String, drive: &Cdrom, letters: &mut Letters) {
    text.push_str("    <disk type='file' device='cdrom'>\n");
    text.push_str("      <driver name='qemu' type='raw'/>\n");
    if let Some(image) = &drive.image {
        let _ = writeln!(text, "      <source file='{}'/>", escaped(&image.to_string_lossy()));
    }
    let (name, bus) = (letters.next(drive.bus), drive.bus.name());
    let _ = writeln!(text, "      <target dev='{name}' bus='{bus}'/>\n      <readonly/>");
    if let Some(order) = drive.boot_order {
        let _ = writeln!(text, "      <boot order='{order}'/>");
    }
    unit(text, drive.bus, drive.unit);
    text.push_str("    </disk>\n");
}

fn nic_of(
    text: &mut String,
    nic: &Nic,
    bridge: &dyn Fn(&str) -> Option<String>,
    notes: &mut Findings,
) {
    let what = format!("NIC {}", nic.mac.as_deref().unwrap_or_default());
    match bridge(&nic.network) {
        Some(bridge) => {
            text.push_str("    <interface type='bridge'>\n");
            let _ = writeln!(text, "      <source bridge='{}'/>", escaped(&bridge));
        }
        None => {
            text.push_str("    <interface type='network'>\n");
            let _ = writeln!(text, "      <source network='{}'/>", escaped(&nic.network));
        }
    }
    if let Some(mac) = &nic.mac {
        let _ = writeln!(text, "      <mac address='{}'/>", escaped(mac));
    }
    let model = if nic.model == NicModel::Virtio { "virtio" } else { "e1000e" };
    let _ = writeln!(text, "      <model type='{model}'/>");
    if let Some(queues) = nic.queues.filter(|queues| *queues > 1) {
        let _ = writeln!(text, "      <driver name='vhost' queues='{queues}'/>");
    }
    if let Some(mtu) = nic.mtu {
        let _ = writeln!(text, "      <mtu size='{mtu}'/>");
    }
    if nic.link == NicLink::Down {
        text.push_str("      <link state='down'/>\n");
    }
    if let Some(order) = nic.boot_order {
        let _ = writeln!(text, "      <boot order='{order}'/>");
    }
    if nic.vlan.is_some() || !nic.trunk.is_empty() {
        notes.note(&what, "VLANs are left out: libvirt sets none on a Linux bridge");
    }
    if nic.filter.is_some() {
        notes.note(&what, "its filter is left out: see filterref of libvirt");
    }
    text.push_str("    </interface>\n");
}

fn others(text: &mut String, spec: &VmSpec, notes: &mut Findings) {
    for port in 0..spec.serial_ports {
        let _ = writeln!(text, "    <serial type='pty'><target port='{port}'/></serial>");
    }
    if spec.guest_agent {
        text.push_str("    <channel type='unix'>");
        text.push_str("<target type='virtio' name='org.qemu.guest_agent.0'/></channel>\n");
    }
    match spec.video {
        Video::None => text.push_str("    <video><model type='none'/></video>\n"),
        Video::Vga => text.push_str("    <video><model type='vga'/></video>\n"),
        Video::Virtio => text.push_str("    <video><model type='virtio'/></video>\n"),
    }
    if !spec.video.is_none() {
        text.push_str("    <graphics type='vnc' autoport='yes' listen='127.0.0.1'/>\n");
    }
    if spec.tpm {
        text.push_str("    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>\n");
        notes.note("TPM", "its state stays here: secrets sealed to it stay sealed");
    }
    if spec.rng {
        text.push_str("    <rng model='virtio'><backend model='random'>/dev/urandom</backend>");
        text.push_str("</rng>\n");
    }
    if let Some(action) = spec.watchdog {
        let _ = writeln!(text, "    <watchdog model='i6300esb' action='{action}'/>");
    }
    if spec.panic_device == Some(true) {
        text.push_str("    <panic model='isa'/>\n");
    }
    text.push_str("    <memballoon model='none'/>\n");
    if spec.cloud_init.is_some() {
        notes.note("cloud-init", "the disk with its settings is left out");
    }
    if spec.firmware != Firmware::Bios {
        notes.note("UEFI variables", "they stay here: the firmware finds the default boot loader");
    }
    for device in &spec.extra_devices {
        notes.note(format!("device {device}"), "left out");
    }
}
