//! The headers of images: the few fields of qcow2 that name other files (QEMU's
//! docs/interop/qcow2.txt), and the leading bytes that distinguish other formats from raw images.
//! Pure. The header is untrusted: its author, or a guest that broke out of QEMU, could have written
//! anything. So every offset is bounded.

use std::io;
use std::path::{Path, PathBuf};

use crate::spec::DiskFormat;

/// Bytes of an image that are read: the header, its extensions and the name, all in the first
/// cluster of at most 2 MiB.
pub(super) const HEAD_BYTES: u64 = 2 << 20;
const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Length of the header before version 3, which has no feature bits.
const HEADER_V2_BYTES: u32 = 72;
/// "The external data file bit" of the incompatible features.
const EXTERNAL_DATA: u64 = 1 << 2;
/// Type of the header extension with the backing file's format.
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Longest name that QEMU accepts.
const MOST_NAME_BYTES: u32 = 1023;

/// The backing file of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    /// The name in the header.
    pub(crate) file: String,
    pub(super) format: DiskFormat,
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    /// The image has another format.
    #[error("it is not in qcow2 format")]
    NotQcow2,
    /// The image is named as raw. The guest would find the header where its disk begins, and could
    /// overwrite it.
    #[error("it is in {format} format, not raw")]
    NotRaw { format: &'static str },
    /// The header is invalid.
    #[error("its header is damaged")]
    Garbled,
    /// The header does not name the format of the backing file.
    #[error("it does not specify the format of its backing file \"{file}\"")]
    NoBackingFormat { file: String },
    /// The backing file has a type that this host does not open.
    #[error("its backing file \"{file}\" ({format}) is not a file in raw or qcow2 format")]
    Unsupported { file: String, format: String },
    /// The data is in another file.
    #[error("it keeps its data in another file")]
    ExternalData,
}

impl ImageError {
    pub(super) fn remedy(&self) -> &'static str {
        match self {
            ImageError::Read(_) | ImageError::Garbled => "check it with `qemu-img check`",
            ImageError::NotQcow2 => "give the actual format of the disk image",
            ImageError::NotRaw { format } if *format == DiskFormat::Qcow2.name() => {
                "give format=qcow2"
            }
            ImageError::NotRaw { .. } => "convert it with `qemu-img convert -O qcow2`",
            ImageError::NoBackingFormat { .. } => {
                "specify it with `qemu-img rebase -u -b FILE -F FORMAT`: if it were guessed, a \
                guest could make QEMU open any file"
            }
            ImageError::Unsupported { .. } | ImageError::ExternalData => {
                "convert it into one image with `qemu-img convert`"
            }
        }
    }
}

/// Leading bytes of image formats, with the names of QEMU's block drivers (QEMU 7.2, `block/*.c`,
/// `*_probe`).
const MAGICS: [(&[u8], &str); 8] = [
    (&MAGIC, "qcow2"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vpc"),
    (b"<<< ", "vdi"),
    (b"QED\0", "qed"),
];
/// Most bytes of a raw image that are read to recognize another format.
pub(super) const MAGIC_BYTES: usize = 32;

/// Returns the format of an image, by its leading bytes, if it is not raw.
pub(crate) fn format_of(head: &[u8]) -> Option<&'static str> {
    MAGICS.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, format)| *format)
}

/// Reads the head of an image; `None` if it has no backing file.
pub(crate) fn backing(head: &[u8]) -> Result<Option<Backing>, ImageError> {
    if head.get(..4) != Some(&MAGIC) {
        return Err(ImageError::NotQcow2);
    }
    let version = u32_at(head, 4)?;
    let (offset, length) = (u64_at(head, 8)?, u32_at(head, 16)?);
    let header_bytes = if version >= 3 { u32_at(head, 100)? } else { HEADER_V2_BYTES };
    if version >= 3 && u64_at(head, 72)? & EXTERNAL_DATA != 0 {
        return Err(ImageError::ExternalData);
    }
    if offset == 0 {
        return Ok(None);
    }
    if length > MOST_NAME_BYTES {
        return Err(ImageError::Garbled);
    }
    let name = slice_at(head, usize::try_from(offset).map_err(|_| ImageError::Garbled)?, length)?;
    let file = String::from_utf8(name.to_vec()).map_err(|_| ImageError::Garbled)?;
    // QEMU reads up to the first zero byte, and would mean another file.
    if file.is_empty() || file.contains('\0') {
        return Err(ImageError::Garbled);
    }
    let format = backing_format(head, header_bytes as usize, offset)?;
    let Some(format) = format else { return Err(ImageError::NoBackingFormat { file }) };
    let known =
        [DiskFormat::Raw, DiskFormat::Qcow2].into_iter().find(|known| known.name() == format);
    // QEMU would open `json:` and `nbd://` with its own rights.
    match known.filter(|_| !is_protocol(&file)) {
        Some(format) => Ok(Some(Backing { file, format })),
        None => Err(ImageError::Unsupported { file, format }),
    }
}

/// Returns the size of the disk in the head of an image.
pub(crate) fn virtual_bytes(head: &[u8]) -> Result<u64, ImageError> {
    if head.get(..4) != Some(&MAGIC) {
        return Err(ImageError::NotQcow2);
    }
    u64_at(head, 24)
}

