//! Specification of a VM from options or from a file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use godwit_api::{Client, NewDisk, VmInfo, with_new_disks};
use godwit_planner::placement::{NEARLY_FULL_REMEDY, is_nearly_full};
use godwit_qemu::{Backing, ByteSize, DiskBus, MemoryBlock, Nic, SpecPatch, VmSpec};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::args::{CloudInitArgs, CreateArgs, OnOff, SpecArgs};
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::target::absolute;
use crate::units::byte_count;
use crate::vm::drives::{cdrom, disk, is_new, new_disk};
use crate::vm::settings;

/// Returns the specification that the options or the file describe, checked as far as possible
/// without a host.
pub(super) fn specification(options: &CreateArgs) -> Result<(VmSpec, Vec<NewDisk>), Failure> {
    let name = options.name.as_deref();
    let spec = match &options.file {
        Some(path) => from_file(path, name)?,
        None => {
            let mut patch = patch(&options.spec, &options.cloud_init)?;
            settings::add(&mut patch, &options.settings)?;
            patch
                .apply(&VmSpec::new(name.unwrap_or_default()))
                .map_err(|why| Failure::usage(why, "see `godwit vm create --help`"))?
        }
    };
    let new_disks = options.spec.disk.iter().map(|text| new_disk(text));
    let new_disks: Vec<NewDisk> =
        new_disks.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let checked = with_new_disks(&spec, &new_disks);
    checked.validate().map_err(|error| Failure::usage(error.to_string(), error.remedy()))?;
    Ok((spec, new_disks))
}

/// Warns of a host that a new VM leaves nearly full.
pub(super) async fn note_nearly_full(client: &Client, vm: &VmInfo, output: Output) {
    let Ok(host) = client.host().await else { return };
    // A VM that does not run has not taken its memory yet.
    let taken = if vm.state.is_off() { vm.memory_bytes } else { 0 };
    let left = host.memory_available_bytes.saturating_sub(taken);
    if is_nearly_full(left, host.memory_total_bytes) {
        output.note(&format!(
            "warning: host {} is nearly full with it: {} of {} memory left; {NEARLY_FULL_REMEDY}",
            host.name,
            byte_count(left),
            byte_count(host.memory_total_bytes)
        ));
    }
}

pub(super) fn from_file(path: &Path, name: Option<&str>) -> Result<VmSpec, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::new(
            Exit::NotFound,
            format!("cannot read {}: {error}", path.display()),
            "name an existing file with -f",
        )
    })?;
    let wrong = |why: String| {
        let remedy = "docs/cli.md shows a specification; `godwit vm show --json` prints one";
        Failure::usage(format!("cannot read {}: {why}", path.display()), remedy)
    };
    let is_json = path.extension().is_some_and(|extension| extension == "json")
        || text.trim_start().starts_with('{');
    let mut spec: VmSpec = if is_json {
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?
    } else {
        toml::from_str(&text).map_err(|error| wrong(error.to_string().trim().to_owned()))?
    };
    if let Some(name) = name {
        name.clone_into(&mut spec.name);
    }
    Ok(spec)
}

/// Returns the keys of a specification that the options set.
pub(super) fn patch(options: &SpecArgs, first_boot: &CloudInitArgs) -> Result<SpecPatch, Failure> {
    let backing = if options.private_memory { Backing::Private } else { Backing::Shared };
    let block = |size: &ByteSize| MemoryBlock { backing, ..MemoryBlock::shared(*size) };
    let mut memory: Vec<MemoryBlock> = options.memory.iter().map(block).collect();
    if memory.is_empty() && options.private_memory {
        memory.push(block(&ByteSize::from_mib(1024)));
    }
    let memory = match options.memory[..] {
        // A VM that exists keeps its backing.
        [size] if !options.private_memory => json!(size),
        _ => list(&memory),
    };
    let path = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
    let disks = options.disk.iter().filter(|text| !is_new(text));
    let disks = disks.map(|text| disk(text, DiskBus::Virtio)).collect::<Result<Vec<_>, _>>()?;
    let cdroms = options.cdrom.iter().map(|text| cdrom(text)).collect::<Result<Vec<_>, _>>()?;
    let nics = options.nic.iter().map(|text| nic(text)).collect::<Result<Vec<_>, _>>()?;
    let mut patch = SpecPatch::default();
    let values = [
        ("memory", memory),
        ("max_memory", json!(options.max_memory)),
        ("vcpus", json!(options.vcpus)),
        ("max_cpus", json!(options.max_cpus)),
        ("cpu_model", json!(options.cpu)),
        ("machine", json!(options.machine)),
        ("firmware", json!(options.firmware)),
        ("tpm", json!(options.tpm.then_some(true))),
        ("video", json!(options.video)),
        ("accel", json!(options.accel)),
        ("qemu", json!(path(&options.qemu)?)),
        ("kernel", json!(path(&options.kernel)?)),
        ("initrd", json!(path(&options.initrd)?)),
        ("cmdline", json!(options.append)),
        ("disks", list(&disks)),
        ("cdroms", list(&cdroms)),
        ("scsi_controller", json!(options.scsi_controller.then_some(true))),
        ("nics", list(&nics)),
        ("hotplug_slots", json!(options.hotplug_slots)),
        ("extra_devices", list(&options.device)),
        ("refuses_page_in", json!(options.no_page_in.then_some(true))),
        ("guest_agent", json!(options.guest_agent.then_some(true))),
        ("rng", json!(options.rng.then_some(true))),
        ("free_page_reporting", json!(options.no_free_page_reporting.then_some(false))),
        ("watchdog", json!(options.watchdog)),
        ("panic_device", json!(options.panic_device.map(|choice| choice == OnOff::On))),
        ("serial_ports", json!(options.serial_ports)),
        ("cloud_init", super::cloud_init::settings(first_boot)?),
    ];
    for (key, value) in values {
        if !value.is_null() {
            patch.set(key, value);
        }
    }
    Ok(patch)
}

