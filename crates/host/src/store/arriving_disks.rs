//! Records of disks that arrive with a VM: `STATE_DIR/arriving-disks/TRANSFER.json`. Beside each is
//! the map of what has arrived, `TRANSFER.present`.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

use godwit_qemu::{BackingFile, DiskFormat, ThinPool, Uuid, VmName};
use godwit_wire::MigrationId;
use serde::{Deserialize, Serialize};

use super::live_exports::notes_in;
use super::{FORMAT, Store, StoreError, failed};
use crate::block_devices::DeviceIdentity;

/// Saved form of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedArrival {
    /// Format version of this record.
    format: u32,
    /// ID of the transfer, in hexadecimal digits.
    pub(crate) transfer: String,
    pub(crate) vm: VmName,
    pub(crate) uuid: Uuid,
    /// The source host.
    pub(crate) from: String,
    /// Last time of a connection of the source, in Unix time.
    pub(crate) seen_unix_s: u64,
    pub(crate) disks: Vec<SavedArrivingDisk>,
}

/// Saved form of one disk of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedArrivingDisk {
    /// Its image at the source.
    pub(crate) source: PathBuf,
    /// Its image here.
    pub(crate) path: PathBuf,
    pub(crate) format: DiskFormat,
    pub(crate) virtual_bytes: u64,
    /// Number of the image's file, of an image in its pool of Ceph or of a device: another one may
    /// have its name later. 0: the image in the pool is being created.
    pub(crate) inode: u64,
    /// Time of the file's birth, in nanoseconds of Unix time; its mark if the file system records
    /// none; of a device its sequence number. 0: it has no mark either, or is in a pool.
    pub(crate) born_unix_ns: u64,
    /// Its backing files here, the nearest first.
    pub(crate) backing: Vec<BackingFile>,
    /// What an image in a pool is named by until it has its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unnamed: Option<Uuid>,
    /// The block device, if it arrives on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<DeviceIdentity>,
    /// The thin volume that is made for it, whose device is absent until the volume is ready, and
    /// again once it is to be removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) thin: Option<SavedThinVolume>,
}

/// Saved form of a thin volume that is made for a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedThinVolume {
    pub(crate) pool: ThinPool,
    /// Its name in its volume group.
    pub(crate) name: String,
    /// The tag that it has while it is made or removed, and that no other volume has.
    pub(crate) tag: String,
    /// Its UUID. Absent: it is being created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
}

impl SavedArrival {
    /// Creates a record in this version's format.
    pub(crate) fn new(
        id: MigrationId,
        (vm, uuid): (VmName, Uuid),
        from: String,
        seen_unix_s: u64,
        disks: Vec<SavedArrivingDisk>,
    ) -> SavedArrival {
        let (format, transfer) = (FORMAT, id.to_string());
        SavedArrival { format, transfer, vm, uuid, from, seen_unix_s, disks }
    }

    /// Returns the record with another time of the last connection.
    pub(crate) fn seen_at(&self, seen_unix_s: u64) -> SavedArrival {
        SavedArrival { seen_unix_s, ..self.clone() }
    }

    /// Whether thin volumes are made for its disks.
    pub(crate) fn has_volumes(&self) -> bool {
        self.disks.iter().any(|disk| disk.thin.is_some())
    }

    /// Whether its thin volumes are to be removed, unless they are being made.
    pub(crate) fn has_left_volumes(&self) -> bool {
        self.disks.iter().any(|disk| disk.thin.is_some() && disk.device.is_none())
    }

    /// Returns the record of the transfer once it cannot go on, and its thin volumes are to be
    /// removed.
    pub(crate) fn ended(&self) -> SavedArrival {
        let mut ended = self.clone();
        for disk in ended.disks.iter_mut().filter(|disk| disk.thin.is_some()) {
            disk.device = None;
        }
        ended
    }
}

impl Store {
    fn arrivals_dir(&self) -> PathBuf {
        self.adoptions.with_file_name("arriving-disks")
    }

    /// Returns the map of what has arrived of a transfer.
    pub(crate) fn present_path(&self, id: MigrationId) -> PathBuf {
        self.arrivals_dir().join(format!("{id}.present"))
    }

    /// Writes the record of a transfer; once this returns, it survives a power cut.
    pub(crate) fn save_arrival(&self, record: &SavedArrival) -> Result<(), StoreError> {
        let _alone = self.writing_arrivals.lock();
        let dir = self.arrivals_dir();
        self.disk.make_dir(&dir).map_err(|why| failed(&dir, "create", why))?;
        self.replace(&dir.join(format!("{}.json", record.transfer)), record, "arriving-disks")
    }

    /// Returns the records of transfers, each with its ID. One that cannot be read is logged.
    pub(crate) fn arrivals(&self) -> Vec<(MigrationId, SavedArrival)> {
        let records: Vec<SavedArrival> = notes_in(&self.arrivals_dir());
        let known = records.into_iter().filter(|record| record.format == FORMAT);
        known.filter_map(|record| Some((record.transfer.parse().ok()?, record))).collect()
    }

    /// Removes the record of a transfer, and its map; no error if there is none.
    pub(crate) fn remove_arrival(&self, id: MigrationId) -> Result<(), StoreError> {
        let _alone = self.writing_arrivals.lock();
        let path = self.arrivals_dir().join(format!("{id}.json"));
        self.disk.remove(&path).map_err(|source| failed(&path, "remove", source))?;
        // A map without a record is of no use, and removed at the agent's start.
        let _ = fs::remove_file(self.present_path(id));
        Ok(())
    }

    /// Removes maps without a record.
    pub(crate) fn remove_stray_maps(&self) {
        for entry in fs::read_dir(self.arrivals_dir()).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_map = path.extension() == Some(OsStr::new("present"));
            if is_map && !path.with_extension("json").exists() {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_recorded_until_it_is_removed_with_its_map() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let id = MigrationId([7; 16]);
        assert_eq!(store.arrivals(), []);
        let disk = SavedArrivingDisk {
            source: "/srv/web.raw".into(),
            path: "/ssd/web.raw".into(),
            format: DiskFormat::Raw,
            virtual_bytes: 4096,
            inode: 7,
            born_unix_ns: 0,
            backing: Vec::new(),
            unnamed: None,
            device: None,
            thin: None,
        };
        let vm = (VmName::new("web").unwrap(), Uuid::from_u128(1));
        let record = SavedArrival::new(id, vm, "b".to_owned(), 5, vec![disk]);
        store.save_arrival(&record).unwrap();
        let stray = store.present_path(MigrationId([8; 16]));
        for map in [&store.present_path(id), &stray] {
            fs::write(map, "map").unwrap();
        }
        store.remove_stray_maps();
        assert!(!stray.exists() && store.present_path(id).exists());
        assert_eq!(store.arrivals(), [(id, record.clone())]);
        // Of a later version, or with the ID of none.
        for other in [
            SavedArrival {
                format: 9,
                transfer: MigrationId([1; 16]).to_string(),
                ..record.clone()
            },
            SavedArrival { transfer: "passwd".to_owned(), ..record },
        ] {
            store.save_arrival(&other).unwrap();
        }
        assert_eq!(store.arrivals().len(), 1);
        store.remove_arrival(id).unwrap();
        assert!(store.arrivals().is_empty() && !store.present_path(id).exists());
        store.remove_arrival(id).unwrap();
    }
}
