//! An archive of an OVF package, from its descriptor to the disks, in one pass.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};

use godwit_qemu::VmSpec;
use tar::{EntryType, Header};

use crate::manifest::{Digest, Manifest};
use crate::ovf::{ExportedDisk, write_ovf};
use crate::stream::StreamVmdk;
use crate::vmdk::{SECTOR, SECTOR_BYTES};

/// Bytes of zeros at the end of an archive.
const END_BYTES: usize = 2 * SECTOR_BYTES;

/// An archive that is being written. The descriptor is first, and has its room from the beginning;
/// it is written last, when the sizes of the images are known.
pub struct OvaWriter<'s, W> {
    spec: &'s VmSpec,
    out: W,
    disks: Vec<ExportedDisk>,
    manifest: Manifest,
    seconds: u64,
    /// Room of the descriptor.
    room: u64,
}

impl<'s, W: Write + Seek> OvaWriter<'s, W> {
    /// Begins the archive of a VM at the beginning of `out`. `bytes`: sizes of its disks.
    /// `seconds`: time of the members, since 1970.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn begin(
        spec: &'s VmSpec,
        bytes: &[u64],
        mut out: W,
        seconds: u64,
    ) -> io::Result<OvaWriter<'s, W>> {
        let disks: Vec<_> = bytes
            .iter()
            .enumerate()
            .map(|(index, bytes)| ExportedDisk {
                file: format!("{}-disk{index}.vmdk", spec.name),
                // The longest number.
                file_bytes: u64::MAX,
                bytes: *bytes,
            })
            .collect();
        let room = (write_ovf(spec, &disks).len() as u64).next_multiple_of(SECTOR);
        out.seek(SeekFrom::Start(SECTOR + room))?;
        Ok(OvaWriter { spec, out, disks, manifest: Manifest::default(), seconds, room })
    }

    /// Begins the image of a disk, by the disk's index. It follows the one that was finished last.
    ///
    /// # Errors
    /// It cannot be written, or the package has no such disk.
    pub fn begin_disk(&mut self, index: usize) -> io::Result<OvaDisk<'_, W>> {
        let disk = self.disks.get_mut(index);
        let disk = disk.ok_or_else(|| io::Error::other("the package has no such disk"))?;
        let header = self.out.stream_position()?;
        self.out.seek(SeekFrom::Start(header + SECTOR))?;
        let out = BufWriter::new(&mut self.out);
        let out = Hashed { out, digest: Digest::sha256(), bytes: 0 };
        let image = StreamVmdk::begin(out, disk.bytes, &disk.file)?;
        Ok(OvaDisk { image, header, disk, manifest: &mut self.manifest, seconds: self.seconds })
    }

    /// Writes the manifest and the descriptor, after the last disk.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn finish(mut self) -> io::Result<()> {
        let mut text = write_ovf(self.spec, &self.disks).into_bytes();
        let room = usize::try_from(self.room).map_err(io::Error::other)?;
        // White space may follow the last element.
        text.resize(room, b'\n');
        let mut digest = Digest::sha256();
        digest.update(&text);
        let name = format!("{}.ovf", self.spec.name);
        self.manifest.add(&name, digest.hex());
        let manifest = self.manifest.text().into_bytes();
        let length = manifest.len() as u64;
        self.out.write_all(&tar_header(
            &format!("{}.mf", self.spec.name),
            length,
            self.seconds,
        )?)?;
        self.out.write_all(&manifest)?;
        self.out.write_all(&vec![0; pad_to_block(length) + END_BYTES])?;
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&tar_header(&name, self.room, self.seconds)?)?;
        self.out.write_all(&text)?;
        self.out.flush()
    }
}

/// A disk of an archive that is being written.
pub struct OvaDisk<'a, W: Write> {
    image: StreamVmdk<Hashed<&'a mut W>>,
    /// Offset of its header.
    header: u64,
    disk: &'a mut ExportedDisk,
    manifest: &'a mut Manifest,
    seconds: u64,
}

