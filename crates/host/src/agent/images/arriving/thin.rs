//! Thin volumes for disks that arrive in a thin pool of LVM. Once made, a volume is filled as any
//! block device is ([`super::devices`]).
//!
//! 1. The transfer is recorded, with a tag that no other has.
//! 2. The volumes are made with that tag, and their UUIDs are recorded.
//! 3. The tag is removed, and the devices are recorded. From here on the transfer can go on, and
//!    its volumes are found by their devices.
//! 4. A volume that is given up gets the tag again, the record goes, and the volume is removed. If
//!    LVM does not answer, the record stays without the device, and the next sweep does it.
//!
//! So a volume with such a tag is no VM's. One whose transfer is not recorded is removed. LVM
//! removes a volume only if it has the UUID and the tag: another one may have got its name.
//! The agent's start does not wait for LVM.

use std::any::Any;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ArrivingDisks, ArrivingImage, ErrorCode};
use godwit_qemu::{ByteSize, DiskFormat, ThinPool, Uuid, pool_stem};
use godwit_wire::MigrationId;
use tokio::runtime::Handle;

use super::devices::soon;
use super::{Claims, MOST_NAMES};
use crate::agent::Agent;
use crate::agent::images::in_work::{self, WriteClaim};
use crate::block_devices::DeviceIdentity;
use crate::disk_arrivals::{DiskArrival, Subject, now_unix_s};
use crate::hold::hold;
use crate::store::{SavedArrival, SavedArrivingDisk, SavedThinVolume};
use crate::thin_pools::{self, ARRIVING_TAG, Lvm, LvmError, PoolState, ThinVolume};

/// Attempts to remove a volume that something may still have open, and the time between.
const REMOVALS: u32 = 10;
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);

/// Hundredths of a per cent of a pool's metadata from which no disk begins to arrive in it: its
/// blocks need metadata, and a pool without any takes no writes, also none of other volumes.
const MOST_METADATA: u64 = 9_000;

/// A name for a volume, which nobody else makes a volume of.
struct FreeName {
    name: String,
    path: PathBuf,
    claim: WriteClaim,
}

impl Agent {
    /// Returns the volumes that a transfer would make. Changes nothing.
    pub(super) async fn images_in_thin_pool(
        &self,
        request: &ArrivingDisks,
        pool: &ThinPool,
    ) -> Result<Vec<ArrivingImage>, ApiError> {
        let names = self.free_volumes(request, pool).await?;
        let image = |free: &FreeName| ArrivingImage {
            path: free.path.clone(),
            backing: Vec::new(),
            cluster: None,
            present: Vec::new(),
            identity: None,
        };
        Ok(names.iter().map(image).collect())
    }

    /// Makes the volumes of a transfer. If that fails, nothing of them remains.
    pub(super) async fn make_arrival_in_thin_pool(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
        pool: &ThinPool,
    ) -> Result<DiskArrival, ApiError> {
        let names = self.free_volumes(request, pool).await?;
        let disks = names.iter().zip(&request.disks).map(|(free, disk)| SavedArrivingDisk {
            source: disk.path.clone(),
            path: free.path.clone(),
            format: DiskFormat::Raw,
            virtual_bytes: disk.virtual_bytes,
            inode: 0,
            born_unix_ns: 0,
            backing: Vec::new(),
            unnamed: None,
            device: None,
            thin: Some(SavedThinVolume {
                pool: pool.clone(),
                name: free.name.clone(),
                // A removal after an earlier attempt does not take this one.
                tag: format!("{ARRIVING_TAG}{}", Uuid::new_v4()),
                uuid: None,
            }),
        });
        let (vm, disks) = ((request.vm.clone(), request.uuid), disks.collect());
        let mut record = SavedArrival::new(id, vm, request.from.clone(), now_unix_s(), disks);
        tokio::task::block_in_place(|| self.store.save_arrival(&record))?;
        hold("disks-recorded");
        let mut held = Claims::new();
        for FreeName { claim, .. } in names {
            claim.reserve_for(&request.vm);
            held.push(Box::new(claim));
        }
        let images = match self.make_volumes(&mut record, pool, &mut held).await {
            Ok(images) => images,
            Err(error) => {
                tokio::task::block_in_place(|| self.remove_left(id, &record, held));
                return Err(error);
            }
        };
        let present = self.map_of(id, &record, true);
        tracing::info!(vm = request.vm.as_str(), from = request.from, %pool, "thin volumes made");
        Ok(DiskArrival::new(id, record, images, present, held))
    }

