//! Folder of a VM that agents restart among themselves: `.godwit/protected/VM/` on its datastore.
//!
//! `vm.json` is the VM's record, and `term-N` the block of a term. A host claims a term by giving
//! its block that name, which only one host can. Folders and files are checked like heartbeats
//! ([`crate::ha::heartbeats::block_file`]).
//!
//! A claim names the term after the newest one that it has found. So it succeeds wrongly only if
//! another host has claimed that term and its file is gone again. The file of a term stays until
//! [`KEPT_TERMS`] later ones exist; each takes longer than a claim may last, because a lease counts
//! from before the claim began.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_api::MOST_OWN_VMS;
use godwit_ha::Term;
use godwit_ha::heartbeat::{BadBlock, Slot};
use godwit_ha::own::{End, OwnBlock};
use godwit_qemu::Uuid;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fsync, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::record::{MOST_RECORD_BYTES, OwnRecord};
use crate::datastores::{give_free_name, open_datastore};
use crate::ha::heartbeats::block_file::{
    HeartbeatError, Page, make_folders, open_file, open_folder, past_cache, read_again, stage,
};

/// Folders between a datastore's directory and those of the VMs.
const FOLDERS: [&str; 2] = [".godwit", "protected"];
const RECORD: &str = "vm.json";
const TERM: &str = "term-";
/// Most names that are read of a folder.
const MOST_NAMES: usize = 1024;
/// Number of the newest terms whose files stay.
const KEPT_TERMS: u64 = 64;

/// The block that this host has last written in a term that it holds, or has tried to write.
pub(super) type LastBlock = Mutex<Option<OwnBlock>>;

/// Why the folder of a VM cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnError {
    #[error(transparent)]
    File(#[from] HeartbeatError),
    #[error("{0} is claimed already")]
    Claimed(Term),
    #[error("the folder has too many files")]
    TooMany,
    #[error("its datastore has {most} VMs that agents restart already", most = MOST_OWN_VMS)]
    TooManyVms,
    #[error("its record cannot be used: {0}")]
    Record(String),
}

impl From<Errno> for OwnError {
    fn from(error: Errno) -> Self {
        OwnError::File(error.into())
    }
}

impl From<io::Error> for OwnError {
    fn from(error: io::Error) -> Self {
        OwnError::File(HeartbeatError::Io(error))
    }
}

/// Place of a VM's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) directory: PathBuf,
    pub(crate) datastore: Uuid,
    pub(crate) vm: Uuid,
}

impl Place {
    fn slot(&self, host: Uuid) -> Slot {
        Slot {
            cluster: self.vm.into_bytes(),
            host: host.into_bytes(),
            datastore: self.datastore.into_bytes(),
        }
    }

    /// Opens the folder.
    fn open(&self) -> Result<OwnedFd, OwnError> {
        let root = open_datastore(&self.directory, self.datastore)?;
        Ok(open_folder(&all_in(&root)?, &self.vm.to_string())?)
    }
}

/// What is in a folder.
#[derive(Debug)]
pub(crate) struct Found {
    /// The newest term; 0 if none was claimed.
    pub(crate) term: Term,
    /// Block of that term.
    pub(crate) block: Result<Option<OwnBlock>, OwnError>,
    /// The record; `None`: there is none.
    pub(crate) record: Result<Option<OwnRecord>, OwnError>,
}

/// What is on a datastore.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) vms: Vec<(Uuid, Result<Found, OwnError>)>,
    /// Number of folders beyond the most that are looked into.
    pub(crate) left_out: usize,
}

/// Looks into the folders of all VMs of a datastore.
///
/// # Errors
/// The directory is not the datastore, or its folder cannot be read.
pub(super) fn scan(directory: &Path, datastore: Uuid) -> Result<Scan, OwnError> {
    let root = open_datastore(directory, datastore)?;
    let all = match all_in(&root) {
        Ok(all) => all,
        Err(OwnError::File(HeartbeatError::Missing)) => return Ok(Scan::default()),
        Err(error) => return Err(error),
    };
    let mut vms = vms_in(&all)?;
    let left_out = vms.len().saturating_sub(MOST_OWN_VMS);
    vms.truncate(MOST_OWN_VMS);
    let look = |vm: Uuid| {
        let folder = open_folder(&all, &vm.to_string())?;
        look_into(&folder, vm, datastore)
    };
    Ok(Scan { vms: vms.into_iter().map(|vm| (vm, look(vm))).collect(), left_out })
}

