//! State of a lab, saved while it is made, so that `down` finds everything after any crash.

use std::fs::File;
use std::io::ErrorKind;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::links::LinkEngine;
use crate::options::LabOptions;
use crate::process::ProcessId;
use crate::topology::LabPaths;

/// Purpose of a process of the lab.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Emulator,
    Client,
    Manager,
    /// The second of two managers.
    SecondManager,
    /// The store of two managers.
    Etcd,
    Door,
    /// The agent of the host of that name.
    Agent(String),
    /// The watchdog process of the host of that name.
    Watchdog(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LabProcess {
    pub(crate) role: Role,
    #[serde(flatten)]
    pub(crate) id: ProcessId,
}

/// The content of lab.json.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LabState {
    pub(crate) options: LabOptions,
    /// Known once the migration networks exist.
    pub(crate) engine: Option<LinkEngine>,
    pub(crate) processes: Vec<LabProcess>,
    /// Address of the manager's console on this machine.
    #[serde(default)]
    pub(crate) console: Option<String>,
    /// Whether `up` has finished.
    pub(crate) complete: bool,
}

impl LabState {
    pub(crate) fn new(options: &LabOptions) -> LabState {
        LabState {
            options: options.clone(),
            engine: None,
            processes: Vec::new(),
            console: None,
            complete: false,
        }
    }

    /// Loads the state. Returns `None` if there is none, or none that is readable (a crash while
    /// another version wrote it): `down` then works from names alone.
    pub(crate) fn load(paths: &LabPaths) -> Option<LabState> {
        serde_json::from_str(&std::fs::read_to_string(paths.state_file()).ok()?).ok()
    }

    /// Replaces the file atomically: a reader sees the old or the new one.
    pub(crate) fn save(&self, paths: &LabPaths) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        write_whole(&paths.state_file(), &text)
    }

    pub(crate) fn process(&self, role: &Role) -> Option<ProcessId> {
        self.processes.iter().find(|process| process.role == *role).map(|process| process.id)
    }

    pub(crate) fn set_process(&mut self, role: Role, id: ProcessId) {
        self.processes.retain(|process| process.role != role);
        self.processes.push(LabProcess { role, id });
    }
}

/// Writes a file beside its final path, then moves it there.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<()> {
    let beside = path.with_extension("new");
    std::fs::write(&beside, text)
        .and_then(|()| std::fs::rename(&beside, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Lock that admits only one `up` or `down` at a time. It is on the lab's own directory, so it
/// leaves nothing behind.
pub(crate) struct LabLock {
    _directory: File,
}

impl LabLock {
    /// Takes the lock, and creates the directory if it does not exist.
    pub(crate) fn take(paths: &LabPaths) -> Result<LabLock> {
        let root = paths.root();
        loop {
            std::fs::create_dir_all(root)
                .with_context(|| format!("cannot make {}", root.display()))?;
            let directory = match File::open(root) {
                Ok(directory) => directory,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot open {}", root.display()));
                }
            };
            if flock(&directory, FlockOperation::NonBlockingLockExclusive).is_err() {
                bail!(
                    "another `godwit-lab` command is working on {}; wait for it, then try again",
                    root.display()
                );
            }
            // The previous holder may have removed the directory that we hold: the one with its
            // name is then another.
            let held = directory.metadata()?;
            if std::fs::metadata(root).is_ok_and(|named| {
                (named.st_dev(), named.st_ino()) == (held.st_dev(), held.st_ino())
            }) {
                return Ok(LabLock { _directory: directory });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_kept_and_processes_are_replaced_by_role() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        assert!(LabState::load(&paths).is_none());
        let mut state = LabState::new(&LabOptions::default());
        for start_time in [1, 2] {
            state.set_process(Role::Agent("a".to_owned()), ProcessId { pid: 10, start_time });
        }
        state.save(&paths).unwrap();
        let loaded = LabState::load(&paths).unwrap();
        assert_eq!(loaded.processes.len(), 1);
        assert_eq!(
            loaded.process(&Role::Agent("a".to_owned())),
            Some(ProcessId { pid: 10, start_time: 2 })
        );
        assert_eq!(loaded.process(&Role::Client), None);
    }

    #[test]
    fn a_torn_state_file_is_as_none() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(directory.path());
        std::fs::write(paths.state_file(), "{\"options\":").unwrap();
        assert!(LabState::load(&paths).is_none());
    }

    #[test]
    fn a_second_command_has_to_wait() {
        let directory = tempfile::tempdir().unwrap();
        let paths = LabPaths::new(&directory.path().join("lab"));
        let lock = LabLock::take(&paths).unwrap();
        assert!(LabLock::take(&paths).is_err());
        drop(lock);
        assert!(LabLock::take(&paths).is_ok());
    }
}
