//! Note of a disk that moves while its VM runs: `STATE_DIR/vms/NAME/disk-move.json`. It is removed
//! with the VM's record.

use godwit_qemu::{ResolvedDisk, VmName};
use serde::{Deserialize, Serialize};

use super::{Store, StoreError};

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

/// Kind of the note.
const KIND: &str = "disk-move";

impl Store {
    /// Notes a move, before QEMU knows of it.
    pub(crate) fn save_disk_move(
        &self,
        name: &VmName,
        note: &DiskMoveNote,
    ) -> Result<(), StoreError> {
        self.save_note(name, KIND, note)
    }

    /// Returns the move that was noted last and has not ended.
    pub(crate) fn disk_move(&self, name: &VmName) -> Result<Option<DiskMoveNote>, StoreError> {
        self.read_note(name, KIND)
    }

    /// Removes the note of a move.
    pub(crate) fn forget_disk_move(&self, name: &VmName) {
        self.forget_note(name, KIND);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        fs::write(store.note_path(&name, KIND), "{}").unwrap();
        assert!(store.disk_move(&name).is_err());
        store.forget_disk_move(&name);
        assert_eq!(store.disk_move(&name).unwrap(), None);
        store.forget_disk_move(&name);
    }
}
