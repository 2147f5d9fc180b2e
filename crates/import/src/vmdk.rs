//! Headers of VMDK images (VMware's "Virtual Disk Format 5.0"). They are untrusted: a descriptor
//! can name any file of the host, as an extent or as a parent, and QEMU would open it. So only an
//! image that is whole in its own file is given to QEMU. The one other form is read here: a
//! descriptor with one flat extent beside it, which is a raw image.

use std::io;

use crate::definition::MOST_TEXT_BYTES;
use crate::ovf::check_member;
use crate::shown::shown;

/// Bytes of a sector, the unit of all positions.
pub(crate) const SECTOR: u64 = 512;
pub(crate) const SECTOR_BYTES: usize = 512;
/// First bytes of an image with its own header, and of one that is a descriptor.
pub(crate) const MAGIC: &[u8; 4] = b"KDMV";
const DESCRIPTOR: &[u8] = b"# Disk DescriptorFile";
/// Position of the table when a footer at the end has it.
pub(crate) const AT_END: u64 = u64::MAX;
/// Footer: its marker, the header again, and the end of the stream.
const FOOTER_SECTORS: u64 = 3;
/// Longest embedded descriptor, in sectors. Writers reserve 20.
const MOST_DESCRIPTOR_SECTORS: u64 = 128;
/// Largest disk: 64 TiB.
const MOST_SECTORS: u64 = 64 << 31;

/// An image that is safe to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmdkImage {
    /// It has its own header, and all of its data.
    Sparse { bytes: u64 },
    /// A descriptor. The data is a raw image in the file with this plain name beside it, from this
    /// offset on.
    Flat { file: String, offset: u64, bytes: u64 },
}

