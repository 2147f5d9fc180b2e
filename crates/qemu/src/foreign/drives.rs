//! Images of another program's QEMU: block nodes (`-blockdev`) and drives (`-drive`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::size::ByteSize;
use crate::spec::{Disk, DiskCache, DiskFormat, Properties};

/// Longest chain of nodes of one image.
const MOST_NODES: usize = 8;
/// Why an image cannot come whose locks do not keep two QEMUs apart.
const UNLOCKED: &str = "a disk has locking=off: two QEMUs could write it at once";

/// Block nodes and drives by their names.
#[derive(Debug, Default)]
pub(super) struct Drives {
    nodes: BTreeMap<String, Properties>,
    drives: BTreeMap<String, Properties>,
    /// Drives that are flash, by their unit.
    pub(super) flash: BTreeMap<u32, Properties>,
}

/// An image as another program's QEMU has it.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) path: PathBuf,
    pub(super) format: DiskFormat,
    pub(super) readonly: bool,
    discard: bool,
    detect_zeroes: bool,
    iops: Option<u64>,
    bytes_per_second: Option<u64>,
}

impl Image {
    pub(super) fn disk(self) -> Disk {
        Disk {
            readonly: self.readonly,
            discard: self.discard,
            detect_zeroes: self.detect_zeroes,
            iops: self.iops,
            bytes_per_second: self.bytes_per_second.map(ByteSize::from_bytes),
            cache: DiskCache::Writeback,
            ..Disk::new(self.path, self.format)
        }
    }
}

impl Drives {
    pub(super) fn add_node(&mut self, node: Properties) -> Result<(), String> {
        let name = node.get("node-name").ok_or("a block node has no name")?;
        self.nodes.insert(name, node);
        Ok(())
    }

    pub(super) fn add_drive(&mut self, drive: Properties) -> Result<(), String> {
        match drive.get("if").as_deref() {
            Some("none") => {
                let id = drive.get("id").ok_or("a drive with if=none has no id")?;
                self.drives.insert(id, drive);
                Ok(())
            }
            Some("pflash") => {
                let unit = drive.get("unit").map_or(Ok(self.flash.len()), |unit| unit.parse());
                let unit = unit.ok().and_then(|unit: usize| u32::try_from(unit).ok());
                self.flash.insert(unit.ok_or("a drive has an invalid unit")?, drive);
                Ok(())
            }
            other => {
                let other = other.unwrap_or("ide");
                Err(format!("a drive has if={other}: QEMU chooses its device itself"))
            }
        }
    }

    /// Whether a name is that of an empty drive.
    pub(super) fn is_empty(&self, name: &str) -> bool {
        self.drives.get(name).is_some_and(|drive| drive.get("file").is_none())
    }

    /// Finds the image behind the node or drive of that name.
    pub(super) fn image(&self, name: &str) -> Result<Image, String> {
        match self.drives.get(name) {
            Some(drive) => of_drive(drive),
            None => self.of_node(name),
        }
    }

    fn of_node(&self, name: &str) -> Result<Image, String> {
        let mut at = self.node(name)?;
        let mut found = Image {
            path: PathBuf::new(),
            format: DiskFormat::Raw,
            readonly: false,
            discard: false,
            detect_zeroes: false,
            iops: None,
            bytes_per_second: None,
        };
        let (mut has_format, mut unlocked) = (false, false);
        for _ in 0..MOST_NODES {
            found.readonly |= at.is_on("read-only");
            unlocked |= is_unlocked(&at);
            found.discard |= at.get("discard").as_deref() == Some("unmap");
            found.detect_zeroes |= at.get("detect-zeroes").is_some_and(|value| value != "off");
            let driver = at.get("driver").unwrap_or_default();
            match driver.as_str() {
                "file" | "host_device" => {
                    found.path = path_of(&at.get("filename").unwrap_or_default())?;
                    return match unlocked && !found.readonly {
                        true => Err(UNLOCKED.to_owned()),
                        false => Ok(found),
                    };
                }
                // A raw node may have one of another format below it only in odd hands.
                "raw" | "qcow2" if !has_format => {
                    has_format = true;
                    found.format = match driver.as_str() {
                        "qcow2" => DiskFormat::Qcow2,
                        _ => DiskFormat::Raw,
                    };
                    let parts = at.fields();
                    let odd = parts.iter().find(|(key, _)| {
                        matches!(key.as_str(), "offset" | "size" | "data-file")
                            || key.starts_with("encrypt")
                    });
                    if let Some((key, _)) = odd {
                        return Err(format!("a disk has property {key} of driver {driver}"));
                    }
                }
                _ => return Err(format!("a disk is on block driver \"{driver}\"")),
            }
            at = match at.get("file") {
                Some(below) => self.node(&below)?,
                None => below(&at)?,
            };
        }
        Err(format!("block node {name} has no file"))
    }

