//! # On dirty pages
//!
//! A guest runs while it moves, so its memory is copied while it changes. This works because of one
//! promise: *every page that the guest writes after it was copied is copied again*. An
//! implementation that copies too many pages is slow. One that misses a single page corrupts a
//! guest silently, some time later. This essay explains how the promise is kept from outside QEMU,
//! and where its limits are.
//!
//! ## The mechanism
//!
//! The kernel can mark a page table entry of a shared mapping as *write-protected for userfaultfd*.
//! A write then faults. With `UFFD_FEATURE_WP_ASYNC` (Linux 6.7) no process handles the fault: the
//! kernel removes the mark and the write goes on, at the price of that one fault. An entry without
//! the mark is therefore a page that was written: the mark *is* the dirty bit, inverted.
//! `PAGEMAP_SCAN` on /proc/PID/pagemap (Linux 6.7) finds the entries without the mark. In the same
//! step, under the page table's lock, it marks them again and flushes the TLBs and, for KVM, the
//! secondary page tables. So there is no instant between report and protection in which a write
//! could be missed.
//!
//! [`DirtyTracker::attach`] requests a userfaultfd from the library in QEMU (it belongs to the
//! address space that created it), finds the RAM files in /proc/PID/maps, and registers every
//! mapping of them. [`DirtyTracker::start`] marks all pages. From then on
//! [`DirtyTracker::take_dirty`] returns the pages that were written and marks them again.
//!
//! A missing mark means dirty also where there is no page yet: `start` leaves a marker in every
//! empty entry, and a first write replaces it. The markers cost page tables for all of the guest's
//! memory: 2 MiB per GiB. Huge pages are mapped with 4 KiB entries while they are tracked, so
//! tracking is exact to the page on them as well.
//!
//! ## The order
//!
//! 1. **Start, then look for data.** Calling [`crate::Region::data_ranges`] before `start` would
//!    miss what is written in between.
//! 2. **Take, then read.** A page is protected again before it is read. If the guest writes during
//!    the read, the copy may be torn; but the page is then dirty again, and a later copy overwrites
//!    the torn one.
//! 3. **Copy, then judge.** Bytes to be hashed, compared or compressed are copied first
//!    ([`crate::Region::copy_out`]). The zero check ([`crate::Region::is_zero`]) reads in place,
//!    once. A wrong answer does no harm, for the same reason as a torn copy.
//! 4. **Stop, then take a last time.** With the vCPUs stopped and QEMU's devices quiet, the last
//!    `take_dirty` is complete. QEMU itself writes guest memory when it saves its devices (virtio's
//!    rings, for example), so the last `take_dirty` comes after that.
//!
//! ## What it costs
//!
//! A scan reads the page tables: about a millisecond per GiB, whatever the guest does. Protecting
//! makes KVM drop its own mappings of the *whole range that the call names*, clean pages included,
//! and the guest faults them back in one by one. So `take_dirty` looks first and protects only
//! around what it found (see `take.rs`). A guest with a small working set keeps the rest of its
//! memory mapped.
//!
//! ## Limits
//!
//! The mark is in the page tables of QEMU's address space, so writes that bypass them are not seen:
//!
//! - **Other processes** that map the same file: vhost-user back ends, virtiofsd, and this agent.
//!   VMs that use the first two need QEMU's own engine. The agent writes only the destination's
//!   RAM, which is not tracked.
//! - **Devices** that write memory by themselves: VFIO. Such VMs need QEMU's own engine too.
//! - **Pinned pages.** If the kernel pins pages to write them later, the fault occurs at the time
//!   of pinning and the bytes arrive afterwards. In between, a scan may report and protect a page,
//!   and the engine may copy it, before it is written. Disk reads without the page cache work this
//!   way (`O_DIRECT`: `cache=none`, `cache=directsync`, `aio=native`). Disks of a VM that is to be
//!   tracked must use the page cache (`cache=writeback` or `writethrough`), whose copies go through
//!   the page tables. Kernel vhost goes through them too and is tracked.
//! - **Discards**: a hole punched into the file by a balloon or by free page reporting leaves the
//!   marker in place. The guest has given that page up and may expect neither its old bytes nor
//!   zeros; the destination has the old ones.
//! - **A QEMU that forks** to run the guest in the child (`-daemonize` after the library has
//!   started its thread).
//! - **Memory plugged in later** belongs to no attached block. Attach again.
//!
//! A QEMU that has ended would look perfectly clean, because it has no page tables left. So every
//! answer is followed by a request that only a living address space answers; otherwise the result
//! is [`TrackError::ProcessGone`].