/// Why an image is refused.
#[derive(Debug, thiserror::Error)]
pub enum VmdkError {
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    #[error("not a VMDK image")]
    NotVmdk,
    #[error("its header is damaged: {0}")]
    Garbled(&'static str),
    /// It needs other files, which it names.
    #[error("it refers to other files ({0}): convert it into one file first (`qemu-img convert`)")]
    Refers(String),
}

/// Function that reads bytes at an offset of a file.
pub type ReadAt<'a> = &'a dyn Fn(u64, &mut [u8]) -> io::Result<usize>;

struct Header {
    capacity: u64,
    descriptor: (u64, u64),
    table: u64,
}

/// Reads the headers of an image of `length` bytes.
///
/// # Errors
/// It is damaged, or needs files other than a flat extent beside it.
pub fn read_vmdk(read: ReadAt<'_>, length: u64) -> Result<VmdkImage, VmdkError> {
    let head = bytes_at(read, 0, SECTOR)?;
    if head.starts_with(DESCRIPTOR) {
        if length > MOST_TEXT_BYTES as u64 {
            return Err(VmdkError::Garbled("the descriptor is too long"));
        }
        return flat(&bytes_at(read, 0, length)?);
    }
    if head.starts_with(b"COWD") {
        return Err(VmdkError::Refers("it is an extent of an ESX host".to_owned()));
    }
    let header = header(&head)?;
    if header.table == AT_END {
        // QEMU takes the header in the footer for the right one, so both must say the same.
        let at = length
            .checked_sub(FOOTER_SECTORS * SECTOR)
            .ok_or(VmdkError::Garbled("it ends before its footer"))?;
        let footer = self::header(&bytes_at(read, at + SECTOR, SECTOR)?)
            .map_err(|_| VmdkError::Garbled("it ends before its footer"))?;
        if footer.capacity != header.capacity || footer.table == AT_END {
            return Err(VmdkError::Garbled("its footer and its header differ"));
        }
    }
    let (at, sectors) = header.descriptor;
    if at == 0 || sectors == 0 {
        return Err(VmdkError::Refers("it is an extent of a disk in several files".to_owned()));
    }
    if sectors > MOST_DESCRIPTOR_SECTORS || at > length / SECTOR {
        return Err(VmdkError::Garbled("its descriptor is not in it"));
    }
    let text = text_of(&bytes_at(read, at * SECTOR, sectors * SECTOR)?);
    refuse_parent(&text)?;
    let bytes = header.capacity * SECTOR;
    let extents: Vec<Extent> = text.lines().filter_map(extent).collect();
    match &extents[..] {
        [extent] if extent.kind == "SPARSE" && extent.sectors == header.capacity => {
            Ok(VmdkImage::Sparse { bytes })
        }
        [extent] if extent.kind == "SPARSE" => {
            Err(VmdkError::Garbled("its header and its descriptor have different sizes"))
        }
        _ => Err(VmdkError::Refers("its descriptor has several extents, or none".to_owned())),
    }
}

fn header(head: &[u8]) -> Result<Header, VmdkError> {
    if !head.starts_with(MAGIC) || head.len() < 79 {
        return Err(VmdkError::NotVmdk);
    }
    let word = |at: usize| {
        head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    let version = u32::try_from(word(4) & 0xffff_ffff).unwrap_or(0);
    if !(1..=3).contains(&version) {
        return Err(VmdkError::Garbled("its version is unknown"));
    }
    let (capacity, grain) = (word(12), word(20));
    // With no capacity, QEMU takes the embedded descriptor for that of a disk in other files (7.2,
    // block/vmdk.c `vmdk_open_vmdk4`).
    if capacity == 0 || capacity > MOST_SECTORS {
        return Err(VmdkError::Garbled("its size is invalid"));
    }
    if !grain.is_power_of_two() || !(8..=1 << 12).contains(&grain) {
        return Err(VmdkError::Garbled("its grains have an invalid size"));
    }
    Ok(Header { capacity, descriptor: (word(28), word(36)), table: word(56) })
}

/// Reads a descriptor with one flat extent.
fn flat(bytes: &[u8]) -> Result<VmdkImage, VmdkError> {
    let text = text_of(bytes);
    refuse_parent(&text)?;
    let extents: Vec<Extent> = text.lines().filter_map(extent).collect();
    let [extent] = &extents[..] else {
        return Err(VmdkError::Refers(format!("{} extents", extents.len())));
    };
    let kind = extent.kind;
    if !matches!(kind, "FLAT" | "VMFS") {
        return Err(VmdkError::Refers(format!("an extent of type {}", shown(kind))));
    }
    check_member(extent.file).map_err(|_| VmdkError::Refers(shown(extent.file)))?;
    if extent.sectors == 0 || extent.sectors > MOST_SECTORS || extent.offset > MOST_SECTORS {
        return Err(VmdkError::Garbled("its size is invalid"));
    }
    Ok(VmdkImage::Flat {
        file: extent.file.to_owned(),
        offset: extent.offset * SECTOR,
        bytes: extent.sectors * SECTOR,
    })
}

fn refuse_parent(text: &str) -> Result<(), VmdkError> {
    for line in text.lines() {
        let Some((key, value)) = line.split_once('=') else { continue };
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim().trim_matches('"'));
        let has_parent = key == "parentfilenamehint"
            || key == "parentcid" && !value.eq_ignore_ascii_case("ffffffff");
        if has_parent {
            return Err(VmdkError::Refers(format!("its parent {}", shown(value))));
        }
    }
    Ok(())
}

/// A line such as `RW 8192 FLAT "disk-flat.vmdk" 0`.
struct Extent<'a> {
    sectors: u64,
    kind: &'a str,
    file: &'a str,
    offset: u64,
}

fn extent(line: &str) -> Option<Extent<'_>> {
    let mut words = line.split_whitespace();
    words.next().filter(|access| matches!(*access, "RW" | "RDONLY" | "NOACCESS"))?;
    // A size that is not a number matches nothing.
    let sectors = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    let kind = words.next().unwrap_or_default();
    let mut quoted = line.splitn(3, '"').skip(1);
    let file = quoted.next().unwrap_or_default();
    let offset = quoted.next().map_or("0", str::trim);
    let offset = if offset.is_empty() { 0 } else { offset.parse().unwrap_or(u64::MAX) };
    Some(Extent { sectors, kind, file, offset })
}

