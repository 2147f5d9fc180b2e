//! Disks of a VM, and the backing chains of their images.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::SpecError;
use crate::spec::checks::check_path;

/// Most backing files of a disk. A longer chain is a loop.
pub(crate) const MOST_BACKING_FILES: usize = 31;

/// A disk: an image at a path that exists on every host of the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Disk {
    /// Absolute path of the image.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: PathBuf,
    /// Format of the image. Never guessed from its content: a guest could write another header into
    /// a raw image.
    pub format: DiskFormat,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub readonly: bool,
}

/// Formats of disk images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum DiskFormat {
    /// The bytes of the disk without a header.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl DiskFormat {
    /// Returns the name of QEMU's block driver.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DiskFormat::Raw => "raw",
            DiskFormat::Qcow2 => "qcow2",
        }
    }
}

/// A disk with its backing chain. A guest or the author of an image can change the chain in the
/// image's header, so it is recorded when an operator names the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResolvedDisk {
    /// See [`Disk::path`].
    pub path: PathBuf,
    /// See [`Disk::format`].
    pub format: DiskFormat,
    /// See [`Disk::readonly`].
    #[serde(default)]
    pub readonly: bool,
    /// Backing files, from the image's own down to the last one. `None`: not recorded, as in
    /// definitions of releases that recorded no chains. A raw image has no chain to record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<Vec<BackingFile>>,
}

impl From<Disk> for ResolvedDisk {
    fn from(disk: Disk) -> Self {
        ResolvedDisk {
            path: disk.path,
            format: disk.format,
            readonly: disk.readonly,
            backing: None,
        }
    }
}

impl ResolvedDisk {
    /// Returns the disk as its user describes it.
    #[must_use]
    pub fn to_disk(&self) -> Disk {
        Disk { path: self.path.clone(), format: self.format, readonly: self.readonly }
    }
}

/// A backing file of an image, or of another backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingFile {
    /// Real path, with every link resolved.
    pub path: PathBuf,
    pub format: DiskFormat,
}

impl fmt::Display for BackingFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path.display(), self.format.name())
    }
}
/// Checks a chain that a peer sent.
///
/// # Errors
/// It is too long, or a path in it is invalid.
pub(super) fn check_chain(backing: &[BackingFile]) -> Result<(), SpecError> {
    if let Some(beyond) = backing.get(MOST_BACKING_FILES) {
        return Err(SpecError::Path {
            role: "backing file",
            path: beyond.path.clone(),
            why: "beyond the longest backing chain",
        });
    }
    backing.iter().try_for_each(|file| check_path("backing file", &file.path))
}
