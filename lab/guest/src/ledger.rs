//! Ledger on a disk that proves whether two boots of a guest ever wrote at the same time. Knows
//! files, and no devices.
//!
//! Each boot has a block of its own, behind those of all boots before it, and writes it again and
//! again with a growing count. It also records the count that the boot before it had reached when
//! it began. A write of an earlier boot that lands later, from however long ago, is a count that
//! its successor has not seen. Two boots that begin at once take the same block: one of them then
//! finds the other's entry in it, and marks the ledger.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;
/// Number of blocks: the last one has the mark.
pub const BLOCKS: u64 = 256;
/// Smallest disk.
pub const LEDGER_BYTES: u64 = BLOCKS * BLOCK_BYTES as u64;

const MAGIC: [u8; 8] = *b"gwledger";
/// Magic, boot, count, former boot, former count, checksum.
const ENTRY_BYTES: usize = 8 + 16 + 8 + 16 + 8 + 16;
const CHECKED_BYTES: usize = ENTRY_BYTES - 16;

/// Random number of a boot. Zeros are none.
pub type BootId = [u8; 16];

/// How far a boot had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The boot.
    pub boot: BootId,
    /// Number of its writes.
    pub count: u64,
}

/// Entry of one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The boot, and its writes up to now.
    pub progress: Progress,
    /// The boot before it, as this one found it at its beginning.
    pub former: Option<Progress>,
}

/// Content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Empty,
    Entry(Entry),
    Damaged,
}

/// What is wrong with a ledger.
#[derive(Debug)]
pub enum Fault {
    /// The disk cannot be read.
    Unreadable(io::Error),
    /// A block is no entry.
    Damaged(u64),
    /// Two boots had one block.
    Shared(u64),
    /// A boot wrote after its successor had begun.
    Late { boot: u64, seen: u64, found: u64 },
    /// An entry names another former boot.
    OtherFormer(u64),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Unreadable(why) => write!(f, "cannot read the ledger: {why}"),
            Fault::Damaged(block) => write!(f, "TWO WRITERS: block {block} is no entry"),
            Fault::Shared(block) => write!(f, "TWO WRITERS: two boots wrote block {block}"),
            Fault::Late { boot, seen, found } => write!(
                f,
                "TWO WRITERS: boot {boot} had made {seen} writes when its successor began, and \
                 has made {found}"
            ),
            Fault::OtherFormer(boot) => {
                write!(f, "TWO WRITERS: boot {boot} began behind another than the one before it")
            }
        }
    }
}

impl std::error::Error for Fault {}

/// A block, aligned for O_DIRECT.
#[derive(Debug)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Writer of a boot's entry.
#[derive(Debug)]
pub struct Ledger {
    file: File,
    place: u64,
    entry: Entry,
    block: Box<Block>,
}

impl Ledger {
    /// Takes the next block for a boot.
    ///
    /// # Errors
    /// The disk cannot be read or written, a block is damaged, or the ledger is full.
    pub fn begin(file: File, boot: BootId) -> io::Result<Ledger> {
        let mut block = Box::new(Block([0; BLOCK_BYTES]));
        let (mut place, mut former) = (0, None);
        loop {
            if place + 1 >= BLOCKS {
                return Err(io::Error::other("the ledger is full"));
            }
            match read(&file, place, &mut block)? {
                Content::Empty => break,
                Content::Entry(entry) => former = Some(entry.progress),
                Content::Damaged => {
                    return Err(io::Error::other(format!(
                        "block {place} of the ledger is damaged"
                    )));
                }
            }
            place += 1;
        }
        let entry = Entry { progress: Progress { boot, count: 1 }, former };
        write(&file, place, entry, &mut block)?;
        Ok(Ledger { file, place, entry, block })
    }

    /// Returns the number of boots before this one.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.place
    }

    /// Writes the entry with the next count. Marks the ledger if another boot has written the
    /// block.
    ///
    /// # Errors
    /// The disk cannot be read or written.
    pub fn append(&mut self) -> io::Result<()> {
        let found = read(&self.file, self.place, &mut self.block)?;
        if found != Content::Entry(self.entry) {
            write(&self.file, BLOCKS - 1, self.entry, &mut self.block)?;
        }
        self.entry.progress.count += 1;
        write(&self.file, self.place, self.entry, &mut self.block)
    }
}