    /// Removes the volumes and the record of a transfer that could not be made, or has ended. If
    /// LVM does not answer, the record stays, and they are removed later.
    fn remove_left(&self, id: MigrationId, record: &SavedArrival, held: Claims) {
        let volumes = match self.mark_volumes(&record.disks) {
            Ok(volumes) => volumes,
            Err(error) => return tracing::warn!(%error, "volumes of a transfer stay for now"),
        };
        if self.forget_record(id) {
            let held: Arc<dyn Any + Send + Sync> = Arc::new(held);
            self.remove_volumes(volumes, &held);
        }
    }

    /// Makes the volumes of a record, and records their UUIDs and their devices. Returns the real
    /// paths of the devices, which are claimed for the VM.
    async fn make_volumes(
        &self,
        record: &mut SavedArrival,
        pool: &ThinPool,
        held: &mut Claims,
    ) -> Result<Vec<PathBuf>, ApiError> {
        let lvm = self.lvm();
        for disk in &record.disks {
            let Some(thin) = &disk.thin else { continue };
            let made = lvm.create(pool, (&thin.name, disk.virtual_bytes), &thin.tag).await;
            made.map_err(|error| failed("create", &disk.path, &error))?;
        }
        let seen = lvm.look(pool).await.map_err(|error| failed("create", &pool.place(), &error))?;
        let mut volumes = Vec::new();
        for disk in &mut record.disks {
            let path = disk.path.clone();
            let Some(thin) = &mut disk.thin else { continue };
            let found = seen.volumes.iter().find(|volume| thin.is(volume));
            let found = found.ok_or_else(|| {
                let (why, remedy) = ("it was removed again", "see the log of that host");
                refused("create", &path, ErrorCode::HostFailed, why, remedy)
            })?;
            thin.uuid = Some(found.uuid.clone());
            volumes.push((found.clone(), thin.tag.clone()));
        }
        tokio::task::block_in_place(|| self.store.save_arrival(record))?;
        for (volume, tag) in &volumes {
            let untagged = lvm.untag(pool, volume, tag).await;
            untagged.map_err(|error| failed("create", &pool.device(&volume.name), &error))?;
        }
        tokio::task::block_in_place(|| {
            let images = record.disks.iter_mut();
            let images = images.map(|disk| self.take_volume(disk, &record.vm, held));
            let images = images.collect::<Result<Vec<PathBuf>, ApiError>>()?;
            self.store.save_arrival(record)?;
            Ok(images)
        })
    }

    /// Takes the device of a volume that was made, unless a VM has got it meanwhile.
    fn take_volume(
        &self,
        disk: &mut SavedArrivingDisk,
        vm: &str,
        held: &mut Claims,
    ) -> Result<PathBuf, ApiError> {
        let real = take_device(disk, vm, held)?;
        // Once it is claimed, no VM gets it any more.
        if self.may_be_a_vms(&disk.path)? {
            let (why, remedy) = ("a VM has got it meanwhile", "see `godwit vm list`");
            return Err(refused("use", &disk.path, ErrorCode::Busy, why, remedy));
        }
        Ok(real)
    }

    /// Returns a free name for each volume. Refuses a pool that is not for VMs, that does not
    /// answer, or that has no room.
    async fn free_volumes(
        &self,
        request: &ArrivingDisks,
        pool: &ThinPool,
    ) -> Result<Vec<FreeName>, ApiError> {
        let place = pool.place();
        self.check_configured("create", pool, &place)?;
        let seen = self.lvm().look(pool).await.map_err(|error| failed("use", &place, &error))?;
        let Some(state) = &seen.pool else {
            let why = format!("host {} has no such thin pool", self.config().name);
            let remedy = format!("see `lvs {}` there", pool.group());
            return Err(refused("use", &place, ErrorCode::NotFound, &why, &remedy));
        };
        let used = request.disks.iter().map(|disk| disk.used_bytes.min(disk.virtual_bytes));
        if let Some((why, remedy)) = lacking(pool, state, used.fold(0, u64::saturating_add)) {
            return Err(refused("use", &place, ErrorCode::HostFailed, &why, &remedy));
        }
        tokio::task::block_in_place(|| {
            let free = |source: &Path| self.free_volume(source, pool, &seen.volumes);
            request.disks.iter().map(|disk| free(&disk.path)).collect()
        })
    }

