use super::*;
use crate::ByteSize;
use crate::inspect::MachineType;

fn bootable() -> VmSpec {
    VmSpec { kernel: Some("/boot/vmlinuz".into()), ..VmSpec::new("web-1") }
}

fn qemu() -> QemuInfo {
    let machine = |name: &str, alias: Option<&str>, is_default| MachineType {
        name: name.to_owned(),
        alias: alias.map(str::to_owned),
        is_default,
    };
    QemuInfo {
        path: "/usr/bin/qemu-system-x86_64".into(),
        version: (7, 2, 22),
        machines: vec![
            machine("pc-i440fx-7.2", Some("pc"), true),
            machine("pc-q35-7.2", Some("q35"), false),
        ],
        cpu_models: vec!["Westmere-v1".to_owned(), "Nehalem".to_owned()],
    }
}

fn no_kvm() -> AccelProbe {
    AccelProbe { kvm: false, reason: "/dev/kvm does not exist".to_owned() }
}

#[test]
fn a_short_specification_is_enough() {
    let spec: VmSpec = serde_json::from_str(
        r#"{"name":"web-1","memory":"2GiB","vcpus":2,"kernel":"/boot/vmlinuz"}"#,
    )
    .unwrap();
    assert_eq!(spec.memory, [MemoryBlock::shared(ByteSize::from_mib(2048))]);
    assert_eq!(spec.accel, Accel::Auto);
    spec.validate().unwrap();
}

#[test]
fn blocks_may_be_listed() {
    let text = r#"{"name":"a","kernel":"/k",
        "memory":[{"size":"512M"},{"size":4096,"backing":"private"}]}"#;
    let spec: VmSpec = serde_json::from_str(text).unwrap();
    assert_eq!(spec.memory.len(), 2);
    assert_eq!(spec.memory[1].backing, Backing::Private);
    let again: VmSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    assert_eq!(again, spec);
}

#[test]
fn unknown_keys_are_refused() {
    for text in [
        r#"{"name":"a","memry":"1G"}"#,
        r#"{"name":"a","disks":[{"path":"/d","format":"raw","cache":"none"}]}"#,
        r#"{"name":"a","memory":[{"size":"1G","shared":true}]}"#,
    ] {
        assert!(serde_json::from_str::<VmSpec>(text).is_err(), "{text}");
    }
}

#[test]
fn each_error_has_its_code() {
    type Spoil = fn(&mut VmSpec);
    let cases: [(&str, Spoil); 20] = [
        ("vm-name", |s| s.name = "../etc".to_owned()),
        ("vm-name", |s| s.name = "x".repeat(49)),
        ("vm-memory", |s| s.memory.clear()),
        ("vm-memory", |s| {
            s.memory = vec![MemoryBlock::shared(ByteSize::from_bytes(1 << 30 | 512))];
        }),
        ("vm-memory", |s| {
            s.memory = vec![MemoryBlock::shared(ByteSize::from_bytes((1 << 30) + 4096))];
        }),
        ("vm-memory", |s| {
            s.memory = vec![MemoryBlock::shared(ByteSize::from_bytes(u64::MAX - 4095)); 2];
        }),
        ("vm-vcpus", |s| s.vcpus = 0),
        ("vm-path", |s| s.kernel = Some("vmlinuz".into())),
        ("vm-nothing-to-boot", |s| s.kernel = None),
        ("vm-no-kernel", |s| {
            (s.kernel, s.initrd) = (None, Some("/initrd".into()));
        }),
        ("vm-no-kernel", |s| {
            (s.kernel, s.cmdline) = (None, Some("quiet".into()));
        }),
        ("vm-cmdline", |s| s.cmdline = Some("quiet\nroot".into())),
        ("vm-cmdline", |s| s.cmdline = Some("x".repeat(2048))),
        ("vm-mac", |s| {
            s.nics = vec![Nic { network: "lan".into(), mac: Some("1:2".into()), ..Nic::default() }];
        }),
        ("vm-mac", |s| {
            let mac = Some("52:54:00:00:00:01".to_owned());
            s.nics = vec![Nic { network: "lan".into(), mac, ..Nic::default() }; 2];
        }),
        ("vm-nic", |s| {
            s.nics = vec![Nic { network: "lan".into(), queues: Some(17), ..Nic::default() }];
        }),
        ("vm-nic", |s| {
            s.nics = vec![Nic { network: "lan".into(), mtu: Some(60), ..Nic::default() }];
        }),
        ("vm-nic", |s| {
            let model = NicModel::E1000e;
            s.nics = vec![Nic { network: "lan".into(), model, mtu: Some(9000), ..Nic::default() }];
        }),
        ("vm-value", |s| s.machine = Some("q35 -daemonize".into())),
        ("vm-value", |s| s.extra_devices = vec![String::new()]),
    ];
    for (code, spoil) in cases {
        let mut spec = bootable();
        spoil(&mut spec);
        let error = spec.validate().unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(!error.remedy().is_empty());
    }
}

