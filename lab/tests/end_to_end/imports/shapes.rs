//! Six definitions of other platforms are imported with a disk from which a real guest boots:
//! libvirt's XML, Proxmox VE's configurations, OVAs after VirtualBox and VMware. Two VMs leave as
//! domains of a real libvirtd, which starts them. It takes minutes: `make adoption` runs it.
//!
//! The definitions are those of the unit tests (`crates/import/src/tests`), with other paths and
//! sizes. libvirt's are its own; the others are written after what those platforms write. VMDK
//! images come from qemu-img.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::StopVm;
use godwit_lab::LAN_NETWORK;
use godwit_lab::trial::{GuestPlan, Trial, must_run, until};
use godwit_qemu::{ByteSize, Disk, DiskFormat, Firmware, MemoryBlock, Nic, VmSpec};

use super::bootable::{self, DISK_BYTES, convert, run};
use crate::adoption::libvirt::Libvirt;

const LIBVIRT_Q35: &str = include_str!("../../../../crates/import/src/tests/libvirt-q35.xml");
const LIBVIRT_PC: &str = include_str!("../../../../crates/import/src/tests/libvirt-pc.xml");
const PROXMOX_UEFI: &str = include_str!("../../../../crates/import/src/tests/proxmox-101.conf");
const PROXMOX_OLD: &str = include_str!("../../../../crates/import/src/tests/proxmox-204.conf");
const VIRTUALBOX: &str = include_str!("../../../../crates/import/src/tests/virtualbox.ovf");
const VMWARE: &str = include_str!("../../../../crates/import/src/tests/vmware.ovf");

/// Line of the guest's console once its memory is filled.
const READY: &str = "READY pages=";
const STREAM: &str = "subformat=streamOptimized";

/// A definition to import.
struct Shape<'a> {
    file: &'a Path,
    /// Name of the VM.
    vm: &'a str,
    options: &'a [&'a str],
    macs: &'a [&'a str],
    /// Whether its first NIC is one that the guest has a driver for.
    answers: bool,
}

/// A lab with a folder for VMs, and the disk of a guest in it.
struct Site {
    trial: Trial,
    folder: tempfile::TempDir,
    disk: PathBuf,
    plan: GuestPlan,
}

