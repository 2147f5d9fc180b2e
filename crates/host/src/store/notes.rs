//! Notes of work on a VM that is going on: `STATE_DIR/vms/NAME/KIND.json`. They are removed with
//! the VM's record.

use std::fs;
use std::io;
use std::path::PathBuf;

use godwit_qemu::VmName;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Store, StoreError, failed};

impl Store {
    pub(super) fn note_path(&self, name: &VmName, kind: &str) -> PathBuf {
        self.vms.join(name).join(format!("{kind}.json"))
    }

    /// Saves a note in place of the last one of its kind.
    pub(super) fn save_note(
        &self,
        name: &VmName,
        kind: &str,
        note: &impl Serialize,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.replace(&self.note_path(name, kind), note, kind)
    }

    /// Returns the note of a kind, if there is one.
    pub(super) fn read_note<T: DeserializeOwned>(
        &self,
        name: &VmName,
        kind: &str,
    ) -> Result<Option<T>, StoreError> {
        let path = self.note_path(name, kind);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&path, "read", error)),
        };
        let note = serde_json::from_slice(&text);
        note.map(Some).map_err(|error| StoreError::Format { path, why: error.to_string() })
    }

    /// Removes a note. A failure is logged: the next agent looks at the work again.
    pub(super) fn forget_note(&self, name: &VmName, kind: &str) {
        let _alone = self.writing.lock();
        let path = self.note_path(name, kind);
        if let Err(error) = self.disk.remove(&path) {
            tracing::error!(path = %path.display(), %error, "a note of work that has ended stays");
        }
    }
}
