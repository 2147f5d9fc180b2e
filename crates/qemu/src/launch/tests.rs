//! Tests of the whole command line, and of errors from QEMU's log.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use uuid::Uuid;

use crate::accel::AccelProbe;
use crate::inspect::{MachineType, QemuInfo};
use crate::size::ByteSize;
use crate::spec::{
    Accel, Backing, Cdrom, CloudInit, Disk, DiskBus, DiskCache, DiskFormat, Firmware, MemoryBlock,
    Nic, NicModel, OnCrash, ResolvedSpec, Video, VmSpec, Watchdog,
};

fn fds(launch: &Launch) -> Inherited {
    let spec = &launch.spec;
    let shared = spec.memory.iter().filter(|block| block.backing == Backing::Shared).count();
    let disks =
        (70..).step_by(5).zip(&spec.disks).map(|(number, disk)| vec![(number, disk.format)]);
    Inherited {
        qmp: 10,
        serial: 11,
        console_log: 12,
        further_serial: (2..=spec.serial_ports).map(|_| (93, 94)).collect(),
        ram: (20..).take(shared).collect(),
        kernel: spec.kernel.as_ref().map(|_| 40),
        initrd: spec.initrd.as_ref().map(|_| 41),
        disks: disks.collect(),
        rbd: BTreeMap::new(),
        devices: BTreeSet::new(),
        seed: spec.cloud_init.as_ref().map(|_| 90),
        guest_agent: spec.guest_agent.then_some(91),
        tpm: spec.tpm.then_some(92),
        cdroms: spec.cdroms.iter().map(|drive| drive.image.as_ref().map(|_| 65)).collect(),
        firmware: (!spec.firmware.is_bios()).then_some((60, 61)),
        taps: vec![(vec![50], Vec::new()); spec.nics.len()],
    }
}

fn launch(change: impl FnOnce(&mut VmSpec)) -> Launch {
    let mut spec = VmSpec {
        kernel: Some("/boot/vmlinuz".into()),
        uuid: Some(Uuid::from_u128(7)),
        free_page_reporting: Some(false),
        ..VmSpec::new("web")
    };
    change(&mut spec);
    let machine =
        MachineType { name: "pc-q35-7.2".into(), alias: Some("q35".into()), is_default: false };
    let (path, cpu_models) = ("/q".into(), vec!["Westmere-v1".into(), "host".into()]);
    let info = QemuInfo { path, version: (7, 2, 0), machines: vec![machine], cpu_models };
    let spec = spec.resolve(&info, &AccelProbe { kvm: false, reason: String::new() }).unwrap();
    Launch {
        ram_files: (0..spec.memory.len()).map(|index| format!("/ram/web.{index}").into()).collect(),
        spec,
        qemu: "/q".into(),
        run_dir: "/run/a,b/web".into(),
        files: OpenFiles::default(),
        taps: Vec::new(),
        tpm: None,
        tracker: None,
        user: None,
        sandbox: true,
        limits: Default::default(),
        incoming: false,
        paused: false,
    }
}

fn line(launch: &Launch) -> String {
    line_with(launch, &fds(launch))
}

