//! Disks on every bus that can move, a CD, and what is attached, inserted and removed while the
//! guest runs: it moves there and back with the guest, which writes and reads all of it meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::{
    ChangeDrive, ClientError, CreateDisk, CreateVm, DriveChange, ErrorCode, MigrationRequest,
    NewDisk, ResizeDisk, VmInfo, VmState,
};
use godwit_lab::image;
use godwit_lab::trial::{Guest, GuestPlan, LIMIT, Trial, until};
use godwit_qemu::{ByteSize, Cdrom, Disk, DiskBus, DiskCache, DiskFormat, MemoryBlock, VmSpec};
use rustix::process::Signal;

use crate::move_and_check;

const MIB: u64 = 1 << 20;
/// Bytes of a block of the guest, and how many it writes (lab/guest/src/init/drives.rs).
pub(crate) const BLOCK_BYTES: usize = 4096;
pub(crate) const BLOCKS: u64 = 256;

#[test]
fn disks_of_every_bus_and_a_cd_move_with_the_guest() -> Result<()> {
    let Some(trial) = Trial::begin("drives")? else { return Ok(()) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: drives: no qemu-img (apt-get install qemu-utils)");
        return trial.finish();
    }
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let made = |name: &str, format: DiskFormat| image_at(&folder.path().join(name), format);
    let virtio = made("virtio.img", DiskFormat::Raw)?;
    let scsi = Disk {
        bus: DiskBus::Scsi,
        cache: DiskCache::Writethrough,
        detect_zeroes: true,
        serial: Some("lab-1".to_owned()),
        iops: Some(2000),
        bytes_per_second: Some(ByteSize::from_mib(64)),
        ..made("scsi.qcow2", DiskFormat::Qcow2)?
    };
    let sata = Disk { bus: DiskBus::Sata, ..made("sata.img", DiskFormat::Raw)? };
    let second = Disk { discard: false, ..made("second.qcow2", DiskFormat::Qcow2)? };
    let (one, two) = (cd(folder.path(), "first cd")?, cd(folder.path(), "second cd")?);
    let plan = GuestPlan {
        disks: vec![virtio, scsi, sata, second],
        image: Some(image::build_with_drives(&image::default_dir())?),
        words: "godwit.drives=on".to_owned(),
        ..GuestPlan::new("drives")
    };
    let spec = VmSpec {
        cdroms: vec![
            Cdrom { image: Some(one.clone()), bus: DiskBus::Scsi, ..Cdrom::default() },
            Cdrom::default(),
        ],
        ..plan.spec(trial.image())
    };
    let mut guest = trial.guest_of("a", &plan, spec)?;
    says(&trial, "a", "sr0 holds first cd")?;
    for disk in ["vda", "vdb", "sda"] {
        says(&trial, "a", &format!("{disk} of 65536 sectors is written"))?;
    }

    let hot = Disk { bus: DiskBus::Scsi, ..made("hot.qcow2", DiskFormat::Qcow2)? };
    let attach = |disk: &Disk| DriveChange::Attach { disk: Box::new(disk.clone()) };
    refuse_bad_input(&trial, folder.path(), &attach)?;
    change(&trial, "a", attach(&hot))?;
    says(&trial, "a", "sdb of 65536 sectors is written")?;
    change(&trial, "a", insert(&two))?;
    says(&trial, "a", "sr0 holds second cd")?;

    // Without its CD the VM stays where it is.
    let away = folder.path().join("away");
    fs::rename(&two, &away)?;
    let refused = trial.begin_migration("drives", "a", &MigrationRequest::to("b"))?.report()?;
    let error = refused.error.context("a move without the CD image")?;
    ensure!(error.message.contains("second cd.iso"), "{error:?}");
    fs::rename(&away, &two)?;

    move_and_check(&trial, &mut guest)?;
    let at_b = trial.vm("b", "drives")?;
    ensure!(at_b.spec.disks.iter().any(|disk| disk.path == hot.path), "{:?}", at_b.spec);
    change(&trial, "b", DriveChange::Eject { drive: Some(0), force: true })?;
    says(&trial, "b", "sr0 holds nothing")?;
    change(&trial, "b", DriveChange::Detach { path: hot.path.clone() })?;
    says(&trial, "b", "sdb is gone")?;
    change(&trial, "b", attach(&hot))?;
    says(&trial, "b", "sdb of 65536 sectors is written")?;
    suspended_while_writing(&trial, &guest)?;
    move_and_check(&trial, &mut guest)?;
    ensure!(guest.status()?.problems.is_empty(), "{:?}", guest.status()?.problems);

    trial.delete("a", "drives")?;
    for disk in ["virtio.img", "scsi.qcow2", "second.qcow2", "hot.qcow2"] {
        expect_blocks(&folder.path().join(disk))?;
    }
    stays_with_nvme(&trial, made("nvme.img", DiskFormat::Raw)?)?;
    trial.finish()
}

