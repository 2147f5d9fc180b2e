//! Disks that leave this host with their VM: what their images are, and what a transfer leaves in
//! QEMU and on the disk. The transfer itself is in `migration/disks`.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use godwit_api::{ApiError, ArrivingBase, ErrorCode};
use godwit_qemu::{OpenLayer, QmpError, ResolvedSpec, VmName};

use super::moved::internal_snapshots;
use super::{allocated_bytes, walk_permit};
use crate::agent::Agent;
use crate::block_devices::{DeviceIdentity, is_device_path};
use crate::file_digest::file_digest;
use crate::store::{BITMAP_PREFIX, DiskTransferNote};
use crate::vm::Vm;

/// A disk that can travel with its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DepartingDisk {
    /// Its position in the VM's definition.
    pub(crate) index: usize,
    /// Bytes that its image has on this host's disk, with those of backing files that travel.
    pub(crate) used_bytes: u64,
    /// Backing files that stay behind, the nearest first.
    pub(crate) base: Vec<ArrivingBase>,
    /// Name of its block device, which no other device has; empty if the kernel knows none. `None`:
    /// its image is a file.
    pub(crate) device: Option<String>,
}

impl Agent {
    /// Returns the disks that travel with a running VM: those that it writes. With `flatten`, the
    /// content of their backing files travels, too. Blocks while it reads backing files.
    ///
    /// # Errors
    /// An image cannot be read or cannot travel.
    pub(crate) fn departing_disks(
        &self,
        spec: &ResolvedSpec,
        flatten: bool,
    ) -> Result<Vec<DepartingDisk>, ApiError> {
        let refuse = |path: &Path, code, why: &str, remedy: &str| {
            let (path, vm) = (path.display(), &spec.name);
            let message = format!("cannot move disk {path} together with VM \"{vm}\": {why}");
            ApiError::new(code, message, remedy)
        };
        if self.store.disk_move(&spec.name)?.is_some() {
            let message = format!(
                "cannot move VM \"{}\" together with its disks: a disk is moved",
                spec.name
            );
            let remedy = "wait for its end: see `godwit job list`";
            return Err(ApiError::new(ErrorCode::Busy, message, remedy));
        }
        let files = self.open_to_read(spec)?;
        let (mut all, mut images) = (Vec::new(), BTreeSet::new());
        for (index, (disk, layers)) in spec.disks.iter().zip(&files.disks).enumerate() {
            // The destination reaches an image in a pool of Ceph where it is.
            let travels = |top: &&OpenLayer| !disk.readonly && top.rbd.is_none();
            let Some(top) = layers.first().filter(travels) else { continue };
            let failed = |error: &std::io::Error| {
                let remedy = "check the file system of the image";
                refuse(&disk.path, ErrorCode::HostFailed, &error.to_string(), remedy)
            };
            let (file, _) = top.file.open_to_read().map_err(|error| failed(&error))?;
            let data = file.metadata().map_err(|error| failed(&error))?;
            if !images.insert((data.dev(), data.ino())) {
                let why = "the VM has its image twice";
                return Err(refuse(
                    &disk.path,
                    ErrorCode::WrongState,
                    why,
                    "detach one of the two disks",
                ));
            }
            let internal = internal_snapshots(top);
            if internal > 0 {
                let why =
                    format!("its image has {internal} internal snapshots, which do not travel");
                let remedy = "delete them with `qemu-img snapshot -d` while the VM is stopped";
                return Err(refuse(&disk.path, ErrorCode::WrongState, &why, remedy));
            }
            let travelling = if flatten { &layers[..] } else { &layers[..1] };
            let used = travelling.iter().map(layer_bytes).sum::<std::io::Result<u64>>();
            let used_bytes = used.map_err(|error| failed(&error))?;
            let staying = layers[travelling.len()..].iter().map(base_of);
            let base = staying.collect::<std::io::Result<_>>().map_err(|error| failed(&error))?;
            let device = top.is_device().then(|| DeviceIdentity::of(&data));
            let device = device.map(|found| found.map_or_else(|_| String::new(), |is| is.name));
            all.push(DepartingDisk { index, used_bytes, base, device });
        }
        Ok(all)
    }

    /// Returns the transfer of a VM's disks that was noted last and has not ended. One that cannot
    /// be read is none: it cannot be continued.
    pub(crate) fn disk_transfer(&self, name: &VmName) -> Option<DiskTransferNote> {
        let noted = tokio::task::block_in_place(|| self.store.disk_transfer(name));
        noted.unwrap_or_else(|error| {
            tracing::warn!(vm = name.as_str(), %error, "an earlier transfer is not continued");
            None
        })
    }

    /// Notes a transfer of a VM's disks, durably.
    pub(crate) fn note_disk_transfer(
        &self,
        name: &VmName,
        note: &DiskTransferNote,
    ) -> Result<(), ApiError> {
        Ok(tokio::task::block_in_place(|| self.store.save_disk_transfer(name, note))?)
    }