fn line_with(launch: &Launch, fds: &Inherited) -> String {
    let arguments = launch.command_line(fds);
    arguments.iter().map(|argument| argument.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_small_vm_has_this_command_line() {
    let expected = "-nodefaults -no-user-config -display none -name guest=web,debug-threads=on \
        -uuid 00000000-0000-0000-0000-000000000007 \
        -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
        -machine pc-q35-7.2,suppress-vmdesc=on,dump-guest-core=off,mem-merge=off,usb=off,\
        vmport=off,hpet=off,smbus=off,graphics=off,sata=off,memory-backend=ram0 \
        -accel tcg,thread=multi -cpu Westmere-v1,enforce=on \
        -smp 1 -m 1073741824B \
        -object {\"align\":2097152,\"dump\":false,\"id\":\"ram0\",\
        \"mem-path\":\"/proc/self/fd/20\",\"merge\":false,\"prealloc\":false,\
        \"qom-type\":\"memory-backend-file\",\"share\":true,\"size\":1073741824} \
        -add-fd fd=12,set=1,opaque=/run/a,,b/web/console.log \
        -chardev socket,id=qmp,fd=10,server=on,wait=off \
        -mon chardev=qmp,mode=control \
        -chardev socket,id=serial0,fd=11,server=on,wait=off,logfile=/dev/fdset/1,logappend=on \
        -serial chardev:serial0 -kernel /proc/self/fd/40";
    assert_eq!(line(&launch(|_| {})), expected);
    assert!(!line(&Launch { sandbox: false, ..launch(|_| {}) }).contains("-sandbox"));
}

#[test]
fn several_blocks_become_nodes() {
    let text = line(&launch(|spec| {
        spec.vcpus = 3;
        spec.memory = vec![MemoryBlock::shared(ByteSize::from_mib(64)); 2];
        spec.memory.push(MemoryBlock {
            size: ByteSize::from_mib(32),
            backing: Backing::Private,
            address: None,
        });
    }));
    for part in [
        "-m 167772160B",
        "-numa node,nodeid=0,cpus=0-0,memdev=ram0 -numa node,nodeid=1,cpus=1-1,memdev=ram1",
        "-numa node,nodeid=2,cpus=2-2,memdev=ram2",
        "\"id\":\"ram2\",\"merge\":false,\"qom-type\":\"memory-backend-ram\",\"share\":false",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    assert!(!text.contains("memory-backend=ram0"));
}

#[test]
fn an_image_in_a_pool_is_opened_by_an_inherited_configuration() {
    let launch = launch(|spec| {
        spec.disks = vec![
            Disk::new("/srv/web.raw", DiskFormat::Raw),
            Disk::new("rbd:vms/web", DiskFormat::Raw),
        ];
    });
    let image = crate::rbd::RbdImage::of("rbd:vms/web".as_ref()).unwrap();
    let rbd = crate::rbd::RbdAccess { image, fsid: Uuid::nil(), user: "agents".into() };
    let fds = Inherited { rbd: BTreeMap::from([(75, rbd)]), ..fds(&launch) };
    let text = line_with(&launch, &fds);
    for part in [
        "-add-fd fd=70,set=72 ",
        "-blockdev {\"cache\":{\"direct\":false,\"no-flush\":false},\
         \"conf\":\"/proc/self/fd/75\",\"discard\":\"unmap\",\"driver\":\"rbd\",\
         \"image\":\"web\",\"node-name\":\"disk1-file\",\"pool\":\"vms\",\
         \"read-only\":false,\"user\":\"agents\"}",
        "\"driver\":\"raw\",\"file\":\"disk1-file\",\"node-name\":\"disk1\"",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    assert!(!text.contains("fd=75") && !text.contains("key"), "{text}");
}

#[test]
fn a_block_device_is_opened_by_the_driver_for_devices() {
    let launch = launch(|spec| {
        spec.disks = vec![
            Disk::new("/srv/web.raw", DiskFormat::Raw),
            Disk::new("/dev/vg0/web", DiskFormat::Raw),
        ];
    });
    let text = line_with(&launch, &Inherited { devices: [75].into(), ..fds(&launch) });
    for part in [
        r#""driver":"file","filename":"/dev/fdset/72","locking":"on","node-name":"disk0-file""#,
        r#""driver":"host_device","filename":"/dev/fdset/77","locking":"on""#,
        r#""driver":"raw","file":"disk1-file","node-name":"disk1""#,
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn disks_and_backing_files_are_descriptors() {
    let launch = launch(|spec| {
        spec.kernel = None;
        spec.disks = vec![
            Disk::new("/srv/a,b=\"c\".img", DiskFormat::Raw),
            Disk::new("/srv/d.qcow2", DiskFormat::Qcow2).readonly(),
        ];
    });
    let mut fds = fds(&launch);
    fds.disks[1].extend([(76, DiskFormat::Qcow2), (77, DiskFormat::Raw)]);
    let text = line_with(&launch, &fds);
    for part in [
        r#"-add-fd fd=70,set=72"#,
        r#""filename":"/dev/fdset/72","locking":"on","node-name":"disk0-file","read-only":false"#,
        r#""driver":"raw","file":"disk0-file","node-name":"disk0""#,
        concat!(
            r#""filename":"/dev/fdset/79","locking":"on","node-name":"disk1-back2-file","#,
            r#""read-only":true"#,
        ),
        r#""driver":"raw","file":"disk1-back2-file","node-name":"disk1-back2","read-only":true"#,
        r#""driver":"qcow2","file":"disk1-file","node-name":"disk1","read-only":true"#,
        r#"{"bootindex":1,"drive":"disk0","driver":"virtio-blk-pci","id":"virtio-disk0"}"#,
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    // QEMU gets each layer that it would look for in a header, including the end of the chain.
    for (backing, node) in
        [("\"disk1-back1\"", "disk1-file"), ("\"disk1-back2\"", "disk1-back1-file")]
    {
        let image = text
            .split(" -")
            .find(|argument| argument.contains(&format!("\"file\":\"{node}\"")))
            .unwrap();
        assert!(image.contains(&format!("\"backing\":{backing}")), "{image}");
    }
    assert!(text.find("disk1-back2\"").unwrap() < text.find("\"disk1-file\"").unwrap());
    assert!(!text.contains("/srv/"), "{text}");
    let whole = line_with(&launch, &self::fds(&launch));
    assert!(whole.contains(r#""backing":null"#), "{whole}");
}

#[test]
fn uefi_is_in_two_flash_units() {
    let text = line(&launch(|spec| spec.firmware = Firmware::Uefi));
    for part in [
        ",memory-backend=ram0,pflash0=firmware-code,pflash1=firmware-variables -accel ",
        "-add-fd fd=60,set=62 -blockdev ",
        r#""filename":"/dev/fdset/62","locking":"off","read-only":true},"node-name":"firmware-c"#,
        r#""filename":"/dev/fdset/63","locking":"on","read-only":false}"#,
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    assert!(!text.contains("smm") && !text.contains("-global"), "{text}");
    let secure = line(&launch(|spec| spec.firmware = Firmware::UefiSecure));
    for part in [",smm=on,pflash0=", "-global driver=cfi.pflash01,property=secure,value=on "] {
        assert!(secure.contains(part), "{part} not in {secure}");
    }
}

#[test]
fn a_screen_has_no_listening_server() {
    for (video, adapter) in [
        (Video::Vga, r#"-device {"driver":"VGA","id":"video","vgamem_mb":16} "#),
        (Video::Virtio, r#"-device {"driver":"virtio-vga","id":"video","max_outputs":1} "#),
    ] {
        let text = line(&launch(|spec| {
            spec.video = video;
            spec.extra_devices = vec!["virtio-rng-pci,id=rng0".into()];
        }));
        let usb = "-device {\"driver\":\"qemu-xhci\",\"id\":\"usb\"} \
            -device {\"bus\":\"usb.0\",\"driver\":\"usb-tablet\",\"id\":\"tablet\"} \
            -device virtio-rng-pci,id=rng0";
        let whole = format!(" -display none -name {}", "guest=web");
        assert!(text.contains(&whole) && !text.contains("graphics=off"), "{text}");
        assert!(text.contains(&format!(" -vnc none,share=force-shared {adapter}{usb}")), "{text}");
    }
}

#[test]
fn a_nic_gets_its_tap() {
    let launch = launch(|spec| {
        let mac = Some("52:54:00:00:00:07".to_owned());
        spec.nics = vec![Nic { network: "lan".into(), mac, ..Nic::default() }];
    });
    let text = line(&launch);
    assert!(text.contains("-netdev tap,id=net0,fd=50,vhost=off"), "{text}");
    let by_kernel =
        line_with(&launch, &Inherited { taps: vec![(vec![50], vec![51])], ..fds(&launch) });
    assert!(by_kernel.contains("-netdev tap,id=net0,fd=50,vhost=on,vhostfd=51 "), "{by_kernel}");
    assert!(text.contains(r#""mac":"52:54:00:00:00:07","netdev":"net0","romfile":"""#), "{text}");
}

#[test]
fn a_nic_has_queues_an_mtu_or_another_model() {
    let launch = launch(|spec| {
        let nic = Nic { network: "lan".into(), ..Nic::default() };
        spec.nics = vec![
            Nic { queues: Some(2), mtu: Some(9000), ..nic.clone() },
            Nic { model: NicModel::E1000e, ..nic },
        ];
    });
    let taps = vec![(vec![50, 51], vec![52, 53]), (vec![54], Vec::new())];
    let text = line_with(&launch, &Inherited { taps, ..fds(&launch) });
    for part in [
        "-netdev tap,id=net0,fds=50:51,vhost=on,vhostfds=52:53 -device",
        r#""driver":"virtio-net-pci","guest_announce":false,"host_mtu":9000,"id":"nic0""#,
        r#""mq":true,"netdev":"net0","romfile":"","vectors":6}"#,
        r#"-netdev tap,id=net1,fd=54,vhost=off -device {"driver":"e1000e","id":"nic1""#,
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn small_devices_follow_the_others() {
    let text = line(&launch(|spec| {
        spec.nics = vec![Nic { network: "lan".into(), ..Nic::default() }];
        spec.guest_agent = true;
        spec.cloud_init = Some(CloudInit::default());
        spec.rng = true;
        spec.watchdog = Some(Watchdog::Pause);
        spec.panic_device = Some(true);
        spec.extra_devices = vec!["virtio-balloon-pci".into()];
    }));
    let mut rest = text.as_str();
    for part in [
        r#"-add-fd fd=90,set=92 -blockdev {"driver":"raw","file":{"driver":"file","filename":"#,
        r#"-device {"drive":"seed","driver":"virtio-blk-pci","id":"virtio-seed"} -netdev tap"#,
        "-chardev socket,id=guest-agent,fd=91,server=on,wait=off -device ",
        r#""name":"org.qemu.guest_agent.0","nr":1}"#,
        r#"-object {"id":"rng0","qom-type":"rng-builtin"} -device {"driver":"virtio-rng-pci""#,
        r#"{"driver":"i6300esb","id":"watchdog0"} -action watchdog=pause -device "#,
        r#"{"driver":"pvpanic"} -action panic=shutdown -device virtio-balloon"#,
    ] {
        let at = rest.find(part).unwrap_or_else(|| panic!("{part} not in {rest}"));
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn only_a_new_vm_whose_policy_asks_for_it_can_report_a_panic() {
    let with = |on_crash: OnCrash, choice: Option<bool>, devices: &[&str]| {
        let launch = launch(|spec| {
            spec.on_crash = on_crash;
            spec.panic_device = choice;
            spec.extra_devices = devices.iter().map(|device| (*device).to_owned()).collect();
        });
        // A later change of the policy leaves the machine as it is.
        let wanted = VmSpec { on_crash: OnCrash::Times(9), ..launch.spec.to_vm_spec() };
        let changed = launch.spec.with_settings_of(&wanted);
        assert_eq!(changed.panic_device, launch.spec.panic_device);
        line(&launch).contains(r#"{"driver":"pvpanic"}"#)
    };
    assert!(!with(OnCrash::Never, None, &[]));
    assert!(with(OnCrash::Never, Some(true), &[]));
    assert!(with(OnCrash::Always, None, &[]));
    assert!(with(OnCrash::Times(1), None, &[]));
    assert!(!with(OnCrash::Always, Some(false), &[]));
    assert!(!with(OnCrash::Always, None, &["pvpanic-pci"]));
    // A record of an earlier release has none, also with a policy that was set since.
    let launch = launch(|_| {});
    let mut old = serde_json::to_value(&launch.spec).unwrap();
    assert!(old.get("panic_device").is_none());
    old["on_crash"] = "always".into();
    let old: ResolvedSpec = serde_json::from_value(old).unwrap();
    assert!(!old.panic_device && old.to_vm_spec().panic_device == Some(false));
}

#[test]
fn free_memory_is_reported_unless_there_is_a_balloon_or_a_choice() {
    let balloon = r#"{"driver":"virtio-balloon-pci","free-page-reporting":true,"id":"balloon0"}"#;
    let with = |choice: Option<bool>, devices: &[&str]| {
        line(&launch(|spec| {
            spec.free_page_reporting = choice;
            spec.extra_devices = devices.iter().map(|device| (*device).to_owned()).collect();
        }))
    };
    assert!(with(None, &["virtio-rng-pci"]).contains(balloon));
    assert!(!with(None, &["virtio-balloon-pci"]).contains("free-page-reporting"));
    assert!(!with(Some(false), &[]).contains("free-page-reporting"));
}

#[test]
fn a_paused_shadow_never_starts_by_itself() {
    let shadow = Launch { incoming: true, paused: true, ..launch(|_| {}) };
    assert!(line(&shadow).ends_with("-incoming defer -S"));
    let runs_on_arrival = Launch { incoming: true, ..launch(|_| {}) };
    assert!(line(&runs_on_arrival).ends_with("-incoming defer"));
    let paused = Launch { paused: true, ..launch(|_| {}) };
    assert!(line(&paused).ends_with("/proc/self/fd/40 -S"));
}

#[test]
fn the_user_can_override_the_cpu() {
    let text = line(&launch(|spec| {
        spec.accel = Accel::Kvm;
        spec.cpu_model = Some("host,enforce=off".into());
        spec.extra_devices = vec!["virtio-rng-pci,id=rng0".into()];
    }));
    assert!(text.contains("-accel kvm -cpu host,enforce=off -smp"), "{text}");
    assert!(text.contains("-device virtio-rng-pci,id=rng0"), "{text}");
}

#[test]
fn last_words_are_errors_of_this_start() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join(QEMU_LOG);
    let old = "qemu-system-x86_64: an error of last week\n";
    let new = "qemu-system-x86_64: warning: slow\nqemu-system-x86_64: -device foo: not valid\n\n";
    std::fs::write(&log, format!("{old}{new}")).unwrap();
    assert_eq!(last_words(&log, old.len() as u64), "-device foo: not valid");
    std::fs::write(&log, "qemu-system-x86_64: warning: slow\n").unwrap();
    assert_eq!(last_words(&log, 0), "warning: slow");
    std::fs::write(&log, "x".repeat(100_000)).unwrap();
    assert!(last_words(&log, 0).len() <= 8 << 10);
    assert_eq!(last_words(folder.path(), 0), "");
}

#[test]
fn remedies_match_the_messages_of_qemu() {
    let remedy = |words: &str| {
        StartError::Exited { exit: crate::process::Exit::Code(1), last_words: words.to_owned() }
            .remedy()
    };
    assert!(remedy("Failed to get \"write\" lock").contains("uses this disk image"));
    assert!(remedy("Host doesn't support requested features").contains("CPU model"));
    assert!(remedy("could not open kernel file '/x': No such file").contains("kernel"));
    assert!(remedy("Could not open '/x.img': No such file or directory").contains("exists"));
    assert!(remedy("something else").contains("log"));
}

#[test]
fn disks_and_cds_are_on_their_buses() {
    let on = |bus, path: &str| Disk { bus, ..Disk::new(path, DiskFormat::Raw) };
    let text = line(&launch(|spec| {
        spec.kernel = None;
        spec.disks = vec![
            on(DiskBus::Sata, "/a"),
            Disk {
                cache: DiskCache::Writethrough,
                serial: Some("s-1".to_owned()),
                iops: Some(100),
                detect_zeroes: true,
                boot_order: Some(1),
                ..on(DiskBus::Scsi, "/b")
            },
            Disk { discard: false, ..on(DiskBus::Nvme, "/c") },
        ];
        spec.cdroms = vec![
            Cdrom { image: Some("/cd.iso".into()), ..Cdrom::default() },
            Cdrom { bus: DiskBus::Scsi, ..Cdrom::default() },
        ];
    }));
    for part in [
        r#"-device {"driver":"virtio-scsi-pci","id":"scsi0"} -device {"driver":"ich9-ahci","#,
        r#"{"bootindex":2,"bus":"sata0.0","drive":"sata0","driver":"ide-hd","id":"drive-sata0"}"#,
        r#""bootindex":1,"bus":"scsi0.0","device_id":"scsi0","drive":"scsi0-limited","#,
        r#""driver":"scsi-hd","id":"drive-scsi0","lun":0,"scsi-id":0,"serial":"s-1","#,
        r#""write-cache":"off""#,
        r#"-object {"id":"scsi0-limits","limits":{"iops-total":100},"qom-type":"throttle-group"}"#,
        r#""detect-zeroes":"unmap""#,
        r#""driver":"nvme","id":"drive-disk0","serial":"disk0""#,
        r#"{"bootindex":4,"bus":"sata0.1","drive":"cd-sata1-medium","driver":"ide-cd","#,
        r#""driver":"scsi-cd","id":"cd-scsi1","lun":0,"scsi-id":1"#,
        r#"-add-fd fd=65,set=67,opaque=cd-sata1-medium"#,
        r#""discard":"ignore""#,
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn a_tpm_is_a_connection() {
    let text = line(&launch(|spec| spec.tpm = true));
    let part = "-chardev socket,id=tpm0,fd=92 -tpmdev emulator,id=tpm0,chardev=tpm0 \
        -device {\"driver\":\"tpm-crb\",\"id\":\"tpm-crb0\",\"tpmdev\":\"tpm0\"}";
    assert!(text.contains(part), "{text}");
}

#[test]
fn a_nic_boots_in_its_place_of_the_order() {
    let boot = |kernel: bool| {
        let nic = |boot_order| Nic { network: "lan".into(), boot_order, ..Nic::default() };
        line(&launch(|spec| {
            spec.kernel = kernel.then(|| "/boot/vmlinuz".into());
            spec.disks = vec![Disk::new("/srv/a.img", DiskFormat::Raw)];
            spec.disks[0].boot_order = Some(2);
            spec.nics = vec![nic(None), nic(Some(1))];
        }))
    };
    let text = boot(false);
    assert_eq!(text.matches("\"romfile\":\"\"").count(), 1, "{text}");
    let place = |index: usize, device: &str| {
        let found = text.split(" -device ").find(|part| part.contains(device)).unwrap();
        assert!(found.contains(&format!("\"bootindex\":{index}")), "{found}");
    };
    place(1, "\"id\":\"nic1\"");
    place(2, "virtio-blk-pci");
    assert!(!boot(true).contains("bootindex"));
}

#[test]
fn further_serial_ports_follow_the_console() {
    let text = line(&launch(|spec| spec.serial_ports = 2));
    let part = "-serial chardev:serial0 -add-fd fd=94,set=96 \
        -chardev socket,id=serial1,fd=93,server=on,wait=off,logfile=/dev/fdset/96,logappend=on \
        -serial chardev:serial1";
    assert!(text.contains(part), "{text}");
}

#[test]
fn a_disk_has_a_thread_where_it_asks_for_one() {
    let disk = |bus, iothread| Disk { bus, iothread, ..Disk::new("/srv/a", DiskFormat::Raw) };
    let text = line(&launch(|spec| {
        spec.disks = vec![
            disk(DiskBus::Virtio, false),
            disk(DiskBus::Virtio, true),
            disk(DiskBus::Scsi, true),
            disk(DiskBus::Scsi, false),
        ];
    }));
    for id in ["disk1-iothread", "scsi0-iothread"] {
        let object = format!("-object {{\"id\":\"{id}\",\"qom-type\":\"iothread\"}}");
        assert_eq!(text.matches(&object).count(), 1, "{text}");
        assert_eq!(text.matches(&format!("\"iothread\":\"{id}\"")).count(), 1, "{text}");
    }
    assert_eq!(text.matches("\"iothread\":").count(), 2, "{text}");
    let sata = VmSpec { disks: vec![disk(DiskBus::Sata, true)], ..VmSpec::new("web") };
    assert_eq!(sata.validate().unwrap_err().code(), "vm-disk");
}