/// Returns a list, or null for an empty one, which no option has set.
fn list<T: Serialize>(items: &[T]) -> Value {
    if items.is_empty() { Value::Null } else { json!(items) }
}

/// Parses `--nic`.
pub(super) fn nic(text: &str) -> Result<Nic, Failure> {
    let wrong = |why: String| {
        let remedy = "use network=NAME[,mac=MAC][,address=IP][,model=virtio|e1000e][,queues=N]\
                      [,mtu=N][,link=up|down][,boot-order=N][,vlan=N][,trunk=N+N]\
                      [,filter=mac|mac-ip][,addresses=IP+IP]";
        Failure::usage(format!("--nic {text}: {why}"), remedy)
    };
    let mut nic = Nic::default();
    for (key, value) in pairs(text) {
        let value = value.ok_or_else(|| wrong(format!("\"{key}\" is not understood")))?;
        let not = |what: &str| wrong(format!("\"{value}\" is not {what}"));
        match key {
            "network" => value.clone_into(&mut nic.network),
            "mac" => nic.mac = Some(value.to_owned()),
            "address" => nic.address = Some(value.parse().map_err(|_| not("an IP address"))?),
            "model" => nic.model = named(value).ok_or_else(|| not("virtio or e1000e"))?,
            "queues" => nic.queues = Some(value.parse().map_err(|_| not("a number of queues"))?),
            "mtu" => nic.mtu = Some(value.parse().map_err(|_| not("an MTU"))?),
            "boot-order" => {
                nic.boot_order = Some(value.parse().map_err(|_| not("a position"))?);
            }
            "vlan" => nic.vlan = Some(value.parse().map_err(|_| not("a number of a VLAN"))?),
            "trunk" => nic.trunk = all(value).ok_or_else(|| not("numbers of VLANs like 10+20"))?,
            "filter" => nic.filter = Some(named(value).ok_or_else(|| not("mac or mac-ip"))?),
            "addresses" => {
                nic.addresses = all(value).ok_or_else(|| not("IP addresses like IP+IP"))?;
            }
            "link" => nic.link = named(value).ok_or_else(|| not("up or down"))?,
            _ => return Err(wrong(format!("\"{key}\" is not understood"))),
        }
    }
    if nic.network.is_empty() {
        return Err(wrong("the network is missing".to_owned()));
    }
    Ok(nic)
}

/// Reads values between `+`.
fn all<T: FromStr + Ord>(text: &str) -> Option<BTreeSet<T>> {
    text.split('+').map(|part| part.trim().parse().ok()).collect()
}

/// Reads a name as the API does.
fn named<T: DeserializeOwned>(name: &str) -> Option<T> {
    serde_json::from_value(json!(name)).ok()
}