    /// Removes the note of a transfer of which nothing is left in QEMU.
    pub(crate) fn forget_disk_transfer(&self, name: &VmName) {
        tokio::task::block_in_place(|| self.store.forget_disk_transfer(name));
    }

    /// Deletes the image of a disk that has left with its VM. One that is needed here stays, and so
    /// does a block device: its name is not ours to remove, should `vm_dirs` contain it.
    pub(crate) async fn delete_departed(&self, path: &Path) {
        if is_device_path(path) {
            return;
        }
        let _turn = walk_permit().await;
        let shown = path.display();
        match tokio::task::block_in_place(|| self.remove_layer(path)) {
            Ok(true) => tracing::info!(path = %shown, "image of a disk that has left deleted"),
            Ok(false) => {
                tracing::warn!(path = %shown, "the image stays: a VM or another image uses it");
            }
            Err(error) => tracing::warn!(path = %shown, %error, "the image stays"),
        }
    }

    /// Removes from a VM's QEMU what a transfer of its disks has there: exports, mirrors, limits
    /// of the guest's writes and, unless they are kept for its continuation, bitmaps. Returns
    /// whether nothing of that is left.
    pub(crate) async fn clear_disk_transfer(
        &self,
        vm: &Vm,
        note: &DiskTransferNote,
        keeps_bitmaps: bool,
    ) -> bool {
        let qmp = &vm.process.qmp;
        let mut cleared = true;
        let is_gone = |what: &str, done: Result<(), QmpError>| match done {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(vm = vm.name.as_str(), what, %error, "not removed from QEMU");
                false
            }
        };
        let spec = vm.spec();
        for (number, noted) in note.disks.iter().enumerate() {
            if note.limited
                && let Some(index) = noted.index_in(&spec.disks)
                && let Err(error) = qmp.limit_writes(&spec.disks, index, None).await
            {
                let vm = vm.name.as_str();
                tracing::error!(vm, %error, "cannot lift the limit of a disk's writes");
                cleared = false;
            }
            if note.mirrored {
                let mirror = DiskTransferNote::mirror(number);
                cleared &= is_gone(&mirror, qmp.remove_mirror(&mirror).await);
            }
            for export in [DiskTransferNote::dirty_export(number), DiskTransferNote::export(number)]
            {
                cleared &= is_gone(&export, qmp.remove_export(&export).await);
            }
            if keeps_bitmaps {
                continue;
            }
            let bitmaps = qmp.bitmaps(&noted.node).await;
            for bitmap in bitmaps.as_deref().unwrap_or_default() {
                if bitmap.starts_with(BITMAP_PREFIX) {
                    cleared &= is_gone(bitmap, qmp.remove_bitmap(&noted.node, bitmap).await);
                }
            }
            cleared &= is_gone("bitmaps", bitmaps.map(drop));
        }
        cleared
    }

    /// Ends what the last agent left of moves of disks in a VM's QEMU, as
    /// [`Agent::settle_disk_move`] does, and of transfers of disks to another host.
    pub(in crate::agent) async fn settle_disks(&self, vm: &Vm) -> bool {
        self.settle_disk_transfer(vm).await;
        self.settle_disk_move(vm).await
    }

    /// Ends what the last agent left of a transfer of disks in a VM's QEMU. The bitmaps stay, so
    /// that the transfer can be continued, unless its hand-over had begun.
    async fn settle_disk_transfer(&self, vm: &Vm) {
        let note = match tokio::task::block_in_place(|| self.store.disk_transfer(&vm.name)) {
            Ok(Some(note)) => note,
            Ok(None) => return,
            Err(error) => {
                return tracing::error!(vm = vm.name.as_str(), %error, "a transfer is not ended");
            }
        };
        let keeps_bitmaps = !note.handed_over;
        if !self.clear_disk_transfer(vm, &note, keeps_bitmaps).await {
            return;
        }
        let ended = DiskTransferNote { limited: false, ..note.clone() };
        tokio::task::block_in_place(|| {
            if !keeps_bitmaps {
                self.store.forget_disk_transfer(&vm.name);
            } else if note != ended
                && let Err(error) = self.store.save_disk_transfer(&vm.name, &ended)
            {
                let vm = vm.name.as_str();
                tracing::warn!(vm, %error, "the next agent lifts the limits of writes again");
            }
        });
    }
}

/// Returns the bytes of its file system that an image takes; the length of a block device.
fn layer_bytes(layer: &OpenLayer) -> std::io::Result<u64> {
    let (file, _) = layer.file.open_to_read()?;
    match file.metadata()?.is_file() {
        true => allocated_bytes(&file),
        false => Ok(rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?),
    }
}

fn base_of(layer: &OpenLayer) -> std::io::Result<ArrivingBase> {
    let (file, path) = layer.file.open_to_read()?;
    let (file_bytes, blake3) = file_digest(&file)?;
    Ok(ArrivingBase { path, format: layer.format, file_bytes, blake3 })
}
