//! State that survives the agent: one file for each VM, `STATE_DIR/vms/NAME/vm.json`. It is
//! replaced atomically and synced, so that after a crash either the old record or the new one is
//! complete.
//!
//! The saved types are separate from those that the agent works with: later versions must be able
//! to read their fields.

mod arriving_disks;
mod crashes;
mod disk;
mod disk_moves;
mod disk_transfers;
pub(crate) mod kept_disks;
mod leftovers;
mod live_exports;
mod notes;
mod snapshots;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_migration::fail_writes;
pub(crate) use godwit_migration::handover::Role;
use godwit_migration::handover::{Known, Standing};
use godwit_qemu::{ResolvedSpec, Uuid, VmName};
use godwit_types::{Incarnation, Ownership};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub(crate) use arriving_disks::{SavedArrival, SavedArrivingDisk, SavedThinVolume};
pub(crate) use disk::Disk;
pub(crate) use disk_moves::DiskMoveNote;
pub(crate) use disk_transfers::{BITMAP_PREFIX, DiskTransferNote, NotedDisk};

/// Format version that this agent writes, and the only one it reads.
const FORMAT: u32 = 1;
/// Limit on the records of deleted VMs. Only a host that was cut off while this many VMs left can
/// ask about a deleted record.
const MOST_GONE: usize = 10_000;

/// Whether a VM should run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Desired {
    /// It should run; if it does not, it has failed.
    Running,
    /// It should not run.
    Stopped,
    /// It should not run, and a file has its memory.
    Suspended,
    /// It must not run: other disks are layers on its images. An agent of an earlier release
    /// refuses the record, and so leaves the VM alone.
    Template,
}

/// The other host of a hand-over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OtherHost {
    pub name: String,
    /// This host retains pages that the guest lacks there.
    #[serde(default)]
    pub needs_pages: bool,
    /// The guest ran when it was handed over; otherwise it was paused and stays so.
    pub runs: bool,
}

/// Saved form of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedVm {
    /// Format version of this record.
    pub format: u32,
    /// Whether the VM should run.
    pub desired: Desired,
    pub role: Role,
    /// Incarnation of the VM. A record without one belongs to a VM that an earlier version created.
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    pub incarnation: Incarnation,
    /// Epoch of its ownership.
    pub epoch: u64,
    /// Other host of a migration or hand-over; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<OtherHost>,
    pub spec: ResolvedSpec,
}

impl SavedVm {
    /// Creates a record in this version's format.
    #[must_use]
    pub(crate) fn new(
        spec: ResolvedSpec,
        role: Role,
        desired: Desired,
        ownership: Ownership,
    ) -> Self {
        let Ownership { incarnation, epoch } = ownership;
        SavedVm { format: FORMAT, desired, role, incarnation, epoch, other: None, spec }
    }

    /// Adds the other host of a hand-over.
    #[must_use]
    pub(crate) fn with(self, other: OtherHost) -> Self {
        SavedVm { other: Some(other), ..self }
    }

    /// Returns the host that pages are retained for.
    #[must_use]
    pub(crate) fn pages_kept_for(&self) -> Option<&str> {
        self.other.as_ref().filter(|other| other.needs_pages).map(|other| &*other.name)
    }

    /// Returns the guest's role and ownership.
    #[must_use]
    pub(crate) fn standing(&self) -> Standing {
        Standing { role: self.role, ownership: self.ownership() }
    }

    /// Returns the recorded ownership: this host's, or the one that this host would get.
    #[must_use]
    pub(crate) fn ownership(&self) -> Ownership {
        Ownership { incarnation: self.incarnation, epoch: self.epoch }
    }

    /// Whether the record belongs to this VM and incarnation.
    #[must_use]
    pub(crate) fn is_of(&self, uuid: Uuid, incarnation: Incarnation) -> bool {
        self.spec.uuid == uuid && self.incarnation == incarnation
    }
}

/// Record of a VM that this host owned and no longer has: what is needed to answer a host that asks
/// later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GoneVm {
    format: u32,
    name: String,
    #[serde(default, skip_serializing_if = "Incarnation::is_unrecorded")]
    incarnation: Incarnation,
    epoch: u64,
}