impl Site {
    /// Returns `None`, and says why, if the test is not wanted or cannot run.
    fn begin(name: &str) -> Result<Option<Site>> {
        if std::env::var_os("GODWIT_ADOPTIONS").is_none() {
            eprintln!("skipped: {name}: it takes minutes (make adoption)");
            return Ok(None);
        }
        if let Some(why) = bootable::missing() {
            ensure!(!must_run(), "{why}");
            eprintln!("skipped: {name}: {why}");
            return Ok(None);
        }
        let Some(trial) = Trial::begin(name)? else { return Ok(None) };
        let folder = tempfile::Builder::new().prefix("godwit-shapes-").tempdir_in("/var/tmp")?;
        let dirs: toml::Value = vec![folder.path().display().to_string()].into();
        trial.reconfigure("a", |config| drop(config.insert("vm_dirs".to_owned(), dirs)))?;
        let plan = GuestPlan { number: 41, ..GuestPlan::new("shape") };
        let disk = bootable::build(&trial, folder.path(), &plan)?;
        Ok(Some(Site { trial, folder, disk, plan }))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a definition in which each of these texts, which must be there, is another.
    fn define(&self, name: &str, text: &str, changes: &[(&str, &str)]) -> Result<PathBuf> {
        let mut text = text.to_owned();
        for (from, to) in changes {
            ensure!(text.contains(from), "{name} has no {from}");
            text = text.replace(from, to);
        }
        let path = self.at(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Makes an archive of files of the folder, the descriptor first.
    fn pack(&self, name: &str, members: &[&str]) -> Result<PathBuf> {
        let (path, folder) = (self.at(name), self.folder.path().display().to_string());
        let to = path.display().to_string();
        let head = ["--format=ustar", "--owner=0", "--group=0", "-C", &folder, "-cf", &to];
        run("tar", &[&head[..], members].concat())?;
        Ok(path)
    }

    /// Imports a definition, starts the VM, and waits until its guest runs.
    fn boot(&self, shape: &Shape<'_>) -> Result<()> {
        let (trial, name) = (&self.trial, shape.vm);
        let begun = std::time::Instant::now();
        let file = shape.file.display().to_string();
        let head = ["vm", "import", &file, "--start", "--host", "a"];
        let imported = trial.godwit(&[&head[..], shape.options].concat())?;
        ensure!(imported.code == Some(0), "{}{}", imported.stdout, imported.stderr);
        let started = begun.elapsed();
        ensure!(
            imported.stdout.contains(&format!("VM {name} on host a is running")),
            "{imported:?}"
        );
        until("the guest runs", self.plan.boot_limit, || {
            let text = trial.console("a", name)?;
            ensure!(text.contains(READY), "its console: {text}");
            Ok(Some(()))
        })?;
        if shape.answers {
            let guest = trial.guest_elsewhere("a", &self.plan);
            guest.wait_ready(self.plan.boot_limit)?;
            guest.verify()?;
        }
        let vm = trial.vm("a", name)?;
        let macs: Vec<&str> = vm.spec.nics.iter().filter_map(|nic| nic.mac.as_deref()).collect();
        ensure!(macs == shape.macs, "{macs:?}");
        // Its QEMU has them, too.
        let pid = vm.pid.context("it has no process")?;
        let arguments = fs::read(format!("/proc/{pid}/cmdline"))?;
        let arguments = String::from_utf8_lossy(&arguments).into_owned();
        ensure!(shape.macs.iter().all(|mac| arguments.contains(mac)), "{arguments}");
        eprintln!(
            "  {name}: imported and started in {:.1} s, its guest runs after {:.1} s",
            started.as_secs_f64(),
            begun.elapsed().as_secs_f64()
        );
        let delete = ["vm", "delete", name, "--force", "--delete-disks", "--yes", "--host", "a"];
        let deleted = trial.godwit(&delete)?;
        ensure!(deleted.code == Some(0), "{}", deleted.stderr);
        Ok(())
    }
}

#[test]
fn domains_of_libvirt_boot() -> Result<()> {
    let Some(site) = Site::begin("shapes-libvirt")? else { return Ok(()) };
    convert(&site.disk, "qcow2", "", &site.at("shop-db.qcow2"))?;
    fs::File::create(site.at("shop-data.img"))?.set_len(8 << 20)?;
    let folder = site.folder.path().display().to_string();
    let q35 = site.define(
        "q35.xml",
        LIBVIRT_Q35,
        &[("/tmp/lvs", &folder), ("unit='KiB'>4194304<", "unit='KiB'>524288<")],
    )?;
    site.boot(&Shape {
        file: &q35,
        vm: "shop-db",
        options: &["--network", "default=lan"],
        macs: &["52:54:00:6b:3c:58", "52:54:00:11:22:33"],
        answers: true,
    })?;
    convert(&site.disk, "vmdk", "", &site.at("print.vmdk"))?;
    let pc = site.define("pc.xml", LIBVIRT_PC, &[("/tmp/lvs", &folder)])?;
    site.boot(&Shape {
        file: &pc,
        vm: "Old-Print-Server--2",
        options: &["--network", "user=lan"],
        macs: &["52:54:00:aa:bb:cc"],
        answers: false,
    })?;
    site.trial.finish()
}

#[test]
fn vms_of_proxmox_boot() -> Result<()> {
    let Some(site) = Site::begin("shapes-proxmox")? else { return Ok(()) };
    let folder = site.folder.path().display().to_string();
    let networks = ["--network", "vmbr0=lan", "--network", "vmbr1=lan", "--disks-in", &folder];
    convert(&site.disk, "raw", "", &site.at("vm-101-disk-1"))?;
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &format!("{folder}/vm-101-disk-2.qcow2"), "16M"],
    )?;
    // The lab has no VLANs, and no keys of the firmware trust its GRUB.
    let uefi = site.define(
        "101.conf",
        PROXMOX_UEFI,
        &[
            ("memory: 4096", "memory: 512"),
            ("pre-enrolled-keys=1", "pre-enrolled-keys=0"),
            (",tag=20", ""),
            ("size=32G,ssd", "size=64M,ssd"),
            ("size=8G", "size=16M"),
        ],
    )?;
    site.boot(&Shape {
        file: &uefi,
        vm: "shop-web",
        options: &networks,
        macs: &["bc:24:11:6a:1b:2c", "bc:24:11:6a:1b:2d"],
        answers: true,
    })?;
    convert(&site.disk, "vmdk", "", &site.at("vm-204-disk-0.vmdk"))?;
    let old = site.define(
        "204.conf",
        PROXMOX_OLD,
        &[("memory: 1024", "memory: 512"), ("size=10G", "size=64M")],
    )?;
    site.boot(&Shape {
        file: &old,
        vm: "legacy.erp",
        options: &[&networks[..2], &networks[4..]].concat(),
        macs: &["52:54:00:0e:0f:10"],
        answers: false,
    })?;
    site.trial.finish()
}

#[test]
fn packages_boot() -> Result<()> {
    let Some(site) = Site::begin("shapes-packages")? else { return Ok(()) };
    convert(&site.disk, "vmdk", STREAM, &site.at("wiki-disk001.vmdk"))?;
    let bytes = fs::metadata(site.at("wiki-disk001.vmdk"))?.len().to_string();
    ensure!(DISK_BYTES == 67_108_864, "the size in the descriptor");
    site.define("wiki.ovf", VIRTUALBOX, &[("68096", &bytes), (">1024<", ">512<")])?;
    let wiki = site.pack("wiki.ova", &["wiki.ovf", "wiki-disk001.vmdk"])?;
    site.boot(&Shape {
        file: &wiki,
        vm: "wiki",
        options: &["--network", "Bridged=lan"],
        macs: &["08:00:27:a1:b2:c3"],
        answers: false,
    })?;

    convert(&site.disk, "vmdk", STREAM, &site.at("erp-disk1.vmdk"))?;
    let second = site.at("erp-disk2.vmdk").display().to_string();
    run("qemu-img", &["create", "-q", "-f", "vmdk", "-o", STREAM, &second, "2G"])?;
    fs::write(site.at("erp-file1.nvram"), vec![0; 8684])?;
    let first = "ovf:capacity=\"1\" ovf:capacityAllocationUnits=\"byte * 2^30\"";
    let in_mib = "ovf:capacity=\"64\" ovf:capacityAllocationUnits=\"byte * 2^20\"";
    site.define("erp.ovf", VMWARE, &[(first, in_mib), (">8192<", ">512<")])?;
    let members = ["erp.ovf", "erp-disk1.vmdk", "erp-disk2.vmdk", "erp-file1.nvram"];
    let mut manifest = String::new();
    for member in members {
        let sum = Command::new("sha256sum").arg(site.at(member)).output()?;
        let sum = String::from_utf8_lossy(&sum.stdout).into_owned();
        let digest = sum.split_whitespace().next().context("no digest")?;
        manifest.push_str(&format!("SHA256({member})= {digest}\n"));
    }
    fs::write(site.at("erp.mf"), manifest)?;
    let [descriptor, files @ ..] = members;
    let erp = site.pack("erp.ova", &[&[descriptor, "erp.mf"][..], &files].concat())?;
    site.boot(&Shape {
        file: &erp,
        vm: "erp",
        options: &["--network", "VM Network=lan"],
        macs: &["00:50:56:8a:01:02"],
        answers: false,
    })?;
    site.trial.finish()
}

#[test]
fn exported_vms_start_under_libvirt() -> Result<()> {
    let Some(site) = Site::begin("exports")? else { return Ok(()) };
    if let Some(why) = crate::adoption::libvirt::missing_programs() {
        ensure!(!must_run(), "{why}");
        eprintln!("skipped: exports: {why}");
        return site.trial.finish();
    }
    let trial = &site.trial;
    let libvirt = Libvirt::start(trial)?;
    for (name, firmware) in [("by-bios", Firmware::Bios), ("by-uefi", Firmware::Uefi)] {
        let disk = site.at(&format!("{name}.qcow2"));
        convert(&site.disk, "qcow2", "", &disk)?;
        let spec = VmSpec {
            memory: vec![MemoryBlock::shared(ByteSize::from_mib(384))],
            firmware,
            disks: vec![Disk::new(disk, DiskFormat::Qcow2)],
            nics: vec![Nic { network: LAN_NETWORK.to_owned(), ..Nic::default() }],
            ..VmSpec::new(name)
        };
        trial.create("a", spec)?;
        let guest = trial.guest_elsewhere("a", &site.plan);
        guest.wait_ready(site.plan.boot_limit)?;
        trial.ask(trial.agent("a").stop_vm(name, StopVm { force: true, grace_ms: None }))?;
        let out = site.at(&format!("{name}-out"));
        fs::create_dir(&out)?;
        let to = out.display().to_string();
        let command = ["vm", "export", name, "--to", &to, "--format", "libvirt", "--host", "a"];
        let exported = trial.godwit(&command)?;
        ensure!(exported.code == Some(0), "{}{}", exported.stdout, exported.stderr);

        let xml = out.join(format!("{name}.xml")).display().to_string();
        libvirt.virsh(&["define", &xml])?;
        let begun = std::time::Instant::now();
        libvirt.virsh(&["start", name])?;
        guest.wait_ready(site.plan.boot_limit)?;
        guest.verify()?;
        let mac = trial.vm("a", name)?.spec.nics[0].mac.clone().context("it has no address")?;
        ensure!(libvirt.virsh(&["domiflist", name])?.contains(&mac), "another address");
        eprintln!(
            "  {name}: under libvirt its guest runs after {:.1} s",
            begun.elapsed().as_secs_f64()
        );
        libvirt.virsh(&["destroy", name])?;
        trial.ask(trial.agent("a").delete_vm(name))?;
    }
    drop(libvirt);
    site.trial.finish()
}