    fn free_volume(
        &self,
        source: &Path,
        pool: &ThinPool,
        volumes: &[ThinVolume],
    ) -> Result<FreeName, ApiError> {
        let stem = source.file_stem().unwrap_or(OsStr::new("disk")).to_string_lossy();
        let stem = pool_stem(&stem);
        for number in 0..MOST_NAMES {
            let name = if number == 0 { stem.clone() } else { format!("{stem}-{number}") };
            let path = pool.device(&name);
            let is_taken = volumes.iter().any(|volume| volume.name == name)
                || fs::symlink_metadata(&path).is_ok()
                || self.is_recorded(&path);
            if !is_taken && let Some(claim) = in_work::claim(&path) {
                return Ok(FreeName { name, path, claim });
            }
        }
        let why = format!("its volume group has {MOST_NAMES} volumes of the name {stem}");
        let remedy = "remove those that no VM uses";
        Err(refused("use", &pool.place(), ErrorCode::AlreadyExists, &why, remedy))
    }

    fn check_configured(&self, verb: &str, pool: &ThinPool, path: &Path) -> Result<(), ApiError> {
        let pools = &self.config().thin_pools;
        if thin_pools::find(pools, &pool.place()).is_some() {
            return Ok(());
        }
        let why = format!("host {} has no thin pool {pool} for VMs", self.config().name);
        let remedy = "add [[thin_pools]] with it to that host's configuration";
        Err(refused(verb, path, ErrorCode::InvalidRequest, &why, remedy))
    }

    fn lvm(&self) -> Lvm {
        Lvm::new(&self.config().lvm)
    }

    /// Marks the volumes that were made for a transfer, as far as they are still those: from here
    /// on the tag lets any later agent remove them. Returns those that are to be removed. One that
    /// a VM may have stays. Blocks.
    ///
    /// # Errors
    /// LVM does not do it: the record of the transfer must stay, as nothing else tells of them.
    pub(super) fn mark_volumes(
        &self,
        disks: &[SavedArrivingDisk],
    ) -> Result<Vec<SavedThinVolume>, ApiError> {
        let volumes = self.removable(disks)?;
        let Some(first) = volumes.first() else { return Ok(volumes) };
        let runtime = Handle::try_current().map_err(|error| {
            let (path, why) = (first.pool.device(&first.name), error.to_string());
            refused("remove", &path, ErrorCode::HostFailed, &why, "restart that host's agent")
        })?;
        tokio::task::block_in_place(|| runtime.block_on(mark_all(&self.lvm(), &volumes)))?;
        Ok(volumes)
    }

    /// Returns the volumes of a transfer that are in a pool for VMs, and that no VM may have.
    ///
    /// # Errors
    /// It is unknown whether a VM has one: its storage does not answer.
    fn removable(&self, disks: &[SavedArrivingDisk]) -> Result<Vec<SavedThinVolume>, ApiError> {
        let mut volumes = Vec::new();
        for (thin, path) in disks.iter().filter_map(|disk| Some((disk.thin.as_ref()?, &disk.path)))
        {
            match self.check_configured("remove", &thin.pool, path) {
                Ok(()) if self.may_be_a_vms(path)? => {
                    tracing::warn!(path = %path.display(), "volume stays: a VM may have it");
                }
                Ok(()) => volumes.push(thin.clone()),
                Err(error) => tracing::warn!(%error, "the volume for a disk stays"),
            }
        }
        Ok(volumes)
    }

    /// Whether a VM may have the device at a path, whatever path it names it by.
    ///
    /// # Errors
    /// It is unknown: the storage of a VM does not answer.
    fn may_be_a_vms(&self, path: &Path) -> Result<bool, ApiError> {
        if self.is_recorded(path) {
            return Ok(true);
        }
        match path.canonicalize() {
            Ok(real) => Ok(self.is_recorded(&real) || self.user_before_removal(&real)?.is_some()),
            // No device, no user.
            Err(_) => Ok(false),
        }
    }

    /// Removes volumes that are marked, each in a task of its own. `held`: what keeps others from
    /// them meanwhile.
    pub(super) fn remove_volumes(
        &self,
        volumes: Vec<SavedThinVolume>,
        held: &Arc<dyn Any + Send + Sync>,
    ) {
        for thin in volumes {
            let (lvm, held) = (self.lvm(), Arc::clone(held));
            tokio::spawn(async move {
                remove_with_patience(&lvm, &thin).await;
                drop(held);
            });
        }
    }