/// Peers that a manager set: `STATE_DIR/peers.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedPeers {
    format: u32,
    peers: BTreeMap<String, String>,
}

/// Longest wait for the lock of the directory.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// Time between two attempts to lock it.
const LOCK_INTERVAL: Duration = Duration::from_millis(10);

/// Failure to read or write a record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// The file system refused the access.
    #[error(
        "cannot {action} {path}: {source} (is the disk full or not writable? change state_dir in \
         the configuration if needed)"
    )]
    Io {
        path: PathBuf,
        /// Verb of the attempted action.
        action: &'static str,
        source: io::Error,
    },
    /// The file is not a valid record of this version.
    #[error(
        "cannot use {path}: it is not a VM record of this version: {why} (restore it, or remove \
         the directory to forget the VM)"
    )]
    Format { path: PathBuf, why: String },
    /// Another agent uses the directory.
    #[error(
        "another agent already uses {path} (stop it, or give this agent its own state_dir and \
         run_dir)"
    )]
    InUse { path: PathBuf },
}

/// Directory of all records, used by one agent at a time.
#[derive(Debug)]
pub(crate) struct Store {
    vms: PathBuf,
    /// One file for each deleted incarnation of a VM: `STATE_DIR/gone/UUID.INCARNATION.json`, or
    /// `UUID.json` if the VM is older than incarnations.
    gone: PathBuf,
    peers: PathBuf,
    pub(crate) disk: Disk,
    /// Held while a record is written, so that no other task renames an incomplete one.
    writing: Mutex<()>,
    /// Held while a record of arriving disks is written. A paused guest waits for the removal of
    /// that record, and must not wait for the record of its take-over, too.
    writing_arrivals: Mutex<()>,
    /// Notes of adoptions.
    adoptions: PathBuf,
    /// The lock is released with this file.
    _lock: File,
}

impl Store {
    /// Opens or creates the store, and locks it against other agents.
    pub(crate) fn open(state_dir: &Path) -> Result<Store, StoreError> {
        let vms = state_dir.join("vms");
        let gone = state_dir.join("gone");
        for dir in [&vms, &gone] {
            fs::create_dir_all(dir).map_err(|source| failed(dir, "create", source))?;
        }
        // Definitions may contain secrets, such as kernel command lines.
        fs::set_permissions(state_dir, fs::Permissions::from_mode(0o700))
            .map_err(|source| failed(state_dir, "set the permissions of", source))?;
        let path = state_dir.join("agent.lock");
        let lock = File::create(&path).map_err(|source| failed(&path, "create", source))?;
        lock_within(&lock, LOCK_LIMIT).map_err(|error| match error {
            fs::TryLockError::WouldBlock => StoreError::InUse { path: state_dir.to_owned() },
            fs::TryLockError::Error(source) => failed(&path, "lock", source),
        })?;
        let peers = state_dir.join("peers.json");
        Ok(Store {
            vms,
            gone,
            peers,
            adoptions: state_dir.join("adoptions"),
            disk: Disk::default(),
            writing: Mutex::default(),
            writing_arrivals: Mutex::default(),
            _lock: lock,
        })
    }

    /// Returns the names of all VMs that have a record, readable or not.
    pub(crate) fn names(&self) -> Result<Vec<String>, StoreError> {
        let entries =
            fs::read_dir(&self.vms).map_err(|source| failed(&self.vms, "list", source))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| failed(&self.vms, "list", source))?;
            names.extend(entry.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// Returns every readable record, and the errors of the others.
    pub(crate) fn load_all(&self) -> Result<(Vec<SavedVm>, Vec<StoreError>), StoreError> {
        let (mut records, mut problems) = (Vec::new(), Vec::new());
        let entries =
            fs::read_dir(&self.vms).map_err(|source| failed(&self.vms, "list", source))?;
        for entry in entries {
            let dir = entry.map_err(|source| failed(&self.vms, "list", source))?.path();
            let path = dir.join("vm.json");
            match load(&path) {
                Ok(record) => records.push(record),
                // A crash after creating the directory and before its first record: nothing was
                // promised yet.
                Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    if let Err(error) = leftovers::remove(&dir) {
                        tracing::error!(dir = %dir.display(), %error, "cannot remove leftovers");
                    }
                }
                Err(error) => problems.push(error),
            }
        }
        records.sort_by(|a, b| a.spec.name.cmp(&b.spec.name));
        Ok((records, problems))
    }