mod ahead;
mod attach;
mod block;
mod cores;
mod figures;
pub(crate) mod kernel;
pub(crate) mod library;
pub(crate) mod maps;
pub(crate) mod pagemap;
pub mod simulation;
mod sync_memory;
mod take;
pub(crate) mod uffd;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use linux_raw_sys::general::page_region;

pub(crate) use attach::{find_blocks, open_pagemap};
pub use block::CHUNK_PAGES;
pub use cores::ScanCores;
pub use figures::{DirtyCount, FaultFigures};
pub use library::{protocol, tracker_listener};
pub use sync_memory::{ThrottleFigures, throttle_chunk_pages};

use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, push_merged};
use crate::region::Region;
use ahead::{Ahead, Piece};
use block::{Block, STEP_PAGES};
use kernel::io_or_gone;
use pagemap::Pagemap;
use sync_memory::SyncMemory;
use uffd::Userfaultfd;

/// Most runs of pages that one call of `PAGEMAP_SCAN` may return: 192 KiB of them.
const RUNS_A_SCAN: usize = 8 << 10;

/// Dirty tracking of one QEMU process by userfaultfd and `PAGEMAP_SCAN`; [`crate::tracking`]
/// explains it. Blocks are numbered in the order of the regions given to
/// [`DirtyTracker::attach`]. Dropping it ends the tracking, and the guest runs on at full speed.
pub struct DirtyTracker {
    pid: i32,
    tracker_socket: PathBuf,
    vcpus: Vec<u32>,
    userfaultfd: Userfaultfd,
    /// Whether all memory is to be synchronous from the start.
    by_faults: bool,
    /// Memory whose writes wait for an answer; set once there may be some.
    sync_memory: Option<SyncMemory>,
    pagemap: Pagemap,
    blocks: Vec<Block>,
    /// Address that is in none of the tracked mappings.
    untracked_address: u64,
    /// Buffer for the kernel's answers, kept because it is too big for a stack and needed thousands
    /// of times.
    runs: Vec<page_region>,
    /// Memory examined ahead of the next take.
    ahead: Ahead,
    cores: ScanCores,
    /// Whether the guest is being stopped or is paused.
    is_stopping: bool,
}

impl DirtyTracker {
    /// Prepares to track what process `pid` writes to `regions`, with the library that listens at
    /// `tracker_socket`. It tracks all mappings of each region's file. Nothing is protected yet.
    ///
    /// # Errors
    /// One for each possible obstacle, see [`TrackError`]. QEMU is then unchanged.
    pub fn attach(
        tracker_socket: &Path,
        pid: i32,
        regions: &[Arc<Region>],
    ) -> Result<DirtyTracker, TrackError> {
        attach::attach(tracker_socket, pid, regions)
    }