/// Searches the header's extensions, which end before the backing file's name.
fn backing_format(head: &[u8], mut at: usize, end: u64) -> Result<Option<String>, ImageError> {
    let end = usize::try_from(end).map_err(|_| ImageError::Garbled)?;
    while at + 8 <= end {
        let (kind, length) = (u32_at(head, at)?, u32_at(head, at + 4)?);
        if kind == 0 {
            break;
        }
        if kind == BACKING_FORMAT {
            let text = slice_at(head, at + 8, length)?;
            return Ok(Some(String::from_utf8_lossy(text).into_owned()));
        }
        at = (length as usize)
            .checked_next_multiple_of(8)
            .and_then(|bytes| at.checked_add(8 + bytes))
            .ok_or(ImageError::Garbled)?;
    }
    Ok(None)
}

/// Whether the name has a colon before any slash (QEMU's `path_has_protocol`).
fn is_protocol(file: &str) -> bool {
    file.find([':', '/']).is_some_and(|at| file[at..].starts_with(':'))
}

/// Returns a backing file's path, relative to the image that names it.
pub(super) fn resolve(image: &Path, backing: &str) -> PathBuf {
    image.parent().unwrap_or(Path::new("/")).join(backing)
}

fn slice_at(head: &[u8], at: usize, length: u32) -> Result<&[u8], ImageError> {
    let end = at.checked_add(length as usize).ok_or(ImageError::Garbled)?;
    head.get(at..end).ok_or(ImageError::Garbled)
}

fn u32_at(head: &[u8], at: usize) -> Result<u32, ImageError> {
    let bytes = slice_at(head, at, 4)?.try_into().map_err(|_| ImageError::Garbled)?;
    Ok(u32::from_be_bytes(bytes))
}

fn u64_at(head: &[u8], at: usize) -> Result<u64, ImageError> {
    let bytes = slice_at(head, at, 8)?.try_into().map_err(|_| ImageError::Garbled)?;
    Ok(u64::from_be_bytes(bytes))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Builds a header in the layout of `qemu-img create`.
    pub(in crate::launch) fn head(backing: &str, format: Option<&str>) -> Vec<u8> {
        let mut head = vec![0; 4096];
        head[..4].copy_from_slice(&MAGIC);
        head[4..8].copy_from_slice(&3_u32.to_be_bytes());
        head[100..104].copy_from_slice(&112_u32.to_be_bytes());
        if !backing.is_empty() {
            head[8..16].copy_from_slice(&1024_u64.to_be_bytes());
            head[16..20].copy_from_slice(&u32::try_from(backing.len()).unwrap().to_be_bytes());
            head[1024..1024 + backing.len()].copy_from_slice(backing.as_bytes());
        }
        if let Some(format) = format {
            // Behind an extension of another type.
            head[112..120].copy_from_slice(&[0x68, 0x03, 0xf8, 0x57, 0, 0, 0, 3]);
            head[128..132].copy_from_slice(&BACKING_FORMAT.to_be_bytes());
            head[132..136].copy_from_slice(&u32::try_from(format.len()).unwrap().to_be_bytes());
            head[136..136 + format.len()].copy_from_slice(format.as_bytes());
        }
        head
    }

    #[test]
    fn other_formats_are_not_taken_for_raw() {
        for (magic, format) in MAGICS {
            assert!(magic.len() <= MAGIC_BYTES);
            assert_eq!(format_of(&[magic, b" and more"].concat()), Some(format));
            assert_eq!(format_of(&magic[1..]), None);
        }
        // Blank, empty and boot sectors.
        for raw in [&[0; 32][..], b"", b"\xeb\x63\x90\x10\x8e\xd0", b"QFI"] {
            assert_eq!(format_of(raw), None);
        }
    }

    #[test]
    fn the_backing_file_of_an_image_is_read() {
        assert_eq!(backing(&head("", None)).unwrap(), None);
        let found = backing(&head("base.img", Some("raw"))).unwrap().unwrap();
        assert_eq!(found, Backing { file: "base.img".to_owned(), format: DiskFormat::Raw });
        assert_eq!(
            resolve(Path::new("/srv/vm/top.qcow2"), "base.img"),
            Path::new("/srv/vm/base.img")
        );
        assert_eq!(resolve(Path::new("/srv/vm/top.qcow2"), "/img/base"), Path::new("/img/base"));
    }

    #[test]
    fn an_ambiguous_or_remote_backing_file_is_refused() {
        let refused = |head: &[u8]| backing(head).unwrap_err();
        assert!(matches!(refused(&head("base.img", None)), ImageError::NoBackingFormat { .. }));
        assert!(matches!(refused(&head("base.img", Some("vmdk"))), ImageError::Unsupported { .. }));
        assert!(matches!(refused(&head("nbd://h/x", Some("raw"))), ImageError::Unsupported { .. }));
        assert!(matches!(refused(&head("json:{}", Some("raw"))), ImageError::Unsupported { .. }));
        assert!(matches!(refused(&head("/etc/shadow\0.img", Some("raw"))), ImageError::Garbled));
        assert!(matches!(refused(b"not an image"), ImageError::NotQcow2));
        let mut external = head("", None);
        external[79] = 4;
        assert!(matches!(refused(&external), ImageError::ExternalData));
    }

    proptest! {
        #[test]
        fn parsing_any_header_does_not_panic(
            changes in prop::collection::vec((4_usize..200, any::<u8>()), 0..20),
            length in 0_usize..4096,
        ) {
            let mut head = head("base.img", Some("raw"));
            for (at, byte) in changes {
                head[at] = byte;
            }
            head.truncate(length);
            let _ = backing(&head);
        }
    }
}