/// Suspends the guest while it writes all of its disks, loses the agent, and resumes.
fn suspended_while_writing(trial: &Trial, guest: &Guest) -> Result<()> {
    trial.ask(trial.agent("b").suspend_vm("drives"))?;
    trial.end_agent("b", Signal::KILL)?;
    trial.start_missing()?;
    ensure!(trial.vm("b", "drives")?.state == VmState::Suspended, "not suspended");
    trial.ask(trial.agent("b").start_vm("drives"))?;
    until("the VM runs", LIMIT, || {
        Ok((trial.vm("b", "drives")?.state == VmState::Running).then_some(()))
    })?;
    trial.expect_whole(guest).map(drop)
}

#[test]
fn images_are_made_within_the_directories_for_vms() -> Result<()> {
    let Some(trial) = Trial::begin("images")? else { return Ok(()) };
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let at = |name: &str| folder.path().join(name);
    let dirs: toml::Value = vec![folder.path().display().to_string()].into();
    trial.reconfigure("a", |config| drop(config.insert("vm_dirs".to_owned(), dirs)))?;
    let agent = trial.agent("a");
    let new = |name: &str, size| CreateDisk {
        path: at(name),
        size,
        format: None,
        base: None,
        base_format: None,
        full_copy: false,
    };
    let size = |mib| Some(ByteSize::from_mib(mib));
    let on = |name: &str, base: &str, size| CreateDisk { base: Some(at(base)), ..new(name, size) };

    let base = trial.ask(agent.create_disk(&new("base.qcow2", size(32))))?;
    ensure!(base.virtual_bytes == 32 * MIB && base.vms.is_empty(), "{base:?}");
    let top = trial.ask(agent.create_disk(&on("top.qcow2", "base.qcow2", None)))?;
    ensure!(top.backing.is_some() && top.virtual_bytes == 32 * MIB, "{top:?}");
    let raw = Some(DiskFormat::Raw);
    let whole = CreateDisk { full_copy: true, ..on("whole.qcow2", "top.qcow2", size(48)) };
    let whole = trial.ask(agent.create_disk(&whole))?;
    ensure!(whole.backing.is_none() && whole.virtual_bytes == 48 * MIB, "{whole:?}");
    let copy = CreateDisk { full_copy: true, format: raw, ..on("copy.raw", "base.qcow2", None) };
    ensure!(trial.ask(agent.create_disk(&copy))?.virtual_bytes == 32 * MIB, "the copy's size");
    for name in ["base.qcow2", "whole.qcow2", "copy.raw"] {
        let request = ResizeDisk { path: at(name), size: ByteSize::from_mib(64) };
        let resized = trial.ask(agent.resize_disk(&request))?;
        ensure!(resized.virtual_bytes == 64 * MIB, "{resized:?}");
    }

    std::os::unix::fs::symlink("/etc", at("link"))?;
    fs::write(at("vmdk.raw"), "KDMV and more")?;
    let elsewhere = |path: &str| CreateDisk { path: path.into(), ..new("", size(1)) };
    let invalid = ErrorCode::InvalidRequest;
    for (request, code) in [
        (elsewhere("/etc/godwit.qcow2"), invalid),
        (CreateDisk { path: at("link/x.qcow2"), ..new("", size(1)) }, invalid),
        (CreateDisk { path: at("../x.qcow2"), ..new("", size(1)) }, invalid),
        (new(".hidden", size(1)), invalid),
        (new("base.qcow2", size(1)), ErrorCode::AlreadyExists),
        (new("none/x.qcow2", size(1)), ErrorCode::NotFound),
        (on("small.qcow2", "base.qcow2", size(1)), invalid),
        (on("x.qcow2", "vmdk.raw", size(64)), invalid),
        (on("x.qcow2", "gone.qcow2", size(64)), ErrorCode::NotFound),
        (CreateDisk { format: raw, ..on("x.raw", "base.qcow2", None) }, invalid),
        (CreateDisk { base: Some("/etc/passwd".into()), ..new("x.qcow2", size(1)) }, invalid),
    ] {
        let error = trial.ask(agent.create_disk(&request)).err().context("created")?;
        ensure!(error.code() == Some(code), "{error}");
        eprintln!("  error: {error}");
    }
    let shrink = ResizeDisk { path: at("whole.qcow2"), size: ByteSize::from_mib(1) };
    ensure!(trial.ask(agent.resize_disk(&shrink)).is_err(), "a disk was made smaller");
    resize_only_what_is_meant(&trial, folder.path())?;

    // A VM with a new disk; one whose start fails leaves no image.
    let disk = NewDisk { size: size(16), base: None, bus: DiskBus::Scsi, ..NewDisk::default() };
    let memory = vec![MemoryBlock::shared(ByteSize::from_mib(64))];
    let request = |name: &str, devices: Vec<String>| CreateVm {
        spec: VmSpec { memory: memory.clone(), extra_devices: devices, ..VmSpec::new(name) },
        start: true,
        vm_dirs_only: false,
        new_disks: vec![disk.clone(); 2],
    };
    let failed = trial.ask(agent.create_vm(&request("bad", vec!["no-such-device".to_owned()])));
    ensure!(failed.is_err() && !at("bad.qcow2").exists() && !at("bad-1.qcow2").exists(), "left");
    let vm = trial.ask(agent.create_vm(&request("good", Vec::new())))?;
    ensure!(vm.spec.disks.len() == 2 && at("good-1.qcow2").exists(), "{:?}", vm.spec);
    let used = trial.ask(agent.delete_disk(&at("good.qcow2"))).err().context("deleted")?;
    ensure!(used.code() == Some(ErrorCode::WrongState), "{used}");
    // A running VM's disk is resized by its QEMU.
    let grow = ResizeDisk { path: at("good.qcow2"), size: ByteSize::from_mib(32) };
    ensure!(trial.ask(agent.resize_disk(&grow))?.virtual_bytes == 32 * MIB, "not resized");
    trial.delete("a", "good")?;
    let listed = trial.ask(agent.disks())?;
    ensure!(listed.disks.len() == 7 && !listed.is_cut, "{listed:?}");
    for disk in listed.disks {
        trial.ask(agent.delete_disk(&disk.path))?;
    }
    let left = fs::read_dir(folder.path())?.flatten().map(|entry| entry.path());
    // The agent's own mark of the directory stays.
    let left: Vec<_> = left.filter(|path| *path != at(".godwit-datastore")).collect();
    ensure!(left == [at("link")], "{left:?}");
    trial.finish()
}

