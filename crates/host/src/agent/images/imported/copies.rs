//! Copies of a definition's disks: qcow2 images that get their names when all are complete.

use godwit_api::{ApiError, ErrorCode, ImportDisk};
use godwit_qemu::{DiskFormat, ImageToolError, VmSpec};

use super::opened::Opened;
use crate::agent::Agent;
use crate::agent::images::staged::{Staged, name_all, named_images};
use crate::agent::images::{COPIES, NewImages, Place, allocated_bytes, in_work, tool_failed};
use crate::jobs::Job;

impl Agent {
    /// Copies disks into images of the VM, which get their names when all are complete.
    pub(super) async fn copy_disks(
        &self,
        job: &Job,
        spec: &mut VmSpec,
        disks: &[(ImportDisk, Opened)],
        datastore: Option<&str>,
    ) -> Result<NewImages, ApiError> {
        let bytes = disks.iter().fold(0_u64, |sum, (disk, _)| sum.saturating_add(disk.bytes));
        let dir = tokio::task::block_in_place(|| self.image_dir(datastore, bytes))?.dir;
        let mut places = Vec::new();
        let mut claims = Vec::new();
        for index in 0..disks.len() {
            let place = self.image_place(&dir, &spec.name, index, DiskFormat::Qcow2)?;
            claims.push(place.claim()?);
            if place.exists() {
                return Err(place.taken());
            }
            places.push(place);
        }
        let mut staged = Vec::new();
        let mut before = 0;
        for (place, (disk, opened)) in places.iter().zip(disks) {
            let progress = |bytes: u64| job.set(|status| status.done_bytes = before + bytes);
            staged.push(self.copy_one(place, disk, opened, &progress).await?);
            before += disk.bytes;
            job.set(|status| status.done_bytes = before);
        }
        let named = name_all(staged);
        let images = named_images(places, named)?;
        for (disk, path) in spec.disks.iter_mut().zip(images.paths()) {
            (disk.path, disk.format) = (path, DiskFormat::Qcow2);
        }
        Ok(images)
    }

    /// Copies a disk into a file without a name.
    async fn copy_one<'a>(
        &self,
        place: &'a Place,
        disk: &ImportDisk,
        opened: &Opened,
        progress: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Staged<'a>, ApiError> {
        let _turn = COPIES.acquire().await;
        let staged = place.stage().map_err(|error| place.failed("create", &error))?;
        staged.write(DiskFormat::Qcow2, disk.bytes, None)?;
        let _reading = match opened {
            Opened::Empty => return Ok(staged),
            Opened::Layers(layers) => {
                staged.check_room(layers, disk.bytes)?;
                Some(in_work::read(layers).map_err(|path| {
                    let why = in_work::being_merged(&path);
                    let remedy = "wait until that ends, then try again";
                    place.refused("create", ErrorCode::Busy, &why, remedy)
                })?)
            }
            Opened::Foreign { file, window, .. } => {
                // Of a compressed image the copy may need more: that shows while it is made.
                let taken =
                    allocated_bytes(file).map_err(|error| place.failed("create", &error))?;
                let most = window.map_or(u64::MAX, |(_, length)| length);
                staged.check_room_for(taken.min(most).min(disk.bytes))?;
                None
            }
        };
        let tool = self.image_tool().await?;
        let copied = async {
            let Some(source) = opened.open_in(&tool).await? else { return Ok(()) };
            let target = staged.open_layers(DiskFormat::Qcow2);
            let target = target.map_err(|error| ImageToolError::Copy(error.message))?;
            tool.copy_source(&source, &target, progress).await
        };
        tokio::select! {
            copied = copied => {
                copied.map_err(|error| tool_failed("create", &place.path, &error))?;
            }
            full = staged.until_full() => return Err(full),
        }
        Ok(staged)
    }
}
