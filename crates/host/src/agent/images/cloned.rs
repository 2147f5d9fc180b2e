//! The images of a clone: layers on those of a template, or copies.

use godwit_api::ApiError;
use godwit_qemu::{DiskFormat, OpenFiles, ResolvedDisk, ResolvedSpec, VmName};

use super::{NewImages, Place};
use crate::agent::Agent;
use crate::agent::vm_files::FileRule;

impl Agent {
    /// Creates the images of a clone beside those of its source, and returns the clone's disks.
    /// Disks that the guest only reads stay as they are. `linked`: as layers, not as copies.
    pub(in crate::agent) async fn clone_images(
        &self,
        source: &ResolvedSpec,
        name: &VmName,
        linked: bool,
        made: &mut NewImages,
    ) -> Result<Vec<ResolvedDisk>, ApiError> {
        let files = self.open_to_read(source)?;
        let mut disks = source.disks.clone();
        let mut number = 0;
        for (disk, layers) in disks.iter_mut().zip(&files.disks) {
            if disk.readonly {
                continue;
            }
            let format = if linked { DiskFormat::Qcow2 } else { disk.format };
            let place = self.place_beside(disk, name, number, format)?;
            number += 1;
            let claim = place.claim()?;
            if place.exists() {
                return Err(place.taken());
            }
            let bytes = self.bytes_of(layers, &disk.path)?;
            let staged = place.stage().map_err(|error| place.failed("create", &error))?;
            match linked {
                true => staged.write_layer(bytes, layers)?,
                false => self.copy_into(&staged, format, layers, (bytes, bytes)).await?,
            }
            staged.name_it()?;
            // The chain is recorded from the new image's header.
            *disk =
                ResolvedDisk { path: place.path.clone(), format, backing: None, ..disk.clone() };
            drop(claim);
            made.0.push(place);
        }
        Ok(disks)
    }

    /// Opens the images of a VM without a process, to read them.
    pub(super) fn open_to_read(&self, source: &ResolvedSpec) -> Result<OpenFiles, ApiError> {
        let mut read = source.clone();
        read.disks.iter_mut().for_each(|disk| disk.readonly = true);
        self.open_files_of_running(&read, FileRule::Operator)
    }

    /// Returns the place of a clone's image: the directory of its source's, or the first of
    /// `vm_dirs` if that one is not for VMs.
    fn place_beside(
        &self,
        disk: &ResolvedDisk,
        name: &VmName,
        number: usize,
        format: DiskFormat,
    ) -> Result<Place, ApiError> {
        let number = if number == 0 { String::new() } else { format!("-{number}") };
        let file = format!("{name}{number}.{}", format.name());
        let beside = self.place(&disk.path.with_file_name(&file), "create");
        let place = match (beside, self.config().vm_dirs.iter().find(|dir| dir.is_dir())) {
            (Err(_), Some(dir)) => self.place(&dir.join(&file), "create"),
            (beside, _) => beside,
        }?;
        place.check_name()?;
        Ok(place)
    }
}
