//! Configurations of Proxmox VE (`/etc/pve/qemu-server/ID.conf`, its qm.conf(5), version 8).

mod devices;
mod disks;

use std::collections::BTreeMap;

use godwit_qemu::{Accel, Autostart, Firmware, MemoryBlock, Uuid, VmSpec, Watchdog};

use crate::definition::{ImportError, Imported, MOST_DEVICES};
use crate::finding::Findings;
use crate::names;

/// The settings of the current configuration, by their key.
struct Config<'a> {
    settings: BTreeMap<&'a str, &'a str>,
    description: String,
    has_snapshots: bool,
}

/// Reads a configuration.
pub(crate) fn read(text: &str) -> Result<Imported, ImportError> {
    let config = parse(text)?;
    let get = |key: &str| config.settings.get(key).copied();
    let mut notes = Findings::default();
    let mut spec = VmSpec::new(get("name").unwrap_or_default());
    spec.description = Some(config.description.clone()).filter(|text| !text.is_empty());
    spec.uuid = get("smbios1")
        .and_then(|text| option(text, "uuid"))
        .and_then(|text| Uuid::parse_str(text).ok());
    if config.has_snapshots {
        notes.note("snapshots", "they are not imported: the VM has the current state of its disks");
    }
    read_machine(&get, &mut spec, &mut notes)?;
    read_cpu(&get, &mut spec, &mut notes)?;
    let order = disks::boot_order(&get);
    let disks = disks::read(&config.settings, &order, &mut spec, &mut notes);
    devices::read(&config.settings, &order, &mut spec, &mut notes);
    read_rest(&get, &mut spec, &mut notes);
    for key in config.settings.keys().filter(|key| !is_known(key)) {
        notes.note(*key, "left out: it is not known");
    }
    Ok(Imported { spec, disks, findings: notes.0 })
}

fn parse(text: &str) -> Result<Config<'_>, ImportError> {
    let mut settings = BTreeMap::new();
    let mut description = String::new();
    let mut has_snapshots = false;
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with('[') {
            // Sections of snapshots and of pending changes follow the current configuration.
            has_snapshots = !line.starts_with("[PENDING]");
            break;
        }
        if let Some(comment) = line.strip_prefix('#') {
            description.push_str(&names::decoded(comment));
            description.push('\n');
            continue;
        }
        if line.is_empty() {
            continue;
        }
        let (key, value) = line.split_once(':').ok_or_else(|| {
            ImportError::Invalid(format!("its line \"{}\" has no key", crate::shown::shown(line)))
        })?;
        settings.insert(key.trim(), value.trim());
        if settings.len() > MOST_DEVICES {
            return Err(ImportError::TooManyDevices);
        }
    }
    if let Some(text) = settings.remove("description") {
        description.push_str(&names::decoded(text));
    }
    Ok(Config { settings, description: description.trim().to_owned(), has_snapshots })
}

/// Returns an option of a value such as `virtio=52:54:…,bridge=vmbr0`.
fn option<'a>(value: &'a str, name: &str) -> Option<&'a str> {
    value
        .split(',')
        .filter_map(|part| part.split_once('='))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value)
}

/// Whether an option is on: `1`, `on`, `yes`, `true`.
fn is_on(value: Option<&str>) -> bool {
    matches!(value, Some("1" | "on" | "yes" | "true"))
}

/// Splits a key such as `scsi0` into its name and its number.
fn numbered<'a>(key: &'a str, name: &str) -> Option<(&'a str, u32)> {
    let number = key.strip_prefix(name)?;
    Some((key, number.parse().ok()?))
}

