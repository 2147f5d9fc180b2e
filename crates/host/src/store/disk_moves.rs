//! Note of a disk that moves while its VM runs: `STATE_DIR/vms/NAME/disk-move.json`. It is removed
//! with the VM's record.

use std::fs;
use std::io;
use std::path::PathBuf;

use godwit_qemu::{ResolvedDisk, VmName};
use serde::{Deserialize, Serialize};

use super::{Store, StoreError, failed};

/// A disk before its move and after it. The VM's record says which of them counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskMoveNote {
    pub(crate) old: ResolvedDisk,
    pub(crate) new: ResolvedDisk,
    /// Number of the new image's file, or of the image in its pool: another one may have its name
    /// later.
    pub(crate) inode: u64,
    /// Whether the guest may have written the new image alone.
    #[serde(default)]
    pub(crate) committed: bool,
}

impl Store {
    fn disk_move_path(&self, name: &VmName) -> PathBuf {
        self.vms.join(name).join("disk-move.json")
    }

    /// Notes a move, before QEMU knows of it.
    pub(crate) fn save_disk_move(
        &self,
        name: &VmName,
        note: &DiskMoveNote,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.replace(&self.disk_move_path(name), note, "disk-move")
    }

    /// Returns the move that was noted last and has not ended.
    pub(crate) fn disk_move(&self, name: &VmName) -> Result<Option<DiskMoveNote>, StoreError> {
        let path = self.disk_move_path(name);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&path, "read", error)),
        };
        let note = serde_json::from_slice(&text);
        note.map(Some).map_err(|error| StoreError::Format { path, why: error.to_string() })
    }

    /// Removes the note of a move. A failure is logged: the next agent looks at the disk again.
    pub(crate) fn forget_disk_move(&self, name: &VmName) {
        let _alone = self.writing.lock();
        let path = self.disk_move_path(name);
        if let Err(error) = self.disk.remove(&path) {
            tracing::error!(path = %path.display(), %error, "the note of a disk's move stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_qemu::{Disk, DiskFormat};

    use super::*;

    #[test]
    fn a_move_is_noted_until_it_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let name = VmName::new("web").unwrap();
        assert_eq!(store.disk_move(&name).unwrap(), None);
        fs::create_dir(dir.path().join("vms/web")).unwrap();
        let old: ResolvedDisk = Disk::new("/srv/web.raw", DiskFormat::Raw).into();
        let new = old.with_image("/ssd/web.qcow2".into(), DiskFormat::Qcow2, Some(Vec::new()));
        let note = DiskMoveNote { old, new, inode: 7, committed: false };
        store.save_disk_move(&name, &note).unwrap();
        assert_eq!(store.disk_move(&name).unwrap(), Some(note));
        fs::write(store.disk_move_path(&name), "{}").unwrap();
        assert!(store.disk_move(&name).is_err());
        store.forget_disk_move(&name);
        assert_eq!(store.disk_move(&name).unwrap(), None);
        store.forget_disk_move(&name);
    }
}
