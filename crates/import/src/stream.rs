//! Writes a VMDK image of type streamOptimized (VMware's "Virtual Disk Format 5.0"), from its
//! beginning to its end: the form of disks in OVF packages.

use std::io::{self, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;

use crate::vmdk::{AT_END, MAGIC, SECTOR, SECTOR_BYTES};

/// Bytes of a grain: 128 sectors, the only size that VMware accepts here.
pub const GRAIN_BYTES: usize = 64 << 10;
const GRAIN_SECTORS: u64 = 128;
/// Grains of a table.
const TABLE_GRAINS: usize = 512;
/// Sectors before the first grain: the header, and room for the descriptor.
const OVERHEAD_SECTORS: u64 = 128;
const DESCRIPTOR_SECTORS: usize = 20;
/// Version, and flags: line ends can be checked, grains are compressed, markers are present.
const VERSION: u32 = 3;
const FLAGS: u32 = 1 | 1 << 16 | 1 << 17;
/// Types of markers.
const TABLE: u32 = 1;
const DIRECTORY: u32 = 2;
const FOOTER: u32 = 3;

/// An image that is being written.
pub(crate) struct StreamVmdk<W: Write> {
    out: W,
    /// Sectors written so far.
    at: u64,
    capacity: u64,
    /// Grains so far, of the current table and before.
    next: u64,
    table: Vec<u32>,
    directory: Vec<u32>,
}

impl<W: Write> StreamVmdk<W> {
    /// Begins an image of a disk with this many bytes. `file`: the plain name of the image.
    pub(crate) fn begin(out: W, bytes: u64, file: &str) -> io::Result<StreamVmdk<W>> {
        let capacity = bytes.div_ceil(SECTOR);
        let mut image = StreamVmdk {
            out,
            at: 0,
            capacity,
            next: 0,
            table: vec![0; TABLE_GRAINS],
            directory: Vec::new(),
        };
        image.write(&header(capacity, AT_END))?;
        image.write(&descriptor(capacity, file))?;
        image.pad_to(OVERHEAD_SECTORS)?;
        Ok(image)
    }

    /// Adds the next grain, of [`GRAIN_BYTES`] or, at the end of the disk, fewer. Zeros take no
    /// space.
    pub(crate) fn grain(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > GRAIN_BYTES || self.next * GRAIN_SECTORS >= self.capacity {
            return Err(io::Error::other("a grain is beyond the end of the disk"));
        }
        let index = usize::try_from(self.next % TABLE_GRAINS as u64).unwrap_or(0);
        if bytes.iter().any(|byte| *byte != 0) {
            self.table[index] = sector(self.at)?;
            let mut grain = (self.next * GRAIN_SECTORS).to_le_bytes().to_vec();
            grain.extend([0; 4]);
            let mut encoder = ZlibEncoder::new(grain, Compression::fast());
            encoder.write_all(bytes)?;
            encoder.write_all(&vec![0; GRAIN_BYTES - bytes.len()])?;
            let mut grain = encoder.finish()?;
            let length = u32::try_from(grain.len() - 12).map_err(io::Error::other)?;
            grain[8..12].copy_from_slice(&length.to_le_bytes());
            self.write(&grain)?;
        }
        self.next += 1;
        if index + 1 == TABLE_GRAINS {
            self.end_table()?;
        }
        Ok(())
    }

    /// Ends the image; returns what it was written to.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        if !self.next.is_multiple_of(TABLE_GRAINS as u64) {
            self.end_table()?;
        }
        let tables = self.capacity.div_ceil(GRAIN_SECTORS * TABLE_GRAINS as u64);
        self.directory.resize(usize::try_from(tables).map_err(io::Error::other)?, 0);
        let directory: Vec<u8> =
            self.directory.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        self.marker((directory.len() as u64).div_ceil(SECTOR), DIRECTORY)?;
        let at = self.at;
        self.write(&directory)?;
        self.marker(1, FOOTER)?;
        self.write(&header(self.capacity, at))?;
        // The end of the stream.
        self.marker(0, 0)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn end_table(&mut self) -> io::Result<()> {
        let table = std::mem::replace(&mut self.table, vec![0; TABLE_GRAINS]);
        if table.iter().all(|entry| *entry == 0) {
            self.directory.push(0);
            return Ok(());
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        self.marker(bytes.len() as u64 / SECTOR, TABLE)?;
        self.directory.push(sector(self.at)?);
        self.write(&bytes)
    }

    fn marker(&mut self, sectors: u64, kind: u32) -> io::Result<()> {
        let mut marker = sectors.to_le_bytes().to_vec();
        marker.extend([0; 4]);
        marker.extend(kind.to_le_bytes());
        self.write(&marker)
    }

    /// Writes bytes, and zeros up to the next sector.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        let sectors = (bytes.len() as u64).div_ceil(SECTOR);
        let rest = usize::try_from(sectors * SECTOR).map_err(io::Error::other)? - bytes.len();
        self.out.write_all(&[0; SECTOR_BYTES][..rest])?;
        self.at += sectors;
        Ok(())
    }

    fn pad_to(&mut self, sectors: u64) -> io::Result<()> {
        while self.at < sectors {
            self.write(&[0; SECTOR_BYTES])?;
        }
        Ok(())
    }
}

