//! Images that stay here after their disks have moved with their VM. Each is recorded with its
//! file, and removed when its time is over ([`crate::config::KeepTime`]).
//!
//! An image is removed only if all of this holds; otherwise it stays, and its record says why:
//! - The file is the one that the move has left, on a datastore that this host has for itself.
//! - No VM or record of a VM of this host names it, no image is a layer on it, and no QEMU has it
//!   open.
//! - The destination says again that the guest is its own, with the new disk ([`verdict`]).
//!
//! The record of an image that a VM gets again, that is gone or that was replaced ends: the image
//! is like any other then. Without its record, an image stays until it is deleted by request.
//!
//! The VM does not come back to such an image by a migration without its disks: it is not what the
//! guest has.

mod verdict;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::Duration;

use godwit_api::{ApiError, ClientError, DatastoreInfo, ErrorCode, KeptDisk, KeptDisks};
use godwit_migration::handover::Known;
use godwit_qemu::{Uuid, VmName};
use godwit_ram::lock_image;
use godwit_types::{DatastoreHealth, DiskReport};
use parking_lot::Mutex;
use rustix::fs::OFlags;

use super::arriving::{identity_of, mark_new};
use super::{Place, allocated_bytes, walk_permit};
use crate::agent::Agent;
use crate::block_devices::is_device_path;
use crate::config::KeepTime;
use crate::disk_arrivals::now_unix_s;
use crate::peer_record::ask_known;
use crate::store::kept_disks::{LeftBy, SavedKeptDisk};
use crate::vm::Vm;
use verdict::{FileHere, Look, OwnStorage, There, UseHere, look, may_remove, own_storage};

/// Interval at which the images are looked at.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Longest time for the destination to describe itself and its VM.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Most images that are recorded.
const MOST_KEPT: usize = 1000;
/// Longest reason that is recorded, which may be another host's text.
const MOST_REASON_CHARS: usize = 300;

/// Held while a record is changed, and while an image is removed with its record.
static CHANGING: Mutex<()> = Mutex::new(());

/// What became of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Settled {
    /// Its record ends; why.
    Ends(&'static str),
    /// It stays; why, if it cannot be removed.
    Stays(Option<String>),
    /// It is removed, with its record.
    Removed,
}

impl Agent {
    /// Records the images that stay here of disks that have left with their VM. Returns the time
    /// from which they may be removed, in Unix milliseconds; `None`: no image has such a time. A
    /// block device is no image, and stays.
    pub(crate) fn keep_departed(
        &self,
        vm: &Vm,
        to: &str,
        disks: &[DiskReport],
        time: KeepTime,
    ) -> Option<u64> {
        let now = now_unix_s();
        let left_by = LeftBy {
            vm: vm.name.clone(),
            uuid: vm.spec().uuid,
            offered: vm.ownership().offered(),
            to: to.to_owned(),
            since_unix_s: now,
            until_unix_s: time.until_unix_s(now),
        };
        let mut are_recorded = false;
        for disk in disks.iter().filter(|disk| !is_device_path(Path::new(&disk.from))) {
            match tokio::task::block_in_place(|| self.keep_one(&left_by, disk)) {
                Ok(_) => are_recorded = true,
                Err(error) => tracing::warn!(%error, "the image stays until it is deleted"),
            }
        }
        left_by.until_unix_s.filter(|_| are_recorded).map(to_unix_ms)
    }

