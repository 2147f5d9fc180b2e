//! Disks on a shared path: their locks move with the guest.

use std::fs::Permissions;
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use godwit_api::MigrationRequest;
use godwit_lab::trial::{GuestPlan, Trial, other_host};
use godwit_qemu::{Disk, DiskFormat};
use godwit_types::EngineKind;

use crate::{BUSY, check_report};

#[test]
fn locks_move_with_the_guest() -> Result<()> {
    let Some(trial) = Trial::begin("disk")? else { return Ok(()) };
    if !Path::new("/usr/bin/qemu-img").exists() {
        eprintln!("skipped: disk: no qemu-img (apt-get install qemu-utils)");
        return trial.finish();
    }
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let mut disks = Vec::new();
    for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
        let path = folder.path().join(format!("disk.{}", format.name()));
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format.name()])
            .arg(&path)
            .arg("64M")
            .status()?;
        ensure!(made.success(), "qemu-img create failed");
        let disk = Disk::new(path, format);
        ensure!(!is_locked(&disk)?, "a fresh image is locked");
        disks.push(disk);
    }
    disks.push(on_top_of_another(folder.path())?);
    let plan =
        GuestPlan { disks: disks.clone(), workload: BUSY.to_owned(), ..GuestPlan::new("disky") };
    let mut guest = trial.guest("a", &plan)?;
    for engine in [EngineKind::Godwit, EngineKind::Qemu, EngineKind::Qemu, EngineKind::Godwit] {
        let source = guest.host.clone();
        let request = MigrationRequest { engine, ..guest.to_other_host() };
        let report = trial.move_guest(&mut guest, &request)?.report;
        check_report(&report)?;
        trial.expect_whole(&guest)?;
        let pid = trial.vm(&guest.host, "disky")?.pid.context("no process")?;
        for disk in &disks {
            ensure!(is_locked(disk)?, "no process holds a lock on {}", disk.path.display());
            ensure!(
                holds_lock(pid, &disk.path)?,
                "the destination does not hold {}",
                disk.path.display()
            );
        }
        ensure!(
            trial.vm(&source, "disky").is_err() && source == other_host(&guest.host),
            "still at the source"
        );
    }
    trial.delete("a", "disky")?;
    for disk in &disks {
        ensure!(!is_locked(disk)?, "{} is still locked", disk.path.display());
    }
    trial.finish()
}

/// Makes an overlay image on a base image. Both belong to root, in a folder that is closed to
/// QEMU's user.
fn on_top_of_another(folder: &Path) -> Result<Disk> {
    let (base, path) = (folder.join("base.img"), folder.join("top.qcow2"));
    std::fs::write(&base, vec![0x5a; 1 << 20])?;
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.img"];
    let made = Command::new("qemu-img").args(create).arg(&path).status()?;
    ensure!(made.success(), "qemu-img create failed");
    for file in [&base, &path] {
        std::fs::set_permissions(file, Permissions::from_mode(0o600))?;
    }
    Ok(Disk::new(path, DiskFormat::Qcow2))
}

/// Returns whether the image is locked against a second writer: opens it for writing and closes it
/// again. (`qemu-img info` would do for qcow2 only. Of a raw image it reads nothing that a writer
/// could change.)
pub(crate) fn is_locked(disk: &Disk) -> Result<bool> {
    let output = Command::new("qemu-io")
        .args(["-f", disk.format.name(), "-c", "quit"])
        .arg(&disk.path)
        .output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() || stderr.contains("lock"), "qemu-io: {stderr}");
    Ok(!output.status.success())
}

/// Returns whether a process holds a lock on a file through one of its descriptors.
pub(crate) fn holds_lock(pid: i32, file: &Path) -> Result<bool> {
    let wanted = std::fs::metadata(file)?;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(found) = std::fs::metadata(entry.path()) else { continue };
        if (found.st_dev(), found.st_ino()) != (wanted.st_dev(), wanted.st_ino()) {
            continue;
        }
        let info = format!("/proc/{pid}/fdinfo/{}", entry.file_name().display());
        if std::fs::read_to_string(info)?.lines().any(|line| line.starts_with("lock:")) {
            return Ok(true);
        }
    }
    Ok(false)
}
