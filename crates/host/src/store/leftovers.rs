//! Removal of the directory of a VM's record. A guest that controls its TPM's process can leave
//! anything in a directory below, to any depth: nothing deeper is entered.

use std::fs;
use std::io;
use std::path::Path;

/// Most entries that are removed from one directory.
const MOST_ENTRIES: usize = 4096;

/// Removes a directory, its files, and the directories in it that have only files; no error if it
/// does not exist. Links are removed, never followed.
///
/// # Errors
/// Something deeper is in it, or too much: an operator has to remove that.
pub(super) fn remove(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.take(MOST_ENTRIES) {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_flat(&entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

fn remove_flat(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.take(MOST_ENTRIES) {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_goes_with_its_files_and_nothing_deeper_is_entered() {
        let folder = tempfile::tempdir().unwrap();
        let (dir, outside) = (folder.path().join("web"), folder.path().join("outside"));
        remove(&dir).unwrap();
        fs::create_dir_all(dir.join("tpm/empty")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "").unwrap();
        fs::write(dir.join("vm.json"), "{}").unwrap();
        fs::write(dir.join("tpm/state"), "keys").unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("tpm/link")).unwrap();
        std::os::unix::fs::symlink(&outside, dir.join("link")).unwrap();
        remove(&dir).unwrap();
        assert!(!dir.exists() && outside.join("file").exists());
        fs::create_dir_all(dir.join("tpm/a/b/c")).unwrap();
        remove(&dir).unwrap_err();
        assert!(dir.join("tpm/a/b/c").exists());
    }
}
