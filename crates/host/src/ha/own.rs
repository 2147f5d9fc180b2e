//! VMs that agents restart among themselves, without a manager (`protect_by_agents`): for the
//! machine of a single manager. docs/ha-terms.md explains their terms.
//!
//! A VM has a folder on the shared datastore with its disks ([`folder`]). Its host holds a term of
//! the VM with a guard of its own, of the same kind as the guard of a host ([`HaGuard`]), and
//! writes the term's block as a heartbeat. Other hosts judge that block ([`watching`]), and claim
//! the next term when the last one is over. [`crate::agent`] ends and starts the VM.

mod folder;
mod record;
mod watching;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use godwit_api::{HaAnswer, HaStanding, HaVerdict, OwnStanding, OwnVm, TermHolder};
use godwit_ha::Term;
use godwit_ha::own::End;
use godwit_qemu::{Uuid, VmName};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use super::heartbeats::block_file::HeartbeatError;
use super::heartbeats::in_thread;
use super::heartbeats::turns::{Turns, Work};
use super::{Guarded, HaGuard, boot_clock};
use crate::store::Disk;

pub(crate) use folder::{OwnError, Place};
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

/// A VM of this host, or one that it is starting.
#[derive(Debug)]
pub(crate) struct OwnGuard {
    pub(crate) vm: Uuid,
    pub(crate) guard: Arc<HaGuard>,
    /// Held while a term is claimed or given up, and while the VM is created in it.
    pub(crate) working: Arc<tokio::sync::Mutex<()>>,
    /// Held while the VM's processes are listed for the guard. Taken before the agent's table.
    pub(crate) listing: Mutex<()>,
    /// Name of the VM, for one whose record cannot be read.
    name: Mutex<Option<VmName>>,
}

/// A term that a guard holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldTerm {
    pub(crate) term: Term,
    pub(crate) datastore: Uuid,
}

impl OwnGuard {
    /// Returns the term that is held.
    pub(crate) fn held(&self) -> Option<HeldTerm> {
        let state = self.guard.state();
        let datastore = state.datastores.first()?.datastore;
        let is_held = state.standing == HaStanding::Held;
        is_held.then_some(HeldTerm { term: Term(state.term), datastore })
    }

    /// Whether nothing of the VM runs here, and nothing will before the next claim.
    pub(crate) fn is_over(&self) -> bool {
        self.guard.state().standing == HaStanding::Over && self.working.try_lock().is_ok()
    }

    /// Gives up the term: what runs in it ends.
    pub(crate) fn lose(&self) {
        let renewal = self.guard.renewal();
        let Some(holder) = renewal.holder else { return };
        let verdict = HaVerdict::Ended { term: renewal.term };
        let answer = HaAnswer { nonce: renewal.nonce, holder, verdict };
        if let Err(error) = self.guard.answer(&answer) {
            tracing::error!(vm = %self.vm, %error, "cannot give up a term of a VM");
        }
    }

    /// Has the guard know of no process: it ends none from then on.
    pub(crate) fn list_none(&self) {
        let contained = self.guard.begin_list();
        self.guard.order(contained, Vec::new());
    }

    /// Has the guard note that nothing of the VM runs under it. Blocks.
    pub(crate) fn settle(&self) {
        self.list_none();
        self.guard.vms_ended();
        self.guard.save_lease();
    }

    pub(crate) fn name(&self) -> Option<VmName> {
        self.name.lock().clone()
    }
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

    /// Calls a function with what is known of a VM on a datastore.
    pub(crate) fn with_watched<T>(
        &self,
        datastore: Uuid,
        vm: Uuid,
        ask: impl FnOnce(&mut Watched) -> T,
    ) -> Option<T> {
        self.watched.lock().get_mut(&(datastore, vm)).map(ask)
    }

    /// Returns all VMs that are known, by datastore and identity.
    pub(crate) fn watched(&self) -> Vec<(Uuid, Uuid)> {
        self.watched.lock().keys().copied().collect()
    }

