//! Notes about warm copies: a file in `STATE_DIR/warm-copies`, named after the copy's device, inode
//! and time of birth, has the copy's path. The first pass writes it, the cut-over removes it.
//!
//! Only a file with a note is written again. Any other of the same name may be a disk of a VM, here
//! or on another host.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::agent::Agent;

/// Directory of the notes, below `state_dir`.
const NOTES: &str = "warm-copies";

/// The notes of a host.
pub(super) struct WarmNotes(PathBuf);

impl Agent {
    pub(super) fn warm_notes(&self) -> WarmNotes {
        WarmNotes(self.config().state_dir.join(NOTES))
    }
}

impl WarmNotes {
    /// Notes that this open file is a copy. `real`: its real path.
    pub(super) fn add(&self, copy: &File, real: &Path) -> io::Result<()> {
        fs::create_dir_all(&self.0)?;
        fs::write(self.note_of(copy)?, real.as_os_str().as_bytes())
    }

    /// Whether this open file is a copy with this real path.
    pub(super) fn has(&self, copy: &File, real: &Path) -> io::Result<bool> {
        match fs::read(self.note_of(copy)?) {
            Ok(noted) => Ok(noted == real.as_os_str().as_bytes()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the note about this open file, if there is one.
    pub(super) fn remove(&self, copy: &File) -> io::Result<()> {
        match fs::remove_file(self.note_of(copy)?) {
            // A note must not come back after a power cut.
            Ok(()) => File::open(&self.0)?.sync_all(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn note_of(&self, copy: &File) -> io::Result<PathBuf> {
        let data = copy.metadata()?;
        // Not every file system knows it. An inode number is used again.
        let born = data.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born = born.map_or(0, |born| born.as_nanos());
        Ok(self.0.join(format!("{:x}-{:x}-{born:x}", data.dev(), data.ino())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_file_that_was_noted_is_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let notes = WarmNotes(dir.path().join("notes"));
        let [copy, other] = ["copy", "other"].map(|name| dir.path().join(name));
        let file = File::create(&copy).unwrap();
        assert!(!notes.has(&file, &copy).unwrap());
        notes.remove(&file).unwrap();
        notes.add(&file, &copy).unwrap();
        assert!(notes.has(&file, &copy).unwrap());
        assert!(!notes.has(&file, &other).unwrap());
        assert!(!notes.has(&File::create(&other).unwrap(), &copy).unwrap());
        notes.remove(&file).unwrap();
        assert!(!notes.has(&file, &copy).unwrap());
    }
}