fn read_machine<'a>(
    get: &impl Fn(&str) -> Option<&'a str>,
    spec: &mut VmSpec,
    notes: &mut Findings,
) -> Result<(), ImportError> {
    // `memory: 4096`, or `memory: current=4096`.
    let memory = get("memory").unwrap_or("512");
    let mib = memory.strip_prefix("current=").unwrap_or(memory);
    let bytes = names::bytes_of(mib, "MiB").ok_or_else(|| {
        ImportError::Invalid(format!("its memory \"{}\" is invalid", crate::shown::shown(memory)))
    })?;
    spec.memory = vec![MemoryBlock::shared(names::whole_mib(bytes, notes))];
    if get("balloon").is_some_and(|balloon| balloon != "0" && balloon != mib) {
        notes.note("balloon", "ballooning is not available: the guest gets all of its memory");
    }
    let machine = get("machine").unwrap_or("pc");
    let machine = option(machine, "type").unwrap_or(machine);
    let machine = machine.split([',', '+']).next().unwrap_or(machine);
    let machine = if machine == "i440fx" { "pc" } else { machine };
    names::set_machine(machine, spec, notes);
    match get("bios") {
        Some("ovmf") => {
            let keys = get("efidisk0").and_then(|disk| option(disk, "pre-enrolled-keys"));
            let secure = keys == Some("1") && spec.machine.as_deref().is_some_and(is_q35);
            spec.firmware = if secure { Firmware::UefiSecure } else { Firmware::Uefi };
            notes.note(
                "UEFI variables (efidisk0)",
                "they are not imported: the firmware finds the boot loader at its default path",
            );
        }
        Some("seabios") | None => {}
        Some(other) => notes.refuse(format!("bios {other}"), "only seabios and ovmf are known"),
    }
    if get("arch").is_some_and(|arch| arch != "x86_64") {
        notes.refuse("architecture", "only x86_64 guests can be imported");
    }
    if get("kvm") == Some("0") {
        spec.accel = Accel::Tcg;
    }
    Ok(())
}

fn is_q35(machine: &str) -> bool {
    machine == "q35" || machine.starts_with("pc-q35-")
}

fn read_cpu<'a>(
    get: &impl Fn(&str) -> Option<&'a str>,
    spec: &mut VmSpec,
    notes: &mut Findings,
) -> Result<(), ImportError> {
    let number = |key: &str| get(key).map_or(Some(1), |text| text.parse::<u32>().ok());
    let invalid = || ImportError::Invalid("its number of cores is invalid".to_owned());
    let most = number("sockets").zip(number("cores")).and_then(|(a, b)| a.checked_mul(b));
    let most = most.filter(|most| *most > 0).ok_or_else(invalid)?;
    spec.vcpus = match get("vcpus") {
        Some(text) => text.parse().map_err(|_| invalid())?,
        None => most,
    };
    if spec.vcpus < most {
        spec.max_cpus = Some(most);
    }
    if most > 1 {
        notes.note("CPU topology", "each vCPU is a socket of its own");
    }
    let default = "the default model of Godwit, which every host has; see --cpu of `vm set`";
    let Some(cpu) = get("cpu") else { return Ok(()) };
    let model = option(cpu, "cputype").or(cpu.split(',').next()).unwrap_or_default();
    let flags = option(cpu, "flags").unwrap_or_default();
    if model == "host" || model == "max" {
        notes.note(format!("CPU {model}"), format!("it differs from host to host: {default}"));
    } else if model.starts_with("x86-64-v") || model.starts_with("custom-") || model.contains('=') {
        notes.note(format!("CPU {model}"), format!("only Proxmox VE has this model: {default}"));
    } else {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let flags = flags.split(';').filter(|flag| flag.starts_with(['+', '-']));
        let flags = flags.filter(|flag| flag[1..].chars().all(good)).map(|flag| format!(",{flag}"));
        spec.cpu_model = Some(format!("{model}{}", flags.collect::<String>()));
        return Ok(());
    }
    if !flags.is_empty() {
        notes.note("CPU flags", format!("left out with the model: {flags}"));
    }
    Ok(())
}