    /// Returns the record of a VM; `None` if there is none or it cannot be read.
    pub(crate) fn load(&self, name: &VmName) -> Option<SavedVm> {
        let read = self.read(name);
        read.unwrap_or_else(|error| {
            tracing::error!(vm = name.as_str(), %error, "cannot read the VM's record");
            None
        })
    }

    /// Reads the record of a VM; `None` if there is none.
    ///
    /// # Errors
    /// The record cannot be read, so its content is unknown.
    pub(crate) fn read(&self, name: &VmName) -> Result<Option<SavedVm>, StoreError> {
        match load(&self.vms.join(name).join("vm.json")) {
            Ok(record) => Ok(Some(record)),
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the path of a VM's record, readable or not; `None` if there is none.
    pub(crate) fn record_of(&self, name: &VmName) -> Option<PathBuf> {
        let path = self.vms.join(name).join("vm.json");
        path.exists().then_some(path)
    }

    /// Returns the file of the variables of a VM's firmware. It is removed with the VM's record.
    pub(crate) fn variables_path(&self, spec: &ResolvedSpec) -> PathBuf {
        self.vms.join(&spec.name).join(format!("{}.variables", spec.firmware))
    }

    /// Returns the directory of the state of a VM's TPM. It is removed with the VM's record.
    pub(crate) fn tpm_path(&self, name: &VmName) -> PathBuf {
        self.vms.join(name).join("tpm")
    }

    /// Writes the variables of a VM's firmware before its QEMU starts.
    pub(crate) fn save_variables(
        &self,
        spec: &ResolvedSpec,
        content: &[u8],
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.variables_path(spec);
        let made = self.disk.make_dir(&self.vms.join(&spec.name));
        let written = made.and_then(|()| self.disk.replace(&path, content));
        written.map_err(|source| failed(&path, "write", source))
    }

    /// Returns everything that this host has recorded about the owner of a guest, for one
    /// incarnation of its VM.
    pub(crate) fn known(
        &self,
        name: &VmName,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> Result<Known, StoreError> {
        let _alone = self.writing.lock();
        // Another VM, or another incarnation of it, may have that name.
        if let Some(record) = self.read(name)?.filter(|record| record.is_of(uuid, incarnation)) {
            return Ok(Known::Has(record.standing()));
        }
        let gone = self.load_gone(uuid, incarnation)?;
        Ok(gone
            .map_or(Known::Never, |gone| Known::Gone(Ownership { incarnation, epoch: gone.epoch })))
    }

    fn gone_path(&self, uuid: Uuid, incarnation: Incarnation) -> PathBuf {
        self.gone.join(match incarnation.is_unrecorded() {
            true => format!("{uuid}.json"),
            false => format!("{uuid}.{incarnation}.json"),
        })
    }

    fn load_gone(
        &self,
        uuid: Uuid,
        incarnation: Incarnation,
    ) -> Result<Option<GoneVm>, StoreError> {
        let path = self.gone_path(uuid, incarnation);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&path, "read", error)),
        };
        let wrong = |why: String| StoreError::Format { path: path.clone(), why };
        let gone: GoneVm =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if gone.format != FORMAT {
            return Err(wrong(format!("format {} instead of {FORMAT}", gone.format)));
        }
        if gone.incarnation != incarnation {
            return Err(wrong(format!(
                "incarnation {} instead of {incarnation}",
                gone.incarnation
            )));
        }
        Ok(Some(gone))
    }

