//! Backing files of disks that arrive: this host must have the same, byte by byte.

use std::path::Path;

use godwit_api::{ApiError, ArrivingBase, ArrivingDisk, ArrivingDisks, ErrorCode};
use godwit_qemu::{Disk, OpenLayer, ResolvedDisk};

use crate::agent::Agent;
use crate::agent::images::NO_VM;
use crate::agent::images::in_work::is_being_made;
use crate::disk_arrivals::DiskArrival;
use crate::file_digest::file_digest;

impl Agent {
    /// Finds the backing files of each disk, under their paths at the source or, with the same
    /// name, in the directory for the image. Blocks while it reads them.
    ///
    /// # Errors
    /// One is missing, differs, or is written.
    pub(super) fn find_bases(
        &self,
        request: &ArrivingDisks,
    ) -> Result<Vec<Vec<OpenLayer>>, ApiError> {
        let find = |disk: &ArrivingDisk| self.find_base(request.to.as_deref(), disk);
        request.disks.iter().map(find).collect()
    }

    /// Compares the backing files of a transfer once more: it may have gone on for hours.
    ///
    /// # Errors
    /// Why one is not what its source has.
    pub(super) fn compare_bases_again(&self, arrival: &DiskArrival) -> Result<(), String> {
        let bases = arrival.bases.lock();
        for (disk, base) in arrival.record.disks.iter().zip(&*bases) {
            if let Some((nearest, here)) = base.first().zip(disk.backing.first()) {
                self.base_at(&here.path, nearest, base)?;
            }
        }
        Ok(())
    }

    fn find_base(
        &self,
        to: Option<&Path>,
        disk: &ArrivingDisk,
    ) -> Result<Vec<OpenLayer>, ApiError> {
        let Some(nearest) = disk.base.first() else { return Ok(Vec::new()) };
        let dir = to.or_else(|| disk.path.parent());
        let beside = dir.zip(nearest.path.file_name()).map(|(dir, name)| dir.join(name));
        let beside = beside.filter(|path| *path != nearest.path);
        let mut reasons = Vec::new();
        for path in std::iter::once(nearest.path.clone()).chain(beside) {
            match self.base_at(&path, nearest, &disk.base) {
                Ok(layers) => return Ok(layers),
                Err(why) => reasons.push(why),
            }
        }
        let message = format!(
            "cannot accept disk {}: host {} does not have its backing file: {}",
            disk.path.display(),
            self.config().name,
            reasons.join("; ")
        );
        let remedy = "copy the backing file to that host, under the same path or into the \
                      directory for the image, or let its content travel, too (--flatten-disks)";
        Err(ApiError::new(ErrorCode::Preflight, message, remedy))
    }

    /// Opens a backing file and those below it, if they are what the source has.
    fn base_at(
        &self,
        path: &Path,
        nearest: &ArrivingBase,
        base: &[ArrivingBase],
    ) -> Result<Vec<OpenLayer>, String> {
        let disk = ResolvedDisk::from(Disk::new(path, nearest.format).readonly());
        let layers = self.open_image(&disk).map_err(|error| error.message)?;
        if layers.len() != base.len() {
            let (here, there) = (layers.len() - 1, base.len() - 1);
            let path = path.display();
            return Err(format!("{path} has {here} backing files, and {there} at the source"));
        }
        for (layer, wanted) in layers.iter().zip(base) {
            self.check_base(layer, wanted)?;
        }
        Ok(layers)
    }

    fn check_base(&self, layer: &OpenLayer, wanted: &ArrivingBase) -> Result<(), String> {
        let failed = |why: &str| Err(format!("{}: {why}", layer.file.real.display()));
        if layer.format != wanted.format {
            return failed(&format!("its format is {}", layer.format.name()));
        }
        let real = &layer.file.real;
        if let Some((vm, _)) = self.users_of_image(real).into_iter().find(|(_, writes)| *writes) {
            return failed(&format!("VM \"{vm}\" writes it"));
        }
        if is_being_made(real, NO_VM) {
            return failed("it is being written");
        }
        let opened = layer.file.open_to_read();
        let (file, _) = opened.map_err(|error| format!("{}: {error}", real.display()))?;
        // Most files that differ are of another length, which takes no reading.
        let length = file.metadata().map_or(0, |data| data.len());
        if length != wanted.file_bytes {
            let there = wanted.file_bytes;
            return failed(&format!("it has {length} bytes, and {there} at the source"));
        }
        match file_digest(&file) {
            Ok((_, digest)) if digest == wanted.blake3 => Ok(()),
            Ok(_) => failed("its content differs from that at the source"),
            Err(error) => failed(&error.to_string()),
        }
    }
}
