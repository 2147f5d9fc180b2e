//! Definitions of VMs as other platforms write them: libvirt domains, Proxmox VE configurations,
//! OVF descriptors. Reads them into a [`VmSpec`](godwit_qemu::VmSpec), and writes them from one.
//!
//! Pure: it reads and writes what it is given, and opens nothing. It knows no host. What a
//! definition says is untrusted: its size, its depth and the number of its devices are bounded, and
//! a document with a document type (entities) is refused. What cannot be imported, or changes, is
//! an [`ImportFinding`](godwit_types::ImportFinding) with its reason; one that refuses the import
//! is known before anything is created.

mod definition;
mod finding;
mod kind;
mod libvirt;
mod manifest;
mod names;
mod ova;
mod ovf;
mod proxmox;
mod shown;
mod stream;
mod vhd;
mod vmdk;
mod xml;

pub use definition::{
    DiskSource, ImportError, Imported, MOST_TEXT_BYTES, SourceDisk, SourceFormat,
};
pub use kind::{Kind, kind_of};
pub use libvirt::{DomainDisk, write_domain};
pub use manifest::{Digest, Manifest};
pub use names::vm_name;
pub use ova::{Member, Ova, OvaDisk, OvaError, OvaWriter, ova_members};
pub use ovf::ovf_changes;
pub use stream::GRAIN_BYTES;
pub use vhd::{VHD_FOOTER_BYTES, check_vhd};
pub use vmdk::{ReadAt, VmdkError, VmdkImage, read_vmdk};

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
