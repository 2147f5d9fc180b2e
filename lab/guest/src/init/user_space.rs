//! A user space from a disk. It is booted in place of this init, which runs in it as a service and
//! knows it only by its files.

use std::{
    convert::Infallible,
    fs,
    io::Read,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chroot, symlink},
        process::CommandExt,
    },
    path::Path,
    process::Command,
};

use anyhow::Context;
use rustix::mount::{MountFlags, mount, mount_move};

use crate::{
    boot,
    guest::{Guest, print},
};

/// Argument with which this program runs as a service and not as init.
pub(crate) const SERVICE: &str = "service";

/// Mount point of the disk, read-only.
const DISK: &str = "/disk";
/// Mount point of the layer for writes.
const WRITTEN: &str = "/written";
/// Mount point of both together.
const ROOT: &str = "/root";
/// Program that runs there first.
const INIT: &str = "/sbin/init";
/// This program and its service, as files of the new root. systemd does not touch /run if it is
/// mounted already.
const PROGRAM: &str = "run/godwit/guest";
const UNITS: &str = "run/systemd/system";
const UNIT: &str = "godwit-guest.service";
const UNIT_TEXT: &str = "\
[Unit]
Description=The lab's guest: echo, control protocol, checked memory

[Service]
ExecStart=/run/godwit/guest service
StandardOutput=file:/dev/console
StandardError=inherit
OOMScoreAdjust=-900
";

/// Size of pieces in which files are read: each system call costs an emulated guest more than its
/// bytes.
const PIECE_BYTES: usize = 1 << 20;
/// Files are read until only this fraction of the memory is free; below it the kernel would begin
/// to evict other files.
const FREE_PART: u64 = 16;
/// Bytes read between two checks of the free memory.
const LOOK_BYTES: usize = 16 << 20;

/// Boots the disk's user space in place of this process. Returns only with an error.
pub(crate) fn boot(disk: &str) -> anyhow::Error {
    match enter(disk) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn enter(disk: &str) -> anyhow::Result<Infallible> {
    for folder in [DISK, WRITTEN, ROOT] {
        fs::create_dir_all(folder).with_context(|| format!("making {folder}"))?;
    }
    let none = MountFlags::empty();
    mount(disk, DISK, "ext4", MountFlags::RDONLY | MountFlags::NOATIME, None)
        .context("mounting the disk")?;
    mount("tmpfs", WRITTEN, "tmpfs", none, None).context("mounting a tmpfs for what is written")?;
    for folder in ["files", "work"] {
        fs::create_dir(Path::new(WRITTEN).join(folder))?;
    }
    let layers = c"lowerdir=/disk,upperdir=/written/files,workdir=/written/work";
    mount("overlay", ROOT, "overlay", none, Some(layers)).context("mounting both as one")?;
    let root = Path::new(ROOT);
    mount(
        "tmpfs",
        root.join("run"),
        "tmpfs",
        MountFlags::NODEV | MountFlags::NOSUID,
        Some(c"mode=755"),
    )
    .context("mounting /run")?;
    write_service(root)?;
    for folder in ["dev", "proc", "sys"] {
        mount_move(Path::new("/").join(folder), root.join(folder))
            .with_context(|| format!("moving /{folder}"))?;
    }
    // As switch_root does: the new root covers the initramfs, whose files remain (4 MiB).
    std::env::set_current_dir(ROOT)?;
    mount_move(".", "/").context("moving the new root to /")?;
    chroot(".").context("changing the root")?;
    std::env::set_current_dir("/")?;
    print(&format!("USER SPACE from {disk}: starting {INIT}"));
    Err(Command::new(INIT).env_clear().exec()).with_context(|| format!("starting {INIT}"))
}

/// Installs this program as a service in the new root.
fn write_service(root: &Path) -> anyhow::Result<()> {
    let program = root.join(PROGRAM);
    let units = root.join(UNITS);
    let wants = units.join("multi-user.target.wants");
    for folder in [program.parent(), Some(wants.as_path())].into_iter().flatten() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    fs::copy("/proc/self/exe", &program)
        .with_context(|| format!("writing {}", program.display()))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::write(units.join(UNIT), UNIT_TEXT)?;
    symlink(Path::new("..").join(UNIT), wants.join(UNIT))?;
    Ok(())
}

/// Waits until systemd has finished starting its units.
pub(crate) fn wait_booted(guest: &Guest) {
    let asked = Command::new("systemctl").args(["is-system-running", "--wait"]).output();
    match asked {
        Ok(output) => {
            print(&format!("SYSTEM is {}", String::from_utf8_lossy(&output.stdout).trim()));
        }
        Err(error) => guest.report(&format!("asking systemd whether it has booted: {error}")),
    }
}

/// Reads all files of the folder's file system, in order of their names, until most of the memory
/// is in use.
pub(crate) fn read_files(guest: &Guest, folder: &Path) -> anyhow::Result<()> {
    let device =
        fs::metadata(folder).with_context(|| format!("reading {}", folder.display()))?.dev();
    let mut reading =
        Reading { device, piece: vec![0; PIECE_BYTES], unlooked_bytes: 0, read_bytes: 0, files: 0 };
    let full = reading.folder(folder);
    print(&format!(
        "READ {} files, {} MiB below {}{}",
        reading.files,
        reading.read_bytes >> 20,
        folder.display(),
        if full { ", until the memory was in use" } else { ", all there are" },
    ));
    if reading.files == 0 {
        guest.report(&format!("no file below {} could be read", folder.display()));
    }
    Ok(())
}

/// State of reading files into the page cache.
struct Reading {
    device: u64,
    piece: Vec<u8>,
    unlooked_bytes: usize,
    read_bytes: usize,
    files: usize,
}

impl Reading {
    /// Reads a folder. Returns true once most of the memory is in use. Unreadable files are
    /// skipped.
    fn folder(&mut self, folder: &Path) -> bool {
        let Ok(entries) = fs::read_dir(folder) else { return false };
        let mut paths: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
        paths.sort();
        paths.iter().any(|path| match fs::symlink_metadata(path) {
            // Only a folder's device is that of the whole file system: a file of an overlay shows
            // the layer's.
            Ok(data) if data.is_dir() => data.dev() == self.device && self.folder(path),
            Ok(data) if data.is_file() => self.file(path),
            Ok(_) | Err(_) => false,
        })
    }

    fn file(&mut self, path: &Path) -> bool {
        let Ok(mut file) = fs::File::open(path) else { return false };
        self.files += 1;
        while let Ok(bytes @ 1..) = file.read(&mut self.piece) {
            self.read_bytes += bytes;
            self.unlooked_bytes += bytes;
            if self.unlooked_bytes >= LOOK_BYTES {
                self.unlooked_bytes = 0;
                let memory = boot::memory_use().unwrap_or_default();
                if memory.free_bytes < memory.total_bytes / FREE_PART {
                    return true;
                }
            }
        }
        false
    }
}