/// Returns the VMs with a folder, in their order.
fn vms_in(all: &OwnedFd) -> Result<Vec<Uuid>, OwnError> {
    let named = names(all)?.into_iter().filter_map(|name| {
        let vm: Uuid = name.parse().ok()?;
        (vm.to_string() == name).then_some(vm)
    });
    let mut vms: Vec<Uuid> = named.collect();
    vms.sort_unstable();
    Ok(vms)
}

fn is_full(vms: &[Uuid]) -> bool {
    vms.len() >= MOST_OWN_VMS
}

/// Looks into the folder of a VM; `None` if it has none.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn look(place: &Place) -> Result<Option<Found>, OwnError> {
    let folder = match place.open() {
        Ok(folder) => folder,
        Err(OwnError::File(HeartbeatError::Missing)) => return Ok(None),
        Err(error) => return Err(error),
    };
    look_into(&folder, place.vm, place.datastore).map(Some)
}

fn look_into(folder: &OwnedFd, vm: Uuid, datastore: Uuid) -> Result<Found, OwnError> {
    let term = newest(folder)?;
    let block = match term {
        Term(0) => Ok(None),
        term => block_of(folder, (vm, datastore), term).map(Some),
    };
    Ok(Found { term, block, record: read_record(folder, vm) })
}

/// Claims the term after `after`, the newest one; returns it. `is_first`: the folder is created if
/// it is missing.
///
/// # Errors
/// Another host has claimed a term since, or the claim cannot be written. The term may be claimed
/// all the same; its block then says so.
pub(super) fn claim(
    place: &Place,
    host: Uuid,
    (after, is_first): (Term, bool),
    watchdog: bool,
) -> Result<Term, OwnError> {
    let folder = match place.open() {
        Err(OwnError::File(HeartbeatError::Missing)) if is_first => {
            let root = open_datastore(&place.directory, place.datastore)?;
            // One more would take the place of a VM that is watched.
            if all_in(&root).is_ok_and(|all| vms_in(&all).is_ok_and(|vms| is_full(&vms))) {
                return Err(OwnError::TooManyVms);
            }
            let [outer, inner] = FOLDERS;
            make_folders(root, &[outer, inner, &place.vm.to_string()])?
        }
        opened => opened?,
    };
    let (found, term) = (newest(&folder)?, after.next());
    if found != after || term == after {
        return Err(OwnError::Claimed(found));
    }
    let staged = format!(".{TERM}{}.{}.new", term.0, Uuid::new_v4());
    let block = OwnBlock::claim(place.slot(host), term, watchdog);
    let claimed = stage(&folder, &staged, &block.encode()).map_err(OwnError::from).and_then(|()| {
        match give_free_name(&folder, &staged, &term_name(term)) {
            Err(Errno::EXIST) => Err(OwnError::Claimed(term)),
            named => Ok(named?),
        }
    });
    // It is gone if it has got its name.
    let _ = unlinkat(&folder, &staged, AtFlags::empty());
    claimed?;
    match newest(&folder)? {
        found if found == term => {}
        found => return Err(OwnError::Claimed(found)),
    }
    tidy(&folder, term);
    Ok(term)
}

