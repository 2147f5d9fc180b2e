//! Note of disks that travel with a running VM: `STATE_DIR/vms/NAME/disk-transfer.json`. It is
//! removed with the VM's record.

use std::path::PathBuf;

use godwit_qemu::{ResolvedDisk, VmName};
use serde::{Deserialize, Serialize};

use super::{Store, StoreError};

/// Beginning of the names of all bitmaps that record what is still to be sent.
pub(crate) const BITMAP_PREFIX: &str = "godwit-disks-";
/// Digits of a transfer's ID in the names of its bitmaps.
const SHORT_ID: usize = 12;

/// A transfer of a VM's disks to another host. While it is noted, QEMU may have its exports, its
/// bitmaps and its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskTransferNote {
    /// ID of the transfer: 32 hexadecimal digits.
    pub(crate) transfer: String,
    /// The destination.
    pub(crate) to: String,
    /// Directory for the images there, if one was requested.
    pub(crate) directory: Option<PathBuf>,
    /// Whether the content of backing files travels, too.
    pub(crate) flatten: bool,
    /// The disks, in the order of the transfer.
    pub(crate) disks: Vec<NotedDisk>,
    /// Whether the guest's writes may be limited.
    #[serde(default)]
    pub(crate) limited: bool,
    /// Whether the hand-over has begun. From then on the other host may write its images: the
    /// transfer cannot be continued.
    #[serde(default)]
    pub(crate) handed_over: bool,
    /// Whether QEMU mirrors the disks to the agent, instead of recording in bitmaps. Such a
    /// transfer cannot be continued by another agent.
    #[serde(default)]
    pub(crate) mirrored: bool,
}

/// A disk of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NotedDisk {
    /// The disk as QEMU has it.
    pub(crate) disk: ResolvedDisk,
    /// Node of its image.
    pub(crate) node: String,
    /// Size that the guest sees.
    pub(crate) virtual_bytes: u64,
    /// Whether its image is a layer on files that stay behind: only what it has itself travels.
    #[serde(default)]
    pub(crate) is_layer: bool,
}

impl NotedDisk {
    /// Returns its position among the disks of a running VM.
    pub(crate) fn index_in(&self, disks: &[ResolvedDisk]) -> Option<usize> {
        disks.iter().position(|disk| *disk == self.disk)
    }
}

impl DiskTransferNote {
    /// Returns the export through which a disk is read.
    pub(crate) fn export(disk: usize) -> String {
        format!("godwit-disk{disk}")
    }

    /// Returns the export through which a disk's bitmap is read.
    pub(crate) fn dirty_export(disk: usize) -> String {
        format!("godwit-disk{disk}-dirty")
    }

    /// Returns the name of a disk's mirror.
    pub(crate) fn mirror(disk: usize) -> String {
        format!("godwit-mirror{disk}")
    }

    /// Returns the name of a bitmap.
    pub(crate) fn bitmap(&self, number: u32) -> String {
        format!("{}-{number}", self.bitmap_prefix())
    }

    /// Returns the number of a bitmap of this transfer; `None` if it is not one of them.
    pub(crate) fn number_of(&self, bitmap: &str) -> Option<u32> {
        bitmap.strip_prefix(&self.bitmap_prefix())?.strip_prefix('-')?.parse().ok()
    }

    fn bitmap_prefix(&self) -> String {
        let short: String = self.transfer.chars().take(SHORT_ID).collect();
        format!("{BITMAP_PREFIX}{short}")
    }
}

/// Kind of the note.
const KIND: &str = "disk-transfer";

impl Store {
    /// Notes a transfer, before QEMU or the other host knows of it.
    pub(crate) fn save_disk_transfer(
        &self,
        name: &VmName,
        note: &DiskTransferNote,
    ) -> Result<(), StoreError> {
        self.save_note(name, KIND, note)
    }

    /// Returns the transfer that was noted last and has not ended.
    pub(crate) fn disk_transfer(
        &self,
        name: &VmName,
    ) -> Result<Option<DiskTransferNote>, StoreError> {
        self.read_note(name, KIND)
    }

    /// Removes the note of a transfer.
    pub(crate) fn forget_disk_transfer(&self, name: &VmName) {
        self.forget_note(name, KIND);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use godwit_qemu::{Disk, DiskFormat};

    use super::*;

    fn note() -> DiskTransferNote {
        let disk = NotedDisk {
            disk: Disk::new("/srv/web.raw", DiskFormat::Raw).into(),
            node: "disk0".into(),
            virtual_bytes: 1 << 30,
            is_layer: false,
        };
        DiskTransferNote {
            transfer: "0123456789abcdef0123456789abcdef".into(),
            to: "b".into(),
            directory: None,
            flatten: false,
            disks: vec![disk],
            limited: false,
            handed_over: false,
            mirrored: false,
        }
    }

    #[test]
    fn a_transfer_is_noted_until_it_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let name = VmName::new("web").unwrap();
        assert_eq!(store.disk_transfer(&name).unwrap(), None);
        fs::create_dir(dir.path().join("vms/web")).unwrap();
        store.save_disk_transfer(&name, &note()).unwrap();
        let limited = DiskTransferNote { limited: true, ..note() };
        store.save_disk_transfer(&name, &limited).unwrap();
        assert_eq!(store.disk_transfer(&name).unwrap(), Some(limited));
        fs::write(store.note_path(&name, KIND), "{}").unwrap();
        assert!(store.disk_transfer(&name).is_err());
        store.forget_disk_transfer(&name);
        assert_eq!(store.disk_transfer(&name).unwrap(), None);
        store.forget_disk_transfer(&name);
    }

    #[test]
    fn a_bitmap_belongs_to_one_transfer() {
        let note = note();
        let other = DiskTransferNote { transfer: "fedcba9876543210".into(), ..note.clone() };
        assert_eq!(note.bitmap(7), "godwit-disks-0123456789ab-7");
        assert_eq!(note.number_of(&note.bitmap(7)), Some(7));
        for bitmap in [&*other.bitmap(7), "bitmap0", "godwit-disks-0123456789ab", "godwit-disks-"] {
            assert_eq!(note.number_of(bitmap), None, "{bitmap}");
        }
    }
}