#[test]
fn a_resolved_specification_is_complete() {
    let mut spec = bootable();
    spec.nics = vec![Nic { network: "lan".into(), ..Nic::default() }; 2];
    let resolved = spec.resolve(&qemu(), &no_kvm()).unwrap();
    assert_eq!(resolved.machine, "pc-q35-7.2");
    assert_eq!(resolved.accel, Accelerator::Tcg);
    assert_eq!(resolved.cpu_model, DEFAULT_CPU_MODEL);
    assert_ne!(resolved.nics[0].mac, resolved.nics[1].mac);
    let text = serde_json::to_string(&resolved).unwrap();
    assert_eq!(serde_json::from_str::<ResolvedSpec>(&text).unwrap(), resolved);
    resolved.validate().unwrap();
    assert_eq!(resolved.to_vm_spec().resolve(&qemu(), &no_kvm()).unwrap(), resolved);
}

#[test]
fn kvm_is_used_if_it_works_or_is_requested() {
    let yes = AccelProbe { kvm: true, reason: String::new() };
    let resolve = |accel, probe: &AccelProbe| {
        VmSpec { accel, ..bootable() }.resolve(&qemu(), probe).unwrap().accel
    };
    assert_eq!(resolve(Accel::Auto, &yes), Accelerator::Kvm);
    assert_eq!(resolve(Accel::Tcg, &yes), Accelerator::Tcg);
    assert_eq!(resolve(Accel::Kvm, &no_kvm()), Accelerator::Kvm);
}

#[test]
fn machine_types_and_models_that_qemu_lacks_are_named() {
    let machine = VmSpec { machine: Some("pc-q35-10.0".into()), ..bootable() };
    assert_eq!(machine.resolve(&qemu(), &no_kvm()).unwrap_err().code(), "qemu-machine-unknown");
    let model = VmSpec { cpu_model: Some("Zen9,+avx2".into()), ..bootable() };
    assert_eq!(model.resolve(&qemu(), &no_kvm()).unwrap_err().code(), "qemu-cpu-model-unknown");
    let features = VmSpec { cpu_model: Some("Nehalem,+avx2".into()), ..bootable() };
    assert_eq!(features.resolve(&qemu(), &no_kvm()).unwrap().cpu_model, "Nehalem,+avx2");
}

#[test]
fn a_recorded_backing_chain_is_short_and_has_absolute_paths() {
    let disk = |backing: Vec<&str>| {
        let backing: Vec<_> =
            backing.iter().map(|path| serde_json::json!({"path": path, "format": "raw"})).collect();
        let spec: ResolvedSpec = serde_json::from_value(serde_json::json!({
            "name": "web", "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg",
            "disks": [{"path": "/srv/top.qcow2", "format": "qcow2", "backing": backing}],
        }))
        .unwrap();
        spec.validate()
    };
    disk(vec!["/srv/base.img"; MOST_BACKING_FILES]).unwrap();
    for (chain, text) in [
        (vec!["/srv/base.img"; MOST_BACKING_FILES + 1], "beyond the longest backing chain"),
        (vec!["base.img"], "not an absolute path"),
        (vec!["/srv/\u{1b}[2J"], "control character"),
    ] {
        let error = disk(chain).unwrap_err().to_string();
        assert!(error.contains("backing file") && error.contains(text), "{error}");
    }
}

/// Disks and drives on a bus, without units.
fn on_bus(bus: DiskBus, disks: usize, cdroms: usize) -> VmSpec {
    VmSpec {
        disks: (0..disks)
            .map(|index| Disk { bus, ..Disk::new(format!("/d{index}"), DiskFormat::Raw) })
            .collect(),
        cdroms: vec![Cdrom { bus, ..Cdrom::default() }; cdroms],
        ..bootable()
    }
}

#[test]
fn each_disk_of_a_controller_gets_a_unit_and_keeps_it() {
    let mut spec = on_bus(DiskBus::Scsi, 3, 1);
    spec.disks[1].unit = Some(0);
    let resolved = spec.resolve(&qemu(), &no_kvm()).unwrap();
    let units: Vec<_> = resolved.disks.iter().map(|disk| disk.unit).collect();
    assert_eq!(units, [Some(1), Some(0), Some(2)]);
    assert_eq!(resolved.cdroms[0].unit, Some(3));
    assert!(resolved.scsi_controller);
    resolved.validate().unwrap();
    // A disk is detached, and another one is attached.
    let mut wanted = resolved.to_vm_spec();
    wanted.disks.remove(0);
    wanted.disks.push(Disk { bus: DiskBus::Scsi, ..Disk::new("/new", DiskFormat::Qcow2) });
    let changed = resolved.with_drives(&wanted).unwrap();
    let units: Vec<_> = changed.disks.iter().map(|disk| disk.unit).collect();
    assert_eq!(units, [Some(0), Some(2), Some(1)]);
    let mut lost = changed;
    lost.disks[0].unit = None;
    assert_eq!(lost.validate().unwrap_err().code(), "vm-disk");
}

