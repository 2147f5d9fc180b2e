//! Domains of libvirt (its docs/formatdomain, libvirt 9.0).

mod devices;
mod disks;
mod write;

use std::path::PathBuf;

use godwit_qemu::{Accel, Firmware, MemoryBlock, Uuid, VmSpec};
use roxmltree::Node;

use crate::definition::{ImportError, Imported, MOST_DEVICES};
use crate::finding::Findings;
use crate::names;
use crate::xml::{self, Walk};

pub use write::{DomainDisk, write_domain};

/// Reads a domain.
pub(crate) fn read(text: &str) -> Result<Imported, ImportError> {
    let document = xml::parse(text)?;
    let root = document.root_element();
    // The status of a running domain contains its definition.
    let domain =
        if root.tag_name().name() == "domstatus" { root.child("domain") } else { Some(root) };
    let domain = domain
        .filter(|domain| domain.tag_name().name() == "domain")
        .ok_or_else(|| ImportError::Invalid("it has no <domain>".to_owned()))?;
    let mut notes = Findings::default();
    let mut spec = VmSpec::new(domain.child_text("name").unwrap_or_default());
    spec.uuid = domain.child_text("uuid").and_then(|text| Uuid::parse_str(text).ok());
    spec.description =
        domain.child_text("description").or(domain.child_text("title")).map(str::to_owned);
    match domain.attr("type") {
        Some("kvm") => {}
        Some("qemu") => spec.accel = Accel::Tcg,
        other => notes.refuse(
            format!("domain of type {}", other.unwrap_or("(none)")),
            "only guests of QEMU (type kvm or qemu) have devices that it knows",
        ),
    }
    read_memory(domain, &mut spec, &mut notes)?;
    read_cpu(domain, &mut spec, &mut notes)?;
    read_os(domain, &mut spec, &mut notes);
    read_rest(domain, &mut notes);
    let devices = domain
        .child("devices")
        .ok_or_else(|| ImportError::Invalid("it has no <devices>".to_owned()))?;
    if devices.children().filter(Node::is_element).count() > MOST_DEVICES {
        return Err(ImportError::TooManyDevices);
    }
    let disks = disks::read(devices, &boot_order(domain), &mut spec, &mut notes);
    devices::read(devices, &mut spec, &mut notes);
    Ok(Imported { spec, disks, findings: notes.0 })
}

fn read_memory(domain: Node, spec: &mut VmSpec, notes: &mut Findings) -> Result<(), ImportError> {
    let memory = |name: &str| {
        let unit = domain.child_attr(name, "unit").unwrap_or("KiB");
        names::bytes_of(domain.child_text(name)?, unit)
    };
    let bytes = memory("memory")
        .ok_or_else(|| ImportError::Invalid("it has no valid <memory>".to_owned()))?;
    spec.memory = vec![MemoryBlock::shared(names::whole_mib(bytes, notes))];
    if memory("currentMemory").is_some_and(|current| current != bytes) {
        notes
            .note("currentMemory", "ballooning is not available: the guest gets all of its memory");
    }
    if domain.at(&["memoryBacking", "hugepages"]).is_some() {
        notes.note("hugepages", "the memory is in the host's tmpfs for guests");
    }
    if domain.child("maxMemory").is_some() {
        notes.note("maxMemory", "set it with --max-memory of `vm set`, in whole modules");
    }
    Ok(())
}

fn read_cpu(domain: Node, spec: &mut VmSpec, notes: &mut Findings) -> Result<(), ImportError> {
    let vcpu = domain.child("vcpu");
    let number = |text: &str| text.trim().parse::<u32>().ok();
    let invalid = || ImportError::Invalid("its <vcpu> is invalid".to_owned());
    if let Some(vcpu) = vcpu {
        let most = vcpu.text().and_then(number).ok_or_else(invalid)?;
        spec.vcpus = match vcpu.attr("current") {
            Some(current) => number(current).ok_or_else(invalid)?,
            None => most,
        };
        if spec.vcpus < most {
            spec.max_cpus = Some(most);
        }
    }
    let Some(cpu) = domain.child("cpu") else { return Ok(()) };
    if cpu.child("topology").is_some() {
        notes.note("CPU topology", "each vCPU is a socket of its own");
    }
    if cpu.child("numa").is_some() {
        notes.note("NUMA cells", "the guest has one node: give --memory several blocks for more");
    }
    let default = "the default model of Godwit, which every host has; see --cpu of `vm set`";
    match cpu.attr("mode") {
        Some(mode @ ("host-passthrough" | "host-model" | "maximum")) => {
            notes.note(format!("CPU {mode}"), format!("it differs from host to host: {default}"));
        }
        _ => match cpu.child_text("model") {
            Some(model) if is_cpu_name(model) => {
                spec.cpu_model = Some(with_features(model, cpu, notes));
            }
            Some(model) => {
                notes.note(format!("CPU {model}"), format!("not a model of QEMU: {default}"));
            }
            None => {}
        },
    }
    Ok(())
}