    /// Protects everything: from the return on, each write is seen. Takes about 5 ms per GiB, while
    /// the guest runs.
    pub fn start(&mut self) -> Result<(), TrackError> {
        if self.by_faults {
            match self.sync_memory() {
                Ok(memory) => {
                    let memory = self.sync_memory.insert(memory);
                    memory.take_all(&self.userfaultfd, &self.blocks)?;
                    return self.check_alive();
                }
                Err(TrackError::NoKernelFaults) => self.by_faults = false,
                Err(error) => return Err(error),
            }
        }
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            for step in mapping.pages().chunks(STEP_PAGES) {
                self.userfaultfd
                    .write_protect(mapping.address_of(step.first), step.len_bytes())
                    .map_err(|errno| io_or_gone("write-protect the RAM", self.pid, errno))?;
            }
        }
        self.check_alive()
    }

    /// Chooses for good how dirty pages are found. Call it before anything is sent: pages that are
    /// dirty may be forgotten. A guest that has written more scattered pages than `burst_pages` and
    /// `pages_per_s` since the start allow is tracked by scans, although faults are wanted.
    pub fn settle(&mut self, burst_pages: u64, pages_per_s: f64) -> Result<(), TrackError> {
        let Some(memory) = self.sync_memory.as_ref().filter(|_| self.by_faults) else {
            return Ok(());
        };
        let (scattered, since) = memory.scattered_pages();
        if scattered as f64 <= burst_pages as f64 + pages_per_s * since.as_secs_f64() {
            return Ok(());
        }
        self.by_faults = false;
        if let Some(memory) = self.sync_memory.take() {
            memory.release_all(&self.blocks);
        }
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            self.userfaultfd
                .register(mapping.address, mapping.count * PAGE_SIZE)
                .map_err(|errno| io_or_gone("register the RAM", self.pid, errno))?;
        }
        self.start()
    }

    /// Searches synchronous memory for dirty pages that no fault has named, and adds them. Takes
    /// about a millisecond per GiB and core: call it before the guest is stopped.
    pub fn check_notes(&mut self) -> Result<(), TrackError> {
        take::check_notes(self)?;
        self.check_alive()
    }

    /// Appends to `out` the pages of `block` within `within` that were written since they were last
    /// protected, and protects them again, in one step for each page. Returns the page to go on
    /// from, which is `within.end()` when all is done. Stops after `max_pages` (at least one), or
    /// earlier if that takes long. The ranges ascend and do not touch.
    ///
    /// A caller that takes parts of a block out of order must keep chunks of
    /// [`throttle_chunk_pages`] whole: a chunk changes over when a call reaches its start, and
    /// at that time no thread may be reading pages of it that another call
    /// returned.
    ///
    /// # Errors
    /// Pages appended to `out` before the error are protected again and will not be reported a
    /// second time.
    pub fn take_dirty(
        &mut self,
        block: usize,
        within: PageRange,
        max_pages: u64,
        out: &mut Vec<PageRange>,
    ) -> Result<u64, TrackError> {
        let next = take::take_dirty(self, block, within, max_pages.max(1), out)?;
        self.check_alive()?;
        Ok(next)
    }

    /// Counts the dirty pages of all blocks and leaves them dirty.
    pub fn count_dirty(&self) -> Result<DirtyCount, TrackError> {
        let mut count = take::count_dirty(self)?;
        count.filled_pages = self.sync_memory.as_ref().map_or(0, SyncMemory::filled_pages);
        count.filled_pages = count.filled_pages.min(count.pages);
        self.check_alive()?;
        Ok(count)
    }

    /// Appends to `out` the pages of `block` within `within` that were written since they were last
    /// protected, and leaves them dirty. The ranges ascend and do not touch.
    pub fn peek_dirty(
        &self,
        block: usize,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), TrackError> {
        let floor = out.len();
        take::peek_dirty(self, block, within, |dirty| {
            dirty.iter().for_each(|range| push_merged(out, floor, *range));
        })?;
        self.check_alive()
    }

    /// Sets the thread IDs of the guest's vCPUs: QEMU's other threads then never wait for a
    /// throttle. Without any, all threads wait.
    #[must_use]
    pub fn with_vcpus(mut self, vcpus: Vec<u32>) -> DirtyTracker {
        self.vcpus = vcpus;
        self
    }

    /// Sets whether [`DirtyTracker::start`] makes the memory synchronous: each first write to a
    /// page waits for an answer of this process, and the pages that are dirty when the guest is
    /// stopped are known without a search. Without faults of the kernel (see
    /// [`TrackError::NoKernelFaults`]) it stays asynchronous.
    #[must_use]
    pub fn by_faults(mut self, by_faults: bool) -> DirtyTracker {
        self.by_faults = by_faults;
        self
    }

    /// Sets how scans are divided among cores; the default is [`ScanCores::of_this_machine`].
    #[must_use]
    pub fn scan_on(mut self, cores: ScanCores) -> DirtyTracker {
        self.cores = cores;
        self
    }

    /// Limits the guest to `pages_per_s` newly written pages per second; `None` lifts the limit.
    /// Computing, reading, and writing to pages that are already dirty keep their speed. Memory
    /// comes under the limit when [`DirtyTracker::take_dirty`] reaches it. `sync_memory.rs`
    /// explains how.
    ///
    /// # Errors
    /// [`TrackError::NoKernelFaults`] and others if it is impossible; nothing has changed then.
    pub fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        self.is_stopping = false;
        if self.sync_memory.is_none() && pages_per_s.is_some() {
            self.sync_memory = Some(self.sync_memory()?);
        }
        if let Some(memory) = &mut self.sync_memory {
            memory.set_limit(pages_per_s);
        }
        Ok(())
    }

    /// Creates synchronous memory, of which there is none yet.
    fn sync_memory(&self) -> Result<SyncMemory, TrackError> {
        let DirtyTracker { tracker_socket, pid, vcpus, blocks, by_faults, .. } = self;
        SyncMemory::new(tracker_socket, *pid, vcpus, blocks, *by_faults)
    }

    /// Announces that the guest is about to be stopped: waiting writes go on within a millisecond,
    /// and no more memory changes over, until the next limit is set. Scans use all cores.
    pub fn let_stop(&mut self) {
        self.is_stopping = true;
        if let Some(memory) = &mut self.sync_memory {
            memory.let_stop();
        }
    }

    /// Sets whether memory may change over in [`DirtyTracker::take_dirty`]. It must not while a
    /// thread reads pages that earlier calls returned.
    pub fn let_change(&mut self, may_change: bool) {
        if let Some(memory) = &mut self.sync_memory {
            memory.let_change(may_change);
        }
    }

    /// Returns the memory that changed over in the last [`DirtyTracker::take_dirty`], in its block.
    pub fn changed_over(&self) -> &[PageRange] {
        self.sync_memory.as_ref().map_or(&[], SyncMemory::changed_over)
    }

    /// Returns the throttle's statistics so far.
    pub fn throttle_figures(&self) -> ThrottleFigures {
        self.sync_memory.as_ref().map(SyncMemory::throttle_figures).unwrap_or_default()
    }

    /// Returns the statistics of synchronous memory so far.
    pub fn fault_figures(&self) -> FaultFigures {
        let figures = self.sync_memory.as_ref().map(SyncMemory::fault_figures);
        FaultFigures { by_faults: self.by_faults, ..figures.unwrap_or_default() }
    }

    /// Returns the ID of the tracked process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn scan_threads(&self) -> usize {
        if self.is_stopping { self.cores.paused } else { self.cores.running }
    }

    /// Returns the number of threads that scan these pieces.
    fn threads_for<'a>(&self, pieces: impl Iterator<Item = &'a Piece<'a>>) -> usize {
        let pages = pieces.map(|piece| piece.pages.count).sum();
        if self.cores.are_worth(pages) { self.scan_threads() } else { 1 }
    }

    fn block(&self, block: usize, within: PageRange) -> Result<&Block, TrackError> {
        match self.blocks.get(block) {
            Some(found) if within.end() <= found.pages.end() => Ok(found),
            _ => Err(TrackError::OutOfBounds { block, range: within }),
        }
    }

    /// Checks that the process has not ended: it would have no page tables, and so no dirty pages.
    /// Call it *after* a scan: an address space that is alive now was alive during the scan.
    fn check_alive(&self) -> Result<(), TrackError> {
        self.sync_memory.as_ref().map_or(Ok(()), SyncMemory::check)?;
        match self.userfaultfd.is_alive(self.untracked_address) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TrackError::ProcessGone { pid: self.pid }),
            Err(errno) => Err(io_or_gone("ask for the address space", self.pid, errno)),
        }
    }
}

