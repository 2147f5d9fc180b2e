//! File of a host's heartbeat on a datastore: `.godwit/heartbeats/CLUSTER/HOST`, 4096 bytes, of
//! which the first 512 are the block.
//!
//! Everyone who may write to the datastore may put something else there. So each access opens the
//! directory again and compares its marker, opens what is beneath it without following links, and
//! uses regular files alone, in folders of its own user. Nothing is listed. Reads and writes go
//! past the page cache where the file system allows that: another host must see what was written,
//! and not what is cached. The files of VMs that agents restart among themselves are accessed in
//! the same way (`ha/own`).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Instant;

use godwit_api::{HeartbeatReading, HeartbeatSlot};
use godwit_ha::heartbeat::{BLOCK_BYTES, BadBlock, Block, Slot};
use godwit_ha::{Mark, Term};
use godwit_qemu::Uuid;
use rustix::fs::{
    Advice, AtFlags, FileType, Mode, OFlags, fadvise, fstat, fsync, mkdirat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::datastores::{give_free_name, open_datastore};

/// Folders between a datastore's directory and those of the clusters.
const FOLDERS: [&str; 2] = [".godwit", "heartbeats"];
/// Length of the file: `O_DIRECT` needs whole blocks of the disk below, which have up to 4096
/// bytes.
const FILE_BYTES: usize = 4096;
/// Most readings of a block that is damaged, or of a file that another one replaces.
const READS: usize = 8;

/// Why a heartbeat cannot be read, written or opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeartbeatError {
    #[error("this host does not have the datastore")]
    NoDatastore,
    #[error("the datastore did not answer in time")]
    Late,
    #[error("the last write has not ended")]
    Busy,
    #[error("the heartbeat has no file there")]
    Missing,
    #[error("a part of the heartbeat's path is a link or no directory")]
    Link,
    #[error("other users can change a folder of the heartbeat's path")]
    OfOthers,
    #[error("the heartbeat is not a regular file")]
    NotAFile,
    #[error("the heartbeat has {0} bytes instead of 4096")]
    Length(u64),
    #[error("the heartbeat was replaced while it was opened")]
    Replaced,
    #[error(transparent)]
    Block(#[from] BadBlock),
    #[error("the heartbeat's sequence number is the last one")]
    LastSequence,
    #[error("{0} is open already")]
    Newer(Term),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HeartbeatError {
    /// Whether there is something else in the heartbeat's place.
    fn is_foreign(&self) -> bool {
        matches!(
            self,
            HeartbeatError::Link
                | HeartbeatError::OfOthers
                | HeartbeatError::NotAFile
                | HeartbeatError::Length(_)
                | HeartbeatError::Block(_)
        )
    }

    /// Returns what a reader reports.
    pub(super) fn reading(&self) -> HeartbeatReading {
        let why = self.to_string();
        if self.is_foreign() {
            HeartbeatReading::Foreign { why }
        } else {
            HeartbeatReading::Failed { why }
        }
    }
}

impl From<Errno> for HeartbeatError {
    fn from(error: Errno) -> Self {
        match error {
            Errno::NOENT => HeartbeatError::Missing,
            Errno::LOOP | Errno::NOTDIR => HeartbeatError::Link,
            error => HeartbeatError::Io(error.into()),
        }
    }
}

/// Contents of the file, aligned as `O_DIRECT` needs it.
#[repr(align(4096))]
pub(in crate::ha) struct Page([u8; FILE_BYTES]);

impl Page {
    fn zeroed() -> Box<Self> {
        Box::new(Page([0; FILE_BYTES]))
    }

    fn of(block: &[u8; BLOCK_BYTES]) -> Box<Self> {
        let mut page = Page::zeroed();
        page.0[..BLOCK_BYTES].copy_from_slice(block);
        page
    }

    /// Reads a file, opened with `direct`.
    pub(in crate::ha) fn read(file: &File, direct: OFlags) -> Result<Box<Self>, HeartbeatError> {
        if direct.is_empty() {
            // Not every file system has a cache to drop from.
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
        let mut page = Page::zeroed();
        file.read_exact_at(&mut page.0, 0)?;
        Ok(page)
    }

    /// Returns the block's part.
    pub(in crate::ha) fn block(&self) -> &[u8] {
        &self.0[..BLOCK_BYTES]
    }

    /// Writes a block over the file's.
    pub(in crate::ha) fn write(
        file: &File,
        block: &[u8; BLOCK_BYTES],
    ) -> Result<(), HeartbeatError> {
        if file.write_at(&Page::of(block).0, 0)? != FILE_BYTES {
            return Err(io::Error::from(io::ErrorKind::WriteZero).into());
        }
        Ok(())
    }
}

/// Reads heartbeats of one datastore; returns what was found in their order.
///
/// # Errors
/// The directory is not the datastore.
pub(super) fn read(
    directory: &Path,
    datastore: Uuid,
    slots: &[HeartbeatSlot],
) -> Result<Vec<HeartbeatReading>, HeartbeatError> {
    let root = open_datastore(directory, datastore)?;
    let readings = slots.iter().map(|slot| match mark_at(&root, *slot) {
        Ok(Some(Mark { term, sequence })) => HeartbeatReading::Block { term: term.0, sequence },
        Ok(None) => HeartbeatReading::Empty,
        Err(error) => error.reading(),
    });
    Ok(readings.collect())
}

fn mark_at(root: &OwnedFd, slot: HeartbeatSlot) -> Result<Option<Mark>, HeartbeatError> {
    let block = read_in(&folder(root, slot.cluster)?, slot)?;
    Ok(block.map(|block| block.mark_of(key(slot))).transpose()?)
}

/// Writes the next heartbeat of a term over the one that is there. Its sequence number is larger
/// than the one there and than `least`. The caller's `least` grows, so that a number does not come
/// again when something else was put there: a reader would take that for a silence.
///
/// # Errors
/// There is no heartbeat of this slot and term, or it cannot be written.
pub(super) fn write(
    directory: &Path,
    slot: HeartbeatSlot,
    term: Term,
    least: u64,
) -> Result<(), HeartbeatError> {
    let folder = folder(&open_datastore(directory, slot.datastore)?, slot.cluster)?;
    let name = slot.host.to_string();
    past_cache(|direct| {
        let file = open_file(&folder, &name, OFlags::RDWR | OFlags::DSYNC | direct)?;
        let found = block_in(&file, direct)?.map(|mut block| {
            block.mark.sequence = block.mark.sequence.max(least);
            block
        });
        let next = Block::next(found, key(slot), term)?;
        if found.is_some_and(|found| found.mark.sequence >= next.mark.sequence) {
            return Err(HeartbeatError::LastSequence);
        }
        Page::write(&file, &next.encode())
    })
}

/// Opens a term of another host: creates its heartbeat with sequence number 0, or replaces that of
/// an earlier term, and whatever else is in a regular file there. An open heartbeat of the term
/// stays as it is. After `until`, nothing is put in place any more.
///
/// # Errors
/// A later term is open, there is no file in its place, or the file cannot be written.
pub(super) fn open(
    directory: &Path,
    slot: HeartbeatSlot,
    term: Term,
    until: Instant,
) -> Result<(), HeartbeatError> {
    let folder = make_folder(open_datastore(directory, slot.datastore)?, slot.cluster)?;
    if there(&folder, slot, term)? == There::Opened {
        return Ok(());
    }
    let staged = format!(".{}.{}.new", slot.host, Uuid::new_v4());
    let opened = stage(&folder, &staged, &Block::opening(key(slot), term).encode())
        .and_then(|()| put(&folder, &staged, (slot, term), until));
    // It is gone if it has got its name.
    let _ = unlinkat(&folder, &staged, AtFlags::empty());
    opened
}

/// What is in the place of a term that is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    Nothing,
    /// The term's own heartbeat.
    Opened,
    /// A file that may be replaced.
    Older,
}

fn there(folder: &OwnedFd, slot: HeartbeatSlot, term: Term) -> Result<There, HeartbeatError> {
    let mark = match read_in(folder, slot) {
        Ok(block) => block.and_then(|block| block.mark_of(key(slot)).ok()),
        Err(HeartbeatError::Block(_) | HeartbeatError::Length(_)) => None,
        Err(HeartbeatError::Missing) => return Ok(There::Nothing),
        Err(error) => return Err(error),
    };
    match mark {
        Some(mark) if mark.term > term => Err(HeartbeatError::Newer(mark.term)),
        Some(mark) if mark.term == term => Ok(There::Opened),
        Some(_) | None => Ok(There::Older),
    }
}

/// Puts a staged file in its place, unless the term has been opened meanwhile.
fn put(
    folder: &OwnedFd,
    staged: &str,
    (slot, term): (HeartbeatSlot, Term),
    until: Instant,
) -> Result<(), HeartbeatError> {
    let name = slot.host.to_string();
    let there_now = there(folder, slot, term)?;
    if Instant::now() >= until {
        return Err(HeartbeatError::Late);
    }
    match there_now {
        There::Opened => Ok(()),
        There::Older => {
            renameat(folder, staged, folder, &name)?;
            Ok(fsync(folder)?)
        }
        There::Nothing => match give_free_name(folder, staged, &name) {
            // Another reader was first.
            Err(Errno::EXIST) if there(folder, slot, term)? == There::Opened => Ok(()),
            named => Ok(named?),
        },
    }
}

/// Creates a file with a block, under a name that nobody looks for.
pub(in crate::ha) fn stage(
    folder: &OwnedFd,
    name: &str,
    block: &[u8; BLOCK_BYTES],
) -> Result<(), HeartbeatError> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = File::from(openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?);
    file.write_all_at(&Page::of(block).0, 0)?;
    Ok(file.sync_all()?)
}

/// Opens the folder of a cluster.
fn folder(root: &OwnedFd, cluster: Uuid) -> Result<OwnedFd, HeartbeatError> {
    let [outer, inner] = FOLDERS;
    let folders = open_folder(&open_folder(root, outer)?, inner)?;
    open_folder(&folders, &cluster.to_string())
}

/// Opens the folder of a cluster, and creates what is missing of it.
fn make_folder(root: OwnedFd, cluster: Uuid) -> Result<OwnedFd, HeartbeatError> {
    let [outer, inner] = FOLDERS;
    make_folders(root, &[outer, inner, &cluster.to_string()])
}

/// Opens a folder by the names on the way to it, and creates what is missing.
pub(in crate::ha) fn make_folders(
    root: OwnedFd,
    names: &[&str],
) -> Result<OwnedFd, HeartbeatError> {
    let mut folder = root;
    for name in names {
        match mkdirat(&folder, *name, Mode::RWXU) {
            Ok(()) => fsync(&folder)?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        folder = open_folder(&folder, name)?;
    }
    Ok(folder)
}

/// Opens a folder that this user owns and nobody else can change.
pub(in crate::ha) fn open_folder(dir: &OwnedFd, name: &str) -> Result<OwnedFd, HeartbeatError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = openat(dir, name, flags, Mode::empty())?;
    let found = fstat(&folder)?;
    let others = Mode::WGRP | Mode::WOTH;
    // Others could show readers an old block while the host writes another file.
    if found.st_uid != geteuid().as_raw() || Mode::from_raw_mode(found.st_mode).intersects(others) {
        return Err(HeartbeatError::OfOthers);
    }
    Ok(folder)
}

/// Opens the regular file of a block.
pub(in crate::ha) fn open_file(
    folder: &OwnedFd,
    name: &str,
    flags: OFlags,
) -> Result<File, HeartbeatError> {
    // Not opened before it is known to be a file: opening a device can have side effects.
    let found = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(HeartbeatError::NotAFile);
    }
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(folder, name, flags, Mode::empty())?);
    let opened = file.metadata()?;
    if !opened.is_file() {
        return Err(HeartbeatError::NotAFile);
    }
    if opened.nlink() == 0 {
        return Err(HeartbeatError::Replaced);
    }
    if opened.len() != FILE_BYTES as u64 {
        return Err(HeartbeatError::Length(opened.len()));
    }
    Ok(file)
}