    /// Writes a record; once this returns, the record survives a power cut.
    pub(crate) fn save(&self, record: &SavedVm) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.write(record)
    }

    /// Writes a record in place of `stale` and of no other. Returns whether `stale` was still
    /// there.
    pub(crate) fn save_over(&self, stale: &SavedVm, record: &SavedVm) -> Result<bool, StoreError> {
        let _alone = self.writing.lock();
        if self.load(&stale.spec.name).as_ref() != Some(stale) {
            return Ok(false);
        }
        self.write(record).map(|()| true)
    }

    fn write(&self, record: &SavedVm) -> Result<(), StoreError> {
        let dir = self.vms.join(&record.spec.name);
        self.disk.make_dir(&dir).map_err(|source| failed(&dir, "create", source))?;
        self.replace(&dir.join("vm.json"), record, kind_of(record))
    }

    fn replace(&self, path: &Path, content: &impl Serialize, kind: &str) -> Result<(), StoreError> {
        let text = serde_json::to_vec_pretty(content).map_err(|error| StoreError::Format {
            path: path.to_owned(),
            why: error.to_string(),
        })?;
        let replaced = fail_writes::check(kind).and_then(|()| self.disk.replace(path, &text));
        replaced.map_err(|source| failed(path, "write", source))
    }

    /// Records that a VM which this host owned, or was handing over, is gone; the record answers
    /// hosts that ask later. Must be called before the VM's own record is removed.
    pub(crate) fn note_gone(&self, record: &SavedVm) -> Result<(), StoreError> {
        self.note_gone_guest(&record.spec.name, record.spec.uuid, record.ownership())
    }

    /// Records the same of a guest for which this host has no VM: another program ran it here.
    pub(crate) fn note_gone_guest(
        &self,
        name: &VmName,
        uuid: Uuid,
        ownership: Ownership,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let Ownership { incarnation, epoch } = ownership;
        self.forget_oldest()?;
        let gone = GoneVm { format: FORMAT, name: name.to_string(), incarnation, epoch };
        self.replace(&self.gone_path(uuid, incarnation), &gone, "gone")
    }

    /// Removes the oldest records of deleted VMs beyond the limit.
    fn forget_oldest(&self) -> Result<(), StoreError> {
        let list = || -> io::Result<Vec<_>> {
            let dated = fs::read_dir(&self.gone)?.map(|entry| {
                let entry = entry?;
                Ok((entry.metadata()?.modified()?, entry.path()))
            });
            dated.collect()
        };
        let mut all = list().map_err(|source| failed(&self.gone, "list", source))?;
        if all.len() < MOST_GONE {
            return Ok(());
        }
        all.sort();
        for (_, path) in all.iter().take(all.len() + 1 - MOST_GONE) {
            fs::remove_file(path).map_err(|source| failed(path, "remove", source))?;
        }
        Ok(())
    }

    /// Reads the peers that a manager set; empty if it never did.
    pub(crate) fn load_peers(&self) -> Result<BTreeMap<String, String>, StoreError> {
        let text = match fs::read(&self.peers) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(failed(&self.peers, "read", error)),
        };
        let wrong = |why: String| StoreError::Format { path: self.peers.clone(), why };
        let saved: SavedPeers =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if saved.format == FORMAT {
            Ok(saved.peers)
        } else {
            Err(wrong(format!("format {} instead of {FORMAT}", saved.format)))
        }
    }

    /// Writes the peers that a manager sets.
    pub(crate) fn save_peers(&self, peers: &BTreeMap<String, String>) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.replace(&self.peers, &SavedPeers { format: FORMAT, peers: peers.clone() }, "peers")
    }

    /// Gives a VM's record, and what is beside it, another name. The name of the directory is the
    /// name of the VM, so the VM has one name at each moment.
    pub(crate) fn rename(&self, old: &VmName, new: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let (from, to) = (self.vms.join(old), self.vms.join(new));
        let renamed = fail_writes::check("rename").and_then(|()| self.disk.rename(&from, &to));
        renamed.map_err(|source| failed(&from, "rename", source))?;
        let path = to.join("vm.json");
        let rewritten = load(&path).and_then(|record| self.replace(&path, &record, "owner"));
        if let Err(error) = rewritten {
            // The record is read with the directory's name.
            tracing::warn!(vm = new.as_str(), %error, "the record still says the old name");
        }
        Ok(())
    }

    /// Writes the note of an adoption; once this returns, it survives a power cut.
    pub(crate) fn save_adoption(
        &self,
        vm: &VmName,
        note: &impl Serialize,
    ) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        self.disk
            .make_dir(&self.adoptions)
            .map_err(|why| failed(&self.adoptions, "create", why))?;
        self.replace(&self.adoptions.join(format!("{vm}.json")), note, "adoption")
    }

    /// Returns the notes of adoptions. One that cannot be read is logged.
    pub(crate) fn adoptions<N: serde::de::DeserializeOwned>(&self) -> Vec<N> {
        live_exports::notes_in(&self.adoptions)
    }

    /// Removes the note of an adoption; no error if there is none.
    pub(crate) fn remove_adoption(&self, vm: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let path = self.adoptions.join(format!("{vm}.json"));
        self.disk.remove(&path).map_err(|source| failed(&path, "remove", source))
    }

    /// Removes a VM's record; no error if there is none.
    pub(crate) fn remove(&self, name: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let dir = self.vms.join(name);
        let path = dir.join("vm.json");
        let removed = fail_writes::check("removal").and_then(|()| self.disk.remove(&path));
        removed.map_err(|source| failed(&path, "remove", source))?;
        // A directory without a record is ignored, and removed at the agent's start.
        if let Err(error) = leftovers::remove(&dir) {
            tracing::warn!(path = %dir.display(), %error, "cannot remove a record's directory");
        }
        Ok(())
    }

    /// Removes what is left of an older VM of a name that has no record.
    ///
    /// # Errors
    /// Something is left that would become the new VM's.
    pub(crate) fn remove_leftovers(&self, name: &VmName) -> Result<(), StoreError> {
        let _alone = self.writing.lock();
        let dir = self.vms.join(name);
        if dir.join("vm.json").exists() {
            return Ok(());
        }
        leftovers::remove(&dir).map_err(|source| failed(&dir, "remove", source))
    }
}

