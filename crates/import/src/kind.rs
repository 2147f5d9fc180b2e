//! The kind of a definition, by its content.

use crate::definition::ImportError;
use crate::xml;

/// Kind of a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// XML of a libvirt domain.
    Libvirt,
    /// A Proxmox VE configuration (`qemu-server/ID.conf`).
    Proxmox,
    /// An OVF descriptor.
    Ovf,
    /// An archive of an OVF descriptor and its disks.
    Ova,
}

/// Position and value of the magic of a tar archive (POSIX ustar, and GNU).
const TAR_MAGIC: (usize, &[u8]) = (257, b"ustar");

/// Returns the kind of a definition by its first bytes: all of a text, or at least 512 of an
/// archive. Its name decides nothing.
///
/// # Errors
/// It is of no known kind.
pub fn kind_of(head: &[u8]) -> Result<Kind, ImportError> {
    if head.get(TAR_MAGIC.0..).is_some_and(|rest| rest.starts_with(TAR_MAGIC.1)) {
        return Ok(Kind::Ova);
    }
    let text = head.strip_prefix("\u{feff}".as_bytes()).unwrap_or(head).trim_ascii_start();
    if text.starts_with(b"<") {
        if text.len() > crate::definition::MOST_TEXT_BYTES {
            return Err(ImportError::TooLong);
        }
        let text = std::str::from_utf8(text).map_err(|_| ImportError::NotText)?;
        let document = xml::parse(text)?;
        return match document.root_element().tag_name().name() {
            "domain" | "domstatus" => Ok(Kind::Libvirt),
            "Envelope" => Ok(Kind::Ovf),
            _ => Err(ImportError::UnknownKind),
        };
    }
    let mut lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_start);
    let is_key = |line: &[u8]| {
        [&b"memory:"[..], b"cores:", b"ostype:", b"scsihw:", b"net0:", b"bootdisk:", b"boot:"]
            .iter()
            .any(|key| line.starts_with(key))
    };
    if lines.any(is_key) { Ok(Kind::Proxmox) } else { Err(ImportError::UnknownKind) }
}
