//! The disks of a running VM as its QEMU shows them to this agent: dirty bitmaps that record what
//! the guest writes, read-only exports over one socket, and what both say is to be sent.
//!
//! - Each disk has an export through which its content is read, as long as the transfer lasts.
//! - A round begins with an exchange of the bitmaps, of all disks in one transaction: from then on
//!   new bitmaps record, and the earlier ones say what the round sends. They are removed when that
//!   is on the destination's disk. If this agent ends before, the next one finds them.
//! - The NBD server is never stopped: QEMU 7.2 hangs in that while a client is in the handshake.
//!   Without exports it serves nothing, and it ends with QEMU.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use futures::future::{join, join_all};
use godwit_migration::Failure;
use godwit_migration::disks::{DiskRange, DiskReader};
use godwit_nbd::{DIRTY, Extent, TOP_LAYER, ZERO};
use godwit_qemu::{Qmp, QmpError};
use tokio::runtime::Handle;

use super::door::{Door, ExportReader, disk_failure};
use super::ranges::{merged, push};
use super::wires::Wires;
use crate::store::DiskTransferNote;
use crate::vm::Vm;

/// Context of what an image and its backing files have.
const ALLOCATION: &str = "base:allocation";
/// Context of how deep in the chain of images something is: 1 is the image itself.
const DEPTH: &str = "qemu:allocation-depth";
/// Number of disks up to which all bitmaps are read if it is urgent, also those that are empty.
const FEW_DISKS: usize = 4;
/// Part of a disk whose extents are listed at once: an image has them in blocks of 4 KiB or more, a
/// bitmap in blocks of 64 KiB.
const WINDOW_BYTES: u64 = 16 << 30;
const DIRTY_WINDOW_BYTES: u64 = 256 << 30;

/// Bitmaps that an earlier transfer has left in QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FoundBitmaps {
    /// Number of those that record.
    active: u32,
    /// Numbers of the earlier ones of each disk.
    earlier: Vec<Vec<u32>>,
}

impl FoundBitmaps {
    /// Finds the bitmaps of a transfer; `None` unless each disk has the one that records.
    pub(super) async fn find(
        qmp: &Qmp,
        note: &DiskTransferNote,
    ) -> Result<Option<FoundBitmaps>, QmpError> {
        let mut all = Vec::new();
        for noted in &note.disks {
            let bitmaps = qmp.bitmaps(&noted.node).await?;
            all.push(bitmaps.iter().filter_map(|name| note.number_of(name)).collect());
        }
        Ok(FoundBitmaps::of(all))
    }

    /// Sorts the numbers of each disk's bitmaps.
    fn of(mut all: Vec<Vec<u32>>) -> Option<FoundBitmaps> {
        let mut active = None;
        for numbers in &mut all {
            numbers.sort_unstable();
            let last = numbers.pop()?;
            // They are exchanged together.
            if *active.get_or_insert(last) != last {
                return None;
            }
        }
        Some(FoundBitmaps { active: active?, earlier: all })
    }
}

/// The exports and bitmaps of a transfer.
pub(super) struct Exports {
    host: String,
    vm: Arc<Vm>,
    runtime: Handle,
    door: Door,
    note: DiskTransferNote,
    /// Number of the bitmaps that record.
    active: u32,
    /// For each disk: bitmaps that no longer record and were not read.
    unread: Vec<Vec<u32>>,
    /// For each disk: bitmaps that were read. What they say is not on the destination's disk yet.
    read: Vec<Vec<u32>>,
    /// For each disk: bitmaps that are to be removed. What they say is on the destination's disk.
    sent: Vec<Vec<u32>>,
    /// Whether there are exports through which bitmaps were read.
    has_dirty: bool,
}