    fn keep_one(&self, left_by: &LeftBy, disk: &DiskReport) -> Result<SavedKeptDisk, ApiError> {
        let place = self.place(Path::new(&disk.from), "keep")?;
        let failed = |error: io::Error| place.failed("keep", &error);
        let file = place.open(OFlags::RDONLY).map_err(failed)?;
        let mut identity = identity_of(&file).map_err(failed)?;
        if identity.1 == 0 {
            mark_new(&file);
            identity = identity_of(&file).map_err(failed)?;
        }
        let used_bytes = allocated_bytes(&file).map_err(failed)?;
        let paths = (place.path.clone(), PathBuf::from(&disk.to));
        let datastore = self.own_storage(&place.path).ok().map(|storage| storage.identity);
        let record = SavedKeptDisk::new(left_by, paths, identity, used_bytes);
        let record = SavedKeptDisk { datastore, ..record };
        let _alone = CHANGING.lock();
        let mut known = self.store.kept_disks();
        let earlier: Vec<_> = known.extract_if(.., |known| known.path == record.path).collect();
        if known.len() >= MOST_KEPT {
            let message = format!(
                "cannot record that disk {} stays: {MOST_KEPT} others are recorded",
                place.path.display()
            );
            let remedy = "remove some of them: see `godwit disk kept`";
            return Err(ApiError::new(ErrorCode::HostFailed, message, remedy));
        }
        self.store.save_kept_disk(&record)?;
        earlier.iter().for_each(|earlier| self.forget_kept(earlier));
        Ok(record)
    }

    /// Lists the images that stay here after moves.
    pub(crate) fn kept_disks(&self) -> KeptDisks {
        let all = tokio::task::block_in_place(|| self.store.kept_disks());
        KeptDisks { disks: all.iter().map(shown).collect() }
    }

    /// Keeps an image until it is removed by request.
    ///
    /// # Errors
    /// It has no record, or its record cannot be saved.
    pub(crate) fn keep_disk(&self, path: &Path) -> Result<KeptDisk, ApiError> {
        tokio::task::block_in_place(|| {
            let _alone = CHANGING.lock();
            let known = self.kept_record(path)?;
            let kept = SavedKeptDisk { until_unix_s: None, waits: None, ..known };
            self.store.save_kept_disk(&kept)?;
            tracing::info!(path = %path.display(), "the image stays until it is removed");
            Ok(shown(&kept))
        })
    }

    /// Removes an image now that stays here after a move.
    ///
    /// # Errors
    /// It has no record, or may be needed.
    pub(crate) async fn remove_kept_disk(&self, path: &Path) -> Result<(), ApiError> {
        let kept = tokio::task::block_in_place(|| self.kept_record(path))?;
        self.query_datastores();
        let settled = self.settle_kept(&kept, true).await;
        let why = match &settled {
            Settled::Removed => return Ok(()),
            Settled::Ends(why) => (*why).to_owned(),
            Settled::Stays(why) => {
                let changed = || "its record has just been changed".to_owned();
                why.as_deref().map_or_else(changed, bounded)
            }
        };
        self.note_settled(&kept, kept.is_due(now_unix_s()), settled);
        let message = format!("cannot remove disk {}: {why}", path.display());
        let remedy = "remove it later, or, if it is not needed, with `godwit disk delete`";
        Err(ApiError::new(ErrorCode::WrongState, message, remedy))
    }

    fn kept_record(&self, path: &Path) -> Result<SavedKeptDisk, ApiError> {
        let known = self.store.kept_disks().into_iter().find(|known| known.path == path);
        known.ok_or_else(|| {
            let message = format!("cannot find disk {}: no move has left it here", path.display());
            ApiError::new(ErrorCode::NotFound, message, "see `godwit disk kept`")
        })
    }

