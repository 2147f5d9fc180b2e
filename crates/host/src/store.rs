//! What survives the agent: one file a VM, `STATE_DIR/vms/NAME/vm.json`, replaced atomically and synced, so that
//! after a crash the old record or the new one is there, whole.
//!
//! The saved type is apart from what the agent works with: its fields are a promise to later versions.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use godwit_qemu::ResolvedSpec;
use serde::{Deserialize, Serialize};

/// The version this agent writes; it reads this one only.
const FORMAT: u32 = 1;

/// Whether a VM shall run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Desired {
    /// It shall run; where it does not, something happened to it.
    Running,
    /// It shall not.
    Stopped,
}

/// Whose the guest is, as far as this host knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Role {
    /// This host's.
    Owner,
    /// Another host's, whose memory arrives here.
    Shadow,
    /// This host's or another's: it has been or is being handed over.
    InDoubt,
}

/// A VM as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedVm {
    /// The version of this format.
    pub format: u32,
    /// Whether it shall run.
    pub desired: Desired,
    /// Whose it is.
    pub role: Role,
    /// The generation of its ownership.
    pub epoch: u64,
    /// The host that it is handed over to while pages of it are kept here; none: all go before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_kept_for: Option<String>,
    /// What it is.
    pub spec: ResolvedSpec,
}

impl SavedVm {
    /// A record in this version's format.
    #[must_use]
    pub(crate) fn new(spec: ResolvedSpec, role: Role, desired: Desired, epoch: u64) -> Self {
        SavedVm { format: FORMAT, desired, role, epoch, pages_kept_for: None, spec }
    }
}

/// Why a record can't be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The file system says no.
    #[error(
        "{path} can't be {action}: {source} (is the disk full or not writable? state_dir of the configuration names it)"
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The file is no record of this version.
    #[error(
        "{path} is no VM record of this version: {why} (restore it, or remove the directory to forget the VM)"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Another agent works with the same directory.
    #[error("another agent uses {path} already (stop it, or give this one its own state_dir and run_dir)")]
    InUse {
        /// The directory.
        path: PathBuf,
    },
}

/// The directory of all records, held by one agent at a time.
#[derive(Debug)]
pub(crate) struct Store {
    vms: PathBuf,
    /// Held while a record is written: a half-written one is nobody else's to rename.
    writing: Mutex<()>,
    /// The lock ends with this file.
    _lock: File,
}

impl Store {
    /// Opens or makes the store, and keeps others out while it lives.
    pub(crate) fn open(state_dir: &Path) -> Result<Store, StoreError> {
        let vms = state_dir.join("vms");
        fs::create_dir_all(&vms).map_err(|source| failed(&vms, "made", source))?;
        let path = state_dir.join("agent.lock");
        let lock = File::create(&path).map_err(|source| failed(&path, "made", source))?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::WouldBlock => StoreError::InUse { path: state_dir.to_owned() },
            fs::TryLockError::Error(source) => failed(&path, "locked", source),
        })?;
        Ok(Store { vms, writing: Mutex::default(), _lock: lock })
    }

    /// The names of all VMs that have a record, readable or not.
    pub(crate) fn names(&self) -> Result<Vec<String>, StoreError> {
        let entries = fs::read_dir(&self.vms).map_err(|source| failed(&self.vms, "listed", source))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| failed(&self.vms, "listed", source))?;
            names.extend(entry.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// Every record, and what is wrong with those that can't be read.
    pub(crate) fn load_all(&self) -> Result<(Vec<SavedVm>, Vec<StoreError>), StoreError> {
        let (mut records, mut problems) = (Vec::new(), Vec::new());
        let entries = fs::read_dir(&self.vms).map_err(|source| failed(&self.vms, "listed", source))?;
        for entry in entries {
            let dir = entry.map_err(|source| failed(&self.vms, "listed", source))?.path();
            let path = dir.join("vm.json");
            match load(&path) {
                Ok(record) => records.push(record),
                // A crash between making the directory and its first record: nothing was promised yet.
                Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    let _ = fs::remove_dir_all(&dir);
                }
                Err(error) => problems.push(error),
            }
        }
        records.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
        Ok((records, problems))
    }

    /// The host that pages of a VM are kept for, by its record; none: there is no such host, or no record that can be read.
    pub(crate) fn pages_kept_for(&self, name: &str) -> Option<String> {
        let record = load(&self.vms.join(name).join("vm.json"));
        record.inspect_err(|error| tracing::error!(vm = name, %error, "its record")).ok()?.pages_kept_for
    }

    /// Writes a record; when this returns it survives a power cut.
    pub(crate) fn save(&self, record: &SavedVm) -> Result<(), StoreError> {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = self.vms.join(&record.spec.name);
        fs::create_dir_all(&dir).map_err(|source| failed(&dir, "made", source))?;
        let path = dir.join("vm.json");
        let fresh = dir.join("vm.json.new");
        let text = serde_json::to_vec_pretty(record)
            .map_err(|error| StoreError::Format { path: path.clone(), why: error.to_string() })?;
        let write = || -> io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&fresh, &path)?;
            File::open(&dir)?.sync_all()?;
            File::open(&self.vms)?.sync_all()
        };
        write().map_err(|source| failed(&path, "written", source))
    }

    /// Forgets a VM; no error when there is none.
    pub(crate) fn remove(&self, name: &str) -> Result<(), StoreError> {
        let dir = self.vms.join(name);
        match fs::remove_dir_all(&dir).and_then(|()| File::open(&self.vms)?.sync_all()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&dir, "removed", error)),
            _ => Ok(()),
        }
    }
}

