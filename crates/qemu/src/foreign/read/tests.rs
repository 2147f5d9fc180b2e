use proptest::prelude::*;

use super::*;
use crate::spec::SpecError;

/// Arguments as libvirt 9.0 gives them to QEMU 7.2, one a line. A line that begins with blanks
/// continues the one before.
const LIBVIRT: &str = r#"-name guest=web,debug-threads=on
-S
-object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/key"}
-machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram
-accel tcg
-cpu qemu64
-m 384
-object {"qom-type":"memory-backend-ram","id":"pc.ram","size":402653184}
-overcommit mem-lock=off
-smp 2,sockets=2,cores=1,threads=1
-uuid 4dea22b3-1d52-d8f3-2516-782e98ab3fa0
-display none
-no-user-config
-nodefaults
-chardev socket,id=charmonitor,fd=24,server=on,wait=off
-mon chardev=charmonitor,id=monitor,mode=control
-rtc base=utc
-no-shutdown
-boot strict=on
-device {"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0",
  "multifunction":true,"addr":"0x2"}
-device {"driver":"virtio-serial-pci","id":"virtio-serial0","bus":"pci.1","addr":"0x0"}
-blockdev {"driver":"file","filename":"/srv/web.qcow2","node-name":"libvirt-1-storage",
  "auto-read-only":true,"discard":"unmap"}
-blockdev {"node-name":"libvirt-1-format","read-only":false,"driver":"qcow2",
  "file":"libvirt-1-storage","backing":null}
-device {"driver":"virtio-blk-pci","bus":"pci.2","addr":"0x0","drive":"libvirt-1-format",
  "id":"virtio-disk0","bootindex":1}
-device {"driver":"ide-cd","bus":"ide.0","id":"sata0-0-0"}
-netdev {"type":"tap","fd":"26","vhost":true,"vhostfd":"28","id":"hostnet0"}
-device {"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"52:54:00:11:22:33",
  "bus":"pci.3","addr":"0x0"}
-chardev pty,id=charserial0
-device {"driver":"isa-serial","chardev":"charserial0","id":"serial0","index":0}
-chardev socket,id=charchannel0,fd=22,server=on,wait=off
-device {"driver":"virtserialport","bus":"virtio-serial0.0","nr":1,"chardev":"charchannel0",
  "id":"channel0","name":"org.qemu.guest_agent.0"}
-audiodev {"id":"audio1","driver":"none"}
-vnc 127.0.0.1:0,audiodev=audio1
-device {"driver":"VGA","id":"video0","vgamem_mb":16,"bus":"pcie.0","addr":"0x1"}
-device {"driver":"virtio-balloon-pci","id":"balloon0","bus":"pci.4","addr":"0x0"}
-object {"qom-type":"rng-random","id":"objrng0","filename":"/dev/urandom"}
-device {"driver":"virtio-rng-pci","rng":"objrng0","id":"rng0","bus":"pci.5","addr":"0x0"}
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-msg timestamp=on"#;

/// Arguments in the form of Proxmox VE 8 (pve-docs, `qm showcmd`).
const PROXMOX: &str = r#"-id 100
-name db,debug-threads=on
-no-shutdown
-chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off
-mon chardev=qmp,mode=control
-pidfile /var/run/qemu-server/100.pid
-daemonize
-smbios type=1,uuid=7d3ac7d4-d9a5-4c5f-8f0f-7b7e0f3f0001
-smp 4,sockets=1,cores=4,maxcpus=4
-nodefaults
-boot menu=on,strict=on,reboot-timeout=1000,splash=/usr/share/qemu-server/bootsplash.jpg
-vnc unix:/var/run/qemu-server/100.vnc,password=on
-cpu kvm64,enforce,+kvm_pv_eoi,+kvm_pv_unhalt,+lahf_lm,+sep
-m 2048
-object iothread,id=iothread-virtioscsi0
-device pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e
-device piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2
-device usb-tablet,id=tablet,bus=uhci.0,port=1
-device VGA,id=vga,bus=pci.0,addr=0x2
-chardev socket,path=/var/run/qemu-server/100.qga,server=on,wait=off,id=qga0
-device virtio-serial,id=qga0,bus=pci.0,addr=0x8
-device virtserialport,chardev=qga0,name=org.qemu.guest_agent.0
-device virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3
-iscsi initiator-name=iqn.1993-08.org.debian:01:aabbcc
-drive if=none,id=drive-ide2,media=cdrom,aio=io_uring
-device ide-cd,bus=ide.1,unit=0,drive=drive-ide2,id=ide2,bootindex=101
-device virtio-scsi-pci,id=virtioscsi0,bus=pci.3,addr=0x1,iothread=iothread-virtioscsi0
-drive file=/dev/pve/vm-100-disk-0,if=none,id=drive-scsi0,format=raw,cache=none,aio=io_uring,
  detect-zeroes=on