/// Returns the kind of a write, by which tests make it fail ([`fail_writes`]).
fn kind_of(record: &SavedVm) -> &'static str {
    match (record.role, &record.other) {
        (Role::Owner, None) => "owner",
        (Role::Owner, Some(_)) => "owner-migrating",
        (Role::HandingOver, _) => "handing-over",
        (Role::Shadow, _) => "shadow",
        (Role::TakingOver, _) => "taking-over",
        (Role::Stranded, _) => "stranded",
    }
}

/// Locks a file, with repeated attempts until `limit`. A child process that was forked and has not
/// executed its program yet shares the lock of its parent, even if the parent has ended.
fn lock_within(file: &File, limit: Duration) -> Result<(), fs::TryLockError> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) if begun.elapsed() < limit => {
                std::thread::park_timeout(LOCK_INTERVAL);
            }
            locked => return locked,
        }
    }
}

fn load(path: &Path) -> Result<SavedVm, StoreError> {
    let text = fs::read(path).map_err(|source| failed(path, "read", source))?;
    let wrong = |why| StoreError::Format { path: path.to_owned(), why };
    let mut record = parse(&text).map_err(wrong)?;
    // A rename that was cut off has changed the directory alone.
    let name = path.parent().and_then(Path::file_name).and_then(OsStr::to_str).unwrap_or_default();
    record.spec.name = VmName::new(name).map_err(|error| wrong(error.to_string()))?;
    Ok(record)
}