    /// Removes the volumes of transfers that have ended, and those with a tag of a transfer that is
    /// not recorded.
    pub(super) async fn sweep_volumes(&self) {
        self.sweep_recorded().await;
        for pool in &self.config().thin_pools {
            let lvm = self.lvm();
            match lvm.look(pool).await {
                // Another host may have it active, whose agent makes volumes in it.
                Ok(seen) if seen.pool.as_ref().is_none_or(|state| state.used_bytes.is_none()) => {}
                Ok(seen) => self.sweep_tagged(&lvm, pool, seen.volumes).await,
                Err(error) => tracing::debug!(%pool, %error, "left volumes are not looked for"),
            }
        }
    }

    /// Removes the volumes that the records of transfers name that have ended.
    async fn sweep_recorded(&self) {
        let recorded = || tokio::task::block_in_place(|| self.store.arrivals());
        for (id, record) in recorded() {
            if !record.has_left_volumes() || self.arrivals.source_of(id).is_some() {
                continue;
            }
            let Ok(_turn) = self.arrivals.turn([Subject::Transfer(id)]).await else { continue };
            // A request may have made it, or removed it, meanwhile.
            let is_same = recorded().iter().any(|(known, now)| *known == id && *now == record);
            if !is_same || self.arrivals.find(id).is_some() {
                continue;
            }
            let claims = record.disks.iter().map(|disk| claim_device(&disk.path));
            let Some(held) = claims.collect::<Option<Vec<Claims>>>() else { continue };
            let held = held.into_iter().flatten().collect();
            tokio::task::block_in_place(|| self.remove_left(id, &record, held));
        }
    }

    /// Removes those of a pool's volumes that have a tag of a transfer that is not recorded.
    async fn sweep_tagged(&self, lvm: &Lvm, pool: &ThinPool, volumes: Vec<ThinVolume>) {
        // A transfer is recorded before its volumes have the tag, so this comes after the look.
        let left = tokio::task::block_in_place(|| self.left_volumes(volumes));
        for (volume, tag) in &left {
            let path = pool.device(&volume.name);
            let Some(_held) = claim_device(&path) else { continue };
            let may_be_a_vms = tokio::task::block_in_place(|| self.may_be_a_vms(&path));
            if may_be_a_vms.unwrap_or(true) {
                tracing::warn!(path = %path.display(), "volume stays: a VM may have it");
                continue;
            }
            match lvm.remove(pool, volume, tag).await {
                Ok(()) => tracing::info!(path = %path.display(), "a left volume is removed"),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "a left volume stays");
                    // The next would wait as long.
                    if matches!(error, LvmError::Late { .. }) {
                        return;
                    }
                }
            }
        }
    }

    /// Returns the volumes with a tag of a transfer that is not recorded, each with that tag.
    fn left_volumes(&self, volumes: Vec<ThinVolume>) -> Vec<(ThinVolume, String)> {
        let recorded = self.store.arrivals();
        let disks = || recorded.iter().flat_map(|(_, record)| &record.disks);
        let is_recorded =
            |tag: &str| disks().any(|disk| disk.thin.as_ref().is_some_and(|thin| thin.tag == tag));
        let tagged = volumes.into_iter().filter(|volume| volume.is_in_pool).filter_map(|volume| {
            let tag = volume.arriving_tag().filter(|tag| !is_recorded(tag))?.to_owned();
            Some((volume, tag))
        });
        tagged.collect()
    }
}

impl SavedThinVolume {
    /// Whether a volume is this one: once its UUID is recorded, only that tells.
    fn is(&self, volume: &ThinVolume) -> bool {
        let is_it = match &self.uuid {
            Some(uuid) => *uuid == volume.uuid,
            None => volume.tags.contains(&self.tag),
        };
        is_it && volume.is_in_pool && volume.name == self.name
    }
}

/// Records the device of a volume, and claims it for the VM; returns its real path.
fn take_device(
    disk: &mut SavedArrivingDisk,
    vm: &str,
    held: &mut Claims,
) -> Result<PathBuf, ApiError> {
    let path = disk.path.clone();
    let found =
        fs::metadata(&path).and_then(|node| Ok((DeviceIdentity::of(&node)?, path.canonicalize()?)));
    let (identity, real) = found.map_err(|error| {
        let (why, remedy) = (format!("its device: {error}"), "see that host's kernel log and udev");
        refused("use", &path, ErrorCode::HostFailed, &why, remedy)
    })?;
    // The removal of a volume that had the device before may just end.
    let claim = soon(|| in_work::claim(&real)).ok_or_else(|| {
        let (why, remedy) = ("something else uses its device", "wait until that ends");
        refused("use", &path, ErrorCode::Busy, why, remedy)
    })?;
    claim.reserve_for(vm);
    held.push(Box::new(claim));
    (disk.inode, disk.born_unix_ns) = (identity.number, identity.sequence);
    disk.device = Some(identity);
    Ok(real)
}

