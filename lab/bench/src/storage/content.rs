//! Content of disks as guests have them: files of this machine, each from the beginning of a block
//! as in a file system. Knows no images.

use std::fs::{self, DirEntry, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use zstd::bulk::Compressor;

/// Folders whose files are taken, in this order.
pub(super) const FOLDERS: [&str; 3] = ["/usr/lib", "/usr/bin", "/usr/share"];
/// Bytes that are compressed at a time; sizes and places of content are multiples of it.
pub(super) const BLOCK_BYTES: usize = 64 << 10;
/// Block of a file system.
const FILE_BLOCK_BYTES: usize = 4 << 10;
/// Most that is taken of one file, so that no file makes up a disk.
const MOST_FILE_BYTES: u64 = 64 << 20;
/// The level at which Godwit compresses.
const ZSTD_LEVEL: i32 = 1;

/// What the disks hold, apart from what the guest rewrites.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Content {
    /// Random bytes, which nothing compresses
    Random,
    /// Files of this machine
    Files,
}

/// Content of all disks, in one file: the first disk's, then the next one's.
#[derive(Debug)]
pub(super) struct FileContent {
    pub(super) path: PathBuf,
    pub(super) bytes_per_disk: u64,
    /// Size, divided by the size after compression with zstd in blocks of 64 KiB.
    pub(super) zstd_ratio: f64,
}

impl FileContent {
    /// Writes the content of `disks` disks into a new file. The same files give the same content.
    ///
    /// `bytes_per_disk` is a multiple of [`BLOCK_BYTES`].
    pub(super) fn write<P: AsRef<Path>>(
        path: &Path,
        folders: &[P],
        disks: u64,
        bytes_per_disk: u64,
    ) -> Result<FileContent> {
        let bytes = disks * bytes_per_disk;
        let (mut files, mut found_bytes) = (Vec::new(), 0);
        for folder in folders {
            find(folder.as_ref(), bytes, &mut files, &mut found_bytes)?;
        }
        ensure!(!files.is_empty(), "there are no files for the content of disks");
        let made =
            File::create_new(path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut sink = Sink::new(made, bytes / BLOCK_BYTES as u64)?;
        for repetition in 0.. {
            if sink.blocks_left == 0 {
                break;
            }
            // Otherwise the blocks of a repetition could be those of the former one.
            sink.begin_at(repetition * FILE_BLOCK_BYTES % BLOCK_BYTES)?;
            for file in &files {
                sink.put_file(file).with_context(|| format!("cannot copy {}", file.display()))?;
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes far below 8 PiB")]
        let zstd_ratio = bytes as f64 / sink.packed_bytes.max(1) as f64;
        Ok(FileContent { path: path.to_owned(), bytes_per_disk, zstd_ratio })
    }
}

/// Collects the files below a folder, by name, until they have so many bytes. Follows no links.
fn find(folder: &Path, wanted: u64, files: &mut Vec<PathBuf>, bytes: &mut u64) -> Result<()> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<DirEntry>>>);
    let mut entries = entries.with_context(|| format!("cannot list {}", folder.display()))?;
    entries.sort_by_key(DirEntry::file_name);
    for entry in entries {
        if *bytes >= wanted {
            break;
        }
        // Of the link, if it is one.
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            find(&entry.path(), wanted, files, bytes)?;
        } else if metadata.is_file() && metadata.len() > 0 {
            let taken = metadata.len().min(MOST_FILE_BYTES);
            *bytes += taken.next_multiple_of(FILE_BLOCK_BYTES as u64);
            files.push(entry.path());
        }
    }
    Ok(())
}

/// File that is written block by block, up to its size.
struct Sink {
    file: File,
    block: Vec<u8>,
    blocks_left: u64,
    compressor: Compressor<'static>,
    packed_bytes: u64,
}

impl Sink {
    fn new(file: File, blocks: u64) -> io::Result<Sink> {
        Ok(Sink {
            file,
            block: Vec::with_capacity(BLOCK_BYTES),
            blocks_left: blocks,
            compressor: Compressor::new(ZSTD_LEVEL)?,
            packed_bytes: 0,
        })
    }