    /// Shows the VMs that are known, and what prevents their protection.
    pub(crate) fn shown(&self) -> (Vec<OwnVm>, Vec<String>) {
        let guards = self.guards.lock().clone();
        let all = self.watched.lock();
        let shown = all.iter().map(|(&(datastore, uuid), watched)| {
            let guard = guards.get(&uuid).map(|own| own.guard.state());
            let guard = guard.filter(|state| {
                let beats = state.datastores.first();
                let is_here = beats.is_none_or(|beats| beats.datastore == datastore);
                is_here && watched.term.0 <= state.term && state.standing != HaStanding::Over
            });
            let standing = match guard.as_ref().map(|state| state.standing) {
                Some(HaStanding::Held) => OwnStanding::Held,
                Some(HaStanding::Stopping) => OwnStanding::Stopping,
                Some(HaStanding::Over) | None => watched.standing(),
            };
            let beat = guard.and_then(|state| state.datastores.first()?.problem.clone());
            let record = watched.record.as_ref();
            let here = || watched.problem.clone().or_else(|| watched.refused.clone());
            let problem = beat.or_else(here);
            OwnVm {
                vm: record.map_or_else(|| uuid.to_string(), |record| record.spec.name.clone()),
                uuid,
                datastore,
                term: watched.term.0,
                standing,
                holder: watched.holder(),
                host: record.map(|record| record.host.clone()),
                problem: problem.or_else(|| record.and_then(|record| record.problem.clone())),
            }
        });
        (shown.collect(), self.problems.lock().values().cloned().collect())
    }

    /// Looks into the folders of a datastore. What was found is taken in.
    pub(crate) async fn scan(&self, directory: PathBuf, datastore: Uuid) {
        if self.turns.begin(datastore, Work::Read).is_none() {
            // The last look has not ended: it does not hold up those at other datastores.
            return self.could_not_scan(datastore, &HeartbeatError::Late.into());
        }
        let work = move || {
            let began = boot_clock();
            folder::scan(&directory, datastore).map(|scan| (began, boot_clock(), directory, scan))
        };
        let scanned = self.at(datastore, Work::Read, work).await;
        let (began, now, directory, scan) = match scanned {
            Ok(scanned) => scanned,
            Err(error) => return self.could_not_scan(datastore, &error),
        };
        let mut problems = self.problems.lock();
        problems.remove(&datastore);
        if scan.left_out > 0 {
            let left_out = scan.left_out;
            let problem = format!("{left_out} VMs of datastore {datastore} are not watched");
            problems.insert(datastore, problem);
        }
        drop(problems);
        let mut watched = self.watched.lock();
        watched.retain(|(store, vm), _| {
            *store != datastore || scan.vms.iter().any(|(seen, _)| seen == vm)
        });
        for (vm, found) in scan.vms {
            let place = Place { directory: directory.clone(), datastore, vm };
            let of_vm =
                watched.entry((datastore, vm)).or_insert_with(|| Watched::new(place.clone(), now));
            of_vm.place = place;
            match found {
                Ok(found) => of_vm.saw((began, now), found),
                Err(error) => of_vm.failed(error.to_string()),
            }
        }
    }

    fn could_not_scan(&self, datastore: Uuid, error: &OwnError) {
        let mut watched = self.watched.lock();
        let of_it = watched.iter_mut().filter(|((store, _), _)| *store == datastore);
        of_it.for_each(|(_, watched)| watched.failed(error.to_string()));
        drop(watched);
        let problem = format!("cannot look into .godwit/protected of {datastore}: {error}");
        self.problems.lock().insert(datastore, problem);
    }

    /// Forgets what is known of datastores that this host does not have any more.
    pub(crate) fn keep_datastores(&self, known: &BTreeMap<Uuid, PathBuf>) {
        self.watched.lock().retain(|(datastore, _), _| known.contains_key(datastore));
        self.problems.lock().retain(|datastore, _| known.contains_key(datastore));
    }

    /// Looks into the folder of a VM; `None` if it has none. What was found is taken in.
    ///
    /// # Errors
    /// It cannot be read in time.
    pub(crate) async fn look(&self, place: &Place) -> Result<Option<()>, OwnError> {
        let (of, vm) = (place.clone(), place.vm);
        let work = move || {
            let began = boot_clock();
            folder::look(&of).map(|found| (began, boot_clock(), found))
        };
        let (began, now, found) = self.at(vm, Work::Read, work).await?;
        let mut watched = self.watched.lock();
        let Some(found) = found else {
            watched.remove(&(place.datastore, vm));
            return Ok(None);
        };
        let of_vm = watched
            .entry((place.datastore, vm))
            .or_insert_with(|| Watched::new(place.clone(), now));
        of_vm.saw((began, now), found);
        Ok(Some(()))
    }