impl Exports {
    /// Makes the bitmaps and exports, or takes over the bitmaps that were found.
    ///
    /// # Errors
    /// QEMU refuses. What it has by then is removed by `Agent::clear_disk_transfer`.
    pub(super) async fn open(
        host: &str,
        vm: &Arc<Vm>,
        note: &DiskTransferNote,
        wires: &Arc<Wires>,
        found: Option<FoundBitmaps>,
    ) -> Result<Exports, Failure> {
        let qmp = &vm.process.qmp;
        let door = Door::open(host, vm, wires).await.map_err(|why| {
            disk_failure(host, &format!("cannot export the disks of VM \"{}\": {why}", vm.name))
        })?;
        let failed = |error: &QmpError| refused(host, "export a disk", error);
        let is_fresh = found.is_none();
        for (number, noted) in note.disks.iter().enumerate() {
            if is_fresh {
                let added = qmp.add_bitmap(&noted.node, &note.bitmap(0)).await;
                added.map_err(|error| failed(&error))?;
            }
            let export = DiskTransferNote::export(number);
            let added = qmp.add_export(&export, &noted.node, &[], false).await;
            added.map_err(|error| failed(&error))?;
        }
        let found = found.unwrap_or_else(|| FoundBitmaps {
            active: 0,
            earlier: vec![Vec::new(); note.disks.len()],
        });
        Ok(Exports {
            host: host.to_owned(),
            vm: Arc::clone(vm),
            runtime: Handle::current(),
            door,
            note: note.clone(),
            active: found.active,
            unread: found.earlier,
            read: vec![Vec::new(); note.disks.len()],
            sent: vec![Vec::new(); note.disks.len()],
            has_dirty: false,
        })
    }

    fn qmp(&self) -> &Qmp {
        &self.vm.process.qmp
    }

    /// Returns a reader of all disks, for one stream.
    pub(super) fn reader(&self) -> Box<dyn DiskReader> {
        Box::new(ExportReader(self.door.clone()))
    }

    /// Lists what the images have that travels.
    ///
    /// # Errors
    /// QEMU cannot be asked, or has another disk.
    pub(super) fn allocated(&self) -> Result<Vec<DiskRange>, Failure> {
        let mut all = Vec::new();
        for (disk, noted) in self.note.disks.iter().enumerate() {
            let context = if noted.is_layer { DEPTH } else { ALLOCATION };
            let name = DiskTransferNote::export(disk);
            let travels = |flags: u32| match noted.is_layer {
                true => flags == TOP_LAYER,
                false => flags & ZERO == 0,
            };
            let (bytes, wanted) = (noted.virtual_bytes, [context]);
            let mut export = self.door.connect(&name, &wanted, Some(bytes))?;
            for (at, window) in windows(bytes, WINDOW_BYTES) {
                export.stream_mut().begin();
                let extents = export.extents(0, at, window);
                let extents = extents.map_err(|error| self.door.failed("list", &name, &error))?;
                let extents = extents.into_iter().filter(|extent| travels(extent.flags));
                extents.for_each(|extent| push(&mut all, range_of(disk, extent)));
            }
            // It serves as one that reads.
            self.door.put_back(disk, export);
        }
        Ok(merged(all))
    }

