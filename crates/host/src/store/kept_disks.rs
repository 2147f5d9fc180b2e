//! Records of images that stay at this host after their disks have moved to another one:
//! `STATE_DIR/kept-disks/ID.json`.

use std::path::PathBuf;

use godwit_qemu::{Uuid, VmName};
use godwit_types::Ownership;
use serde::{Deserialize, Serialize};

use super::live_exports::notes_in;
use super::{FORMAT, Store, StoreError, failed};

/// Saved form of an image that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedKeptDisk {
    /// Format version of this record.
    pub(crate) format: u32,
    /// Name of the record's file.
    pub(crate) id: Uuid,
    /// VM whose disk it was.
    pub(crate) vm: VmName,
    pub(crate) uuid: Uuid,
    /// Ownership of the guest that the destination was offered.
    pub(crate) offered: Ownership,
    /// Destination of the move.
    pub(crate) to: String,
    pub(crate) path: PathBuf,
    /// Identity of its datastore, if it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) datastore: Option<String>,
    /// Image of the disk at the destination.
    pub(crate) moved_to: PathBuf,
    /// Number of the image's file.
    pub(crate) inode: u64,
    /// Time of the file's birth, in nanoseconds of Unix time; its mark if the file system records
    /// none. 0: it has no mark either.
    pub(crate) born_unix_ns: u64,
    /// Space that the image took when its disk had moved.
    pub(crate) used_bytes: u64,
    /// Time of the move, in Unix time.
    pub(crate) since_unix_s: u64,
    /// Time from which it may be removed, in Unix time. Absent: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until_unix_s: Option<u64>,
    /// Why it was not removed, although its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) waits: Option<String>,
}

/// What is known of a move whose disks leave images behind.
#[derive(Clone, Debug)]
pub(crate) struct LeftBy {
    pub(crate) vm: VmName,
    pub(crate) uuid: Uuid,
    /// Ownership of the guest that the destination was offered.
    pub(crate) offered: Ownership,
    /// Destination of the move.
    pub(crate) to: String,
    pub(crate) since_unix_s: u64,
    pub(crate) until_unix_s: Option<u64>,
}

impl SavedKeptDisk {
    /// Creates a record in this version's format. `identity`: number and birth of the file.
    pub(crate) fn new(
        left_by: &LeftBy,
        (path, moved_to): (PathBuf, PathBuf),
        identity: (u64, u64),
        used_bytes: u64,
    ) -> SavedKeptDisk {
        let LeftBy { vm, uuid, offered, to, since_unix_s, until_unix_s } = left_by.clone();
        let (inode, born_unix_ns) = identity;
        SavedKeptDisk {
            format: FORMAT,
            id: Uuid::new_v4(),
            vm,
            uuid,
            offered,
            to,
            path,
            datastore: None,
            moved_to,
            inode,
            born_unix_ns,
            used_bytes,
            since_unix_s,
            until_unix_s,
            waits: None,
        }
    }

    /// Whether its time is over.
    pub(crate) fn is_due(&self, now_unix_s: u64) -> bool {
        self.until_unix_s.is_some_and(|until| now_unix_s >= until)
    }
}

impl Store {
    fn kept_disks_dir(&self) -> PathBuf {
        self.adoptions.with_file_name("kept-disks")
    }

    /// Writes the record of an image that stays; once this returns, it survives a power cut.
    pub(crate) fn save_kept_disk(&self, record: &SavedKeptDisk) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let dir = self.kept_disks_dir();
        self.disk.make_dir(&dir).map_err(|why| failed(&dir, "create", why))?;
        self.replace(&dir.join(format!("{}.json", record.id)), record, "kept-disk")
    }

    /// Returns the records of images that stay, by path. One that cannot be read is logged.
    pub(crate) fn kept_disks(&self) -> Vec<SavedKeptDisk> {
        let mut records: Vec<SavedKeptDisk> = notes_in(&self.kept_disks_dir());
        records.retain(|record| record.format == FORMAT);
        records.sort_by(|a, b| (&a.path, a.id).cmp(&(&b.path, b.id)));
        records
    }

    /// Removes the record of an image; no error if there is none.
    pub(crate) fn remove_kept_disk(&self, id: Uuid) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.kept_disks_dir().join(format!("{id}.json"));
        self.disk.remove(&path).map_err(|source| failed(&path, "remove", source))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use godwit_types::Incarnation;

    use super::*;

    #[test]
    fn an_image_is_recorded_until_its_record_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.kept_disks(), []);
        let left_by = LeftBy {
            vm: VmName::new("web").unwrap(),
            uuid: Uuid::from_u128(1),
            offered: Ownership { incarnation: Incarnation::new(7), epoch: 4 },
            to: "b".to_owned(),
            since_unix_s: 100,
            until_unix_s: Some(200),
        };
        let record = |name: &str| {
            let paths = (format!("/srv/{name}").into(), format!("/ssd/{name}").into());
            SavedKeptDisk::new(&left_by, paths, (7, 8), 4096)
        };
        let (one, two) = (record("a.raw"), record("b.raw"));
        assert!(!one.is_due(199) && one.is_due(200));
        store.save_kept_disk(&two).unwrap();
        store.save_kept_disk(&one).unwrap();
        assert_eq!(store.kept_disks(), [one.clone(), two.clone()]);
        let kept = SavedKeptDisk { until_unix_s: None, waits: Some("busy".to_owned()), ..two };
        assert!(!kept.is_due(u64::MAX));
        store.save_kept_disk(&kept).unwrap();
        assert_eq!(store.kept_disks(), [one.clone(), kept.clone()]);
        store.remove_kept_disk(one.id).unwrap();
        store.remove_kept_disk(one.id).unwrap();
        // Of a later version, and damaged.
        store.save_kept_disk(&SavedKeptDisk { format: 9, ..one }).unwrap();
        fs::write(dir.path().join("kept-disks/torn.json"), "{").unwrap();
        assert_eq!(store.kept_disks(), [kept]);
    }
}
