//! Definitions of VMs as other platforms write them: libvirt domains, Proxmox VE configurations,
//! OVF descriptors. Reads them into a [`VmSpec`], and writes them from one.
//!
//! Pure: it reads the bytes that it is given, and opens nothing. It knows no host. What a
//! definition says is untrusted: its size, its depth and the number of its devices are bounded, and
//! a document with a document type (entities) is refused. What cannot be imported, or changes, is a
//! [`Finding`] with its reason; one that refuses the import is known before anything is created.

mod finding;
mod kind;
mod libvirt;
mod manifest;
mod names;
mod nbd;
mod ova;
mod ovf;
mod proxmox;
mod stream;
mod vmdk;
mod xml;

use std::path::PathBuf;

use godwit_qemu::VmSpec;

pub use finding::Finding;
pub use kind::{Kind, kind_of};
pub use libvirt::{DomainDisk, write_domain};
pub use manifest::{Digest, Manifest};
pub use nbd::{NbdAddress, NbdError, NbdExport, parse_nbd};
pub use ova::{Member, Ova, OvaError, ova_members, pad_to_block, tar_header};
pub use ovf::{ExportedDisk, ovf_changes, write_ovf};
pub use stream::StreamVmdk;
pub use vmdk::{ReadAt, VmdkError, VmdkImage, read_vmdk};

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
    pub findings: Vec<Finding>,
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
    #[error("it is no libvirt domain, Proxmox VE configuration, OVF descriptor or OVA")]
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

/// Reads a definition of a known kind.
///
/// # Errors
/// It cannot be read as that.
pub fn read(kind: Kind, text: &[u8]) -> Result<Imported, ImportError> {
    if text.len() > MOST_TEXT_BYTES {
        return Err(ImportError::TooLong);
    }
    let text = std::str::from_utf8(text).map_err(|_| ImportError::NotText)?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut imported = match kind {
        Kind::Libvirt => libvirt::read(text),
        Kind::Proxmox => proxmox::read(text),
        Kind::Ovf => ovf::read(text),
        Kind::Ova => return Err(ImportError::UnknownKind),
    }?;
    names::tidy(&mut imported.spec, &mut imported.findings);
    Ok(imported)
}

#[cfg(test)]
mod tests;