/// Writes the next block of a term that this host has claimed. Its number is larger than `least`.
/// If the block there is damaged, `last` takes its place: no other host writes this file. Once the
/// end of the term was to be written, it does not: that end may be what is damaged.
///
/// # Errors
/// A later term is claimed, the term is another host's or has ended, the block is damaged and
/// `last` is none, or the block cannot be written.
pub(super) fn beat(
    place: &Place,
    host: Uuid,
    numbers: (Term, u64),
    marks: (bool, End),
    last: &LastBlock,
) -> Result<(), OwnError> {
    let is_end = marks.1 != End::None;
    if is_end {
        *last.lock() = None;
    }
    let written = write_next(place, host, numbers, marks, last);
    // Another file may take the place of the one that was written.
    let is_other =
        matches!(&written, Err(OwnError::File(HeartbeatError::Missing | HeartbeatError::Block(_))));
    if is_end || is_other {
        *last.lock() = None;
    }
    written
}

fn write_next(
    place: &Place,
    host: Uuid,
    (term, least): (Term, u64),
    marks: (bool, End),
    last: &LastBlock,
) -> Result<(), OwnError> {
    let folder = place.open()?;
    let found = newest(&folder)?;
    if found > term {
        return Err(OwnError::Claimed(found));
    }
    let slot = place.slot(host);
    let written = past_cache(|direct| {
        let flags = OFlags::RDWR | OFlags::DSYNC | direct;
        let file = open_file(&folder, &term_name(term), flags)?;
        let there = there_or_last(Page::read(&file, direct)?.block(), last)?;
        let next = OwnBlock::next(there, (slot, term), least, marks)?;
        // Before it is written: readers may see one whose write has failed.
        *last.lock() = Some(next);
        Page::write(&file, &next.encode())
    });
    Ok(written?)
}

/// Returns the block that is there, or the last one that was written if that is damaged.
fn there_or_last(bytes: &[u8], last: &LastBlock) -> Result<Option<OwnBlock>, BadBlock> {
    let damage = match OwnBlock::decode(bytes) {
        Ok(Some(block)) => return Ok(Some(block)),
        Ok(None) => BadBlock::Magic,
        Err(damage @ (BadBlock::Magic | BadBlock::Checksum | BadBlock::Trailing)) => damage,
        Err(other) => return Err(other),
    };
    let last = last.lock().ok_or(damage)?;
    tracing::warn!(term = %last.block.mark.term, %damage, "writing a damaged block of a VM again");
    Ok(Some(last))
}

/// Puts a record in place, for the holder of its newest term.
///
/// # Errors
/// A later term is claimed, or the record is too long or cannot be written.
pub(super) fn write_record(place: &Place, record: &OwnRecord) -> Result<(), OwnError> {
    let text = serde_json::to_vec(record).map_err(io::Error::from)?;
    if text.len() as u64 > MOST_RECORD_BYTES {
        return Err(OwnError::Record("it is too long".to_owned()));
    }
    let folder = place.open()?;
    let staged = format!(".{RECORD}.{}.new", Uuid::new_v4());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(openat(&folder, &staged, flags, Mode::RUSR | Mode::WUSR)?);
    let mut put = || -> Result<(), OwnError> {
        file.write_all(&text)?;
        file.sync_all()?;
        match newest(&folder)? {
            found if found.0 > record.term => return Err(OwnError::Claimed(found)),
            _ => renameat(&folder, &staged, &folder, RECORD)?,
        }
        Ok(fsync(&folder)?)
    };
    let written = put();
    // It is gone if it has got its name.
    let _ = unlinkat(&folder, &staged, AtFlags::empty());
    written
}

/// Removes a VM's record: from then on, no other host starts the VM.
///
/// # Errors
/// It cannot be removed.
pub(super) fn remove_record(place: &Place) -> Result<(), OwnError> {
    let folder = place.open()?;
    match unlinkat(&folder, RECORD, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(fsync(&folder)?),
        Err(error) => Err(error.into()),
    }
}