/// Returns the text up to the first zero byte, which fills the rest.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Reads up to `length` bytes, which the caller has bounded.
pub(crate) fn bytes_at(read: ReadAt<'_>, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    let mut done = 0;
    while done < bytes.len() {
        match read(at + done as u64, &mut bytes[done..])? {
            0 => break,
            count => done += count,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stream::tests::written;

    pub(crate) fn read(bytes: &[u8]) -> Result<VmdkImage, VmdkError> {
        let read_at = |at: u64, buffer: &mut [u8]| {
            let at = usize::try_from(at).unwrap().min(bytes.len());
            let length = buffer.len().min(bytes.len() - at);
            buffer[..length].copy_from_slice(&bytes[at..at + length]);
            Ok(length)
        };
        read_vmdk(&read_at, bytes.len() as u64)
    }

    fn descriptor(extents: &str) -> Vec<u8> {
        format!(
            "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
             createType=\"monolithicFlat\"\n\n# Extent description\n{extents}\n"
        )
        .into_bytes()
    }

    #[test]
    fn an_image_that_is_whole_is_read() {
        let image = written(3 << 20, &[(0, 7), (40, 9)]);
        assert_eq!(read(&image).unwrap(), VmdkImage::Sparse { bytes: 3 << 20 });
        let flat = read(&descriptor("RW 8192 FLAT \"web-flat.vmdk\" 0")).unwrap();
        let wanted =
            VmdkImage::Flat { file: "web-flat.vmdk".to_owned(), offset: 0, bytes: 4 << 20 };
        assert_eq!(flat, wanted);
        let vmfs = read(&descriptor("RW 8192 VMFS \"web-flat.vmdk\"")).unwrap();
        assert_eq!(vmfs, wanted);
    }

    #[test]
    fn one_that_refers_to_other_files_is_refused() {
        for extents in [
            "RW 8192 FLAT \"/etc/shadow\" 0",
            "RW 8192 FLAT \"../secret\" 0",
            "RW 8192 FLAT \"json:{}\" 0",
            "RW 8192 FLAT \"a\" 0\nRW 8192 FLAT \"b\" 0",
            "RW 8192 SPARSE \"web-s001.vmdk\"",
            "parentCID=12345678\nRW 8192 FLAT \"a\" 0",
            "parentFileNameHint=\"base.vmdk\"\nRW 8192 FLAT \"a\" 0",
            "",
        ] {
            let refused = read(&descriptor(extents)).unwrap_err();
            assert!(matches!(refused, VmdkError::Refers(_)), "{extents}: {refused}");
        }
    }

    #[test]
    fn one_that_lies_about_its_size_is_refused() {
        let image = written(3 << 20, &[(0, 7)]);
        let lie = |at: usize, value: u64| {
            let mut image = image.clone();
            let at = if at >= 1 << 20 { image.len() - 1024 + (at - (1 << 20)) } else { at };
            image[at..at + 8].copy_from_slice(&value.to_le_bytes());
            read(&image).unwrap_err().to_string()
        };
        assert!(lie(12, 0).contains("size"));
        assert!(lie(12, u64::MAX).contains("size"));
        assert!(lie(12, 4096).contains("differ"));
        assert!(lie((1 << 20) + 12, 4096).contains("differ"));
        assert!(lie(20, 3).contains("grains"));
        assert!(lie(28, 1 << 40).contains("not in it"));
        assert!(lie(28, 0).contains("several files"));
        assert!(read(&image[..image.len() - 512]).is_err());
        assert!(read(b"KDMV").is_err());
        assert!(read(b"").is_err());
        assert!(read(&descriptor("RW 0 FLAT \"a\" 0")).is_err());
        assert!(read(&descriptor("RW 99999999999999999999 FLAT \"a\" 0")).is_err());
    }

    proptest! {
        #[test]
        fn reading_any_header_does_not_panic(
            changes in prop::collection::vec((0_usize..2048, any::<u8>()), 0..30),
            length in 0_usize..80_000,
        ) {
            let mut image = written(1 << 20, &[(0, 7)]);
            for (at, byte) in changes {
                if let Some(place) = image.get_mut(at) {
                    *place = byte;
                }
            }
            image.truncate(length);
            let _ = read(&image);
        }
    }
}