    fn node(&self, name: &str) -> Result<Properties, String> {
        self.nodes.get(name).cloned().ok_or_else(|| format!("there is no block node \"{name}\""))
    }
}

/// Returns the node that is inside of another one.
fn below(node: &Properties) -> Result<Properties, String> {
    let inner = node
        .fields()
        .into_iter()
        .filter_map(|(key, value)| key.strip_prefix("file.").map(|key| (key.to_owned(), value)));
    let inner: Vec<_> = inner.collect();
    if inner.is_empty() {
        return Err("a block node has no file".to_owned());
    }
    Ok(Properties::Text(inner))
}

/// Whether QEMU's locks are switched off, for a node or one inside of it.
fn is_unlocked(node: &Properties) -> bool {
    node.fields().iter().any(|(key, value)| {
        (key == "locking" || key.ends_with(".locking")) && !matches!(value.as_str(), "on" | "auto")
    })
}

fn of_drive(drive: &Properties) -> Result<Image, String> {
    if drive.is_on("snapshot") {
        return Err("a drive has snapshot=on: its changes are in a file without a name".to_owned());
    }
    let format = match drive.get("format").as_deref() {
        Some("raw") => DiskFormat::Raw,
        Some("qcow2") => DiskFormat::Qcow2,
        Some(other) => return Err(format!("a disk has format {other}")),
        None => return Err("a drive names no format".to_owned()),
    };
    let number = |keys: [&str; 2]| keys.iter().find_map(|key| drive.get(key)?.parse::<u64>().ok());
    let has_other_limit = drive.fields().iter().any(|(key, _)| {
        key.starts_with("throttling.")
            && !["throttling.iops-total", "throttling.bps-total"].contains(&key.as_str())
    });
    if has_other_limit {
        return Err("a drive has limits other than of all requests together".to_owned());
    }
    let readonly = drive.is_on("readonly") || drive.is_on("read-only");
    if is_unlocked(drive) && !readonly {
        return Err(UNLOCKED.to_owned());
    }
    Ok(Image {
        path: path_of(&drive.get("file").unwrap_or_default())?,
        format,
        readonly,
        discard: matches!(drive.get("discard").as_deref(), Some("unmap" | "on")),
        detect_zeroes: drive.get("detect-zeroes").is_some_and(|value| value != "off"),
        iops: number(["throttling.iops-total", "iops"]).filter(|limit| *limit > 0),
        bytes_per_second: number(["throttling.bps-total", "bps"]).filter(|limit| *limit > 0),
    })
}

/// Returns the path of a local file or device.
fn path_of(file: &str) -> Result<PathBuf, String> {
    let file = file.strip_prefix("file:").unwrap_or(file);
    if file.starts_with('/') {
        return Ok(PathBuf::from(file));
    }
    Err(format!("a disk is \"{file}\", which is not the absolute path of a file"))
}

/// Returns the path of an image of firmware in flash.
pub(super) fn flash_path(drive: &Properties) -> Result<PathBuf, String> {
    of_drive(drive).and_then(|image| match image.format {
        DiskFormat::Raw => Ok(image.path),
        DiskFormat::Qcow2 => Err("its firmware is in an image of format qcow2".to_owned()),
    })
}