#[test]
fn a_controller_has_a_number_of_units() {
    on_bus(DiskBus::Scsi, 31, 1).validate().unwrap();
    on_bus(DiskBus::Sata, 4, 2).validate().unwrap();
    for (spec, text) in
        [(on_bus(DiskBus::Scsi, 33, 0), "33"), (on_bus(DiskBus::Sata, 5, 2), "controller has 6")]
    {
        let error = spec.validate().unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.code(), "vm-disk");
    }
}

#[test]
fn wrong_options_of_a_disk_are_refused() {
    type Spoil = fn(&mut Disk);
    let cases: [(&str, Spoil); 8] = [
        ("serial", |disk| disk.serial = Some("a,b".to_owned())),
        ("serial", |disk| disk.serial = Some("x".repeat(21))),
        ("readonly", |disk| (disk.bus, disk.readonly) = (DiskBus::Sata, true)),
        ("positive", |disk| disk.iops = Some(0)),
        ("positive", |disk| disk.bytes_per_second = Some(ByteSize::from_bytes(u64::MAX))),
        ("no unit", |disk| disk.unit = Some(0)),
        ("beyond", |disk| (disk.bus, disk.unit) = (DiskBus::Scsi, Some(32))),
        ("begins with 1", |disk| disk.boot_order = Some(0)),
    ];
    for (text, spoil) in cases {
        let mut spec = on_bus(DiskBus::Virtio, 1, 0);
        spoil(&mut spec.disks[0]);
        let error = spec.validate().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let mut twice = on_bus(DiskBus::Virtio, 2, 0);
    twice.disks.iter_mut().for_each(|disk| disk.boot_order = Some(1));
    assert!(twice.validate().unwrap_err().to_string().contains("taken"));
    assert!(on_bus(DiskBus::Virtio, 0, 1).validate().unwrap_err().to_string().contains("virtio"));
}

#[test]
fn a_definition_without_options_stays_as_it_was() {
    let spec = on_bus(DiskBus::Virtio, 1, 0).resolve(&qemu(), &no_kvm()).unwrap();
    let text = serde_json::to_value(&spec).unwrap();
    let disk = serde_json::json!({"path": "/d0", "format": "raw", "readonly": false});
    assert_eq!(text["disks"], serde_json::json!([disk]));
    for key in ["cdroms", "scsi_controller"] {
        assert!(text.get(key).is_none(), "{key}");
    }
}

#[test]
fn a_tpm_needs_a_machine_that_tells_the_guest_of_it() {
    let with = |machine: &str| {
        let mut qemu = qemu();
        let name = machine.to_owned();
        qemu.machines.push(MachineType { name, alias: None, is_default: false });
        let spec = VmSpec { tpm: true, machine: Some(machine.to_owned()), ..bootable() };
        spec.resolve(&qemu, &no_kvm())
    };
    for machine in ["pc-q35-7.2", "pc-i440fx-7.2"] {
        let spec = with(machine).unwrap();
        assert!(spec.tpm && spec.to_vm_spec().tpm);
    }
    let error = with("microvm").unwrap_err();
    assert_eq!(error.code(), "vm-tpm");
    assert!(!error.remedy().is_empty());
    // A record of an earlier release does not name it, and gets none.
    let text = serde_json::to_string(&bootable().resolve(&qemu(), &no_kvm()).unwrap()).unwrap();
    assert!(!text.contains("tpm"), "{text}");
}

#[test]
fn places_in_the_boot_order_are_given_once_among_all_devices() {
    let nic = |boot_order| Nic { network: "lan".into(), boot_order, ..Nic::default() };
    let mut spec = VmSpec { nics: vec![nic(Some(1))], ..VmSpec::new("web") };
    spec.validate().unwrap();
    spec.disks = vec![Disk { boot_order: Some(1), ..Disk::new("/d", DiskFormat::Raw) }];
    assert_eq!(spec.validate().unwrap_err().code(), "vm-disk");
    spec.nics = vec![nic(Some(0))];
    assert_eq!(spec.validate().unwrap_err().code(), "vm-nic");
    let none = VmSpec { nics: vec![nic(None)], ..VmSpec::new("web") };
    assert_eq!(none.validate().unwrap_err(), SpecError::NothingToBoot);
}