fn read_in(folder: &OwnedFd, slot: HeartbeatSlot) -> Result<Option<Block>, HeartbeatError> {
    let name = slot.host.to_string();
    read_again(|| {
        past_cache(|direct| block_in(&open_file(folder, &name, OFlags::RDONLY | direct)?, direct))
    })
}

/// Reads a block, some times if it is damaged.
pub(in crate::ha) fn read_again<T>(
    read: impl Fn() -> Result<T, HeartbeatError>,
) -> Result<T, HeartbeatError> {
    for _ in 1..READS {
        match read() {
            // A block that is just being written may be seen in part.
            Err(HeartbeatError::Block(_) | HeartbeatError::Replaced) => {}
            found => return found,
        }
    }
    read()
}

fn block_in(file: &File, direct: OFlags) -> Result<Option<Block>, HeartbeatError> {
    Ok(Block::decode(Page::read(file, direct)?.block())?)
}

/// Reads or writes past the page cache; through it where the file system refuses that.
pub(in crate::ha) fn past_cache<T>(
    access: impl Fn(OFlags) -> Result<T, HeartbeatError>,
) -> Result<T, HeartbeatError> {
    match access(OFlags::DIRECT) {
        Err(HeartbeatError::Io(error))
            if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
        {
            access(OFlags::empty())
        }
        accessed => accessed,
    }
}

/// Returns a slot as the block names it.
fn key(slot: HeartbeatSlot) -> Slot {
    Slot {
        cluster: slot.cluster.into_bytes(),
        host: slot.host.into_bytes(),
        datastore: slot.datastore.into_bytes(),
    }
}

#[cfg(test)]
mod tests;
