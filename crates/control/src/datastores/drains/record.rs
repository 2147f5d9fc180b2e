//! Saved form of drains of datastores. One value of the store holds [`MOST_DISKS`] disks; a drain's
//! record has none, and each part the next ones. So a drain has no limit of disks.

use std::path::PathBuf;

use godwit_api::control::{DrainDiskState, DrainState};
use godwit_qemu::DiskFormat;
use godwit_store::records::{Record, Table};
use godwit_types::RateLimit;
use serde::{Deserialize, Serialize};

use super::state::{Progress, StoreDisk, StoreDrain, Target};
use crate::cluster::text::beginning;

pub(crate) const DATASTORE_DRAINS: Table<SavedStoreDrain> = Table::new();
/// Disks of drains, by [`part_id`].
pub(crate) const PARTS: Table<SavedDisks> = Table::new();

/// Most disks of one value: each has three paths and a reason.
const MOST_DISKS: usize = 30;
/// Longest reason that is saved, bytes.
const MOST_REASON_BYTES: usize = 300;

/// Returns the ID of a part of a drain.
pub(super) fn part_id(drain: &str, number: usize) -> String {
    format!("{drain}.{number:05}")
}

/// Returns the drain that a part belongs to.
pub(super) fn drain_of(part_id: &str) -> &str {
    part_id.rsplit_once('.').map_or(part_id, |(drain, _)| drain)
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedStoreDrain {
    datastore: String,
    name: String,
    asked_by: String,
    asked_unix_ms: u64,
    flatten: bool,
    bandwidth_limit: Option<RateLimit>,
    state: DrainState,
    was_in_maintenance: bool,
    ended_unix_ms: Option<u64>,
}

/// Some disks of a drain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedDisks {
    disks: Vec<SavedDisk>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedDisk {
    vm: String,
    host: String,
    path: PathBuf,
    state: DrainDiskState,
    reason: String,
    to: Option<SavedTarget>,
    image: Option<PathBuf>,
    job: Option<String>,
    returns: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format_back: Option<DiskFormat>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedTarget {
    id: String,
    name: String,
}

impl Record for SavedStoreDrain {
    const KIND: &'static str = "datastore-drain";
    const PREFIX: &'static str = "datastore-drains/";
    const VERSION: u32 = 1;
}

impl Record for SavedDisks {
    const KIND: &'static str = "datastore-drain-part";
    const PREFIX: &'static str = "datastore-drain-parts/";
    const VERSION: u32 = 1;
}

impl SavedStoreDrain {
    /// Converts a drain to its record and its parts.
    pub(super) fn of(drain: &StoreDrain) -> (SavedStoreDrain, Vec<SavedDisks>) {
        let saved = SavedStoreDrain {
            datastore: drain.datastore.clone(),
            name: drain.name.clone(),
            asked_by: drain.asked_by.clone(),
            asked_unix_ms: drain.asked_unix_ms,
            flatten: drain.flatten,
            bandwidth_limit: drain.bandwidth_limit,
            state: drain.state,
            was_in_maintenance: drain.was_in_maintenance,
            ended_unix_ms: drain.ended_unix_ms,
        };
        let parts = drain.disks.chunks(MOST_DISKS);
        let parts = parts
            .map(|disks| SavedDisks { disks: disks.iter().map(SavedDisk::from).collect() })
            .collect();
        (saved, parts)
    }

    /// Restores a drain from its record and its parts.
    pub(super) fn with(self, parts: Vec<SavedDisks>) -> StoreDrain {
        let disks = parts.into_iter().flat_map(|part| part.disks).map(StoreDisk::from);
        StoreDrain {
            disks: disks.collect(),
            datastore: self.datastore,
            name: self.name,
            asked_by: self.asked_by,
            asked_unix_ms: self.asked_unix_ms,
            flatten: self.flatten,
            bandwidth_limit: self.bandwidth_limit,
            state: self.state,
            was_in_maintenance: self.was_in_maintenance,
            ended_unix_ms: self.ended_unix_ms,
        }
    }
}

impl From<&StoreDisk> for SavedDisk {
    fn from(disk: &StoreDisk) -> SavedDisk {
        let StoreDisk {
            vm,
            host,
            path,
            state,
            reason,
            to,
            image,
            job,
            returns,
            format_back,
            progress: _,
        } = disk.clone();
        SavedDisk {
            vm,
            host,
            path,
            state,
            reason: beginning(&reason, MOST_REASON_BYTES),
            to: to.map(|Target { id, name }| SavedTarget { id, name }),
            image,
            job,
            returns,
            format_back,
        }
    }
}

impl From<SavedDisk> for StoreDisk {
    fn from(saved: SavedDisk) -> StoreDisk {
        let SavedDisk { vm, host, path, state, reason, to, image, job, returns, format_back } =
            saved;
        let to = to.map(|SavedTarget { id, name }| Target { id, name });
        let progress = Progress::default();
        StoreDisk { vm, host, path, state, reason, to, image, job, returns, format_back, progress }
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::{disk, drain};
    use super::*;

    #[test]
    fn a_drain_of_any_size_is_restored_from_its_parts() {
        for count in [0, 1, 30, 31, 100] {
            let mut before = drain((0..count).map(|at| disk("web", "a", at)).collect());
            if let Some(last) = before.disks.last_mut() {
                last.end_moved("/fast/web.raw".into());
                last.job = Some("5b1c2a60".to_owned());
                last.format_back = Some(DiskFormat::Qcow2);
            }
            let (saved, parts) = SavedStoreDrain::of(&before);
            assert_eq!(parts.len(), usize::try_from(count).unwrap().div_ceil(MOST_DISKS));
            assert_eq!(saved.with(parts), before);
        }
        assert_eq!(drain_of(&part_id("s1", 7)), "s1");
    }
}
