//! VMs that agents restart among themselves, without a manager (`protect_by_agents`): for the
//! machine of a single manager. docs/ha-terms.md explains their terms.
//!
//! A VM has a folder on the shared datastore with its disks ([`folder`]). Its host holds a term of
//! the VM with a guard of its own, of the same kind as the guard of a host ([`HaGuard`]), and
//! writes the term's block as a heartbeat. Other hosts judge that block ([`watching`]), and claim
//! the next term when the last one is over. [`crate::agent`] ends and starts the VM.

mod folder;
mod guard;
mod looks;
mod record;
mod terms;
mod watching;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_qemu::{Uuid, VmName};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use super::heartbeats::block_file::HeartbeatError;
use super::heartbeats::in_thread;
use super::heartbeats::turns::{Turns, Work};
use super::{Guarded, HaGuard};
use crate::store::Disk;

pub(crate) use folder::{OwnError, Place};
pub(crate) use guard::OwnGuard;
pub(crate) use record::{OwnRecord, check_images};
pub(crate) use watching::Me;
use watching::Watched;

/// Time limit of a look at a datastore, of a claim and of a record.
const LIMIT: Duration = Duration::from_secs(4);
/// Format version of [`SavedHost`].
const FORMAT: u32 = 1;

/// `STATE_DIR/own/host.json`: this host's identity in blocks. It belongs to the host's name, so
/// that a copy of the host's disk that has another name is another host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedHost {
    format: u32,
    host: Uuid,
    name: String,
}

/// The VMs of all datastores of this host that agents restart among themselves.
#[derive(Debug)]
pub(crate) struct OwnVms {
    state_dir: PathBuf,
    run_dir: PathBuf,
    boot_id: String,
    /// Name of this host in the configuration.
    host_name: String,
    disk: Disk,
    host: Mutex<Option<Uuid>>,
    guards: Mutex<BTreeMap<Uuid, Arc<OwnGuard>>>,
    watched: Mutex<BTreeMap<(Uuid, Uuid), Watched>>,
    /// Why the folder of a datastore cannot be used, or not all of it.
    problems: Mutex<BTreeMap<Uuid, String>>,
    turns: Turns,
    guarded: watch::Sender<Vec<Guarded>>,
    /// Held while a new value is made, so that no older state replaces a newer one. The watchdog's
    /// client, which reads `guarded`, waits for no disk.
    publishing: Mutex<()>,
}

impl OwnVms {
    /// Opens the guards that an earlier agent left.
    ///
    /// # Errors
    /// One cannot be opened: its VM may run without a guard.
    pub(crate) fn open(
        state_dir: &Path,
        run_dir: &Path,
        boot_id: String,
        host_name: &str,
    ) -> io::Result<Arc<OwnVms>> {
        let own = Arc::new(OwnVms {
            state_dir: state_dir.join("own"),
            run_dir: run_dir.join("own"),
            boot_id,
            host_name: host_name.to_owned(),
            disk: Disk::default(),
            host: Mutex::default(),
            guards: Mutex::default(),
            watched: Mutex::default(),
            problems: Mutex::default(),
            turns: Turns::default(),
            guarded: watch::Sender::new(Vec::new()),
            publishing: Mutex::default(),
        });
        let left = match std::fs::read_dir(&own.state_dir) {
            Ok(left) => left,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(own),
            Err(error) => return Err(error),
        };
        for entry in left {
            let name = entry?.file_name();
            if let Some(vm) = name.to_str().and_then(|name| name.parse::<Uuid>().ok()) {
                own.guard_of(vm, None)?;
            }
        }
        Ok(own)
    }

    /// Follows what a watchdog has to end of each VM, and when.
    pub(crate) fn guarded(&self) -> watch::Receiver<Vec<Guarded>> {
        self.guarded.subscribe()
    }

    /// Returns the guards of this host's VMs.
    pub(crate) fn all(&self) -> Vec<Arc<OwnGuard>> {
        self.guards.lock().values().cloned().collect()
    }

    /// Returns the guard of a VM, if there is one.
    pub(crate) fn known(&self, vm: Uuid) -> Option<Arc<OwnGuard>> {
        self.guards.lock().get(&vm).cloned()
    }