    /// Fills up with zeros to a place in a block.
    fn begin_at(&mut self, place: usize) -> io::Result<()> {
        let gap = (place + BLOCK_BYTES - self.block.len()) % BLOCK_BYTES;
        self.put(&[0; BLOCK_BYTES][..gap])
    }

    /// Appends a file, and fills up its last block.
    fn put_file(&mut self, path: &Path) -> io::Result<()> {
        if self.blocks_left == 0 {
            return Ok(());
        }
        let mut file = File::open(path)?.take(MOST_FILE_BYTES);
        let mut buffer = vec![0; BLOCK_BYTES];
        while self.blocks_left > 0 {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            self.put(&buffer[..count])?;
        }
        let over = self.block.len().next_multiple_of(FILE_BLOCK_BYTES) - self.block.len();
        self.put(&[0; FILE_BLOCK_BYTES][..over])
    }

    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && self.blocks_left > 0 {
            let room = BLOCK_BYTES - self.block.len();
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() == BLOCK_BYTES {
                self.end_block()?;
            }
        }
        Ok(())
    }

    fn end_block(&mut self) -> io::Result<()> {
        self.file.write_all(&self.block)?;
        let packed = self.compressor.compress(&self.block)?.len();
        self.packed_bytes += packed.min(BLOCK_BYTES) as u64;
        self.blocks_left -= 1;
        self.block.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::unix::fs::symlink;

    use super::*;

    const DISK_BYTES: u64 = 8 * BLOCK_BYTES as u64;

    /// Makes a folder with three blocks of text in files and a folder.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let text = |first: u32| {
            (first..).map(|line| format!("line {line}\n")).take(9000).collect::<String>()
        };
        fs::create_dir(folder.path().join("b")).unwrap();
        fs::write(folder.path().join("b/text"), text(0)).unwrap();
        fs::write(folder.path().join("a"), text(50_000)).unwrap();
        fs::write(folder.path().join("empty"), "").unwrap();
        symlink("/", folder.path().join("link")).unwrap();
        folder
    }

    fn write(folder: &Path, to: &Path) -> (FileContent, Vec<u8>) {
        let content = FileContent::write(to, &[folder], 2, DISK_BYTES).unwrap();
        (content, fs::read(to).unwrap())
    }

    #[test]
    fn the_same_files_give_the_same_content_and_each_disk_its_own() {
        let (files, out) = (folder(), tempfile::tempdir().unwrap());
        let (content, bytes) = write(files.path(), &out.path().join("one"));
        assert_eq!(bytes.len() as u64, 2 * DISK_BYTES);
        assert!(bytes.starts_with(b"line 50000\n"));
        assert!(content.zstd_ratio > 2.0, "{content:?}");
        assert_eq!(bytes, write(files.path(), &out.path().join("other")).1);
        // Few files are repeated, and no block is.
        let blocks: HashSet<&[u8]> = bytes.chunks(BLOCK_BYTES).collect();
        assert_eq!(blocks.len() as u64, 2 * DISK_BYTES / BLOCK_BYTES as u64);
    }

    #[test]
    fn without_files_there_is_no_content() {
        let (files, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let to = out.path().join("one");
        assert!(FileContent::write(&to, &[files.path()], 1, DISK_BYTES).is_err());
        assert!(FileContent::write(&to, &["/no/such/folder"], 1, DISK_BYTES).is_err());
        assert!(!to.exists());
    }

    #[test]
    fn no_more_files_are_found_than_needed() {
        let (folder, mut found, mut bytes) = (folder(), Vec::new(), 0);
        find(folder.path(), 1, &mut found, &mut bytes).unwrap();
        assert_eq!(found, [folder.path().join("a")]);
        assert!(bytes > 0 && bytes.is_multiple_of(FILE_BLOCK_BYTES as u64));
    }
}