fn is_cpu_name(text: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.len() <= 64
        && text.chars().all(good)
}

fn with_features(model: &str, cpu: Node, notes: &mut Findings) -> String {
    let mut text = model.to_owned();
    for feature in cpu.children_named("feature").into_iter().take(MOST_DEVICES) {
        let Some(name) = feature.attr("name").filter(|name| is_cpu_name(name)) else { continue };
        match feature.attr("policy").unwrap_or("require") {
            "require" | "force" => text.push_str(&format!(",+{name}")),
            "disable" | "forbid" => text.push_str(&format!(",-{name}")),
            policy => notes.note(
                format!("CPU feature {name}"),
                format!("policy {policy} depends on the host: left out"),
            ),
        }
    }
    text
}

fn read_os(domain: Node, spec: &mut VmSpec, notes: &mut Findings) {
    let Some(os) = domain.child("os") else {
        return notes.refuse("os", "the definition has no <os>");
    };
    match os.child_text("type") {
        Some("hvm") => {}
        other => notes.refuse(
            format!("os of type {}", other.unwrap_or("(none)")),
            "only fully virtualised guests (hvm) can be imported",
        ),
    }
    if let Some(arch) = os.child_attr("type", "arch").filter(|arch| *arch != "x86_64") {
        notes.refuse(format!("architecture {arch}"), "only x86_64 guests can be imported");
    }
    let machine = os.child_attr("type", "machine").unwrap_or("pc");
    names::set_machine(machine, spec, notes);
    let loader = os.child("loader");
    let is_flash = loader.is_some_and(|loader| loader.attr("type") == Some("pflash"));
    if is_flash || os.attr("firmware") == Some("efi") {
        let secure = loader.and_then(|loader| loader.attr("secure")) == Some("yes")
            || os.child("firmware").is_some_and(is_secure);
        spec.firmware = if secure { Firmware::UefiSecure } else { Firmware::Uefi };
        notes.note(
            "UEFI variables",
            "they are not imported: the firmware finds the boot loader at its default path",
        );
    }
    let path = |name: &str| os.child_text(name).map(PathBuf::from);
    (spec.kernel, spec.initrd) = (path("kernel"), path("initrd"));
    spec.cmdline = os.child_text("cmdline").map(str::to_owned).filter(|_| spec.kernel.is_some());
}

fn is_secure(firmware: Node) -> bool {
    firmware.children_named("feature").into_iter().any(|feature| {
        feature.attr("name") == Some("secure-boot") && feature.attr("enabled") == Some("yes")
    })
}

/// Returns the kinds of devices that the firmware tries, in order.
fn boot_order(domain: Node) -> Vec<String> {
    let boots = domain.child("os").map(|os| os.children_named("boot")).unwrap_or_default();
    boots.into_iter().filter_map(|boot| boot.attr("dev").map(str::to_owned)).collect()
}

fn read_rest(domain: Node, notes: &mut Findings) {
    if domain.child("launchSecurity").is_some() {
        notes.refuse("launchSecurity", "an encrypted guest's memory can be neither read nor moved");
    }
    if let Some(arguments) = domain.child("commandline") {
        let of = arguments.children_named("arg");
        let of: Vec<_> = of.into_iter().filter_map(|arg| arg.attr("value")).take(8).collect();
        notes.note("qemu:commandline", format!("left out: {}", of.join(" ")));
    }
    if domain.child_attr("clock", "offset").is_some_and(|offset| offset != "utc") {
        notes.note(
            "clock",
            "the guest's clock begins with UTC; a guest that expects another time sets it",
        );
    }
    if domain.at(&["features", "hyperv"]).is_some() {
        notes.note("hyperv", "enlightenments for Windows are left out: it runs, somewhat slower");
    }
    for (name, why) in [
        ("cputune", "pinning and shares are left out"),
        ("numatune", "placement of memory is left out"),
        ("blkiotune", "weights are left out"),
        ("iothreads", "give a disk its own thread with iothread of `vm set --disk`"),
        ("idmap", "it has no meaning for this guest"),
    ] {
        if domain.child(name).is_some() {
            notes.note(name, why);
        }
    }
}

pub(crate) use disks::is_serial;