impl<W: Write + Seek> OvaDisk<'_, W> {
    /// Adds the next grain, of [`GRAIN_BYTES`](crate::GRAIN_BYTES) or, at the end of the disk,
    /// fewer.
    ///
    /// # Errors
    /// It cannot be written, or is beyond the end.
    pub fn grain(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.image.grain(bytes)
    }

    /// Ends the image and writes its header.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn finish(self) -> io::Result<()> {
        let OvaDisk { image, header, disk, manifest, seconds } = self;
        let Hashed { out, digest, bytes } = image.finish()?;
        let out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        out.write_all(&vec![0; pad_to_block(bytes)])?;
        let end = out.stream_position()?;
        out.seek(SeekFrom::Start(header))?;
        out.write_all(&tar_header(&disk.file, bytes, seconds)?)?;
        out.seek(SeekFrom::Start(end))?;
        disk.file_bytes = bytes;
        manifest.add(&disk.file, digest.hex());
        Ok(())
    }
}

/// A file whose digest is computed while it is written.
struct Hashed<W: Write> {
    out: BufWriter<W>,
    digest: Digest,
    bytes: u64,
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.out.write(bytes)?;
        self.digest.update(&bytes[..length]);
        self.bytes += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Returns the header of a member. It fails if the name is too long.
fn tar_header(name: &str, bytes: u64, seconds: u64) -> io::Result<[u8; SECTOR_BYTES]> {
    let mut header = Header::new_ustar();
    header.set_path(name)?;
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_mtime(seconds);
    header.set_entry_type(EntryType::Regular);
    header.set_cksum();
    Ok(*header.as_bytes())
}

/// Returns how many bytes of zeros follow a member of this length.
fn pad_to_block(bytes: u64) -> usize {
    let rest = bytes.next_multiple_of(SECTOR) - bytes;
    usize::try_from(rest).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::{GRAIN_BYTES, Kind, Member, VmdkImage, ova, vmdk};

    #[test]
    fn headers_are_of_ustar() {
        assert_eq!(tar_header("a.ovf", 4, 0).unwrap()[257..262], *b"ustar");
        assert_eq!((pad_to_block(0), pad_to_block(513)), (0, 511));
        // More than the 8 GiB of an octal size.
        let header = tar_header("big.vmdk", 20 << 30, 0).unwrap();
        assert_eq!(Header::from_byte_slice(&header).entry_size().unwrap(), 20 << 30);
    }

    #[test]
    fn an_archive_that_was_written_is_read_again() {
        let spec = VmSpec::new("web");
        let sizes = [3 << 20, GRAIN_BYTES as u64 + 512];
        let mut archive = Cursor::new(Vec::new());
        let mut writer = OvaWriter::begin(&spec, &sizes, &mut archive, 7).unwrap();
        for (index, bytes) in sizes.into_iter().enumerate() {
            let mut disk = writer.begin_disk(index).unwrap();
            let mut left = usize::try_from(bytes).unwrap();
            while left > 0 {
                let length = left.min(GRAIN_BYTES);
                disk.grain(&vec![7; length]).unwrap();
                left -= length;
            }
            assert!(disk.grain(&[7]).is_err());
            disk.finish().unwrap();
        }
        assert!(writer.begin_disk(2).is_err());
        writer.finish().unwrap();

        let archive = archive.into_inner();
        let content = |member: &Member| {
            let at = usize::try_from(member.at).unwrap();
            &archive[at..at + usize::try_from(member.bytes).unwrap()]
        };
        let read = ova::tests::read(&archive).unwrap();
        let names: Vec<_> = read.members().iter().map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["web.ovf", "web-disk0.vmdk", "web-disk1.vmdk", "web.mf"]);
        let imported = crate::read(Kind::Ovf, content(read.descriptor())).unwrap();
        let promised: Vec<_> = imported.disks.iter().filter_map(|disk| disk.bytes).collect();
        assert_eq!(promised, sizes);
        let manifest = String::from_utf8_lossy(content(read.manifest().unwrap())).into_owned();
        let manifest = Manifest::parse(&manifest).unwrap();
        for member in &read.members()[..3] {
            let (mut digest, wanted) = manifest.check_of(&member.name).unwrap();
            digest.update(content(member));
            assert_eq!(digest.hex(), wanted, "{}", member.name);
        }
        for (member, bytes) in read.members()[1..3].iter().zip(sizes) {
            let image = vmdk::tests::read(content(member)).unwrap();
            assert_eq!(image, VmdkImage::Sparse { bytes });
        }
    }
}