-device scsi-hd,bus=virtioscsi0.0,channel=0,scsi-id=0,lun=0,drive=drive-scsi0,id=scsi0,bootindex=100
-netdev type=tap,id=net0,ifname=tap100i0,script=/var/lib/qemu-server/pve-bridge,
  downscript=/var/lib/qemu-server/pve-bridgedown,vhost=on
-device virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,addr=0x12,id=net0
-machine accel=kvm,type=pc+pve0"#;

fn arguments(text: &str) -> Vec<String> {
    let text = text.replace("\n  ", "");
    let words = text.lines().flat_map(|line| match line.split_once(' ') {
        Some((option, value)) => vec![option.to_owned(), value.to_owned()],
        None => vec![line.to_owned()],
    });
    words.collect()
}

fn read(text: &str) -> ForeignVm {
    read_foreign(&arguments(text), "pc-q35-7.2", None).unwrap()
}

/// Returns the findings about libvirt's arguments after a change.
fn findings(change: impl Fn(&str) -> String) -> String {
    let refused = read_foreign(&arguments(&change(LIBVIRT)), "pc-q35-7.2", None).unwrap_err();
    refused.iter().map(|fault| fault.message.as_str()).collect::<Vec<_>>().join("; ")
}

fn valid(mut vm: ForeignVm) -> Result<VmSpec, SpecError> {
    vm.spec.nics.iter_mut().for_each(|nic| nic.network = "lan".to_owned());
    vm.spec.validate().map(|()| vm.spec)
}

#[test]
fn a_domain_of_libvirt_is_read_and_valid() {
    let vm = read(LIBVIRT);
    assert_eq!(vm.nics[0].tap, ForeignTap::Descriptor(26));
    let spec = valid(vm).unwrap();
    assert_eq!((spec.name.as_str(), spec.vcpus, spec.accel), ("web", 2, Accel::Tcg));
    assert_eq!(spec.memory[0].size.bytes(), 402_653_184);
    assert_eq!(spec.disks[0].path, PathBuf::from("/srv/web.qcow2"));
    assert_eq!((spec.disks[0].format, spec.cdroms.len()), (DiskFormat::Qcow2, 1));
    assert_eq!((spec.video, spec.guest_agent, spec.serial_ports), (Video::Vga, true, 1));
    let parts = spec.topology.unwrap().parts;
    let whole =
        |part: &Part| matches!(part, Part::Memory { id, whole: true, .. } if id == "pc.ram");
    assert!(parts.iter().any(whole), "{parts:?}");
}

#[test]
fn a_vm_of_proxmox_is_read_and_valid() {
    let vm = read_foreign(&arguments(PROXMOX), "pc-i440fx-8.1+pve0", None).unwrap();
    assert_eq!(vm.nics[0].tap, ForeignTap::Name("tap100i0".to_owned()));
    let spec = valid(vm).unwrap();
    assert_eq!((spec.accel, spec.vcpus, spec.disks[0].bus), (Accel::Kvm, 4, DiskBus::Scsi));
    assert!(spec.disks[0].detect_zeroes && spec.cdroms[0].image.is_none());
    assert_eq!(spec.memory[0].size.bytes(), 2048 << 20);
}

