//! Marker file of a datastore: a random identity. Hosts that read the same one share the directory.
//!
//! Everybody who can write to the directory can write the marker, so it is believed for that alone:
//! two directories are the same or not. A file is read up to a bound, and only in the form that an
//! agent writes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use godwit_qemu::Uuid;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, linkat, openat, statat, unlinkat};
use rustix::io::Errno;

/// Name of the file.
pub(super) const NAME: &str = ".godwit-datastore";
/// First line.
const HEAD: &str = "godwit datastore 1\n";
/// Longest file that is read.
const MOST_BYTES: u64 = 256;

/// Why a directory has no identity.
#[derive(Debug, thiserror::Error)]
pub(super) enum MarkerError {
    #[error("cannot write its marker: {0}")]
    NotWritable(io::Error),
    #[error(
        "cannot read its marker .godwit-datastore: {0}; remove it, and the agent writes a new one"
    )]
    Damaged(String),
}

/// Returns the identity of an open directory, and creates it if there is none. `None`: a read-only
/// directory without one.
pub(super) fn identity(dir: &OwnedFd, is_readonly: bool) -> Result<Option<Uuid>, MarkerError> {
    if let Some(found) = read(dir)? {
        return Ok(Some(found));
    }
    if is_readonly {
        return Ok(None);
    }
    match make(dir) {
        // Also if another host was first: its identity counts.
        Ok(()) => read(dir),
        Err(error) => Err(MarkerError::NotWritable(error)),
    }
}

fn read(dir: &OwnedFd) -> Result<Option<Uuid>, MarkerError> {
    let damaged = |error: &dyn std::fmt::Display| MarkerError::Damaged(error.to_string());
    // Not opened before it is known to be a file: opening a device can have side effects.
    let found = match statat(dir, NAME, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(damaged(&error)),
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(damaged(&"it is no regular file"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(dir, NAME, flags, Mode::empty()).map_err(|error| damaged(&error))?;
    let mut text = String::new();
    let read = File::from(file).take(MOST_BYTES).read_to_string(&mut text);
    read.map_err(|error| damaged(&error))?;
    let identity = text.strip_prefix(HEAD).and_then(|rest| rest.strip_suffix('\n'));
    let identity = identity.and_then(|identity| identity.parse::<Uuid>().ok());
    identity.map(Some).ok_or_else(|| damaged(&"it has another form"))
}

/// Creates the marker, whole or not. No error if there is one by now.
fn make(dir: &OwnedFd) -> io::Result<()> {
    let staged = format!("{NAME}.{}.new", Uuid::new_v4());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let mut file = File::from(openat(dir, &staged, flags, mode)?);
    let written = file
        .write_all(format!("{HEAD}{}\n", Uuid::new_v4()).as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| give_name(dir, &staged));
    // It is gone if it has got its name.
    let _ = unlinkat(dir, &staged, AtFlags::empty());
    written
}

fn give_name(dir: &OwnedFd, staged: &str) -> io::Result<()> {
    match give_free_name(dir, staged, NAME) {
        Err(Errno::EXIST) => Ok(rustix::fs::fsync(dir)?),
        named => Ok(named?),
    }
}

/// Gives a file a name that nothing has, durably.
///
/// # Errors
/// [`Errno::EXIST`]: something has that name.
pub(crate) fn give_free_name(dir: &OwnedFd, staged: &str, name: &str) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(dir, staged, dir, name, RenameFlags::NOREPLACE) {
        // NFS and Ceph know no flags of a rename.
        Err(Errno::INVAL) => linkat(dir, staged, dir, name, AtFlags::empty())?,
        renamed => renamed?,
    }
    rustix::fs::fsync(dir)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn open(path: &Path) -> OwnedFd {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).unwrap()
    }

    #[test]
    fn hosts_that_begin_at_once_read_the_same_identity() {
        let folder = tempfile::tempdir().unwrap();
        let found: Vec<_> = std::thread::scope(|scope| {
            let read = || identity(&open(folder.path()), false).unwrap().unwrap();
            let hosts: Vec<_> = (0..8).map(|_| scope.spawn(read)).collect();
            hosts.into_iter().map(|host| host.join().unwrap()).collect()
        });
        assert!(found.iter().all(|one| *one == found[0]));
        // Nothing else is left.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(identity(&open(folder.path()), true).unwrap(), Some(found[0]));
    }

    #[test]
    fn a_marker_of_another_form_is_no_identity_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        assert!(identity(&open(folder.path()), true).unwrap().is_none());
        let uuid = Uuid::new_v4();
        let long = format!("{HEAD}{uuid}\n{}", " ".repeat(1 << 20));
        let texts =
            [String::new(), HEAD.to_owned(), format!("{HEAD}{uuid}"), long, "\u{7}".to_owned()];
        for text in texts {
            std::fs::write(&path, &text).unwrap();
            let error = identity(&open(folder.path()), false).unwrap_err();
            assert!(matches!(error, MarkerError::Damaged(_)), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(identity(&open(folder.path()), false).is_err());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        let error = identity(&open(folder.path()), false).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, format!("{HEAD}{uuid}\n")).unwrap();
        assert_eq!(identity(&open(folder.path()), false).unwrap(), Some(uuid));
    }
}
