//! Disks and CDs of a VM: the options that describe them, and the commands that change them.

use std::path::Path;
use std::str::FromStr;

use godwit_api::{DriveChange, NewDisk};
use godwit_qemu::{Cdrom, Disk, DiskBus, DiskFormat};
use serde::de::DeserializeOwned;

use super::create::pairs;
use crate::args::{CdromCommand, VmDiskCommand};
use crate::exit::Failure;
use crate::target::absolute;

/// Parses `--disk`. `bus`: that of a disk that names none.
pub(super) fn disk(text: &str, bus: DiskBus) -> Result<Disk, Failure> {
    let wrong = |why: String| {
        let remedy = "use path=FILE,format=raw|qcow2[,readonly]; docs/disks.md lists all options";
        Failure::usage(format!("--disk {text}: {why}"), remedy)
    };
    let mut disk = Disk { bus, ..Disk::new("", DiskFormat::Raw) };
    let (mut has_path, mut has_format) = (false, false);
    for (key, value) in pairs(text) {
        let bad = || wrong(format!("\"{key}\" is not understood"));
        match (key, value) {
            ("path", Some(value)) => {
                (disk.path, has_path) = (absolute(Path::new(value))?, true);
            }
            ("format", Some(value)) => {
                (disk.format, has_format) = (named(value).ok_or_else(bad)?, true);
            }
            ("readonly", None) => disk.readonly = true,
            ("bus", Some(value)) => disk.bus = named(value).ok_or_else(bad)?,
            ("unit", Some(value)) => disk.unit = Some(number(value).ok_or_else(bad)?),
            ("cache", Some(value)) => disk.cache = named(value).ok_or_else(bad)?,
            ("discard", Some("on")) => disk.discard = true,
            ("discard", Some("off")) => disk.discard = false,
            ("detect-zeroes", None) => disk.detect_zeroes = true,
            ("serial", Some(value)) => disk.serial = Some(value.to_owned()),
            ("iops", Some(value)) => disk.iops = Some(number(value).ok_or_else(bad)?),
            ("bytes-per-second", Some(value)) => {
                disk.bytes_per_second = Some(number(value).ok_or_else(bad)?);
            }
            ("iothread", None) => disk.iothread = true,
            ("boot-order", Some(value)) => disk.boot_order = Some(number(value).ok_or_else(bad)?),
            _ => return Err(bad()),
        }
    }
    match (has_path, has_format) {
        (false, _) => Err(wrong("the path is missing".to_owned())),
        (_, false) => Err(wrong("the format is missing; Godwit does not guess it".to_owned())),
        _ => Ok(disk),
    }
}

/// Whether `--disk` describes a disk whose image is created with the VM: it names a size or a base,
/// not a path.
pub(super) fn is_new(text: &str) -> bool {
    let has = |wanted: &str| pairs(text).any(|(key, _)| key == wanted);
    !has("path") && (has("size") || has("image"))
}

/// Parses `--disk size=SIZE[,image=BASE][,copy=true]`; `None` if its image exists.
pub(super) fn new_disk(text: &str) -> Result<Option<NewDisk>, Failure> {
    if !is_new(text) {
        return Ok(None);
    }
    let mut disk = NewDisk::default();
    for (key, value) in pairs(text) {
        let bad = || {
            let remedy = "use size=SIZE[,image=BASE][,image-format=raw|qcow2][,copy=true]\
                [,format=raw|qcow2][,bus=virtio|scsi|nvme|sata][,datastore=auto|NAME|DIR]";
            Failure::usage(format!("--disk {text}: \"{key}\" is not understood"), remedy)
        };
        match (key, value) {
            ("datastore", Some(value)) => disk.datastore = Some(value.to_owned()),
            ("size", Some(value)) => disk.size = Some(number(value).ok_or_else(bad)?),
            ("image", Some(value)) => disk.base = Some(absolute(Path::new(value))?),
            ("image-format", Some(value)) => {
                disk.base_format = Some(named(value).ok_or_else(bad)?);
            }
            ("copy", Some(value)) => disk.full_copy = number(value).ok_or_else(bad)?,
            ("format", Some(value)) => disk.format = Some(named(value).ok_or_else(bad)?),
            ("bus", Some(value)) => disk.bus = named(value).ok_or_else(bad)?,
            _ => return Err(bad()),
        }
    }
    Ok(Some(disk))
}

/// Parses `--cdrom`.
pub(super) fn cdrom(text: &str) -> Result<Cdrom, Failure> {
    let wrong = |key: &str| {
        let remedy = "use empty or path=FILE, then [,bus=sata|scsi][,boot-order=N]";
        Failure::usage(format!("--cdrom {text}: \"{key}\" is not understood"), remedy)
    };
    let mut drive = Cdrom::default();
    for (key, value) in pairs(text) {
        match (key, value) {
            ("empty", None) => drive.image = None,
            ("path", Some(value)) => drive.image = Some(absolute(Path::new(value))?),
            ("bus", Some(value)) => drive.bus = named(value).ok_or_else(|| wrong(key))?,
            ("boot-order", Some(value)) => {
                drive.boot_order = Some(number(value).ok_or_else(|| wrong(key))?);
            }
            _ => return Err(wrong(key)),
        }
    }
    Ok(drive)
}

/// Returns the VM and its change.
pub(super) fn of_disk(command: &VmDiskCommand) -> Result<(&str, DriveChange), Failure> {
    Ok(match command {
        VmDiskCommand::Attach { name, disk: text } => {
            (name, DriveChange::Attach { disk: Box::new(disk(text, DiskBus::Scsi)?) })
        }
        VmDiskCommand::Detach { name, path } => {
            (name, DriveChange::Detach { path: absolute(path)? })
        }
    })
}

/// Returns the VM and its change.
pub(super) fn of_cdrom(command: &CdromCommand) -> Result<(&str, DriveChange), Failure> {
    Ok(match command {
        CdromCommand::Insert { name, image, drive } => {
            let (image, number, force) = (absolute(image)?, drive.drive, drive.force);
            (name, DriveChange::Insert { image, drive: number, force })
        }
        CdromCommand::Eject { name, drive } => {
            (name, DriveChange::Eject { drive: drive.drive, force: drive.force })
        }
    })
}

fn named<T: DeserializeOwned>(value: &str) -> Option<T> {
    serde_json::from_value(value.into()).ok()
}

fn number<T: FromStr>(value: &str) -> Option<T> {
    value.parse().ok()
}