    /// Claims the term after `after` and has the VM's guard hold it. [`OwnGuard::working`] must be
    /// held. `is_first`: the VM may have no folder yet.
    ///
    /// # Errors
    /// Another host has claimed it, something of the VM may still run here, or the claim took too
    /// long. Then nothing is held.
    pub(crate) async fn claim(
        &self,
        own: &OwnGuard,
        place: &Place,
        (after, is_first): (Term, bool),
        watchdog: bool,
    ) -> Result<Term, OwnError> {
        let host = tokio::task::block_in_place(|| self.host())?;
        if own.guard.state().standing != HaStanding::Over {
            return Err(io::Error::other("this host's last term is not over").into());
        }
        // The lease counts from before the claim.
        let renewal = own.guard.renewal();
        let of = place.clone();
        let work = move || folder::claim(&of, host, (after, is_first), watchdog);
        let term = self.at(own.vm, Work::Write, work).await?;
        // A cluster of its own for each claim: numbers begin anew with a folder.
        let holder = TermHolder { cluster: Uuid::new_v4(), host };
        let verdict = HaVerdict::Granted { term: term.0, datastores: vec![place.datastore] };
        let answer = HaAnswer { nonce: renewal.nonce, holder, verdict };
        let taken = tokio::task::block_in_place(|| own.guard.answer(&answer));
        taken.map_err(|error| io::Error::other(error.message))?;
        match own.held() {
            Some(held) if held == (HeldTerm { term, datastore: place.datastore }) => Ok(term),
            _ => Err(HeartbeatError::Late.into()),
        }
    }

    /// Begins to write the next block of a held term. `directory`: the datastore's, if this host
    /// has it.
    pub(crate) fn beat(
        &self,
        own: &Arc<OwnGuard>,
        held: HeldTerm,
        directory: Option<&PathBuf>,
        watchdog: bool,
    ) {
        let HeldTerm { term, datastore } = held;
        let Some(directory) = directory.cloned() else {
            let why = HeartbeatError::NoDatastore.to_string();
            return own.guard.write_failed(term, 0, why);
        };
        let Some(turn) = self.turns.begin(own.vm, Work::Write) else {
            return own.guard.write_failed(term, 0, HeartbeatError::Busy.to_string());
        };
        let host = match self.host() {
            Ok(host) => host,
            Err(error) => return own.guard.write_failed(term, 0, error.to_string()),
        };
        let own = Arc::clone(own);
        let work = move || {
            let place = Place { directory, datastore, vm: own.vm };
            let (started_at, least) = numbered();
            match folder::beat(&place, host, (term, least), (watchdog, End::None)) {
                Ok(()) => own.guard.confirm_written(term, 0, started_at),
                Err(error) => {
                    own.guard.write_failed(term, 0, error.to_string());
                    let is_lost = matches!(error, OwnError::Claimed(newer) if newer > term);
                    if is_lost && own.held() == Some(held) {
                        tracing::error!(vm = %own.vm, %term, "another host has claimed the VM");
                        own.lose();
                    }
                }
            }
            drop(turn);
        };
        if let Err(error) = in_thread(work) {
            tracing::error!(%error, "cannot start a thread that writes a heartbeat");
        }
    }

    /// Writes how a term of this host has ended. Nothing of the VM may run in it any more.
    ///
    /// # Errors
    /// It is not this host's, has ended already, or cannot be written in time.
    pub(crate) async fn end(&self, place: &Place, term: Term, end: End) -> Result<(), OwnError> {
        let host = tokio::task::block_in_place(|| self.host())?;
        let (of, (_, least)) = (place.clone(), numbered());
        let work = move || folder::beat(&of, host, (term, least), (false, end));
        self.at(place.vm, Work::Write, work).await
    }

    /// Writes the record of a VM for the holder of its newest term.
    ///
    /// # Errors
    /// A later term is claimed, or it cannot be written in time.
    pub(crate) async fn write_record(
        &self,
        place: &Place,
        record: OwnRecord,
    ) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::write_record(&of, &record)).await
    }

    /// Removes a VM's record: no other host starts the VM from then on.
    ///
    /// # Errors
    /// It cannot be removed in time.
    pub(crate) async fn remove_record(&self, place: &Place) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::remove_record(&of)).await
    }

    /// Removes the folder of a VM, whose newest term this host has ended.
    ///
    /// # Errors
    /// A later term is claimed, or it cannot be removed in time.
    pub(crate) async fn remove(&self, place: &Place, term: Term) -> Result<(), OwnError> {
        let of = place.clone();
        self.at(place.vm, Work::Write, move || folder::remove(&of, term)).await
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

/// Returns the boot clock's time, and the number that a block is larger than.
fn numbered() -> (Duration, u64) {
    let now = boot_clock();
    (now, u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
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
