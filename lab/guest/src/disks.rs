//! Disks whose content can be checked: pieces of 64 KiB, each made of pages of [`pattern`] whose
//! version is in a table in memory. Knows files, and no devices.
//!
//! A lost write, a piece in the wrong place and a torn piece all differ from the table. The table
//! is in memory, so it moves with the guest and does not depend on its disks.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::memory::Verdict;
use crate::pattern::{self, Entry, Kind, PAGE_BYTES, PAGE_WORDS, Page};

/// Bytes of one write.
pub const PIECE_BYTES: usize = 64 << 10;
/// Pages of a piece.
const PIECE_PAGES: usize = PIECE_BYTES / PAGE_BYTES;
/// Version of a piece that came with the disk's image, from its base.
pub const BASE_VERSION: u64 = 1;

/// Returns the seed of a guest's disk, counted from 0. Guests with one base agree on it.
#[must_use]
pub fn disk_seed(number: usize) -> u64 {
    pattern::mix(0x0067_6469_736b_0000 | number as u64)
}

/// Disk with the version of each of its pieces.
#[derive(Debug)]
pub struct WrittenDisk {
    file: File,
    seed: u64,
    versions: Vec<u64>,
    buffer: Buffer,
    page: Box<Page>,
    expected: Box<Page>,
}

/// One piece, aligned for O_DIRECT.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    skip: usize,
}

impl Buffer {
    fn new() -> Buffer {
        // One page more than a piece, so that it can be aligned.
        let bytes = vec![0; PIECE_BYTES + PAGE_BYTES];
        let skip = (PAGE_BYTES - bytes.as_ptr().addr() % PAGE_BYTES) % PAGE_BYTES;
        Buffer { bytes, skip }
    }

    fn piece(&mut self) -> &mut [u8] {
        &mut self.bytes[self.skip..self.skip + PIECE_BYTES]
    }
}

impl WrittenDisk {
    /// Takes over a disk or an image, whose content is unknown until [`WrittenDisk::fill`].
    #[must_use]
    pub fn new(file: File, seed: u64) -> WrittenDisk {
        WrittenDisk {
            file,
            seed,
            versions: Vec::new(),
            buffer: Buffer::new(),
            page: Box::new([0; PAGE_WORDS]),
            expected: Box::new([0; PAGE_WORDS]),
        }
    }

    /// Writes the first `bytes` (rounded down to whole pieces) in this version, except pieces that
    /// hold [`BASE_VERSION`]. Returns the number of pieces that were written.
    ///
    /// # Errors
    /// The disk cannot be read or written.
    pub fn fill(&mut self, bytes: u64, version: u64) -> io::Result<u64> {
        self.versions.clear();
        let mut written = 0;
        for piece in 0..bytes / PIECE_BYTES as u64 {
            let held = if self.holds(piece, BASE_VERSION)? {
                BASE_VERSION
            } else {
                self.write(piece, version)?;
                written += 1;
                version
            };
            self.versions.push(held);
        }
        self.flush()?;
        Ok(written)
    }