    /// Exchanges the bitmaps, and lists what those say that recorded until now. The exports through
    /// which they are read remain ([`Exports::clean`]). `is_urgent`: a guest will wait.
    ///
    /// # Errors
    /// QEMU refuses or does not respond: what it records is unknown.
    pub(super) fn exchange(&mut self, is_urgent: bool) -> Result<Vec<DiskRange>, Failure> {
        self.remove_dirty()?;
        let (now, next) = (self.active, self.active.wrapping_add(1));
        let swaps: Vec<_> = self
            .note
            .disks
            .iter()
            .map(|noted| (noted.node.clone(), self.note.bitmap(now), self.note.bitmap(next)))
            .collect();
        self.unread.iter_mut().for_each(|unread| unread.push(now));
        self.has_dirty = true;
        let names = self.unread_names();
        let adding =
            self.note.disks.iter().zip(&names).enumerate().map(|(disk, (noted, names))| {
                let qmp = self.qmp();
                async move {
                    let bitmaps: Vec<&str> = names.iter().map(String::as_str).collect();
                    let export = DiskTransferNote::dirty_export(disk);
                    qmp.add_export(&export, &noted.node, &bitmaps, false).await
                }
            });
        let begun = Instant::now();
        // Few are read at the same time, and sooner than QEMU describes all of its nodes.
        let reads_all = is_urgent && self.note.disks.len() <= FEW_DISKS;
        let empty = async {
            match reads_all {
                true => Ok(HashSet::new()),
                false => self.qmp().empty_bitmaps().await,
            }
        };
        // QEMU gets all of it at once and carries it out in this order: with a stopped guest, each
        // answer that is waited for is downtime.
        let (swapped, (added, empty)) = self
            .runtime
            .block_on(join(self.qmp().swap_bitmaps(&swaps), join(join_all(adding), empty)));
        let exchanged = begun.elapsed();
        let what = "exchange the bitmaps of the disks";
        swapped.map_err(|error| refused(&self.host, what, &error))?;
        self.active = next;
        for added in added {
            added.map_err(|error| refused(&self.host, "export the bitmaps of a disk", &error))?;
        }
        let empty = empty.map_err(|error| refused(&self.host, "list the bitmaps", &error))?;
        let dirty = self.read_bitmaps(&names, &empty)?;
        let (vm, whole) = (self.vm.name.as_str(), begun.elapsed());
        tracing::debug!(vm, ?exchanged, ?whole, "bitmaps exchanged and read");
        for (unread, read) in self.unread.iter_mut().zip(&mut self.read) {
            read.append(unread);
        }
        Ok(dirty)
    }

    /// Returns the names of each disk's bitmaps that no longer record and were not read.
    fn unread_names(&self) -> Vec<Vec<String>> {
        let name = |number: &u32| self.note.bitmap(*number);
        self.unread.iter().map(|unread| unread.iter().map(name).collect()).collect()
    }

    /// Lists what the bitmaps of these names say, of all disks at the same time.
    fn read_bitmaps(
        &self,
        names: &[Vec<String>],
        empty: &HashSet<(String, String)>,
    ) -> Result<Vec<DiskRange>, Failure> {
        let disks = self.note.disks.iter().zip(names).enumerate();
        let noted: Vec<(usize, Vec<&str>)> = disks
            .map(|(disk, (noted, names))| {
                let is_empty = |name: &str| empty.contains(&(noted.node.clone(), name.to_owned()));
                let names = names.iter().map(String::as_str);
                (disk, names.filter(|name| !is_empty(name)).collect::<Vec<_>>())
            })
            .filter(|(_, names)| !names.is_empty())
            .collect();
        let lists = match noted.as_slice() {
            [] => Vec::new(),
            [(disk, names)] => vec![self.read_bitmaps_of(*disk, names)],
            several => std::thread::scope(|scope| {
                let begun: Vec<_> = several
                    .iter()
                    .map(|(disk, names)| {
                        let thread = std::thread::Builder::new().name("disks".to_owned());
                        let begun =
                            thread.spawn_scoped(scope, || self.read_bitmaps_of(*disk, names));
                        begun.map_err(|_| (*disk, names))
                    })
                    .collect();
                let ended = |_| Err(disk_failure(&self.host, "a thread that lists a disk ended"));
                let list = begun.into_iter().map(|begun| match begun {
                    Ok(thread) => thread.join().unwrap_or_else(ended),
                    // There is no thread to spare.
                    Err((disk, names)) => self.read_bitmaps_of(disk, names),
                });
                list.collect()
            }),
        };
        let mut all = Vec::new();
        for list in lists {
            all.extend(list?);
        }
        Ok(merged(all))
    }

