//! Images of a transfer in a pool of Ceph. A QEMU without a guest writes them, through its own
//! driver.
//!
//! An image is made under a name of random digits, which is recorded before: if this agent ends in
//! between, the next one removes it. Ceph's `rbd` tells its number, by which it is found again and
//! removed, and gives it its name once that is recorded. A host without `rbd` accepts no disks into
//! its pools.

use std::any::Any;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use godwit_api::{ApiError, ArrivingDisks, ArrivingImage, ErrorCode};
use godwit_qemu::{DiskFormat, RbdImage, Uuid};
use godwit_wire::MigrationId;

use crate::agent::Agent;
use crate::agent::images::in_work::WriteClaim;
use crate::agent::images::pools::Pooled;
use crate::agent::images::tool_failed;
use crate::disk_arrivals::{DiskArrival, OpenedContent, OpenedImage, now_unix_s};
use crate::hold::hold;
use crate::store::{SavedArrival, SavedArrivingDisk};

impl Agent {
    /// Returns the images that a transfer would make in a pool. Takes a QEMU, in the pool's turn.
    pub(super) async fn images_in_pool(
        &self,
        request: &ArrivingDisks,
        pool: &str,
    ) -> Result<Vec<ArrivingImage>, ApiError> {
        let images = self.free_for_arrival(request, pool).await?;
        let image = |(pooled, _): &(Pooled, WriteClaim)| ArrivingImage {
            path: pooled.path.clone(),
            backing: Vec::new(),
            cluster: Some(pooled.cluster()),
            present: Vec::new(),
            identity: None,
        };
        Ok(images.iter().map(image).collect())
    }

    /// Returns the identity of the cluster that has an image; `None` for a file, and if this host
    /// has no access to the pool any more.
    pub(crate) fn cluster_of_image(&self, path: &Path) -> Option<Uuid> {
        let image = RbdImage::of(path)?;
        self.pooled(image).ok().map(|pooled| pooled.cluster())
    }

    /// Returns a free name in a pool for each image, and the right to create it. Refuses disks for
    /// which the pool has no room.
    async fn free_for_arrival(
        &self,
        request: &ArrivingDisks,
        pool: &str,
    ) -> Result<Vec<(Pooled, WriteClaim)>, ApiError> {
        let mut images = Vec::new();
        for disk in &request.disks {
            let stem = disk.path.file_stem().unwrap_or(OsStr::new("disk")).to_string_lossy();
            let (pooled, claim) = self.free_in_pool(pool, &stem).await?;
            // Without `rbd`, nothing could remove the image.
            match pooled.number().await {
                Err(error) if error.is_missing() => {}
                Err(error) => return Err(pooled.tool_refused("create", &error)),
                Ok(_) => return Err(pooled.just_taken()),
            }
            images.push((pooled, claim));
        }
        if let Some((pooled, _)) = images.first() {
            let used = request.disks.iter().map(|disk| disk.used_bytes.min(disk.virtual_bytes));
            if let Some(why) = pooled.lacks_room(used.fold(0, u64::saturating_add)).await {
                let remedy = "free space there, or give another pool or directory (--disks-to)";
                return Err(pooled.refused("create", ErrorCode::HostFailed, &why, remedy));
            }
        }
        Ok(images)
    }

    /// Makes the images of a transfer in a pool. If that fails, nothing of them remains.
    pub(super) async fn make_arrival_in_pool(
        &self,
        id: MigrationId,
        request: &ArrivingDisks,
        pool: &str,
    ) -> Result<DiskArrival, ApiError> {
        let mut images = Vec::new();
        let mut held: Vec<Box<dyn Any + Send + Sync>> = Vec::new();
        for (pooled, claim) in self.free_for_arrival(request, pool).await? {
            claim.reserve_for(&request.vm);
            held.push(Box::new(claim));
            images.push(pooled);
        }
        let disks = images.iter().zip(&request.disks).map(|(pooled, disk)| SavedArrivingDisk {
            source: disk.path.clone(),
            path: pooled.path.clone(),
            format: DiskFormat::Raw,
            virtual_bytes: disk.virtual_bytes,
            inode: 0,
            born_unix_ns: 0,
            backing: Vec::new(),
            unnamed: Some(Uuid::new_v4()),
            device: None,
            thin: None,
        });
        let vm = (request.vm.clone(), request.uuid);
        let disks = disks.collect();
        let mut record = SavedArrival::new(id, vm, request.from.clone(), now_unix_s(), disks);
        tokio::task::block_in_place(|| self.store.save_arrival(&record))?;
        hold("disks-recorded");
        let mut begun = 0;
        if let Err(error) = self.make_in_its_pool(&mut record, &images, &mut begun).await {
            for (pooled, disk) in images.iter().zip(&record.disks).take(begun) {
                pooled.remove_made(disk.inode, disk.unnamed, ());
            }
            self.forget_record(id);
            return Err(error);
        }
        let present = self.map_of(id, &record, true);
        let paths = record.disks.iter().map(|disk| disk.path.clone()).collect();
        tracing::info!(vm = request.vm.as_str(), from = request.from, pool, "images made");
        Ok(DiskArrival::new(id, record, paths, present, held))
    }