/// Resizes a raw image in which a guest has written another format's header, which is refused. Then
/// detaches a SCSI disk in front of two others and resizes these.
fn resize_only_what_is_meant(trial: &Trial, folder: &Path) -> Result<()> {
    let agent = trial.agent("a");
    let guest = folder.join("guest.raw");
    fs::copy(folder.join("base.qcow2"), &guest)?;
    let by_header = ResizeDisk { path: guest.clone(), size: ByteSize::from_mib(96) };
    ensure!(trial.ask(agent.resize_disk(&by_header)).is_err(), "resized by a guest's header");
    fs::remove_file(guest)?;
    let mut disks = Vec::new();
    for (name, mib, bus) in [
        ("scsi.raw", 8, DiskBus::Scsi),
        ("large.raw", 64, DiskBus::Virtio),
        ("small.raw", 8, DiskBus::Virtio),
    ] {
        let path = folder.join(name);
        fs::File::create(&path)?.set_len(mib * MIB)?;
        disks.push(Disk { bus, ..Disk::new(path, DiskFormat::Raw) });
    }
    let memory = vec![MemoryBlock::shared(ByteSize::from_mib(64))];
    let request = CreateVm {
        spec: VmSpec { memory, disks: disks.clone(), ..VmSpec::new("order") },
        start: true,
        vm_dirs_only: false,
        new_disks: Vec::new(),
    };
    trial.ask(agent.create_vm(&request))?;
    let change = DriveChange::Detach { path: disks[0].path.clone() };
    let detach = ChangeDrive { change, vm_dirs_only: false };
    trial.ask(agent.change_drive("order", &detach))?;
    let resize = |disk: &Disk, mib| {
        let size = ByteSize::from_mib(mib);
        trial.ask(agent.resize_disk(&ResizeDisk { path: disk.path.clone(), size }))
    };
    ensure!(resize(&disks[2], 16)?.virtual_bytes == 16 * MIB, "not resized");
    ensure!(fs::metadata(&disks[1].path)?.len() == 64 * MIB, "another disk was resized");
    ensure!(resize(&disks[1], 32).is_err(), "a running VM's disk was made smaller");
    ensure!(resize(&disks[1], 96)?.virtual_bytes == 96 * MIB, "not resized");
    trial.delete("a", "order")?;
    for disk in disks {
        fs::remove_file(disk.path)?;
    }
    Ok(())
}