/// Parses a record.
///
/// # Errors
/// Why it is not a valid record of this version.
pub(crate) fn parse(text: &[u8]) -> Result<SavedVm, String> {
    let record: SavedVm = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if record.format != FORMAT {
        return Err(format!("format {} instead of {FORMAT}", record.format));
    }
    record.spec.validate().map_err(|error| error.to_string())?;
    Ok(record)
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Incarnation = Incarnation::new(7);

    fn at(epoch: u64) -> Ownership {
        Ownership { incarnation: LIFE, epoch }
    }

    fn web() -> VmName {
        VmName::new("web").unwrap()
    }

    pub(super) fn spec(name: &str) -> ResolvedSpec {
        serde_json::from_value(serde_json::json!({
            "name": name, "memory": [{"size": "64MiB"}], "vcpus": 1, "cpu_model": "Westmere-v1",
            "machine": "pc-q35-7.2", "accel": "tcg", "kernel": "/boot/vmlinuz",
        }))
        .unwrap()
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut record = SavedVm::new(spec("web"), Role::Owner, Desired::Running, at(3));
        store.save(&record).unwrap();
        record.epoch = 4;
        store.save(&record).unwrap();
        assert_eq!(store.load(&web()).unwrap().pages_kept_for(), None);
        record.other = Some(OtherHost { name: "b".to_owned(), needs_pages: true, runs: true });
        store.save(&record).unwrap();
        assert_eq!(store.load(&web()).unwrap().pages_kept_for(), Some("b"));
        store.save(&SavedVm::new(spec("db"), Role::Shadow, Desired::Stopped, at(1))).unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert!(problems.is_empty());
        assert_eq!(records.len(), 2);
        assert_eq!(records[1], record);
        store.remove(&web()).unwrap();
        store.remove(&web()).unwrap();
        assert_eq!(store.load_all().unwrap().0.len(), 1);
    }

    #[test]
    fn a_renamed_record_has_the_name_of_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (shop, record) = (
            VmName::new("shop").unwrap(),
            SavedVm::new(spec("web"), Role::Owner, Desired::Stopped, at(3)),
        );
        store.save(&record).unwrap();
        store.save_variables(&record.spec, b"variables").unwrap();
        store.rename(&web(), &shop).unwrap();
        assert_eq!(store.load(&web()), None);
        let renamed = store.load(&shop).unwrap();
        assert_eq!((renamed.spec.name.as_str(), renamed.epoch), ("shop", 3));
        assert!(store.variables_path(&renamed.spec).exists());
        // A rename that ended between its two steps.
        store.save(&record).unwrap();
        fs::rename(dir.path().join("vms/web"), dir.path().join("vms/late")).unwrap();
        let late = store.load(&VmName::new("late").unwrap()).unwrap();
        assert_eq!(late.spec.name.as_str(), "late");
        assert_eq!(store.load_all().unwrap().0.len(), 2);
        // A name that is taken is not replaced.
        store.rename(&shop, &late.spec.name).unwrap_err();
        assert_eq!(store.load(&late.spec.name), Some(late));
    }

    #[test]
    fn a_late_write_does_not_replace_a_newer_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let owner = SavedVm::new(spec("web"), Role::Owner, Desired::Running, at(3));
        let to_b =
            owner.clone().with(OtherHost { name: "b".to_owned(), needs_pages: false, runs: true });
        assert!(!store.save_over(&to_b, &owner).unwrap());
        assert_eq!(store.load(&web()), None);
        store.save(&to_b).unwrap();
        assert!(store.save_over(&to_b, &owner).unwrap());
        let handing_over = SavedVm { role: Role::HandingOver, ..to_b.clone() };
        store.save(&handing_over).unwrap();
        assert!(!store.save_over(&to_b, &owner).unwrap());
        assert_eq!(store.load(&web()), Some(handing_over));
    }

    #[test]
    fn a_deleted_vm_is_remembered_by_its_identity_and_not_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let old = SavedVm::new(
            ResolvedSpec { uuid: Uuid::from_u128(1), ..spec("web") },
            Role::Owner,
            Desired::Running,
            at(3),
        );
        assert_eq!(store.known(&web(), old.spec.uuid, LIFE).unwrap(), Known::Never);
        store.save(&old).unwrap();
        assert_eq!(store.known(&web(), old.spec.uuid, LIFE).unwrap(), Known::Has(old.standing()));
        store.note_gone(&old).unwrap();
        store.remove(&web()).unwrap();
        let new = ResolvedSpec { uuid: Uuid::from_u128(2), ..spec("web") };
        store.save(&SavedVm::new(new.clone(), Role::Owner, Desired::Running, at(1))).unwrap();
        assert_eq!(store.known(&web(), old.spec.uuid, LIFE).unwrap(), Known::Gone(at(3)));
        assert_eq!(store.known(&web(), Uuid::from_u128(3), LIFE).unwrap(), Known::Never);
        assert!(matches!(store.known(&web(), new.uuid, LIFE).unwrap(), Known::Has(_)));
    }

    #[test]
    fn the_record_of_one_incarnation_does_not_answer_for_another() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let spec = ResolvedSpec { uuid: Uuid::from_u128(1), ..spec("web") };
        let owner =
            |ownership| SavedVm::new(spec.clone(), Role::Owner, Desired::Running, ownership);
        let known = |incarnation| store.known(&web(), spec.uuid, incarnation).unwrap();
        let (older, newer) = (at(3), Ownership { incarnation: Incarnation::new(8), epoch: 1 });
        let unrecorded = Ownership { incarnation: Incarnation::UNRECORDED, epoch: 9 };
        for gone in [unrecorded, older] {
            store.save(&owner(gone)).unwrap();
            store.note_gone(&owner(gone)).unwrap();
            store.remove(&web()).unwrap();
        }
        assert_eq!(known(newer.incarnation), Known::Never);
        store.save(&owner(newer)).unwrap();
        let has = Known::Has(Standing { role: Role::Owner, ownership: newer });
        assert_eq!(known(newer.incarnation), has);
        // A newer incarnation leaves the records of older ones.
        store.note_gone(&owner(newer)).unwrap();
        store.remove(&web()).unwrap();
        for gone in [unrecorded, older, newer] {
            assert_eq!(known(gone.incarnation), Known::Gone(gone));
        }
    }

    #[test]
    fn records_of_earlier_versions_have_the_unrecorded_incarnation() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let spec = ResolvedSpec { uuid: Uuid::from_u128(1), ..spec("web") };
        let unrecorded = Ownership { incarnation: Incarnation::UNRECORDED, epoch: 4 };
        let gone = dir.path().join("gone").join(format!("{}.json", spec.uuid));
        fs::write(gone, r#"{"format":1,"name":"web","epoch":4}"#).unwrap();
        let known = store.known(&web(), spec.uuid, Incarnation::UNRECORDED).unwrap();
        assert_eq!(known, Known::Gone(unrecorded));
        assert_eq!(store.known(&web(), spec.uuid, LIFE).unwrap(), Known::Never);
        let record = SavedVm::new(spec, Role::Owner, Desired::Running, unrecorded);
        let text = serde_json::to_string(&record).unwrap();
        assert!(!text.contains("incarnation"), "{text}");
        assert_eq!(parse(text.as_bytes()), Ok(record));
    }

    #[test]
    fn the_leftovers_of_a_crash_are_not_a_record() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        fs::create_dir(dir.path().join("vms/half")).unwrap();
        fs::write(dir.path().join("vms/half/vm.json.new"), "{").unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert!(records.is_empty() && problems.is_empty());
        assert!(!dir.path().join("vms/half").exists());
    }

    #[test]
    fn a_broken_or_later_record_is_reported_and_does_not_affect_others() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.save(&SavedVm::new(spec("web"), Role::Owner, Desired::Running, at(1))).unwrap();
        let later = SavedVm {
            format: 9,
            ..SavedVm::new(spec("later"), Role::Owner, Desired::Running, at(1))
        };
        store.save(&later).unwrap();
        fs::create_dir(dir.path().join("vms/torn")).unwrap();
        fs::write(dir.path().join("vms/torn/vm.json"), "{\"format\": 1").unwrap();
        let (records, problems) = store.load_all().unwrap();
        assert_eq!(records.len(), 1);
        assert_eq!(problems.len(), 2);
        assert!(problems.iter().any(|problem| problem.to_string().contains("format 9")));
    }

    #[test]
    fn a_second_agent_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(dir.path()).unwrap();
        assert!(matches!(Store::open(dir.path()), Err(StoreError::InUse { .. })));
        drop(first);
        assert!(Store::open(dir.path()).is_ok());
    }
}
