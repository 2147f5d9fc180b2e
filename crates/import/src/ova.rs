//! Archives of OVF packages (tar). Only headers are read. A member that is not a plain file with a
//! plain name is refused: a link, a directory, a path.

mod write;

use std::io;

use tar::{EntryType, Header};

use crate::definition::{ImportError, MOST_TEXT_BYTES};
use crate::ovf::check_member;
use crate::vmdk::{ReadAt, SECTOR, SECTOR_BYTES, bytes_at};

pub use write::{OvaDisk, OvaWriter};

/// Most members of an archive.
const MOST_MEMBERS: usize = 64;

/// A file of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub name: String,
    /// Offset of its content in the archive.
    pub at: u64,
    pub bytes: u64,
}

/// The members of an archive, of which the first is the descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ova(Vec<Member>);

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum OvaError {
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error("{0}")]
    Invalid(String),
}

impl Ova {
    /// Returns the descriptor.
    #[must_use]
    pub fn descriptor(&self) -> &Member {
        &self.0[0]
    }

    /// Returns the manifest, which has the descriptor's name with another ending.
    #[must_use]
    pub fn manifest(&self) -> Option<&Member> {
        self.0.iter().find(|member| member.name.ends_with(".mf"))
    }

    /// Returns all members.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.0
    }

    /// Returns a member by its name.
    #[must_use]
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.0.iter().find(|member| member.name == name)
    }
}

/// Reads the headers of an archive of `length` bytes.
///
/// # Errors
/// It is damaged, or has a member that is not a plain file.
pub fn ova_members(read: ReadAt<'_>, length: u64) -> Result<Ova, OvaError> {
    let invalid = |why: &str| OvaError::Invalid(format!("the archive is invalid: {why}"));
    let mut members: Vec<Member> = Vec::new();
    let mut at = 0;
    loop {
        let block = bytes_at(read, at, SECTOR)?;
        if block.is_empty() || block.iter().all(|byte| *byte == 0) {
            break;
        }
        if block.len() < SECTOR_BYTES {
            return Err(invalid("it ends within a header"));
        }
        let header = Header::from_byte_slice(&block);
        let member = member(header, at + SECTOR)?;
        let end = member.at.checked_add(member.bytes).filter(|end| *end <= length);
        let end = end.ok_or_else(|| invalid("a member is longer than the archive"))?;
        if members.iter().any(|known| known.name == member.name) {
            return Err(invalid("two members have one name"));
        }
        members.push(member);
        if members.len() > MOST_MEMBERS {
            return Err(invalid("it has more than 64 members"));
        }
        at = end.next_multiple_of(SECTOR);
    }
    match members.first() {
        Some(first) if first.name.to_ascii_lowercase().ends_with(".ovf") => {}
        _ => return Err(invalid("its first member is not an OVF descriptor")),
    }
    if members[0].bytes > MOST_TEXT_BYTES as u64 {
        return Err(ImportError::TooLong.into());
    }
    Ok(Ova(members))
}

fn member(header: &Header, at: u64) -> Result<Member, OvaError> {
    let sum: u32 = header
        .as_bytes()
        .iter()
        .enumerate()
        .map(|(at, byte)| {
            // The field of the sum itself counts as spaces.
            if (148..156).contains(&at) { u32::from(b' ') } else { u32::from(*byte) }
        })
        .sum();
    if header.cksum().ok() != Some(sum) {
        return Err(OvaError::Invalid("the archive is invalid: a header is damaged".to_owned()));
    }
    let name = String::from_utf8_lossy(&header.path_bytes()).into_owned();
    match header.entry_type() {
        EntryType::Regular | EntryType::Continuous => {}
        other => {
            return Err(OvaError::Invalid(format!(
                "the archive has \"{}\", which is not a plain file ({other:?})",
                crate::shown::shown(&name)
            )));
        }
    }
    check_member(&name)?;
    Ok(Member { name, at, bytes: header.entry_size()? })
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn archive(members: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        let mut archive = Vec::new();
        for (name, kind, content) in members {
            let mut header = Header::new_ustar();
            // The crate refuses paths that climb out.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(content.len() as u64);
            header.set_entry_type(*kind);
            header.set_cksum();
            archive.extend(header.as_bytes());
            archive.extend(*content);
            archive.resize(archive.len().next_multiple_of(512), 0);
        }
        archive.extend([0; 1024]);
        archive
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Ova, OvaError> {
        let read_at = |at: u64, buffer: &mut [u8]| {
            let at = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
            let length = buffer.len().min(bytes.len() - at);
            buffer[..length].copy_from_slice(&bytes[at..at + length]);
            Ok(length)
        };
        ova_members(&read_at, bytes.len() as u64)
    }

    #[test]
    fn members_are_found() {
        let file = EntryType::Regular;
        let bytes =
            archive(&[("a.ovf", file, b"<x/>"), ("a.mf", file, b""), ("a.vmdk", file, &[7; 600])]);
        let ova = read(&bytes).unwrap();
        assert_eq!(ova.descriptor().bytes, 4);
        assert!(ova.manifest().is_some());
        let disk = ova.member("a.vmdk").unwrap();
        assert_eq!((disk.at, disk.bytes), (4 * 512, 600));
    }

    #[test]
    fn members_that_lead_elsewhere_are_refused() {
        let file = EntryType::Regular;
        for (name, kind) in [
            ("../a.vmdk", file),
            ("/etc/passwd", file),
            ("sub/a.vmdk", file),
            ("a.vmdk", EntryType::Symlink),
            ("a.vmdk", EntryType::Link),
            ("a.vmdk", EntryType::Char),
            ("a.vmdk", EntryType::GNUSparse),
            ("a.vmdk", EntryType::XHeader),
        ] {
            let bytes = archive(&[("a.ovf", file, b"<x/>"), (name, kind, b"")]);
            assert!(read(&bytes).is_err(), "{name} {kind:?}");
        }
        assert!(read(&archive(&[("a.vmdk", file, b"")])).is_err());
        assert!(read(&archive(&[("a.ovf", file, b""), ("a.ovf", file, b"")])).is_err());
        let mut long = archive(&[("a.ovf", file, b"<x/>")]);
        let mut header = Header::from_byte_slice(&long[..512]).clone();
        header.set_size(u64::MAX >> 1);
        header.set_cksum();
        long[..512].copy_from_slice(header.as_bytes());
        assert!(read(&long).is_err());
        assert!(read(&[0; 512]).is_err());
        assert!(read(&[7; 700]).is_err());
    }

    proptest! {
        #[test]
        fn reading_any_archive_does_not_panic(
            changes in prop::collection::vec((0_usize..2048, any::<u8>()), 0..30),
        ) {
            let file = EntryType::Regular;
            let mut bytes = archive(&[("a.ovf", file, b"<x/>"), ("a.vmdk", file, &[7; 600])]);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            let _ = read(&bytes);
        }
    }
}