    /// Lists what the bitmaps of a disk say.
    fn read_bitmaps_of(&self, disk: usize, bitmaps: &[&str]) -> Result<Vec<DiskRange>, Failure> {
        let name = DiskTransferNote::dirty_export(disk);
        let contexts: Vec<String> =
            bitmaps.iter().map(|bitmap| format!("qemu:dirty-bitmap:{bitmap}")).collect();
        let wanted: Vec<&str> = contexts.iter().map(String::as_str).collect();
        let bytes = self.note.disks.get(disk).map_or(0, |noted| noted.virtual_bytes);
        let mut export = self.door.connect(&name, &wanted, Some(bytes))?;
        let mut all = Vec::new();
        for context in 0..wanted.len() {
            for (at, window) in windows(bytes, DIRTY_WINDOW_BYTES) {
                export.stream_mut().begin();
                let extents = export.extents(context, at, window);
                let extents = extents.map_err(|error| self.door.failed("list", &name, &error))?;
                let dirty = extents.into_iter().filter(|extent| extent.flags & DIRTY != 0);
                dirty.for_each(|extent| push(&mut all, range_of(disk, extent)));
            }
        }
        Ok(all)
    }

    /// Notes that what the bitmaps say that were read is on the destination's disk.
    pub(super) fn confirm(&mut self) {
        for (sent, read) in self.sent.iter_mut().zip(&mut self.read) {
            sent.append(read);
        }
    }

    /// Removes what is of no use any more: the exports through which bitmaps were read, and bitmaps
    /// of which all is on the destination's disk.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn clean(&mut self) -> Result<(), Failure> {
        self.remove_dirty()?;
        let (qmp, note) = (&self.vm.process.qmp, &self.note);
        let all = note.disks.iter().zip(&mut self.sent);
        let removing = all.flat_map(|(noted, sent)| {
            sent.drain(..).map(move |number| async move {
                qmp.remove_bitmap(&noted.node, &note.bitmap(number)).await
            })
        });
        for error in self.runtime.block_on(join_all(removing)).into_iter().filter_map(Result::err) {
            // What it says is sent again if the transfer is continued later.
            tracing::warn!(vm = self.vm.name.as_str(), %error, "a bitmap stays");
        }
        Ok(())
    }

    /// Removes the exports through which bitmaps were read, if there are any.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn remove_dirty(&mut self) -> Result<(), Failure> {
        if self.has_dirty {
            self.remove(DiskTransferNote::dirty_export)?;
            self.has_dirty = false;
        }
        Ok(())
    }

    /// Removes all exports, so that QEMU may release the images.
    ///
    /// # Errors
    /// QEMU does not respond.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        self.remove_dirty()?;
        self.remove(DiskTransferNote::export)
    }

    /// Removes the exports with that name of each disk, all at once.
    fn remove(&self, name: fn(usize) -> String) -> Result<(), Failure> {
        let removing = (0..self.note.disks.len()).map(|disk| {
            let qmp = self.qmp();
            async move { qmp.remove_export(&name(disk)).await }
        });
        let removed = self.runtime.block_on(join_all(removing));
        let failed = |error: &QmpError| refused(&self.host, "end the export of a disk", error);
        removed.into_iter().try_for_each(|removed| removed.map_err(|error| failed(&error)))
    }
}

/// Returns the parts of a disk that are listed at once, by offset and length.
fn windows(bytes: u64, window: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes.div_ceil(window)).map(move |number| {
        let at = number * window;
        (at, window.min(bytes - at))
    })
}

fn range_of(disk: usize, extent: Extent) -> DiskRange {
    DiskRange { disk, offset: extent.offset, bytes: extent.bytes }
}

fn refused(host: &str, what: &str, error: &QmpError) -> Failure {
    crate::state_stream::qemu_failure(host, what, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_are_of_use_if_each_disk_has_the_one_that_records() {
        let found = FoundBitmaps::of(vec![vec![4, 3], vec![4]]).unwrap();
        assert_eq!(found, FoundBitmaps { active: 4, earlier: vec![vec![3], vec![]] });
        for lacking in [vec![vec![4], vec![]], vec![vec![4], vec![3]], vec![]] {
            assert_eq!(FoundBitmaps::of(lacking), None);
        }
    }

    #[test]
    fn windows_make_up_the_disk() {
        assert_eq!(windows(25, 10).collect::<Vec<_>>(), [(0, 10), (10, 10), (20, 5)]);
        assert_eq!(windows(20, 10).collect::<Vec<_>>(), [(0, 10), (10, 10)]);
        assert_eq!(windows(0, 10).count(), 0);
    }
}