    /// Returns the number of pieces with content.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.versions.len() as u64
    }

    /// Writes a piece (below [`WrittenDisk::pieces`]) in its next version. Returns the time that
    /// the write took.
    ///
    /// # Errors
    /// The disk cannot be written. The piece's content is then unknown.
    pub fn rewrite(&mut self, piece: u64) -> io::Result<Duration> {
        let at = usize::try_from(piece).unwrap_or(usize::MAX);
        let version = self.versions.get(at).map_or(0, |version| version.wrapping_add(1));
        let took = self.write(piece, version)?;
        if let Some(held) = self.versions.get_mut(at) {
            *held = version;
        }
        Ok(took)
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The disk cannot be flushed.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Checks every page of a piece (below [`WrittenDisk::pieces`]), and adds it to the verdict.
    ///
    /// # Errors
    /// The disk cannot be read.
    pub fn verify(&mut self, piece: u64, verdict: &mut Verdict) -> io::Result<()> {
        let at = usize::try_from(piece).unwrap_or(usize::MAX);
        let version = self.versions.get(at).copied().unwrap_or_default();
        self.read(piece)?;
        for number in 0..PIECE_PAGES {
            let index = piece * PIECE_PAGES as u64 + number as u64;
            self.decode(number);
            verdict.pages += 1;
            let entry = entry(version);
            let found = pattern::check(&self.page, self.seed, index, entry, &mut self.expected);
            if let Err(fault) = found {
                verdict.wrong += 1;
                verdict.first_wrong.get_or_insert_with(|| (index, fault.to_string()));
            }
        }
        Ok(())
    }

    /// Returns whether a piece holds a version, without a fault in any of its pages.
    fn holds(&mut self, piece: u64, version: u64) -> io::Result<bool> {
        self.read(piece)?;
        for number in 0..PIECE_PAGES {
            let index = piece * PIECE_PAGES as u64 + number as u64;
            self.decode(number);
            let entry = entry(version);
            // Most pieces fail here, and cheaply.
            let is_held = pattern::header_matches(&self.page, index, entry)
                && pattern::check(&self.page, self.seed, index, entry, &mut self.expected).is_ok();
            if !is_held {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write(&mut self, piece: u64, version: u64) -> io::Result<Duration> {
        for number in 0..PIECE_PAGES {
            let index = piece * PIECE_PAGES as u64 + number as u64;
            pattern::write_whole(&mut self.page, self.seed, index, entry(version));
            let bytes = &mut self.buffer.piece()[number * PAGE_BYTES..(number + 1) * PAGE_BYTES];
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&*self.page) {
                *bytes = word.to_le_bytes();
            }
        }
        let begun = Instant::now();
        self.file.write_all_at(self.buffer.piece(), piece * PIECE_BYTES as u64)?;
        Ok(begun.elapsed())
    }

    fn read(&mut self, piece: u64) -> io::Result<()> {
        self.file.read_exact_at(self.buffer.piece(), piece * PIECE_BYTES as u64)
    }

    /// Takes a page out of the piece that was read last.
    fn decode(&mut self, number: usize) {
        let bytes = &self.buffer.piece()[number * PAGE_BYTES..(number + 1) * PAGE_BYTES];
        for (word, bytes) in self.page.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
    }
}

/// Returns the table's entry of all pages of a piece: random content, so that no compression helps.
fn entry(version: u64) -> Entry {
    Entry { version, base: version, kind: Kind::Random, touch_words: 0 }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::path::PathBuf;

    use super::*;

    /// File of 16 pieces, removed at the end.
    struct Image(PathBuf);

    const PIECES: u64 = 16;

    impl Image {
        fn new(name: &str) -> Image {
            let name = format!("godwit-disks-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            File::create(&path).unwrap().set_len(PIECES * PIECE_BYTES as u64).unwrap();
            Image(path)
        }

        fn open(&self) -> File {
            OpenOptions::new().read(true).write(true).open(&self.0).unwrap()
        }

        fn disk(&self) -> WrittenDisk {
            WrittenDisk::new(self.open(), disk_seed(0))
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn verify(disk: &mut WrittenDisk) -> Verdict {
        let mut verdict = Verdict::default();
        (0..disk.pieces()).for_each(|piece| disk.verify(piece, &mut verdict).unwrap());
        verdict
    }

    #[test]
    fn what_was_written_is_right_until_a_byte_changes() {
        let image = Image::new("right");
        let mut disk = image.disk();
        assert_eq!(disk.fill(PIECES * PIECE_BYTES as u64 + 5, 7).unwrap(), PIECES);
        disk.rewrite(3).unwrap();
        let verdict = verify(&mut disk);
        assert_eq!((verdict.pages, verdict.wrong), (PIECES * PIECE_PAGES as u64, 0));
        image.open().write_all_at(&[0xff], 5 * PAGE_BYTES as u64 + 77).unwrap();
        let verdict = verify(&mut disk);
        assert_eq!(verdict.wrong, 1);
        assert_eq!(verdict.first_wrong.unwrap().0, 5);
    }

    #[test]
    fn a_lost_write_and_a_misplaced_piece_are_found() {
        let image = Image::new("lost");
        let mut disk = image.disk();
        disk.fill(PIECES * PIECE_BYTES as u64, 7).unwrap();
        let (file, mut old) = (image.open(), vec![0; PIECE_BYTES]);
        file.read_exact_at(&mut old, 0).unwrap();
        disk.rewrite(0).unwrap();
        assert_eq!(verify(&mut disk).wrong, 0);
        file.write_all_at(&old, 0).unwrap();
        file.write_all_at(&old, 9 * PIECE_BYTES as u64).unwrap();
        assert_eq!(verify(&mut disk).wrong, 2 * PIECE_PAGES as u64);
    }

    #[test]
    fn what_the_base_holds_is_not_written() {
        let image = Image::new("base");
        let bytes = PIECES * PIECE_BYTES as u64;
        assert_eq!(image.disk().fill(bytes / 4, BASE_VERSION).unwrap(), PIECES / 4);
        let mut disk = image.disk();
        assert_eq!(disk.fill(bytes, 5).unwrap(), PIECES - PIECES / 4);
        assert_eq!(verify(&mut disk).wrong, 0);
        // Another disk of the guest has other content.
        let mut other = WrittenDisk::new(image.open(), disk_seed(1));
        assert_eq!(other.fill(bytes, 5).unwrap(), PIECES);
    }
}