/// Makes changes that the agent must refuse, and checks that nothing of them stays.
fn refuse_bad_input(
    trial: &Trial,
    folder: &Path,
    attach: &dyn Fn(&Disk) -> DriveChange,
) -> Result<()> {
    let before = trial.vm("a", "drives")?.spec;
    let scsi = |path: PathBuf, format| Disk { bus: DiskBus::Scsi, ..Disk::new(path, format) };
    let whole = image_at(&folder.join("whole.qcow2"), DiskFormat::Qcow2)?;
    // The header is that of qcow2; its table of clusters is beyond every image.
    let broken = folder.join("broken.qcow2");
    let mut bytes = fs::read(&whole.path)?;
    bytes[40..48].fill(0xff);
    fs::write(&broken, bytes)?;
    let unit = Disk { unit: Some(99), ..scsi(whole.path.clone(), DiskFormat::Qcow2) };
    let virtio = Disk::new(&whole.path, DiskFormat::Qcow2);
    for (refused, code, words) in [
        (
            attach(&scsi(whole.path.clone(), DiskFormat::Raw)),
            ErrorCode::InvalidRequest,
            "qcow2 format, not raw",
        ),
        (
            attach(&scsi(folder.join("virtio.img"), DiskFormat::Qcow2)),
            ErrorCode::InvalidRequest,
            "not in qcow2 format",
        ),
        (attach(&scsi(broken, DiskFormat::Qcow2)), ErrorCode::HypervisorFailed, "blockdev-add"),
        (
            attach(&scsi(folder.join("virtio.img"), DiskFormat::Raw)),
            ErrorCode::InvalidRequest,
            "two of its disks",
        ),
        (attach(&unit), ErrorCode::InvalidRequest, "beyond the last one"),
        (attach(&virtio), ErrorCode::WrongState, "bus virtio"),
        (insert(&folder.join("gone.iso")), ErrorCode::NotFound, "gone.iso"),
        (insert(&whole.path), ErrorCode::InvalidRequest, "qcow2 format, not raw"),
        (DriveChange::Detach { path: folder.join("other") }, ErrorCode::NotFound, "no disk"),
    ] {
        let error = change(trial, "a", refused).err().context("accepted")?;
        ensure!(error.code() == Some(code) && error.to_string().contains(words), "{error}");
        eprintln!("  error: {error}");
        let now = trial.vm("a", "drives")?.spec;
        ensure!(now == before, "{now:?}");
    }
    Ok(())
}

/// Checks that a VM with an NVMe disk runs and is not moved.
fn stays_with_nvme(trial: &Trial, disk: Disk) -> Result<()> {
    let disks = vec![Disk { bus: DiskBus::Nvme, ..disk }];
    let plan = GuestPlan { disks, ..GuestPlan::new("nvme") };
    trial.guest("a", &plan)?;
    let refused = trial.begin_migration("nvme", "a", &MigrationRequest::to("b"))?.report()?;
    let error = refused.error.context("a move with NVMe")?;
    ensure!(error.message.contains("bus nvme"), "{error:?}");
    Ok(trial.delete("a", "nvme")?)
}

fn change(trial: &Trial, host: &str, change: DriveChange) -> Result<VmInfo, ClientError> {
    let request = ChangeDrive { change, vm_dirs_only: false };
    trial.ask(trial.agent(host).change_drive("drives", &request))
}

fn insert(image: &Path) -> DriveChange {
    DriveChange::Insert { image: image.to_owned(), drive: Some(0), force: true }
}

/// Waits until the guest says something about its drives.
fn says(trial: &Trial, host: &str, words: &str) -> Result<()> {
    let wanted = format!("DRIVES {words}");
    until(&format!("the guest says {wanted:?}"), LIMIT, || {
        Ok(trial.console(host, "drives")?.contains(&wanted).then_some(()))
    })
}

pub(crate) fn image_at(path: &Path, format: DiskFormat) -> Result<Disk> {
    let create = ["create", "-q", "-f", format.name()];
    let made = Command::new("qemu-img").args(create).arg(path).arg("32M").status()?;
    ensure!(made.success(), "qemu-img create failed");
    Ok(Disk::new(path, format))
}

/// Makes the image of a CD that begins with its name.
fn cd(folder: &Path, name: &str) -> Result<PathBuf> {
    let path = folder.join(format!("{name}.iso"));
    let mut bytes = vec![0; usize::try_from(MIB)?];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    fs::write(&path, bytes)?;
    Ok(path)
}

/// Checks that an image holds what the guest wrote.
pub(crate) fn expect_blocks(image: &Path) -> Result<()> {
    let raw = image.with_extension("read");
    let convert = ["convert", "-O", "raw"];
    let read = Command::new("qemu-img").args(convert).arg(image).arg(&raw).status()?;
    ensure!(read.success(), "qemu-img convert failed");
    let bytes = fs::read(&raw)?;
    let mut written = 0;
    for (place, block) in (0..BLOCKS).zip(bytes.chunks_exact(BLOCK_BYTES)) {
        let number = u64::from_le_bytes(block[..8].try_into()?);
        ensure!(block.chunks_exact(8).all(|part| part == &block[..8]), "{}", image.display());
        ensure!(number == 0 || number % BLOCKS == place, "{}: {number}", image.display());
        written += u64::from(number > 0);
    }
    ensure!(written > 4, "{}: the guest wrote {written} blocks", image.display());
    Ok(())
}