/// Removes the folder of a VM whose newest term this host has ended: its record first.
///
/// # Errors
/// A part of it cannot be removed, or another host has claimed a term since.
pub(super) fn remove(place: &Place, term: Term) -> Result<(), OwnError> {
    let root = open_datastore(&place.directory, place.datastore)?;
    let all = all_in(&root)?;
    let folder = open_folder(&all, &place.vm.to_string())?;
    // A term that is claimed after this is not removed, and neither is its folder.
    let mut known: Vec<_> =
        names(&folder)?.into_iter().map(|name| (term_of(&name), name)).collect();
    known.sort_unstable();
    match known.last() {
        Some((Some(found), _)) if *found > term => return Err(OwnError::Claimed(*found)),
        _ => {}
    }
    remove_record(place)?;
    for (_, name) in known.into_iter().filter(|(_, name)| name != RECORD) {
        unlinkat(&folder, &name, AtFlags::empty())?;
    }
    unlinkat(&all, place.vm.to_string(), AtFlags::REMOVEDIR)?;
    Ok(fsync(&all)?)
}

/// Opens the folder with the folders of all VMs.
fn all_in(root: &OwnedFd) -> Result<OwnedFd, OwnError> {
    let [outer, inner] = FOLDERS;
    Ok(open_folder(&open_folder(root, outer)?, inner)?)
}

/// Returns the names in a folder.
fn names(folder: &OwnedFd) -> Result<Vec<String>, OwnError> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        if matches!(name, "." | "..") {
            continue;
        }
        if names.len() == MOST_NAMES {
            return Err(OwnError::TooMany);
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

fn newest(folder: &OwnedFd) -> Result<Term, OwnError> {
    let all = names(folder)?;
    Ok(all.iter().filter_map(|name| term_of(name)).max().unwrap_or_default())
}

fn term_name(Term(number): Term) -> String {
    format!("{TERM}{number}")
}

/// Returns the term whose block has this name.
fn term_of(name: &str) -> Option<Term> {
    let term = Term(name.strip_prefix(TERM)?.parse().ok()?);
    (term.0 > 0 && term_name(term) == name).then_some(term)
}

fn block_of(
    folder: &OwnedFd,
    (vm, datastore): (Uuid, Uuid),
    term: Term,
) -> Result<OwnBlock, OwnError> {
    let read = || {
        past_cache(|direct| {
            let file = open_file(folder, &term_name(term), OFlags::RDONLY | direct)?;
            let block = OwnBlock::decode(Page::read(&file, direct)?.block())?;
            let block = block.ok_or(BadBlock::Magic)?;
            let host = block.block.slot.host;
            let slot = Slot { cluster: vm.into_bytes(), host, datastore: datastore.into_bytes() };
            match block.block.mark_of(slot)?.term == term {
                true => Ok(block),
                false => Err(BadBlock::OtherTerm.into()),
            }
        })
    };
    Ok(read_again(read)?)
}

fn read_record(folder: &OwnedFd, vm: Uuid) -> Result<Option<OwnRecord>, OwnError> {
    let wrong = |why: &str| OwnError::Record(why.to_owned());
    // Not opened before it is known to be a file: opening a device can have side effects.
    let found = match statat(folder, RECORD, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(wrong("it is not a regular file"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(folder, RECORD, flags, Mode::empty())?);
    let opened = file.metadata()?;
    let others = (Mode::WGRP | Mode::WOTH).as_raw_mode();
    if opened.uid() != geteuid().as_raw() || opened.mode() & others != 0 {
        return Err(wrong("other users can change it"));
    }
    let mut text = Vec::new();
    file.take(MOST_RECORD_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MOST_RECORD_BYTES {
        return Err(wrong("it is too long"));
    }
    OwnRecord::decode(&text, vm).map(Some).map_err(OwnError::Record)
}

/// Removes files of terms that ended long ago, and of claims that were cut off.
fn tidy(folder: &OwnedFd, term: Term) {
    for name in names(folder).unwrap_or_default() {
        let is_old = term_of(&name).is_some_and(|old| old.0.saturating_add(KEPT_TERMS) <= term.0);
        // Claims of this term that are in progress find it claimed.
        let staged = name.strip_prefix('.').and_then(|name| name.split('.').next());
        let is_left = staged.is_some_and(|of| term_of(of).is_none_or(|of| of < term));
        if is_old || is_left {
            // The next claim tries again.
            let _ = unlinkat(folder, &name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests;