    /// Returns the guard of a VM. A new one ends what runs of the VM before it can hold a term.
    /// Blocks.
    ///
    /// # Errors
    /// Its folders cannot be made.
    pub(crate) fn guard_of(
        self: &Arc<Self>,
        vm: Uuid,
        name: Option<&VmName>,
    ) -> io::Result<Arc<OwnGuard>> {
        let mut guards = self.guards.lock();
        if let Some(known) = guards.get(&vm) {
            self.note_name(known, name);
            return Ok(Arc::clone(known));
        }
        let (state, run) = (self.state_dir.join(vm.to_string()), self.run_dir.join(vm.to_string()));
        for dir in [&self.state_dir, &state, &self.run_dir, &run] {
            self.disk.make_dir(dir)?;
        }
        let guard = Arc::new(HaGuard::open(&state, &run, self.boot_id.clone()));
        let saved = std::fs::read_to_string(state.join("name")).ok();
        let known = Arc::new(OwnGuard {
            vm,
            guard: Arc::clone(&guard),
            working: Arc::default(),
            listing: Mutex::default(),
            name: Mutex::new(saved.and_then(|name| VmName::new(name).ok())),
            last: Mutex::default(),
        });
        self.note_name(&known, name);
        guards.insert(vm, Arc::clone(&known));
        drop(guards);
        let guarded = guard.guarded();
        self.publish();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(follow(Arc::downgrade(self), guarded));
        }
        Ok(known)
    }

    fn note_name(&self, known: &OwnGuard, name: Option<&VmName>) {
        let mut saved = known.name.lock();
        let Some(name) = name.filter(|name| saved.as_ref() != Some(*name)) else { return };
        let path = self.state_dir.join(known.vm.to_string()).join("name");
        match self.disk.replace(&path, name.as_str().as_bytes()) {
            Ok(()) => *saved = Some(name.clone()),
            Err(error) => tracing::error!(vm = name.as_str(), %error, "cannot save a VM's name"),
        }
    }

    /// Whether a guard is the one of its VM. Another one may have its place after it was forgotten.
    pub(crate) fn is_current(&self, own: &Arc<OwnGuard>) -> bool {
        self.known(own.vm).is_some_and(|known| Arc::ptr_eq(&known, own))
    }

    /// Forgets the guard of a VM that is not protected here any more. [`OwnGuard::working`] must be
    /// held. Blocks.
    pub(crate) fn forget(&self, vm: Uuid) {
        if self.guards.lock().remove(&vm).is_none() {
            return;
        }
        self.publish();
        for dir in [&self.run_dir, &self.state_dir].map(|dir| dir.join(vm.to_string())) {
            if let Err(error) = std::fs::remove_dir_all(&dir) {
                tracing::warn!(path = %dir.display(), %error, "cannot remove a guard's files");
            }
        }
    }

    /// Publishes what all guards say.
    pub(crate) fn publish(&self) {
        // Of two that publish at once, the later one has the newer state.
        let _alone = self.publishing.lock();
        let all = self.all();
        let guarded = all.iter().map(|own| own.guard.guarded().borrow().clone());
        let guarded: Vec<Guarded> = guarded.filter(|it| it.deadline.is_some()).collect();
        self.guarded.send_if_modified(|known| {
            let is_new = *known != guarded;
            if is_new {
                *known = guarded;
            }
            is_new
        });
    }

    /// Returns this host's identity in blocks. The first call makes it. Blocks.
    ///
    /// # Errors
    /// It cannot be read or saved.
    pub(crate) fn host(&self) -> io::Result<Uuid> {
        let mut host = self.host.lock();
        if let Some(host) = *host {
            return Ok(host);
        }
        let path = self.state_dir.join("host.json");
        let saved: Option<SavedHost> = match std::fs::read(&path) {
            Ok(text) => Some(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let is_ours = |saved: &SavedHost| saved.format == FORMAT && saved.name == self.host_name;
        let identity = match saved.filter(is_ours) {
            Some(saved) => saved.host,
            None => {
                let name = self.host_name.clone();
                let fresh = SavedHost { format: FORMAT, host: Uuid::new_v4(), name };
                self.disk.make_dir(&self.state_dir)?;
                self.disk.replace(&path, &serde_json::to_vec(&fresh)?)?;
                fresh.host
            }
        };
        *host = Some(identity);
        Ok(identity)
    }

    /// Works at a datastore in a thread, which may hang.
    async fn at<T: Send + 'static>(
        &self,
        what: Uuid,
        kind: Work,
        work: impl FnOnce() -> Result<T, OwnError> + Send + 'static,
    ) -> Result<T, OwnError> {
        let late = || OwnError::from(HeartbeatError::Late);
        let outcome = async {
            let turn = self.turns.wait(what, kind).await.ok_or_else(late)?;
            let (done, outcome) = oneshot::channel();
            in_thread(move || {
                let found = work();
                drop(turn);
                let _ = done.send(found);
            })?;
            outcome.await.unwrap_or_else(|_| Err(late()))
        };
        tokio::time::timeout(LIMIT, outcome).await.unwrap_or_else(|_| Err(late()))
    }
}

/// Publishes what all guards say whenever this one changes.
async fn follow(own: Weak<OwnVms>, mut guarded: watch::Receiver<Guarded>) {
    while guarded.changed().await.is_ok() {
        let Some(own) = own.upgrade() else { return };
        own.publish();
    }
}

#[cfg(test)]
mod tests;
