//! Notes of live exports to libvirt, and how notes are read.

use std::fs;
use std::path::{Path, PathBuf};

use godwit_qemu::VmName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Store, StoreError, failed};

impl Store {
    fn live_exports_dir(&self) -> PathBuf {
        self.adoptions.with_file_name("live-exports")
    }

    /// Writes the note of a live export; once this returns, it survives a power cut.
    pub(crate) fn save_live_export(
        &self,
        vm: &VmName,
        note: &impl Serialize,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let dir = self.live_exports_dir();
        self.disk.make_dir(&dir).map_err(|why| failed(&dir, "create", why))?;
        self.replace(&dir.join(format!("{vm}.json")), note, "live-export")
    }

    /// Returns the notes of live exports. One that cannot be read is logged.
    pub(crate) fn live_exports<N: DeserializeOwned>(&self) -> Vec<N> {
        notes_in(&self.live_exports_dir())
    }

    /// Whether a note says that another program's QEMU may have the guest of a VM.
    pub(crate) fn is_shared_with_other_program(&self, vm: &VmName) -> bool {
        let file = format!("{vm}.json");
        self.adoptions.join(&file).exists() || self.live_exports_dir().join(&file).exists()
    }

    /// Removes the note of a live export; no error if there is none.
    pub(crate) fn remove_live_export(&self, vm: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.live_exports_dir().join(format!("{vm}.json"));
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