fn sector(at: u64) -> io::Result<u32> {
    u32::try_from(at).map_err(|_| io::Error::other("the image would have more than 2 TiB"))
}

fn header(capacity: u64, table: u64) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend(FLAGS.to_le_bytes());
    for word in [capacity, GRAIN_SECTORS, 1, DESCRIPTOR_SECTORS as u64] {
        head.extend(word.to_le_bytes());
    }
    head.extend(512_u32.to_le_bytes());
    for word in [0, table, OVERHEAD_SECTORS] {
        head.extend(word.to_le_bytes());
    }
    // Closed properly; line ends; grains are deflated.
    head.push(0);
    head.extend(b"\n \r\n");
    head.extend(1_u16.to_le_bytes());
    head.resize(SECTOR_BYTES, 0);
    head
}

fn descriptor(capacity: u64, file: &str) -> Vec<u8> {
    let cylinders = capacity.div_ceil(16 * 63).clamp(1, 16_383);
    let mut text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
         createType=\"streamOptimized\"\n\n# Extent description\n\
         RW {capacity} SPARSE \"{file}\"\n\n# The Disk Data Base\n#DDB\n\n\
         ddb.adapterType = \"lsilogic\"\nddb.geometry.cylinders = \"{cylinders}\"\n\
         ddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
         ddb.virtualHWVersion = \"13\"\n"
    )
    .into_bytes();
    text.resize(DESCRIPTOR_SECTORS * SECTOR_BYTES, 0);
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::Command;

    use super::*;

    /// Returns an image of a disk, with grains filled with a byte, by their index.
    pub(crate) fn written(bytes: u64, grains: &[(u64, u8)]) -> Vec<u8> {
        let mut image = StreamVmdk::begin(Vec::new(), bytes, "disk.vmdk").unwrap();
        let mut left = bytes;
        let mut index = 0;
        while left > 0 {
            let length = left.min(GRAIN_BYTES as u64);
            let byte = grains.iter().find(|(at, _)| *at == index).map_or(0, |(_, byte)| *byte);
            image.grain(&vec![byte; usize::try_from(length).unwrap()]).unwrap();
            left -= length;
            index += 1;
        }
        image.finish().unwrap()
    }

    #[test]
    fn qemu_reads_what_was_written() {
        if Command::new("qemu-img").arg("--version").output().is_err() {
            eprintln!("skipped: no qemu-img (apt-get install qemu-utils)");
            return;
        }
        let folder = std::env::temp_dir().join(format!("godwit-vmdk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // Two tables and a part of a grain; the first table is empty in the second image.
        let bytes = (32 << 20) + (5 << 16) + 512;
        for grains in [&[(0, 1), (3, 2), (511, 3), (513, 4), (517, 5)][..], &[(513, 4)], &[]] {
            let (image, raw) = (folder.join("a.vmdk"), folder.join("a.raw"));
            std::fs::write(&image, written(bytes, grains)).unwrap();
            let convert = ["convert", "-f", "vmdk", "-O", "raw"];
            let converted =
                Command::new("qemu-img").args(convert).arg(&image).arg(&raw).output().unwrap();
            assert!(converted.status.success(), "{converted:?}");
            let found = std::fs::read(&raw).unwrap();
            assert_eq!(found.len() as u64, bytes);
            for (index, grain) in found.chunks(GRAIN_BYTES).enumerate() {
                let byte = grains.iter().find(|(at, _)| *at == index as u64);
                let byte = byte.map_or(0, |(_, byte)| *byte);
                assert!(grain.iter().all(|found| *found == byte), "grain {index}");
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn grains_beyond_the_end_are_refused() {
        let mut image = StreamVmdk::begin(Vec::new(), 512, "a.vmdk").unwrap();
        assert!(image.grain(&vec![0; GRAIN_BYTES + 1]).is_err());
        image.grain(&[1; 512]).unwrap();
        assert!(image.grain(&[1; 512]).is_err());
    }
}