/// Returns why so many bytes cannot arrive in a pool, with the remedy; `None` if they can.
fn lacking(pool: &ThinPool, state: &PoolState, bytes: u64) -> Option<(String, String)> {
    let Some(used) = state.used_bytes else {
        return Some(("it is not active".into(), format!("run `lvchange --activate y {pool}`")));
    };
    // The guest would find in its disk what earlier volumes had.
    if !state.zeroes {
        let why = "its new blocks are not made zero".to_owned();
        return Some((why, format!("run `lvchange --zero y {pool}` there")));
    }
    if !state.takes_writes {
        let why = "it takes no writes: it has failed, or is out of space".to_owned();
        return Some((why, format!("see `lvs {pool}` and the kernel log there")));
    }
    if let Some(used) = state.metadata_used.filter(|used| *used > MOST_METADATA) {
        let why = format!("{} % of its metadata are used", used / 100);
        return Some((why, format!("run `lvextend --poolmetadatasize +256m {pool}` there")));
    }
    let room = state.total_bytes.saturating_sub(used);
    let (needed, has) = (ByteSize::from_bytes(bytes), ByteSize::from_bytes(room));
    let why = format!("the disks need {needed}, and it has room for {has}");
    let remedy = "free space there, or give another place (--disks-to)";
    (bytes > room).then(|| (why, remedy.to_owned()))
}

/// Removes a volume. What has had it open may have it a little longer.
async fn remove_with_patience(lvm: &Lvm, thin: &SavedThinVolume) {
    let path = thin.pool.device(&thin.name);
    let shown = path.display();
    for attempt in 1..=REMOVALS {
        match remove(lvm, thin).await {
            Ok(false) => return tracing::info!(path = %shown, "the volume for a disk is gone"),
            // LVM reports no error if it did not have the tag any more: look again.
            Ok(true) => {}
            Err(LvmError::Refused(_)) if attempt < REMOVALS => {
                tokio::time::sleep(REMOVAL_INTERVAL).await;
            }
            Err(error) => {
                return tracing::warn!(path = %shown, %error, "the volume for a disk stays");
            }
        }
    }
}

/// Claims the device at a path, if there is one; `None`: something else has claimed it.
fn claim_device(path: &Path) -> Option<Claims> {
    let mut held = Claims::new();
    if let Ok(real) = path.canonicalize() {
        held.push(Box::new(in_work::claim(&real)?));
    }
    Some(held)
}

/// Gives volumes their tags.
async fn mark_all(lvm: &Lvm, volumes: &[SavedThinVolume]) -> Result<(), ApiError> {
    for thin in volumes {
        let marked = mark(lvm, thin).await;
        marked.map_err(|error| failed("remove", &thin.pool.device(&thin.name), &error))?;
    }
    Ok(())
}

/// Gives a volume its tag; `None`: it is gone.
async fn mark(lvm: &Lvm, thin: &SavedThinVolume) -> Result<Option<ThinVolume>, LvmError> {
    let seen = lvm.look(&thin.pool).await?;
    let Some(volume) = seen.volumes.into_iter().find(|volume| thin.is(volume)) else {
        return Ok(None);
    };
    if !volume.tags.contains(&thin.tag) {
        lvm.tag(&thin.pool, &volume, &thin.tag).await?;
    }
    Ok(Some(volume))
}

/// Removes a volume; returns whether there was one.
async fn remove(lvm: &Lvm, thin: &SavedThinVolume) -> Result<bool, LvmError> {
    match mark(lvm, thin).await? {
        Some(volume) => lvm.remove(&thin.pool, &volume, &thin.tag).await.map(|()| true),
        None => Ok(false),
    }
}

fn failed(verb: &str, path: &Path, error: &LvmError) -> ApiError {
    refused(verb, path, ErrorCode::HostFailed, &error.to_string(), error.remedy())
}

fn refused(verb: &str, path: &Path, code: ErrorCode, why: &str, remedy: &str) -> ApiError {
    ApiError::new(code, format!("cannot {verb} {}: {why}", path.display()), remedy)
}

#[cfg(test)]
mod tests;