pub(super) fn pairs(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    text.split(',').map(|pair| match pair.split_once('=') {
        Some((key, value)) => (key.trim(), Some(value.trim())),
        None => (pair.trim(), None),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use godwit_qemu::{Accel, Firmware, NicFilter, OnCrash, Video};

    use super::*;
    use crate::args::{Cli, Command, VmCommand};

    fn create(line: &str) -> Result<VmSpec, Failure> {
        let words = ["godwit", "vm", "create"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Vm { command: VmCommand::Create(options), .. } => {
                specification(&options).map(|(spec, _)| spec)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_become_a_specification() {
        let spec = create(
            "web --memory 1GiB --memory 4096KiB --private-memory --vcpus 2 --kernel k \
             --append console=ttyS0 --disk path=/d,format=qcow2,readonly \
             --nic network=lan,mac=52:54:00:00:00:01,address=10.88.0.21 --accel tcg \
             --firmware uefi --video virtio",
        )
        .unwrap();
        assert_eq!(spec.memory.len(), 2);
        assert!(spec.memory.iter().all(|block| block.backing == Backing::Private));
        assert!(spec.kernel.unwrap().is_absolute());
        assert!(spec.disks[0].readonly);
        assert_eq!(spec.nics[0].address, Some("10.88.0.21".parse().unwrap()));
        assert_eq!((spec.accel, spec.firmware), (Accel::Tcg, Firmware::Uefi));
        assert_eq!(spec.video, Video::Virtio);
    }

    #[test]
    fn vlans_filters_and_settings_become_a_specification() {
        let spec = create(
            "web --kernel k --nic network=lan,vlan=20,trunk=10+30,filter=mac \
             --nic network=wan,filter=mac-ip,addresses=10.0.0.5+fd00::5 \
             --tag prod --autostart-order 2 --description Shop --autostart-after db \
             --on-crash 3 --panic-device off",
        )
        .unwrap();
        let [lan, wan] = &spec.nics[..] else { panic!("{spec:?}") };
        assert_eq!((lan.vlan, &lan.trunk), (Some(20), &[10, 30].into()));
        assert_eq!((lan.filter, wan.filter), (Some(NicFilter::Mac), Some(NicFilter::MacIp)));
        assert_eq!(wan.addresses.len(), 2);
        let autostart = spec.autostart.as_ref().unwrap();
        assert_eq!((autostart.order, autostart.after.len()), (Some(2), 1));
        assert_eq!((spec.on_crash, spec.panic_device), (OnCrash::Times(3), Some(false)));
        assert_eq!((spec.description.as_deref(), spec.tags.len()), (Some("Shop"), 1));
    }

    #[test]
    fn what_is_wrong_is_named_with_the_mend() {
        for (line, word) in [
            ("web --kernel /k --disk path=/d", "format is missing"),
            ("web --kernel /k --disk path=/d,format=raw,bus=ide", "bus"),
            ("web --kernel /k --disk path=/d,format=raw,bus=sata,readonly", "readonly"),
            ("web --kernel /k --disk path=/d,format=raw,cache=none", "cache"),
            ("web --kernel /k --disk /d", "not understood"),
            ("web --kernel /k --nic lan", "not understood"),
            ("web --kernel /k --nic network=lan,address=x", "not an IP address"),
            ("web --kernel /k --nic network=lan,trunk=10-20", "numbers of VLANs"),
            ("web --kernel /k --nic network=lan,vlan=4095", "1 to 4094"),
            ("web --kernel /k --nic network=lan,filter=mac-ip", "needs addresses"),
            ("web --kernel /k --nic network=lan,filter=ip", "not mac or mac-ip"),
            ("web --kernel /k --nic network=lan,addresses=10.0.0.1;x", "not IP addresses"),
            ("web --kernel /k --autostart off --autostart-order 1", "no order"),
            ("web --kernel /k --autostart-after web", "after itself"),
            ("web --kernel /k --on-crash 0", "on_crash"),
            ("web --kernel /k --tag a/b", "tags"),
            ("web", "nothing to boot"),
            ("-f /nonexistent.toml", "/nonexistent.toml"),
        ] {
            let failure = create(line).unwrap_err();
            assert!(failure.fault.message.contains(word), "{line}: {failure}");
            assert!(!failure.fault.remedy.is_empty());
        }
    }

    #[test]
    fn a_file_may_be_toml_or_json() {
        let dir = tempfile::tempdir().unwrap();
        let toml = dir.path().join("web.toml");
        std::fs::write(&toml, "name = \"web\"\nmemory = \"512MiB\"\nkernel = \"/k\"\n").unwrap();
        let json = dir.path().join("web.json");
        std::fs::write(&json, "{\"name\":\"web\",\"memory\":\"512MiB\",\"kernel\":\"/k\"}")
            .unwrap();
        let from_toml = create(&format!("-f {}", toml.display())).unwrap();
        assert_eq!(from_toml, create(&format!("-f {}", json.display())).unwrap());
        assert_eq!(create(&format!("other -f {}", toml.display())).unwrap().name, "other");
        std::fs::write(&toml, "name = \"web\"\nmemroy = \"512MiB\"\n").unwrap();
        assert!(
            create(&format!("-f {}", toml.display())).unwrap_err().fault.message.contains("memroy")
        );
    }
}
