//! A definition that was read, and why one cannot be.

use std::path::PathBuf;

use godwit_qemu::VmSpec;
use godwit_types::ImportFinding;

/// Longest definition that is read.
pub const MOST_TEXT_BYTES: usize = 1 << 20;
/// Most devices of a definition. No real VM comes near.
pub(crate) const MOST_DEVICES: usize = 512;

/// A definition that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The VM. Its disks are those of `disks`, in that order; their paths are stand-ins. The names
    /// of its networks are the definition's.
    pub spec: VmSpec,
    pub disks: Vec<SourceDisk>,
    /// What cannot be imported or changes.
    pub findings: Vec<ImportFinding>,
}

/// A disk of a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceDisk {
    /// Name in the definition, for findings: `vda`, `scsi0`, `Hard disk 1`.
    pub name: String,
    pub source: DiskSource,
    /// Format that the definition names; `None`: it names none.
    pub format: Option<SourceFormat>,
    /// Size of the disk that the definition promises.
    pub bytes: Option<u64>,
}

/// Where the content of a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSource {
    /// A file or block device, by its absolute path.
    Path(PathBuf),
    /// A volume of the other platform's storage, by that and its name.
    Volume { storage: String, name: String },
    /// A file of the package of the definition, by its plain name.
    Member(String),
    /// None: the disk is empty.
    Empty,
}

/// Format of a disk of another platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    Raw,
    Qcow2,
    Vmdk,
    Vdi,
    Vhdx,
    Vpc,
}

impl SourceFormat {
    /// Returns the name of QEMU's block driver.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SourceFormat::Raw => "raw",
            SourceFormat::Qcow2 => "qcow2",
            SourceFormat::Vmdk => "vmdk",
            SourceFormat::Vdi => "vdi",
            SourceFormat::Vhdx => "vhdx",
            SourceFormat::Vpc => "vpc",
        }
    }

    /// Returns the format with this name of QEMU's block drivers.
    #[must_use]
    pub fn named(name: &str) -> Option<SourceFormat> {
        use SourceFormat::{Qcow2, Raw, Vdi, Vhdx, Vmdk, Vpc};
        [Raw, Qcow2, Vmdk, Vdi, Vhdx, Vpc].into_iter().find(|format| format.name() == name)
    }
}

/// Why a definition cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// It is of no known kind.
    #[error("not a libvirt domain, Proxmox VE configuration, OVF descriptor or OVA")]
    UnknownKind,
    /// It is longer than any real one.
    #[error("it has more than {} KiB", MOST_TEXT_BYTES >> 10)]
    TooLong,
    /// It has more devices than any real one.
    #[error("it has more than {MOST_DEVICES} devices")]
    TooManyDevices,
    #[error("it is not UTF-8 text")]
    NotText,
    /// It is not well-formed, has a document type, or is nested too deep.
    #[error("its XML is invalid: {0}")]
    Xml(String),
    /// A part that it must have is missing or invalid.
    #[error("{0}")]
    Invalid(String),
}