    /// Looks at the images from time to time, for as long as the agent exists.
    pub(in crate::agent) async fn watch_kept_disks(agent: Weak<Agent>) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            let Some(agent) = agent.upgrade() else { return };
            agent.sweep_kept_disks(now_unix_s()).await;
        }
    }

    async fn sweep_kept_disks(&self, now_unix_s: u64) {
        let all = tokio::task::block_in_place(|| self.store.kept_disks());
        if all.is_empty() {
            return;
        }
        self.query_datastores();
        for kept in all {
            let is_due = kept.is_due(now_unix_s);
            let settled = self.settle_kept(&kept, is_due).await;
            self.note_settled(&kept, is_due, settled);
        }
    }

    /// Has the datastores queried, whose answers [`Agent::own_storage`] uses.
    fn query_datastores(&self) {
        drop(self.datastores.infos(&self.directories(), &self.config.vm_dirs));
    }

    /// Removes an image whose time is over, if nothing needs it.
    async fn settle_kept(&self, kept: &SavedKeptDisk, is_due: bool) -> Settled {
        match tokio::task::block_in_place(|| self.look_here(kept, is_due)) {
            Look::Ends(why) => Settled::Ends(why),
            Look::Stays(why) => Settled::Stays(why),
            Look::Ask => {
                let there = self.ask_there(kept).await;
                let _turn = walk_permit().await;
                tokio::task::block_in_place(|| self.remove_if_moved(kept, there))
            }
        }
    }

    /// Records what became of an image that is not removed.
    fn note_settled(&self, kept: &SavedKeptDisk, is_due: bool, settled: Settled) {
        let waits = match settled {
            Settled::Removed => return,
            Settled::Ends(why) => {
                let path = kept.path.display();
                tracing::info!(%path, why, "the image is no longer one that a move has left");
                return tokio::task::block_in_place(|| {
                    let _alone = CHANGING.lock();
                    self.forget_kept(kept);
                });
            }
            Settled::Stays(why) => why.filter(|_| is_due).map(|why| bounded(&why)),
        };
        if waits == kept.waits {
            return;
        }
        tokio::task::block_in_place(|| {
            let _alone = CHANGING.lock();
            if !self.is_unchanged(kept) {
                return;
            }
            let path = kept.path.display();
            if let Some(why) = &waits {
                tracing::warn!(%path, why, "the image of a disk that has moved stays for now");
            }
            if let Err(error) = self.store.save_kept_disk(&SavedKeptDisk { waits, ..kept.clone() })
            {
                tracing::warn!(%path, %error, "cannot record why an image stays");
            }
        });
    }

    /// Whether the record of an image is still the one that was read.
    fn is_unchanged(&self, kept: &SavedKeptDisk) -> bool {
        let same =
            |known: &SavedKeptDisk| known.id == kept.id && known.until_unix_s == kept.until_unix_s;
        self.store.kept_disks().iter().any(same)
    }

    fn forget_kept(&self, kept: &SavedKeptDisk) {
        if let Err(error) = self.store.remove_kept_disk(kept.id) {
            let path = kept.path.display();
            tracing::warn!(%path, %error, "the record of an image that stayed is not removed");
        }
    }

    /// Ends the records of images that a VM gets, by their real paths: it may write them, and give
    /// them back before the next look. Blocks.
    pub(in crate::agent) fn end_kept(&self, images: &BTreeSet<PathBuf>) {
        let all = self.store.kept_disks();
        if all.is_empty() {
            return;
        }
        let paths = all.iter().map(|kept| kept.path.clone()).collect();
        let reals = self.real_paths.resolve(paths, &self.config.vm_dirs);
        for kept in all.iter().filter(|kept| images.contains(&reals.of(&kept.path))) {
            let path = kept.path.display();
            tracing::info!(%path, "a VM gets an image that a move has left");
            let _alone = CHANGING.lock();
            self.forget_kept(kept);
        }
    }

    /// Refuses a VM of another host with these disks if one is an image that a move of it has left
    /// here, on a datastore that this host has for itself: the guest has written its disk elsewhere
    /// since. Blocks.
    pub(in crate::agent) fn refuse_left(
        &self,
        vm: &str,
        uuid: Uuid,
        disks: &[&Path],
    ) -> Result<(), ApiError> {
        let is_left = |kept: &SavedKeptDisk| {
            let same = || {
                let storage = self.own_storage(&kept.path).ok()?;
                let place = self.place(&kept.path, "keep").ok()?;
                Some(file_at(&place, &storage.root, kept) == FileHere::Same)
            };
            kept.uuid == uuid && disks.contains(&kept.path.as_path()) && same().unwrap_or(false)
        };
        let Some(kept) = self.store.kept_disks().into_iter().find(is_left) else { return Ok(()) };
        let message = format!(
            "cannot accept VM \"{vm}\" on host {}: disk {} there is what an earlier move has left, \
             and not what the guest has",
            self.config.name,
            kept.path.display()
        );
        let remedy = "let its disks move with it (--with-disks)";
        Err(ApiError::new(ErrorCode::Preflight, message, remedy))
    }

    /// Returns the datastore of an image.
    ///
    /// # Errors
    /// Other hosts may use it, or that is unknown. Also if another directory for VMs does not
    /// answer: layers on the image would be looked for there.
    fn own_storage(&self, path: &Path) -> Result<OwnStorage, String> {
        let dirs = &self.config.vm_dirs;
        let infos = self.datastores.last(dirs);
        let below = dirs.iter().filter(|dir| path.starts_with(dir));
        let root = below.max_by_key(|dir| dir.as_os_str().len());
        let root = root.ok_or_else(|| "it is below none of the directories for VMs".to_owned())?;
        let own = own_storage(root, infos.get(root))?;
        let is_silent = |info: &DatastoreInfo| info.health == Some(DatastoreHealth::NoAnswer);
        match infos.iter().find(|(_, info)| is_silent(info)) {
            Some((dir, _)) => Err(format!("datastore {} does not answer", dir.display())),
            None => Ok(own),
        }
    }

    /// Looks at an image and its users here. Blocks.
    fn look_here(&self, kept: &SavedKeptDisk, is_due: bool) -> Look {
        let storage = match self.own_storage(&kept.path) {
            Ok(storage) => storage,
            Err(why) => return Look::Stays(Some(why)),
        };
        if kept.datastore.as_ref().is_some_and(|known| *known != storage.identity) {
            let dir = storage.root.display();
            return Look::Stays(Some(format!("another datastore is at {dir} now: is it mounted?")));
        }
        match self.place(&kept.path, "keep") {
            Ok(place) => {
                let file = file_at(&place, &storage.root, kept);
                look(file, self.use_here(kept, &place.real), is_due)
            }
            Err(error) => Look::Stays(Some(error.message)),
        }
    }

    /// Returns whether a VM of the table uses an image.
    fn use_here(&self, kept: &SavedKeptDisk, real: &Path) -> UseHere {
        let users = self.users_of_file(real);
        let table = self.table();
        let leaves = |(name, _): &(VmName, bool)| {
            table.get(name).is_some_and(|slot| {
                slot.spec.uuid == kept.uuid
                    && slot.ownership.incarnation == kept.offered.incarnation
                    && slot.ownership.epoch < kept.offered.epoch
            })
        };
        match users.is_empty() {
            true => UseHere::Unused,
            false if users.iter().all(leaves) => UseHere::Leaving,
            false => UseHere::Again,
        }
    }

    /// Asks the destination what has become of the guest.
    ///
    /// # Errors
    /// Why there is no answer.
    async fn ask_there(&self, kept: &SavedKeptDisk) -> Result<There, String> {
        let unanswered = |why: String| format!("host {} cannot be asked: {why}", kept.to);
        let peer = self.peer(&kept.to).map_err(|error| unanswered(error.message))?;
        let known = ask_known(&peer, &kept.vm, kept.uuid, kept.offered.incarnation).await;
        let known = known.map_err(|error| unanswered(error.message))?;
        let asked = async {
            let host = peer.host().await?;
            let vm = match known {
                Known::Has(_) => Some(peer.vm(&kept.vm).await?),
                Known::Gone(_) | Known::Never => None,
            };
            Ok::<_, ClientError>((host, vm))
        };
        match tokio::time::timeout(ASK_LIMIT, asked).await {
            Ok(Ok((host, _))) if host.name != kept.to => {
                Err(unanswered(format!("host {} answers in its place", host.name)))
            }
            Ok(Ok((host, vm))) => Ok(There::new(known, &host, vm.as_ref())),
            Ok(Err(error)) => Err(unanswered(error.to_string())),
            Err(_) => Err(unanswered(format!("no answer within {} s", ASK_LIMIT.as_secs()))),
        }
    }

    /// Removes an image with its record, if the destination's answer allows it and nothing here
    /// needs it. Blocks.
    fn remove_if_moved(&self, kept: &SavedKeptDisk, there: Result<There, String>) -> Settled {
        let storage = self.own_storage(&kept.path);
        let may = storage.and_then(|storage| may_remove(kept, &storage, &there?));
        if let Err(why) = may {
            return Settled::Stays(Some(why));
        }
        // No record waits for the storage of an image, but it changes no more once that may go.
        let may_go = |place: &Place, file: Option<&File>| {
            let alone = self.is_free(kept, place, file).then(|| CHANGING.lock());
            alone.filter(|_| self.is_unchanged(kept))
        };
        match self.remove_if_unused(&kept.path, may_go) {
            Ok(Some(_alone)) => {
                let (path, vm) = (kept.path.display(), kept.vm.as_str());
                tracing::info!(%path, vm, to = kept.to, "image of a disk that has moved removed");
                self.forget_kept(kept);
                Settled::Removed
            }
            Ok(None) if !self.is_unchanged(kept) => Settled::Stays(None),
            Ok(None) => {
                let why = "a VM, another image or a program of this host uses it";
                Settled::Stays(Some(why.to_owned()))
            }
            Err(error) => Settled::Stays(Some(error.message)),
        }
    }

    /// Whether the file at a place is the image, which no QEMU has open and no record names. Keeps
    /// QEMUs from opening it until the file is closed. `file`: it, if it can be locked.
    fn is_free(&self, kept: &SavedKeptDisk, place: &Place, file: Option<&File>) -> bool {
        let Some(file) = file else { return false };
        let identity = identity_of(file);
        identity.is_ok_and(|identity| identity == (kept.inode, kept.born_unix_ns))
            && lock_image(file).unwrap_or(false)
            && !self.is_recorded(&place.path)
            && !self.is_recorded(&place.real)
    }
}

