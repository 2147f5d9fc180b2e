//! Saved form of protected VMs, of VMs that hosts must give up, and of VMs whose protection ends.

use std::collections::BTreeMap;
use std::path::PathBuf;

use godwit_qemu::{Uuid, VmSpec};
use godwit_store::records::{Record, Table};
use godwit_types::Incarnation;
use serde::{Deserialize, Serialize};

pub(super) const PROTECTED: Table<SavedVm> = Table::new();
pub(super) const RELEASES: Table<SavedRelease> = Table::new();
pub(super) const ENDINGS: Table<SavedEnding> = Table::new();

/// A protected VM, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedVm {
    /// Specification with which it can start on another host.
    pub(super) spec: VmSpec,
    pub(super) incarnation: Incarnation,
    /// Host that has it.
    pub(super) host: String,
    /// Whether it should run.
    pub(super) runs: bool,
    /// ID of the datastore of each image: another host may know it by the path alone.
    pub(super) datastores: BTreeMap<PathBuf, String>,
    /// Its restart, after a term of its host has ended.
    pub(super) restart: Option<SavedRestart>,
}

/// A restart that is not over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedRestart {
    /// Term that has ended.
    pub(super) term: u64,
    pub(super) since_unix_ms: u64,
    /// Start that may have been requested. It is saved before the request, and until it is certain
    /// that it starts nothing any more.
    pub(super) attempt: Option<SavedAttempt>,
}

/// A start on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedAttempt {
    pub(super) host: String,
    /// Term of that host, in which alone the request is accepted.
    pub(super) term: u64,
    /// ID in all requests of it; the nil one in records of earlier versions.
    #[serde(default)]
    pub(super) id: Uuid,
    /// Other hosts that may have a definition of the VM, to be released when it has started.
    #[serde(default)]
    pub(super) left_at: Vec<SavedLeftAt>,
}

impl SavedAttempt {
    pub(super) fn new(host: &str, term: u64, left_at: Vec<SavedLeftAt>) -> SavedAttempt {
        SavedAttempt { host: host.to_owned(), term, id: Uuid::new_v4(), left_at }
    }
}

/// A host that may have a definition of a VM that starts elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedLeftAt {
    pub(super) host: String,
    /// What it answered; none: it did not respond, and its term is over.
    pub(super) incarnation: Option<Incarnation>,
}

/// A VM that a host must give up, by host and name: it was started elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedRelease {
    pub(super) uuid: Option<Uuid>,
    /// Incarnation that the host has; none: it may have been created there, without an answer.
    pub(super) incarnation: Option<Incarnation>,
    /// Host that runs it now.
    pub(super) to: String,
}

/// A VM whose protection is about to end, by host and uuid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedEnding {
    pub(super) since_unix_ms: u64,
}

impl Record for SavedEnding {
    const KIND: &'static str = "ha-ending";
    const PREFIX: &'static str = "ha-endings/";
    const VERSION: u32 = 1;
}

impl Record for SavedVm {
    const KIND: &'static str = "protected-vm";
    const PREFIX: &'static str = "ha-vms/";
    const VERSION: u32 = 1;
}

impl Record for SavedRelease {
    const KIND: &'static str = "ha-release";
    const PREFIX: &'static str = "ha-releases/";
    const VERSION: u32 = 1;
}

/// Host and name of a VM that the host must give up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ReleaseKey {
    pub(super) host: String,
    pub(super) vm: String,
}

impl ReleaseKey {
    pub(super) fn new(host: &str, vm: &str) -> ReleaseKey {
        ReleaseKey { host: host.to_owned(), vm: vm.to_owned() }
    }

    /// Returns the ID in the store. No name contains a slash.
    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.host, self.vm)
    }

    pub(super) fn of_id(id: &str) -> Option<ReleaseKey> {
        id.split_once('/').map(|(host, vm)| ReleaseKey::new(host, vm))
    }
}

/// Host and uuid of a VM whose protection is about to end there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EndingKey {
    pub(super) host: String,
    pub(super) vm: Uuid,
}

impl EndingKey {
    pub(super) fn new(host: &str, vm: Uuid) -> EndingKey {
        EndingKey { host: host.to_owned(), vm }
    }

    /// Returns the ID in the store. No name contains a slash.
    pub(super) fn id(&self) -> String {
        format!("{}/{}", self.host, self.vm)
    }

    pub(super) fn of_id(id: &str) -> Option<EndingKey> {
        let (host, vm) = id.split_once('/')?;
        Some(EndingKey::new(host, vm.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_of_an_earlier_version_has_the_nil_id() {
        let earlier: SavedAttempt = serde_json::from_str(r#"{"host":"b","term":3}"#).unwrap();
        assert!(earlier.id.is_nil() && earlier.left_at.is_empty());
        let attempt = SavedAttempt::new("b", 3, Vec::new());
        let text = serde_json::to_string(&attempt).unwrap();
        assert_eq!(serde_json::from_str::<SavedAttempt>(&text).unwrap(), attempt);
        assert_ne!(attempt.id, SavedAttempt::new("b", 3, Vec::new()).id);
    }

    #[test]
    fn keys_are_read_as_they_were_saved() {
        let ending = EndingKey::new("a", Uuid::from_u128(7));
        assert_eq!(EndingKey::of_id(&ending.id()), Some(ending));
        assert_eq!((EndingKey::of_id("a"), EndingKey::of_id("a/web")), (None, None));
        let release = ReleaseKey::new("a", "web");
        assert_eq!(ReleaseKey::of_id(&release.id()), Some(release));
    }
}
