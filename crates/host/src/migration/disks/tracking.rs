//! How the source knows what the guest writes while its disks travel: by bitmaps and exports, or by
//! mirrors where exports are unsafe.

use std::sync::Arc;
use std::time::Duration;

use godwit_migration::Failure;
use godwit_migration::disks::{DiskRange, DiskReader};
use godwit_qemu::PlugError;
use godwit_types::DiskMeans;
use tokio::runtime::Handle;

use super::exports::{Exports, FoundBitmaps};
use super::mirror::{Behind, Mirrors};
use super::wires::Wires;
use crate::store::DiskTransferNote;
use crate::vm::Vm;

/// Bytes of a sample.
const SAMPLE_BYTES: u64 = 4096;

/// Access to the disks of a transfer.
pub(super) struct Tracking {
    vm: Arc<Vm>,
    note: DiskTransferNote,
    runtime: Handle,
    by: By,
}

enum By {
    Bitmaps(Box<Exports>),
    Mirrors(Mirrors),
}

impl Tracking {
    /// Has QEMU record what the guest writes, by the means of the note. `found`: bitmaps of an
    /// earlier transfer that this one continues.
    ///
    /// # Errors
    /// QEMU refuses. What it has by then is removed by `Agent::clear_disk_transfer`.
    pub(super) async fn open(
        host: &str,
        vm: &Arc<Vm>,
        note: &DiskTransferNote,
        wires: &Arc<Wires>,
        found: Option<FoundBitmaps>,
    ) -> Result<Tracking, Failure> {
        let by = match note.mirrored {
            true => By::Mirrors(Mirrors::open(host, vm, note, wires).await?),
            false => {
                let exports = Exports::open(host, vm, note, wires, found).await?;
                By::Bitmaps(Box::new(exports))
            }
        };
        let runtime = Handle::current();
        Ok(Tracking { vm: Arc::clone(vm), note: note.clone(), runtime, by })
    }

    /// Returns the means.
    pub(super) fn means(&self) -> DiskMeans {
        match &self.by {
            By::Bitmaps(_) => DiskMeans::Bitmaps,
            By::Mirrors(_) => DiskMeans::Mirror,
        }
    }

    /// Returns a reader of all disks, for one stream. That of a mirror has only what a round sends.
    pub(super) fn reader(&self) -> Box<dyn DiskReader> {
        match &self.by {
            By::Bitmaps(exports) => exports.reader(),
            By::Mirrors(mirrors) => mirrors.reader(),
        }
    }

    /// Lists what the images have that travels, as far as it can be read. A mirror sends it by
    /// itself, and once: what was confirmed is on the destination's disk.
    ///
    /// # Errors
    /// QEMU cannot be asked, or has another disk.
    pub(super) fn allocated(&self) -> Result<Vec<DiskRange>, Failure> {
        match &self.by {
            By::Bitmaps(exports) => exports.allocated(),
            By::Mirrors(_) => Ok(Vec::new()),
        }
    }

    /// Waits, with mirrors, until there is a good deal to send, or for this long. With bitmaps
    /// there always is.
    pub(super) fn wait(&self, limit: Duration) {
        match &self.by {
            By::Bitmaps(_) => {}
            By::Mirrors(mirrors) => mirrors.wait(limit),
        }
    }

    /// Begins a round, and lists what the guest has written since the last one. `is_urgent`: the
    /// guest is about to be stopped, or is.
    ///
    /// # Errors
    /// QEMU refuses or does not respond.
    pub(super) fn exchange(&mut self, is_urgent: bool) -> Result<Vec<DiskRange>, Failure> {
        match &mut self.by {
            By::Bitmaps(exports) => exports.exchange(is_urgent),
            By::Mirrors(mirrors) => mirrors.exchange(),
        }
    }

    /// Returns what QEMU has not handed over yet, beside what [`Tracking::exchange`] lists.
    ///
    /// # Errors
    /// QEMU does not respond, or has ended a mirror.
    pub(super) fn behind(&self) -> Result<Behind, Failure> {
        match &self.by {
            By::Bitmaps(_) => Ok(Behind::default()),
            By::Mirrors(mirrors) => mirrors.behind(),
        }
    }

    /// Ends a round: what it has sent is on the destination's disk.
    pub(super) fn confirm(&mut self) {
        match &mut self.by {
            By::Bitmaps(exports) => exports.confirm(),
            By::Mirrors(mirrors) => mirrors.forget(),
        }
    }

    /// Removes from QEMU what earlier rounds needed, and the listing of this one.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn clean(&mut self) -> Result<(), Failure> {
        match &mut self.by {
            By::Bitmaps(exports) => exports.clean(),
            By::Mirrors(_) => Ok(()),
        }
    }

    /// Returns a small part of a disk: to send it shows whether the streams still carry anything.
    /// `None`: there is none yet.
    pub(super) fn sample(&self) -> Option<DiskRange> {
        match &self.by {
            By::Bitmaps(_) => {
                let bytes = self.note.disks.first().map_or(0, |noted| noted.virtual_bytes);
                Some(DiskRange { disk: 0, offset: 0, bytes: bytes.min(SAMPLE_BYTES) })
            }
            By::Mirrors(mirrors) => mirrors.sample(),
        }
    }

    /// Removes the exports through which bitmaps were read.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn remove_dirty(&mut self) -> Result<(), Failure> {
        match &mut self.by {
            By::Bitmaps(exports) => exports.remove_dirty(),
            By::Mirrors(_) => Ok(()),
        }
    }

    /// Prepares for the stop of the guest: until the last round, nobody takes what it writes.
    pub(super) fn settled(&self) {
        match &self.by {
            By::Bitmaps(_) => {}
            By::Mirrors(mirrors) => mirrors.widen(),
        }
    }

    /// Has QEMU hand over all that the stopped guest has written.
    ///
    /// # Errors
    /// It has not, or QEMU does not respond.
    pub(super) fn stopped(&self) -> Result<(), Failure> {
        match &self.by {
            By::Bitmaps(_) => Ok(()),
            By::Mirrors(mirrors) => mirrors.end(),
        }
    }

    /// Ends the access, so that QEMU may release the images.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        match &mut self.by {
            By::Bitmaps(exports) => exports.close(),
            // They have ended with the stop.
            By::Mirrors(_) => Ok(()),
        }
    }

    /// Limits the guest's writes to all disks together, in bytes per second.
    ///
    /// # Errors
    /// QEMU refuses, does not respond, or has other disks.
    pub(super) fn limit_writes(&self, bytes_per_s: u64) -> Result<(), PlugError> {
        let share = bytes_per_s / (self.note.disks.len() as u64).max(1);
        let (spec, qmp) = (self.vm.spec(), &self.vm.process.qmp);
        let mut all = self.note.disks.iter().filter_map(|noted| noted.index_in(&spec.disks));
        all.try_for_each(|index| {
            let limiting = qmp.limit_writes(&spec.disks, index, Some(share.max(1)));
            self.runtime.block_on(limiting)
        })
    }
}