    /// Creates the images of a record, records their numbers, and gives them their names. `begun`:
    /// how many may exist.
    async fn make_in_its_pool(
        &self,
        record: &mut SavedArrival,
        images: &[Pooled],
        begun: &mut usize,
    ) -> Result<(), ApiError> {
        for (disk, pooled) in record.disks.iter_mut().zip(images) {
            let Some(id) = disk.unnamed else { continue };
            *begun += 1;
            let unnamed = pooled.unnamed(id);
            self.make_in_pool(&unnamed, disk.virtual_bytes).await?;
            let number = unnamed.number().await;
            disk.inode = number.map_err(|error| unnamed.tool_refused("create", &error))?;
        }
        hold("disks-unnamed");
        // From here on, images with their names have recorded numbers.
        tokio::task::block_in_place(|| self.store.save_arrival(record))?;
        for (disk, pooled) in record.disks.iter().zip(images) {
            let Some(id) = disk.unnamed else { continue };
            pooled.name_it(id).await?;
        }
        Ok(())
    }

    /// Whether the images of a transfer that are in a pool are those that were made.
    ///
    /// # Errors
    /// [`ErrorCode::Busy`]: the cluster does not tell. The source may ask again.
    pub(super) async fn has_pool_images(&self, record: &SavedArrival) -> Result<bool, ApiError> {
        for disk in &record.disks {
            let Some(image) = RbdImage::of(&disk.path) else { continue };
            let pooled = self.pooled(image)?;
            match pooled.number().await {
                Ok(number) if number == disk.inode => {}
                Ok(_) => return Ok(false),
                Err(error) if error.is_missing() => return Ok(false),
                Err(error) => {
                    let why = error.to_string();
                    return Err(pooled.refused("write", ErrorCode::Busy, &why, error.remedy()));
                }
            }
        }
        Ok(true)
    }

    /// Opens an image in a pool to fill it.
    pub(super) async fn open_in_its_pool(
        &self,
        disk: &SavedArrivingDisk,
        image: RbdImage,
    ) -> Result<OpenedImage, ApiError> {
        let pooled = self.pooled(image)?;
        let (tool, layers) = (self.image_tool().await?, pooled.open(false)?);
        match tool.export(&layers).await {
            Ok(stream) => Ok(OpenedImage {
                path: disk.path.clone(),
                content: OpenedContent::Exported(stream, Box::new(tool)),
                cached: None,
                // The cluster itself refuses what it has no room for.
                check_growth: Box::new(|| Ok(())),
            }),
            Err(error) => {
                tool.end().await;
                Err(tool_failed("write", &disk.path, &error))
            }
        }
    }

    /// Removes an image that was made in a pool for a transfer, a little later and if it is still
    /// that image. `held`: what nobody else may use it during.
    pub(super) fn remove_from_pool(
        &self,
        disk: &SavedArrivingDisk,
        image: RbdImage,
        held: Option<&Arc<DiskArrival>>,
    ) {
        // Without a number it has not got the name that a VM may use.
        if disk.inode != 0 && self.is_recorded(&disk.path) {
            return tracing::warn!(image = %image, "image stays: a VM may have it");
        }
        match self.pooled(image) {
            Ok(pooled) => pooled.remove_made(disk.inode, disk.unnamed, held.cloned()),
            Err(error) => {
                let path = disk.path.display();
                tracing::warn!(%path, %error, "the image for a disk stays");
            }
        }
    }
}
