//! Notes of VMs that leave for libvirt while they run, and how notes are read.

use std::fs;
use std::path::{Path, PathBuf};

use godwit_qemu::VmName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Store, StoreError, failed};

impl Store {
    fn leavings_dir(&self) -> PathBuf {
        self.adoptions.with_file_name("leavings")
    }

    /// Writes the note of a VM that leaves; once this returns, it survives a power cut.
    pub(crate) fn save_leaving(
        &self,
        vm: &VmName,
        note: &impl Serialize,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let dir = self.leavings_dir();
        self.disk.make_dir(&dir).map_err(|why| failed(&dir, "create", why))?;
        self.replace(&dir.join(format!("{vm}.json")), note, "leaving")
    }

    /// Returns the notes of VMs that leave. One that cannot be read is logged.
    pub(crate) fn leavings<N: DeserializeOwned>(&self) -> Vec<N> {
        notes_in(&self.leavings_dir())
    }

    /// Removes the note of a VM that leaves; no error if there is none.
    pub(crate) fn remove_leaving(&self, vm: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.leavings_dir().join(format!("{vm}.json"));
        self.disk.remove(&path).map_err(|source| failed(&path, "remove", source))
    }
}

/// Returns the notes in a directory. One that cannot be read is logged.
pub(super) fn notes_in<N: DeserializeOwned>(dir: &Path) -> Vec<N> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let notes = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let read = |path: PathBuf| {
        let read = fs::read(&path).map_err(|error| error.to_string());
        let note =
            read.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
        note.inspect_err(|error| {
            let path = path.display();
            tracing::error!(%path, error, "cannot read a note");
        })
        .ok()
    };
    notes.filter_map(read).collect()
}