fn read_rest<'a>(get: &impl Fn(&str) -> Option<&'a str>, spec: &mut VmSpec, notes: &mut Findings) {
    if let Some(lock) = get("lock") {
        notes.refuse(format!("lock {lock}"), "Proxmox VE works on the VM: wait until that ends");
    }
    let tags = get("tags").unwrap_or_default().split([';', ',', ' ']);
    spec.tags = tags.filter(|tag| !tag.is_empty()).map(str::to_owned).collect();
    let agent = get("agent").unwrap_or_default();
    spec.guest_agent = is_on(agent.split(',').next()) || is_on(option(agent, "enabled"));
    if is_on(get("onboot")) {
        let startup = get("startup").unwrap_or_default();
        let number = |name: &str| option(startup, name).and_then(|text| text.parse::<u32>().ok());
        let delay_ms = number("up").map_or(0, |seconds| u64::from(seconds.min(3600)) * 1000);
        spec.autostart =
            Some(Autostart { order: number("order"), delay_ms, ..Autostart::default() });
        notes.note("onboot", "the VM starts with its new host: see --autostart of `vm set`");
    }
    if let Some(watchdog) = get("watchdog") {
        spec.watchdog = Some(match option(watchdog, "action") {
            Some("poweroff" | "shutdown") => Watchdog::Poweroff,
            Some("pause") => Watchdog::Pause,
            Some("none") => Watchdog::None,
            _ => Watchdog::Reset,
        });
    }
    if get("template") == Some("1") {
        notes.note("template", "it becomes an ordinary VM: see `vm template`");
    }
    if get("numa").is_some_and(|numa| numa != "0") {
        notes.note("numa", "the guest has one node: give --memory several blocks for more");
    }
    for (key, why) in [
        ("args", "arguments of QEMU are left out"),
        ("hookscript", "scripts of a host are left out"),
        ("hugepages", "the memory is in the host's tmpfs for guests"),
        ("cpulimit", "limits of CPU time are left out"),
        ("cpuunits", "shares of CPU time are left out"),
        ("affinity", "pinning is left out"),
        ("localtime", "the guest's clock begins with UTC"),
        ("vmstatestorage", "suspended memory is not imported"),
        ("vmstate", "suspended memory is not imported"),
    ] {
        if get(key).is_some() {
            notes.note(key, why);
        }
    }
    if ["ciuser", "cipassword", "sshkeys", "cicustom", "ipconfig0"]
        .iter()
        .any(|key| get(key).is_some())
    {
        notes.note("cloud-init", "its settings are left out: see --cloud-init of `vm set`");
    }
}

/// Whether a key is read, or has no meaning for a VM elsewhere.
fn is_known(key: &str) -> bool {
    const KNOWN: &[&str] = &[
        "name",
        "memory",
        "balloon",
        "machine",
        "bios",
        "arch",
        "kvm",
        "cores",
        "sockets",
        "vcpus",
        "cpu",
        "numa",
        "lock",
        "tags",
        "agent",
        "onboot",
        "startup",
        "watchdog",
        "template",
        "args",
        "hookscript",
        "hugepages",
        "cpulimit",
        "cpuunits",
        "affinity",
        "localtime",
        "vmstate",
        "vmstatestorage",
        "ciuser",
        "cipassword",
        "sshkeys",
        "cicustom",
        "citype",
        "nameserver",
        "searchdomain",
        "boot",
        "bootdisk",
        "scsihw",
        "vga",
        "smbios1",
        "meta",
        "vmgenid",
        "ostype",
        "protection",
        "digest",
        "tablet",
        "acpi",
        "hotplug",
        "parent",
        "freeze",
        "reboot",
    ];
    const NUMBERED: &[&str] = &[
        "scsi", "virtio", "sata", "ide", "efidisk", "tpmstate", "net", "serial", "parallel",
        "hostpci", "usb", "unused", "rng", "audio", "ipconfig", "numa",
    ];
    KNOWN.contains(&key) || NUMBERED.iter().any(|name| numbered(key, name).is_some())
}