fn load(path: &Path) -> Result<SavedVm, StoreError> {
    let text = fs::read(path).map_err(|source| failed(path, "read", source))?;
    parse(&text).map_err(|why| StoreError::Format { path: path.to_owned(), why })
}

/// Reads a record.
///
/// # Errors
/// In words: it is none of this version.
pub(crate) fn parse(text: &[u8]) -> Result<SavedVm, String> {
    let record: SavedVm = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if record.format != FORMAT {
        return Err(format!("format {} instead of {FORMAT}", record.format));
    }
    // The name becomes part of paths.
    record.spec.validate().map_err(|error| error.to_string())?;
    Ok(record)
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str) -> ResolvedSpec {
        serde_json::from_value(serde_json::json!({
            "name": name, "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz",
        }))
        .unwrap()
    }

    #[test]
    fn a_record_comes_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut record = SavedVm::new(spec("web"), Role::Owner, Desired::Running, 3);
        store.save(&record).unwrap();
        record.epoch = 4;
        store.save(&record).unwrap();
        assert_eq!(store.pages_kept_for("web"), None);
        record.pages_kept_for = Some("b".to_owned());
        store.save(&record).unwrap();
        assert_eq!(store.pages_kept_for("web").as_deref(), Some("b"));
        store.save(&SavedVm::new(spec("db"), Role::Shadow, Desired::Stopped, 1)).unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert!(problems.is_empty());
        assert_eq!(records.len(), 2);
        assert_eq!(records[1], record);
        store.remove("web").unwrap();
        store.remove("web").unwrap();
        assert_eq!(store.load_all().unwrap().0.len(), 1);
    }

    #[test]
    fn what_a_crash_leaves_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::create_dir(dir.path().join("vms/half")).unwrap();
        fs::write(dir.path().join("vms/half/vm.json.new"), "{").unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert!(records.is_empty() && problems.is_empty());
        assert!(!dir.path().join("vms/half").exists());
    }

    #[test]
    fn a_broken_or_later_record_is_told_and_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.save(&SavedVm::new(spec("web"), Role::Owner, Desired::Running, 1)).unwrap();
        let later = SavedVm { format: 9, ..SavedVm::new(spec("later"), Role::Owner, Desired::Running, 1) };
        store.save(&later).unwrap();
        fs::create_dir(dir.path().join("vms/torn")).unwrap();
        fs::write(dir.path().join("vms/torn/vm.json"), "{\"format\": 1").unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert_eq!(records.len(), 1);
        assert_eq!(problems.len(), 2);
        assert!(problems.iter().any(|problem| problem.to_string().contains("format 9")));
    }

    #[test]
    fn a_second_agent_is_kept_out() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap();
        assert!(matches!(Store::open(dir.path()), Err(StoreError::InUse { .. })));
        drop(first);
        assert!(Store::open(dir.path()).is_ok());
    }
}