#[test]
fn what_cannot_come_is_refused_by_its_name() {
    let more = |line: &str| findings(|text| format!("{text}\n{line}"));
    for (line, words) in [
        (r#"-device {"driver":"vfio-pci","host":"0000:01:00.0"}"#, "device vfio-pci passes"),
        ("-device usb-host,vendorid=1", "device usb-host passes"),
        ("-fw_cfg name=opt/x,string=y", "option -fw_cfg"),
        ("-readconfig /etc/shadow", "option -readconfig"),
        ("-bios /etc/shadow", "option -bios"),
        ("-object filter-dump,id=f,netdev=n,file=/x", "object filter-dump"),
        ("-drive file=/srv/x.img,format=raw,if=virtio", "if=virtio"),
        ("-device virtio-blk-pci,drive=none", "no block node"),
        ("-device isa-serial,chardev=none", "unknown channel"),
        ("-device virtio-net-pci,netdev=none,mac=52:54:00:00:00:01", "no network none"),
        ("-nographic", "-nographic"),
        ("-smbios file=/etc/shadow", "names a file"),
        ("-machine memory-encryption=sev0", "machine option memory-encryption"),
        ("-m size=384M,slots=16,maxmem=1G", "may grow"),
        ("-unknown", "option -unknown"),
    ] {
        let found = more(line);
        assert!(found.contains(words), "{line}: {found}");
    }
    let unlocked =
        findings(|text| text.replace(r#""driver":"file","#, r#""driver":"file","locking":"off","#));
    assert!(unlocked.contains("locking=off"), "{unlocked}");
    let drive = "-drive if=none,id=d,format=raw,file.locking=off,file=/srv/x.img\n\
                 -device virtio-blk-pci,drive=d";
    assert!(more(drive).contains("locking=off"));
    let shared = |text: &str| text.replace(r#""bootindex":1}"#, r#""share-rw":true}"#);
    assert!(findings(shared).contains("share-rw"));
    // Two that only read need no lock between them.
    let readonly = shared(LIBVIRT).replace(r#""read-only":false"#, r#""read-only":true"#);
    assert!(valid(read(&readonly)).unwrap().disks[0].readonly);
    let huge = findings(|text| {
        text.replace("\"memory-backend-ram\"", "\"memory-backend-memfd\",\"hugetlb\":true")
    });
    assert!(huge.contains("huge pages"), "{huge}");
    let unset = findings(|text| text.replace("-nodefaults\n", ""));
    assert!(unset.contains("-nodefaults"), "{unset}");
    let user = findings(|text| text.replace(r#""type":"tap","fd":"26""#, r#""type":"user""#));
    assert!(user.contains("type user"), "{user}");
    let remote = findings(|text| text.replace(r#""driver":"file""#, r#""driver":"rbd""#));
    assert!(remote.contains("\"rbd\""), "{remote}");
}

#[test]
fn a_topology_that_does_not_fit_its_specification_is_refused() {
    let spec = valid(read(LIBVIRT)).unwrap();
    let change = |change: &dyn Fn(&mut VmSpec)| {
        let mut spec = spec.clone();
        change(&mut spec);
        spec.validate().unwrap_err().to_string()
    };
    let parts = |spec: &mut VmSpec, part: Part| {
        spec.topology.as_mut().unwrap().parts.push(part);
    };
    let device = |text: &str| Part::Device(Properties::parse(text, "driver").unwrap());
    for (text, words) in [
        ("virtio-blk-pci,drive=godwit", "unknown drive"),
        ("isa-serial,chardev=qmp", "unknown chardev"),
        ("vfio-pci,host=1", "vfio-pci"),
    ] {
        let why = change(&|spec| parts(spec, device(text)));
        assert!(why.contains(words), "{text}: {why}");
    }
    assert!(change(&|spec| spec.disks.clear()).contains("each disk"));
    assert!(change(&|spec| spec.hotplug_slots = 2).contains("hotplug_slots"));
    assert!(change(&|spec| spec.tpm = true).contains("TPM"));
    let machine = Part::Machine(String::new());
    assert!(change(&|spec| parts(spec, machine.clone())).contains("machine"));
    let id = Part::Silent { id: "a,fd=3".to_owned() };
    assert!(change(&|spec| parts(spec, id.clone())).contains("not a valid ID"));
    // A record keeps all of it.
    let record = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<VmSpec>(&record).unwrap(), spec);
}

proptest! {
    #[test]
    fn any_arguments_are_refused_or_give_a_checked_topology(
        words in prop::collection::vec(
            prop_oneof![
                "-(device|object|drive|blockdev|netdev|chardev|machine|smp|m|numa|global|boot)",
                "[a-z]{0,8}(-pci)?(,[a-z]{1,6}=[ -~]{0,12}){0,4}",
                r#"\{("[a-z]{1,6}":"[ a-z/]{0,8}",?){0,3}\}"#,
                "\\PC{0,30}",
            ],
            0..24,
        ),
    ) {
        let mut arguments = arguments(LIBVIRT);
        arguments.extend(words);
        if let Ok(mut vm) = read_foreign(&arguments, "pc-q35-7.2", Some("web")) {
            vm.spec.nics.iter_mut().for_each(|nic| nic.network = "lan".to_owned());
            let topology = vm.spec.topology.clone().unwrap();
            for part in &topology.parts {
                if let Part::Device(device) = part {
                    allowed::check_device(device).unwrap();
                }
            }
            let _ = vm.spec.validate();
        }
    }
}