/// Returns what is at the place of an image. `root`: its directory for VMs.
fn file_at(place: &Place, root: &Path, kept: &SavedKeptDisk) -> FileHere {
    let file = match place.open(OFlags::RDONLY) {
        Ok(file) => file,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound => FileHere::Gone,
                io::ErrorKind::InvalidInput => FileHere::Another,
                _ => FileHere::Unknown(error.to_string()),
            };
        }
    };
    let found = || {
        let is_of_root = file.metadata()?.dev() == std::fs::metadata(root)?.dev();
        Ok::<_, io::Error>((identity_of(&file)?, is_of_root))
    };
    match found() {
        Err(error) => FileHere::Unknown(error.to_string()),
        Ok((_, false)) => {
            let why = "another file system than that of its datastore is mounted there";
            FileHere::Unknown(why.to_owned())
        }
        Ok((identity, _)) if identity != (kept.inode, kept.born_unix_ns) => FileHere::Another,
        Ok(_) if kept.born_unix_ns == 0 => {
            let why = "its file system does not distinguish it from a file with its number";
            FileHere::Unknown(why.to_owned())
        }
        Ok(_) => FileHere::Same,
    }
}

fn shown(kept: &SavedKeptDisk) -> KeptDisk {
    KeptDisk {
        path: kept.path.clone(),
        vm: kept.vm.to_string(),
        to: kept.to.clone(),
        moved_to: kept.moved_to.clone(),
        used_bytes: kept.used_bytes,
        since_unix_ms: to_unix_ms(kept.since_unix_s),
        until_unix_ms: kept.until_unix_s.map(to_unix_ms),
        waits: kept.waits.clone(),
    }
}

fn to_unix_ms(unix_s: u64) -> u64 {
    unix_s.saturating_mul(1000)
}

/// Returns a reason without control characters, shortened.
fn bounded(why: &str) -> String {
    why.chars().filter(|c| !c.is_control()).take(MOST_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests;