/// Returns the entries of a ledger, the first boot first.
///
/// # Errors
/// Two boots wrote at the same time, or the file cannot be read.
pub fn check(file: &File) -> Result<Vec<Entry>, Fault> {
    let mut block = Box::new(Block([0; BLOCK_BYTES]));
    let mut read = |place| read(file, place, &mut block).map_err(Fault::Unreadable);
    match read(BLOCKS - 1)? {
        Content::Empty => {}
        Content::Entry(_) | Content::Damaged => return Err(Fault::Shared(BLOCKS - 1)),
    }
    let mut entries: Vec<Entry> = Vec::new();
    for place in 0..BLOCKS - 1 {
        let entry = match read(place)? {
            Content::Empty => break,
            Content::Entry(entry) => entry,
            Content::Damaged => return Err(Fault::Damaged(place)),
        };
        let before = entries.last().map(|entry| entry.progress);
        match (before, entry.former) {
            (None, None) => {}
            (Some(before), Some(seen)) if before.boot == seen.boot => {
                if before.count != seen.count {
                    let (seen, found) = (seen.count, before.count);
                    return Err(Fault::Late { boot: place - 1, seen, found });
                }
            }
            _ => return Err(Fault::OtherFormer(place)),
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read(file: &File, place: u64, block: &mut Block) -> io::Result<Content> {
    file.read_exact_at(&mut block.0, place * BLOCK_BYTES as u64)?;
    Ok(decode(&block.0))
}

fn write(file: &File, place: u64, entry: Entry, block: &mut Block) -> io::Result<()> {
    block.0.fill(0);
    block.0[..ENTRY_BYTES].copy_from_slice(&encode(entry));
    file.write_all_at(&block.0, place * BLOCK_BYTES as u64)
}

fn encode(entry: Entry) -> [u8; ENTRY_BYTES] {
    let former = entry.former.unwrap_or(Progress { boot: [0; 16], count: 0 });
    let mut bytes = [0; ENTRY_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..24].copy_from_slice(&entry.progress.boot);
    bytes[24..32].copy_from_slice(&entry.progress.count.to_le_bytes());
    bytes[32..48].copy_from_slice(&former.boot);
    bytes[48..CHECKED_BYTES].copy_from_slice(&former.count.to_le_bytes());
    let sum = checksum(&bytes[..CHECKED_BYTES]);
    bytes[CHECKED_BYTES..].copy_from_slice(&sum);
    bytes
}

fn decode(block: &[u8; BLOCK_BYTES]) -> Content {
    if block.iter().all(|byte| *byte == 0) {
        return Content::Empty;
    }
    let (entry, rest) = block.split_at(ENTRY_BYTES);
    let (checked, sum) = entry.split_at(CHECKED_BYTES);
    let is_entry = checked.starts_with(&MAGIC)
        && checksum(checked) == *sum
        && rest.iter().all(|byte| *byte == 0);
    if !is_entry {
        return Content::Damaged;
    }
    let progress = |at: usize| {
        let (mut boot, mut count) = ([0; 16], [0; 8]);
        boot.copy_from_slice(&checked[at..at + 16]);
        count.copy_from_slice(&checked[at + 16..at + 24]);
        Progress { boot, count: u64::from_le_bytes(count) }
    };
    let former = Some(progress(32)).filter(|former| former.boot != [0; 16]);
    Content::Entry(Entry { progress: progress(8), former })
}

fn checksum(bytes: &[u8]) -> [u8; 16] {
    let mut sum = [0; 16];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    sum
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::path::PathBuf;

    use super::*;

    /// Empty ledger in a file, removed at the end.
    struct Disk(PathBuf);

    impl Disk {
        fn new(name: &str) -> Disk {
            let name = format!("godwit-ledger-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            File::create(&path).unwrap().set_len(LEDGER_BYTES).unwrap();
            Disk(path)
        }

        fn open(&self) -> File {
            OpenOptions::new().read(true).write(true).open(&self.0).unwrap()
        }

        fn boot(&self, number: u8) -> Ledger {
            Ledger::begin(self.open(), [number; 16]).unwrap()
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn boots_one_after_the_other_are_right() {
        let disk = Disk::new("right");
        assert!(check(&disk.open()).unwrap().is_empty());
        for number in 1..4 {
            let mut ledger = disk.boot(number);
            (0..number).for_each(|_| ledger.append().unwrap());
        }
        let entries = check(&disk.open()).unwrap();
        let counts: Vec<u64> = entries.iter().map(|entry| entry.progress.count).collect();
        assert_eq!(counts, [2, 3, 4]);
        assert_eq!(entries[2].former, Some(entries[1].progress));
    }

    #[test]
    fn a_late_write_is_found() {
        let disk = Disk::new("late");
        let mut first = disk.boot(1);
        first.append().unwrap();
        let _second = disk.boot(2);
        assert!(check(&disk.open()).is_ok());
        first.append().unwrap();
        let fault = check(&disk.open()).unwrap_err();
        assert!(matches!(fault, Fault::Late { boot: 0, seen: 2, found: 3 }), "{fault}");
    }

    #[test]
    fn two_that_began_at_once_are_found() {
        let disk = Disk::new("at-once");
        let mut first = disk.boot(1);
        // The second one has seen an empty block, too.
        disk.open().write_all_at(&[0; BLOCK_BYTES], 0).unwrap();
        let mut second = disk.boot(2);
        first.append().unwrap();
        assert!(matches!(check(&disk.open()).unwrap_err(), Fault::Shared(_)));
        second.append().unwrap();
        assert!(matches!(check(&disk.open()).unwrap_err(), Fault::Shared(_)));
    }

    #[test]
    fn another_former_boot_and_damage_are_found() {
        let disk = Disk::new("damage");
        let _first = disk.boot(1);
        let _second = disk.boot(2);
        let other = Entry { progress: Progress { boot: [9; 16], count: 1 }, former: None };
        let mut block = Block([0; BLOCK_BYTES]);
        write(&disk.open(), 0, other, &mut block).unwrap();
        assert!(matches!(check(&disk.open()).unwrap_err(), Fault::OtherFormer(1)));
        disk.open().write_all_at(&[1], 40).unwrap();
        assert!(matches!(check(&disk.open()).unwrap_err(), Fault::Damaged(0)));
        assert!(Ledger::begin(disk.open(), [3; 16]).is_err());
    }

    #[test]
    fn a_full_ledger_takes_no_boot() {
        let disk = Disk::new("full");
        for number in 1..BLOCKS {
            let number = u8::try_from(number).unwrap();
            assert_eq!(disk.boot(number).place(), u64::from(number) - 1);
        }
        assert!(Ledger::begin(disk.open(), [7; 16]).is_err());
        assert_eq!(check(&disk.open()).unwrap().len(), 255);
    }
}
