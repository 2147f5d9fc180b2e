//! Thin volumes for disks that arrive in a thin pool of LVM. Once made, a volume is filled as any
//! block device is ([`super::devices`]).
//!
//! 1. The transfer is recorded, with a tag that no other has.
//! 2. The volumes are made with that tag, and their UUIDs are recorded.
//! 3. The tag is removed, and the devices are recorded. From here on the transfer can go on, and
//!    its volumes are found by their devices.
//! 4. A volume that is given up gets the tag again, and is removed.
//!
//! So a volume with such a tag is no VM's. One whose transfer is not recorded is removed. LVM
//! removes a volume only if it has the UUID and the tag: another one may have got its name.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ApiError, ArrivingDisks, ArrivingImage, ErrorCode};
use godwit_qemu::{ByteSize, DiskFormat, ThinPool, Uuid, pool_stem};
use godwit_wire::MigrationId;

use super::devices::soon;
use super::{Claims, MOST_NAMES};
use crate::agent::Agent;
use crate::agent::images::in_work::{self, WriteClaim};
use crate::block_devices::DeviceIdentity;
use crate::disk_arrivals::{DiskArrival, now_unix_s};
use crate::hold::hold;
use crate::store::{SavedArrival, SavedArrivingDisk, SavedThinVolume};
use crate::thin_pools::{self, ARRIVING_TAG, Lvm, LvmError, PoolState, ThinVolume};

/// Attempts to remove a volume that something may still have open, and the time between.
const REMOVALS: u32 = 10;
const REMOVAL_INTERVAL: Duration = Duration::from_secs(5);

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
                record.disks.iter().for_each(|disk| self.remove_volume(disk, None));
                self.forget_record(id);
                return Err(error);
            }
        };
        let present = self.map_of(id, &record, true);
        tracing::info!(vm = request.vm.as_str(), from = request.from, %pool, "thin volumes made");
        Ok(DiskArrival::new(id, record, images, present, held))
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
        hold("disks-tagged");
        let seen = lvm.look(pool).await.map_err(|error| failed("create", &pool.place(), &error))?;
        let mut volumes = Vec::new();
        for disk in &mut record.disks {
            let path = disk.path.clone();
            let Some(thin) = &mut disk.thin else { continue };
            let found = seen.volumes.iter().find(|volume| thin.is(volume));
            let found = found.ok_or_else(|| {
                let (why, remedy) = ("it is gone again", "see the log of that host");
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
        hold("disks-untagged");
        tokio::task::block_in_place(|| {
            let images = record.disks.iter_mut().map(|disk| take_device(disk, &record.vm, held));
            let images = images.collect::<Result<Vec<PathBuf>, ApiError>>()?;
            self.store.save_arrival(record)?;
            Ok(images)
        })
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

    /// Marks a volume that was made for a transfer, if it is still that volume, and removes it in a
    /// task of its own. One that a VM may have stays. `held`: what nobody else may use it during.
    pub(super) fn remove_volume(&self, disk: &SavedArrivingDisk, held: Option<Arc<DiskArrival>>) {
        let Some(thin) = disk.thin.clone() else { return };
        let path = disk.path.clone();
        // Without its device it has never been ready for a VM.
        if disk.device.is_some() && self.is_recorded(&path) {
            return tracing::warn!(path = %path.display(), "volume stays: a VM may have it");
        }
        if let Err(error) = self.check_configured("remove", &thin.pool, &path) {
            return tracing::warn!(%error, "the volume for a disk stays");
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let lvm = self.lvm();
        // The record goes next: from here on the tag lets a later agent remove it.
        let marked = tokio::task::block_in_place(|| runtime.block_on(mark(&lvm, &thin)));
        if let Err(error) = marked {
            tracing::warn!(path = %path.display(), %error, "the volume for a disk has no tag yet");
        }
        runtime.spawn(async move {
            remove_with_patience(&lvm, &thin, &path).await;
            drop(held);
        });
    }

    /// Removes the volumes that are being made or removed for a transfer that is not recorded.
    pub(super) async fn sweep_volumes(&self) {
        for pool in &self.config().thin_pools {
            let lvm = self.lvm();
            let seen = match lvm.look(pool).await {
                Ok(seen) => seen,
                Err(error) => {
                    tracing::debug!(%pool, %error, "left volumes are not looked for");
                    continue;
                }
            };
            // A transfer is recorded before its volumes have the tag, so this comes after the look.
            let left = tokio::task::block_in_place(|| self.left_volumes(pool, seen.volumes));
            for (volume, tag) in &left {
                let removed = lvm.remove(pool, volume, tag).await;
                let path = pool.device(&volume.name);
                match removed {
                    Ok(()) => tracing::info!(path = %path.display(), "a left volume is removed"),
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "a left volume stays");
                    }
                }
            }
        }
    }

    /// Returns the volumes with a tag of a transfer that is not recorded, each with that tag.
    fn left_volumes(&self, pool: &ThinPool, volumes: Vec<ThinVolume>) -> Vec<(ThinVolume, String)> {
        let recorded = self.store.arrivals();
        let disks = || recorded.iter().flat_map(|(_, record)| &record.disks);
        let is_recorded =
            |tag: &str| disks().any(|disk| disk.thin.as_ref().is_some_and(|thin| thin.tag == tag));
        let tagged = volumes.into_iter().filter(|volume| volume.is_in_pool).filter_map(|volume| {
            let tag = volume.arriving_tag().filter(|tag| !is_recorded(tag))?.to_owned();
            Some((volume, tag))
        });
        let is_no_vms = |(volume, _): &(ThinVolume, String)| {
            let path = pool.device(&volume.name);
            let stays = self.is_recorded(&path);
            if stays {
                tracing::warn!(path = %path.display(), "volume stays: a VM may have it");
            }
            !stays
        };
        tagged.filter(is_no_vms).collect()
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
    let room = state.total_bytes.saturating_sub(used);
    let (needed, has) = (ByteSize::from_bytes(bytes), ByteSize::from_bytes(room));
    let why = format!("the disks need {needed}, and it has room for {has}");
    let remedy = "free space there, or give another place (--disks-to)";
    (bytes > room).then(|| (why, remedy.to_owned()))
}

/// Removes a volume. What has had it open may have it a little longer.
async fn remove_with_patience(lvm: &Lvm, thin: &SavedThinVolume, path: &Path) {
    let shown = path.display();
    for attempt in 1..=REMOVALS {
        match remove(lvm, thin).await {
            Ok(true) => return tracing::info!(path = %shown, "the volume for a disk is removed"),
            Ok(false) => return tracing::info!(path = %shown, "the volume for a disk is gone"),
            Err(LvmError::Refused(_)) if attempt < REMOVALS => {
                tokio::time::sleep(REMOVAL_INTERVAL).await;
            }
            Err(error) => {
                return tracing::warn!(path = %shown, %error, "the volume for a disk stays");
            }
        }
    }
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
