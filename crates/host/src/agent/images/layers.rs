//! Layers of snapshots: new ones on frozen images, and their end.

use std::fs::File;
use std::io;
use std::path::Path;

use godwit_api::ApiError;
use godwit_qemu::{DiskFormat, OpenLayer, ResolvedDisk, ResolvedSpec, Uuid, VmName, is_rbd};
use rustix::fs::{AtFlags, OFlags};

use super::in_work::{self, Merging};
use super::{COPIES, NewImages, Place, not_a_file, tool_failed};
use crate::agent::Agent;

impl Agent {
    /// Refuses an image on which no layer can be created.
    pub(in crate::agent) fn check_layer_place(&self, path: &Path) -> Result<(), ApiError> {
        if is_rbd(path) {
            return Err(not_a_file(path));
        }
        let place = self.place(path, "snapshot")?;
        place.open(OFlags::PATH).map(drop).map_err(|error| place.failed("snapshot", &error))
    }

    /// Creates a layer on each image that `frozen` writes; returns that specification with the
    /// layers, for the VM `current`.
    pub(in crate::agent) fn layered(
        &self,
        current: &ResolvedSpec,
        frozen: &ResolvedSpec,
        made: &mut NewImages,
    ) -> Result<ResolvedSpec, ApiError> {
        let mut spec = ResolvedSpec { name: current.name.clone(), ..frozen.clone() };
        let files = self.open_to_read(frozen)?;
        for (disk, layers) in spec.disks.iter_mut().zip(&files.disks) {
            if disk.readonly {
                continue;
            }
            let id = Uuid::new_v4().simple().to_string();
            let file = format!("{}.{}.qcow2", current.name, &id[..12]);
            let place = self.place(&disk.path.with_file_name(file), "create")?;
            let bytes = self.bytes_of(layers, &disk.path)?;
            let staged = place.stage().map_err(|error| place.failed("create", &error))?;
            staged.write_layer(bytes, layers)?;
            staged.name_it()?;
            disk.backing = Some(layers.iter().map(OpenLayer::as_backing).collect());
            (disk.path, disk.format) = (place.path.clone(), DiskFormat::Qcow2);
            made.0.push(place);
        }
        Ok(spec)
    }

    /// Merges a disk's layer into the image below it. Returns the disk with that image, and what
    /// keeps both from becoming a base until the VM has that disk; `None` if another VM, another
    /// layer or a new image needs it as it is, or if its clusters are larger than those of
    /// the layer: QEMU copies by the target's clusters, and would write zeros where the layer has
    /// only a part of one (7.2).
    pub(in crate::agent) async fn merge_layer(
        &self,
        name: &VmName,
        disk: &ResolvedDisk,
    ) -> Result<Option<(ResolvedDisk, Merging)>, ApiError> {
        let Some((below, rest)) = disk.backing.as_deref().and_then(<[_]>::split_first) else {
            return Ok(None);
        };
        // Before the checks: what they say holds only as long as nothing is waited for.
        let _turn = COPIES.acquire().await;
        let tool = self.image_tool().await?;
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (layer, target) = (real(&disk.path), real(&below.path));
        let Some(merging) = in_work::merge(vec![layer.clone(), target]) else { return Ok(None) };
        let found = self.users_of_any_file(&below.path);
        let is_used = found.unknown.is_some() || found.users.iter().any(|(user, _)| user != name);
        if is_used || self.layers_on(&below.path)?.iter().any(|above| *above != layer) {
            return Ok(None);
        }
        let is_qcow2 = below.format == DiskFormat::Qcow2;
        let merged = ResolvedDisk {
            path: below.path.clone(),
            format: below.format,
            backing: is_qcow2.then(|| rest.to_vec()),
            ..disk.clone()
        };
        let top = self.open_image(&ResolvedDisk { readonly: true, ..disk.clone() })?;
        let target = self.open_image(&merged)?;
        if is_qcow2 && has_large_clusters(&target).unwrap_or(true) {
            return Ok(None);
        }
        let bytes = self.bytes_of(&top, &disk.path)?;
        let done = tool.merge(&top, &target, bytes).await;
        done.map_err(|error| tool_failed("merge", &disk.path, &error))?;
        Ok(Some((merged, merging)))
    }

    /// Removes a layer, unless a VM uses it or an image is a layer on it. Returns whether it is no
    /// longer there.
    ///
    /// # Errors
    /// Another program writes it, or the file system's error.
    pub(in crate::agent) fn remove_layer(&self, path: &Path) -> Result<bool, ApiError> {
        Ok(self.remove_if_unused(path, |_, _| Some(()))?.is_some())
    }

    /// Removes an image as [`Agent::remove_layer`] does, if `may_go` agrees at last: with its
    /// place, and with the open file if that keeps QEMUs from writing it. Returns what that has
    /// returned if the image is no longer there.
    ///
    /// # Errors
    /// Those of that function.
    pub(super) fn remove_if_unused<G>(
        &self,
        path: &Path,
        may_go: impl FnOnce(&Place, Option<&File>) -> Option<G>,
    ) -> Result<Option<G>, ApiError> {
        let place = self.place(path, "delete")?;
        let Some(_claim) = in_work::claim(&place.real) else { return Ok(None) };
        let is_used =
            self.user_before_removal(&place.real)?.is_some() || in_work::is_read(&place.real);
        if is_used || !self.layers_on(path)?.is_empty() {
            return Ok(None);
        }
        let unwritten = place.refuse_writers()?;
        let Some(agreed) = may_go(&place, unwritten.as_ref()) else { return Ok(None) };
        match rustix::fs::unlinkat(&place.dir, &place.name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(Some(agreed)),
            Err(error) => Err(place.failed("delete", &io::Error::from(error))),
        }
    }
}

/// Whether a qcow2 image has clusters of more than the 64 KiB of layers. Their size is in its
/// header at offset 20 as a power of two (QEMU's docs/interop/qcow2.txt).
fn has_large_clusters(layers: &[OpenLayer]) -> io::Result<bool> {
    let top = layers.first().ok_or(io::ErrorKind::NotFound)?;
    let mut bits = [0; 4];
    let read = rustix::io::pread(&top.file, &mut bits[..], 20)?;
    Ok(read < bits.len() || u32::from_be_bytes(bits) > 16)
}