impl Drop for DirtyTracker {
    fn drop(&mut self) {
        // Comes first: the tracker must not unregister synchronous memory.
        self.sync_memory = None;
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            // Closing the userfaultfd has the same effect, and is the only way left if this fails.
            let _ = self.userfaultfd.unregister(mapping.address, mapping.count * PAGE_SIZE);
        }
    }
}

/// Checks whether this kernel can track dirty pages: Linux 6.7 or later, with userfaultfd and pages
/// of 4 KiB. It tries the features instead of reading the version, because distributions backport.
///
/// # Errors
/// [`TrackError::PageSize`], [`TrackError::NoUserfaultfd`] or [`TrackError::KernelTooOld`].
pub fn check_kernel() -> Result<(), TrackError> {
    let page_size = rustix::param::page_size();
    if page_size as u64 != PAGE_SIZE {
        return Err(TrackError::PageSize { found: page_size });
    }
    Userfaultfd::of_this_process()?.enable_tracking()?;
    pagemap::check_kernel()
}

#[cfg(test)]
mod pause_tests;

#[cfg(test)]
mod tests {
    use super::figures::ChunkCount;
    use super::*;

    #[test]
    fn the_fullest_chunk_is_found() {
        let mut chunk = ChunkCount::default();
        for (first, count) in [(0, 2), (500, 20), (530, 1), (1023, 514), (3000, 1)] {
            chunk.add(PageRange::new(first, count));
        }
        assert_eq!((chunk.most, chunk.pages, chunk.chunk), (512, 1, 5));
        assert_eq!(ChunkCount::default().most, 0);
    }
}
