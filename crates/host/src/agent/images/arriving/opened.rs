//! Opens the images of a transfer to fill them.

use std::fs::File;
use std::time::Duration;

use godwit_api::{ApiError, ErrorCode};
use godwit_qemu::{DiskFormat, ImageToolError, RbdImage};
use rustix::fs::OFlags;

use crate::agent::Agent;
use crate::agent::images::arriving::as_disk;
use crate::agent::images::arriving::identity::is_ours;
use crate::agent::images::{Place, tool_failed};
use crate::disk_arrivals::{DiskArrival, OpenedContent, OpenedImage};
use crate::store::SavedArrivingDisk;

/// Attempts to open an image, and the time between: the QEMU of an agent that was killed may have
/// it open a little longer.
const OPEN_ATTEMPTS: u32 = 20;
const OPEN_INTERVAL: Duration = Duration::from_millis(100);

impl Agent {
    /// Opens the images of a transfer, in the order of its disks. Nobody else writes them until
    /// they are dropped.
    ///
    /// # Errors
    /// One is gone, or another program writes it.
    pub(crate) async fn open_arrival(
        &self,
        arrival: &DiskArrival,
    ) -> Result<Vec<OpenedImage>, ApiError> {
        let mut opened = Vec::new();
        for disk in &arrival.record.disks {
            opened.push(self.open_arriving(disk).await?);
        }
        Ok(opened)
    }

    async fn open_arriving(&self, disk: &SavedArrivingDisk) -> Result<OpenedImage, ApiError> {
        if let Some(image) = RbdImage::of(&disk.path) {
            return self.open_in_its_pool(disk, image).await;
        }
        if let Some(device) = &disk.device {
            return tokio::task::block_in_place(|| self.open_device(disk, device));
        }
        let place = self.place(&disk.path, "write")?;
        if !is_ours(&place, disk).map_err(|error| place.failed("write", &error))? {
            let (why, remedy) = ("it is another file than was made", "migrate again");
            return Err(place.refused("write", ErrorCode::WrongState, why, remedy));
        }
        let (content, cached) = match disk.format {
            DiskFormat::Raw => (OpenedContent::Raw(open_raw(&place)?), None),
            DiskFormat::Qcow2 => {
                (self.export(disk, &place).await?, place.open(OFlags::RDONLY).ok())
            }
        };
        let check_growth = Box::new(move || place.check_growth(&place.dir));
        Ok(OpenedImage { path: disk.path.clone(), content, cached, check_growth })
    }

    async fn export(
        &self,
        disk: &SavedArrivingDisk,
        place: &Place,
    ) -> Result<OpenedContent, ApiError> {
        let mut attempts = 1;
        loop {
            let tool = self.image_tool().await?;
            let layers = self.open_image(&as_disk(disk, &place.real))?;
            match tool.export(&layers).await {
                Ok(stream) => return Ok(OpenedContent::Exported(stream, Box::new(tool))),
                Err(error) if attempts < OPEN_ATTEMPTS && is_locked(&error) => {
                    tracing::debug!(%error, "cannot open an image yet");
                }
                // The source asks again within its limit for cuts.
                Err(error) if is_locked(&error) => {
                    let remedy = "end the program that has it open, and migrate again";
                    return Err(place.refused(
                        "write",
                        ErrorCode::Busy,
                        &error.to_string(),
                        remedy,
                    ));
                }
                Err(error) => return Err(tool_failed("write", &disk.path, &error)),
            }
            attempts += 1;
            tokio::time::sleep(OPEN_INTERVAL).await;
        }
    }
}

/// Whether another QEMU has the image open.
fn is_locked(error: &ImageToolError) -> bool {
    // QEMU: 'Failed to get "write" lock', 'Failed to lock byte 100'.
    let why = error.to_string();
    why.contains("Failed to get") && why.contains("lock") || why.contains("Failed to lock byte")
}

fn open_raw(place: &Place) -> Result<File, ApiError> {
    let file = place.open(OFlags::RDWR).map_err(|error| place.failed("write", &error))?;
    // A file system without locks has none to respect.
    if godwit_ram::lock_against_writers(&file).is_ok_and(|is_locked| !is_locked) {
        let (why, remedy) = ("another program has it open for writing", "end that program first");
        return Err(place.refused("write", ErrorCode::Busy, why, remedy));
    }
    Ok(file)
}
