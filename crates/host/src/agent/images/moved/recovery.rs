//! Moves of disks that did not end as they should: the VM's record names its old image again, and
//! the next agent ends what the last one left unfinished.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_qemu::{RbdImage, ResolvedDisk, ResolvedSpec, VmName};
use rustix::fs::OFlags;

use crate::agent::Agent;
use crate::agent::images::Place;
use crate::store::{DiskMoveNote, StoreError};
use crate::vm::Vm;

/// Interval at which a record is saved again after a failure.
const SAVE_AGAIN: Duration = Duration::from_secs(1);

impl Agent {
    /// Gives a VM its old image again in the table and in its record; returns whether that is
    /// saved.
    pub(super) fn restore_old(
        &self,
        vm: &Vm,
        spec: &Arc<ResolvedSpec>,
        note: &DiskMoveNote,
    ) -> bool {
        vm.set_spec(spec.clone());
        self.set_spec(&vm.name, spec.clone());
        self.record_old(&vm.name, note)
    }

    /// Records the old image in place of the new one; returns whether no record names the new one.
    pub(in crate::agent::images) fn record_old(&self, name: &VmName, note: &DiskMoveNote) -> bool {
        let saved = tokio::task::block_in_place(|| -> Result<bool, StoreError> {
            let Some(record) = self.store.read(name)? else { return Ok(true) };
            let mut corrected = record.clone();
            let disks = &mut corrected.spec.disks;
            let Some(disk) = disks.iter_mut().find(|disk| **disk == note.new) else {
                return Ok(true);
            };
            *disk = note.old.clone();
            self.store.save_over(&record, &corrected)
        });
        saved.unwrap_or_else(|error| {
            tracing::error!(vm = name.as_str(), %error, "cannot record the old image again");
            false
        })
    }

    /// Records the old image as soon as the disk accepts it. The new image stays, unused.
    pub(super) async fn restore_old_later(self: Arc<Self>, name: VmName, note: DiskMoveNote) {
        let mut every = tokio::time::interval(SAVE_AGAIN);
        loop {
            every.tick().await;
            if self.record_old(&name, &note) {
                return tokio::task::block_in_place(|| self.store.forget_disk_move(&name));
            }
        }
    }

    /// Forgets a move that the last agent left unfinished and that has ended. `spec`: the VM as it
    /// is recorded now. Removes a new image that had its name already and was not recorded.
    pub(in crate::agent) fn end_disk_move(&self, spec: &ResolvedSpec) {
        let Ok(Some(note)) = self.store.disk_move(&spec.name) else {
            return self.store.forget_disk_move(&spec.name);
        };
        if !note.committed && spec.disks.contains(&note.old) && !self.is_recorded(&note.new.path) {
            if let Some(image) = RbdImage::of(&note.new.path)
                && let Ok(pooled) = self.pooled(image)
            {
                pooled.remove_later(Some(note.inode));
            }
            let place = self.place(&note.new.path, "remove");
            let is_it = |place: &Place| {
                let found = place.open(OFlags::RDONLY).and_then(|file| file.metadata());
                found.is_ok_and(|data| data.ino() == note.inode)
            };
            if let Some(place) = place.ok().filter(is_it) {
                tracing::info!(path = %place.path.display(), "unfinished image removed");
                place.remove();
            }
        }
        self.store.forget_disk_move(&spec.name);
    }

    /// Whether the record of a VM names this image, or a record cannot be read.
    pub(in crate::agent::images) fn is_recorded(&self, path: &Path) -> bool {
        let names_it = |spec: &ResolvedSpec| {
            let mut backing = spec.disks.iter().flat_map(|disk| disk.backing.iter().flatten());
            spec.images().any(|image| image == path) || backing.any(|file| file.path == path)
        };
        let Ok(names) = self.store.names() else { return true };
        names.into_iter().any(|name| match VmName::new(name).map(|name| self.store.read(&name)) {
            Ok(Ok(record)) => record.is_some_and(|record| names_it(&record.spec)),
            _ => true,
        })
    }

    /// Ends a move that the last agent left unfinished in a VM's QEMU, and corrects [`Vm::spec`] to
    /// what QEMU has. Returns whether there is nothing left to do.
    pub(in crate::agent) async fn settle_disk_move(&self, vm: &Vm) -> bool {
        let noted = tokio::task::block_in_place(|| self.store.disk_move(&vm.name));
        let DiskMoveNote { old, new, .. } = match noted {
            Ok(Some(note)) => note,
            Ok(None) => return true,
            Err(error) => {
                let why = "cannot end the interrupted move of a disk";
                tracing::error!(vm = vm.name.as_str(), %error, "{why}");
                return false;
            }
        };
        let mut spec = ResolvedSpec::clone(&vm.spec());
        let at = |disk: &ResolvedDisk| spec.disks.iter().position(|known| known == disk);
        let (index, committed) = match (at(&new), at(&old)) {
            (Some(index), _) => (index, true),
            (None, Some(index)) => (index, false),
            // The VM was changed since.
            (None, None) => return true,
        };
        let qmp = &vm.process.qmp;
        let settled = qmp.settle_disk_move((&spec.disks, index), (&old, &new), committed).await;
        match settled {
            Ok(uses_new) => {
                tracing::info!(vm = vm.name.as_str(), uses_new, "the move of a disk has ended");
                spec.disks[index] = if uses_new { new } else { old };
                vm.set_spec(Arc::new(spec));
                true
            }
            Err(error) => {
                let why = "cannot end the interrupted move of a disk";
                tracing::error!(vm = vm.name.as_str(), %error, "{why}");
                false
            }
        }
    }
}
