//! # On dirty pages
//!
//! A guest moves while it runs, so its memory is copied while it changes. That works because of one promise: *every page
//! that the guest writes after it was copied is copied again*. Whoever keeps that promise with too many pages is slow;
//! whoever keeps it with one page too few corrupts a guest, silently, some time later. This page is about how the promise
//! is kept from outside QEMU, and where it ends.
//!
//! ## The mechanism
//!
//! The kernel can mark a page table entry of a shared mapping as *write-protected for userfaultfd*. A write then faults;
//! with `UFFD_FEATURE_WP_ASYNC` (Linux 6.7) nobody is asked, the fault handler removes the mark and the write goes on, at
//! the price of that one fault. An entry without the mark is thus a page that was written: the mark *is* the dirty bit,
//! inverted. `PAGEMAP_SCAN` on /proc/PID/pagemap (Linux 6.7) finds the entries without it and, in the same step and under
//! the page table's lock, marks them again and flushes the TLBs, and for KVM the secondary page tables too. So between
//! being reported and being protected there is no instant in which a write could slip through.
//!
//! [`DirtyTracker::attach`] asks the library in QEMU for a userfaultfd (it belongs to the address space that made it),
//! finds the RAM files in /proc/PID/maps, registers every mapping of them. [`DirtyTracker::start`] marks all pages. From
//! then on [`DirtyTracker::take_dirty`] gives what was written and forgets it.
//!
//! Unmarked means dirty also where there is no page yet: `start` leaves a marker in every empty entry, and a first write
//! replaces it. That costs page tables for all of the guest's memory: 2 MiB per GiB. Huge pages are mapped by 4 KiB entries
//! as long as they are tracked, and tracking is exact to the page on them as well.
//!
//! ## The order
//!
//! 1. **Start, then look for data.** [`crate::Region::data_ranges`] before `start` would miss what is written in between.
//! 2. **Take, then read.** A page is protected again before it is read. The guest may write while it is being read and the
//!    copy be torn; then it is dirty again, and the torn copy is overwritten by a later one.
//! 3. **Copy, then judge.** What is hashed, compared or compressed is copied first ([`crate::Region::copy_out`]). The zero
//!    check ([`crate::Region::is_zero`]) reads in place, once, and a wrong answer has the same excuse as a torn copy.
//! 4. **Stop, then take a last time.** With the vCPUs stopped and QEMU's devices quiet, the last `take_dirty` is complete.
//!    QEMU itself writes guest memory as it saves its devices (virtio's rings, for one), so it comes after that.
//!
//! ## What it costs
//!
//! A scan reads the page tables: about a millisecond per GiB, whatever the guest does. Protecting makes KVM drop its own
//! mappings of the *whole range that the call names*, clean pages included, and the guest faults them back in one by one.
//! So `take_dirty` looks first and protects only around what it found (see `take.rs`); a guest with a small working set
//! keeps the rest of its memory mapped.
//!
//! ## Where it ends
//!
//! The mark lives in the page tables of QEMU's address space, so what goes past them is not seen:
//!
//! - **Other processes** that map the same file: vhost-user back ends, virtiofsd, and this agent. The first two make a VM
//!   one for QEMU's own engine; the agent writes the destination's RAM only, which is not tracked.
//! - **Devices** that write memory by themselves: VFIO. QEMU's own engine again.
//! - **Pinned pages.** Where the kernel takes hold of pages to write them later, the fault comes when it takes hold and
//!   the bytes come after. In between a scan may report, protect, and the engine copy a page that is not yet written. That
//!   is how reads of a disk without the page cache work (`O_DIRECT`: `cache=none`, `cache=directsync`, `aio=native`). Disks of a
//!   VM that is to be tracked go through the page cache (`cache=writeback` or `writethrough`), whose copies take the
//!   page tables' way. Kernel vhost does too and is tracked.
//! - **Discards**: a hole punched into the file by a balloon or by free page reporting leaves the marker where it was. The
//!   guest has given that page up and may expect neither its old bytes nor zeros; the destination has the old ones.
//! - **A QEMU that forks** to run the guest in the child (`-daemonize` after the library has started its thread).
//! - **Memory plugged in later** is of no block that was attached. Attach again.
//!
//! A QEMU that has ended would look perfectly clean, as it has no page tables left. Every answer is therefore followed by
//! a question that only a living address space answers; [`TrackError::ProcessGone`] otherwise.

mod attach;
pub(crate) mod library;
pub(crate) mod maps;
pub(crate) mod pagemap;
#[path = "../../../tracker/src/protocol.rs"]
pub mod protocol;
mod take;
mod throttle;
pub(crate) mod uffd;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use linux_raw_sys::general::page_region;

pub(crate) use attach::{find_blocks, open_pagemap};
pub use library::tracker_listener;
pub use throttle::{ThrottleFigures, throttle_chunk_pages};

use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, page_count, push_merged};
use crate::region::Region;
use maps::{Mapping, Segment};
use pagemap::Pagemap;
use throttle::Throttle;
use uffd::Userfaultfd;

/// Write protection is applied in steps of this many pages (256 MiB, under a millisecond each), as KVM keeps a guest
/// that touches the range waiting for the length of a step.
const STEP_PAGES: u64 = 64 << 10;
/// How many runs of pages one call of `PAGEMAP_SCAN` may return: 192 KiB of them.
const RUNS_A_SCAN: usize = 8 << 10;

/// Dirty tracking of one QEMU process by `UFFD_FEATURE_WP_ASYNC` and `PAGEMAP_SCAN`; [`crate::tracking`] explains it.
/// Blocks are numbered as the regions were given to [`DirtyTracker::attach`]. Dropping it ends the tracking, and the
/// guest runs on at full speed.
pub struct DirtyTracker {
    pid: i32,
    tracker_socket: PathBuf,
    vcpus: Vec<u32>,
    userfaultfd: Userfaultfd,
    /// Once writers were to be slowed.
    throttle: Option<Throttle>,
    pagemap: Pagemap,
    blocks: Vec<Block>,
    /// An address that is in none of the mappings tracked.
    untracked_address: u64,
    /// The kernel's answers, kept as it is too big for a stack and needed thousands of times.
    runs: Vec<page_region>,
}

/// Pages of a chunk: 2 MiB, at its own multiple.
pub const CHUNK_PAGES: u64 = 512;

/// How many pages are dirty, and how close together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirtyCount {
    /// All of them.
    pub pages: u64,
    /// The most in one chunk of [`CHUNK_PAGES`].
    pub fullest_chunk_pages: u64,
}

/// Counts pages chunk by chunk, as runs come in order.
#[derive(Default)]
struct ChunkCount {
    chunk: u64,
    pages: u64,
    most: u64,
}

impl ChunkCount {
    fn add(&mut self, run: PageRange) {
        let mut rest = run;
        while !rest.is_empty() {
            let (piece, after) = rest.split(CHUNK_PAGES - rest.first % CHUNK_PAGES);
            let chunk = piece.first / CHUNK_PAGES;
            if chunk != self.chunk {
                (self.chunk, self.pages) = (chunk, 0);
            }
            self.pages += piece.count;
            self.most = self.most.max(self.pages);
            rest = after;
        }
    }
}

/// A RAM block as QEMU maps it.
struct Block {
    pages: PageRange,
    region: Arc<Region>,
    mappings: Vec<Mapping>,
    segments: Vec<Segment>,
}

impl DirtyTracker {
    /// Prepares to track what process `pid` writes to `regions`, by the library that listens at `tracker_socket`. Tracks
    /// all mappings of each region's file. Nothing is protected yet.
    ///
    /// # Errors
    /// One for each thing that can be missing, see [`TrackError`]; QEMU is then as it was.
    pub fn attach(
        tracker_socket: &Path,
        pid: i32,
        regions: &[Arc<Region>],
    ) -> Result<DirtyTracker, TrackError> {
        attach::attach(tracker_socket, pid, regions)
    }

    /// Protects everything: from the return on each write is seen. About 5 ms per GiB, in which the guest runs.
    pub fn start(&mut self) -> Result<(), TrackError> {
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            for step in mapping.pages().chunks(STEP_PAGES) {
                self.userfaultfd
                    .write_protect(mapping.address_of(step.first), step.len_bytes())
                    .map_err(|errno| io_or_gone("write-protect the RAM", self.pid, errno))?;
            }
        }
        self.check_alive()
    }

    /// Appends to `out` the pages of `block` within `within` that were written since they were last protected, and
    /// protects them again, in one step for each page. Gives the page to go on from, which is `within.end()` when all is
    /// done; stops after `max_pages` (at least one), or earlier where that takes long. The ranges ascend and do not touch.
    ///
    /// Who takes parts of a block in another order than they lie keeps chunks of [`throttle_chunk_pages`] whole: under a growing
    /// throttle a chunk changes hands when a call comes to its begin, and nobody may then be reading what another call gave of it.
    ///
    /// # Errors
    /// What was appended to `out` before the error is protected again and will not be reported a second time.
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
        let mut count = DirtyCount::default();
        for (block, tracked) in self.blocks.iter().enumerate() {
            let mut chunk = ChunkCount::default();
            take::look(self, block, tracked.pages, |dirty| {
                dirty.iter().for_each(|range| chunk.add(*range));
                count.pages += page_count(dirty);
            })?;
            count.fullest_chunk_pages = count.fullest_chunk_pages.max(chunk.most);
        }
        self.check_alive()?;
        Ok(count)
    }

    /// Appends to `out` the pages of `block` within `within` that were written since they were last protected, and leaves
    /// them dirty. The ranges ascend and do not touch.
    pub fn look(&self, block: usize, within: PageRange, out: &mut Vec<PageRange>) -> Result<(), TrackError> {
        let floor = out.len();
        take::look(self, block, within, |dirty| {
            dirty.iter().for_each(|range| push_merged(out, floor, *range));
        })?;
        self.check_alive()
    }

    /// Names the guest's processors, by their thread ids: QEMU's other threads never wait for a throttle. Where none are
    /// named, everybody does.
    #[must_use]
    pub fn with_vcpus(mut self, vcpus: Vec<u32>) -> DirtyTracker {
        self.vcpus = vcpus;
        self
    }

    /// Holds the guest to `pages_per_s` pages that are written anew in a second; none: to no limit any more. Computing,
    /// reading, and writing to pages that are dirty already keep their speed. What [`DirtyTracker::take_dirty`] comes to is
    /// held from then on. `throttle/mod.rs` explains how.
    ///
    /// # Errors
    /// [`TrackError::NoKernelFaults`] and others where it can't be done; nothing has changed then.
    pub fn throttle(&mut self, pages_per_s: Option<f64>) -> Result<(), TrackError> {
        match (&mut self.throttle, pages_per_s) {
            (None, None) => {}
            (Some(throttle), limit) => throttle.set_limit(limit),
            (absent @ None, limit) => {
                let throttle = Throttle::new(&self.tracker_socket, self.pid, &self.vcpus, &self.blocks)?;
                absent.insert(throttle).set_limit(limit);
            }
        }
        Ok(())
    }

    /// The guest is about to be stopped: whoever waits goes on within a millisecond, until the next limit.
    pub fn let_stop(&mut self) {
        if let Some(throttle) = &mut self.throttle {
            throttle.let_stop();
        }
    }

    /// Whether memory may change over to the throttle in [`DirtyTracker::take_dirty`]: not while somebody reads pages that earlier
    /// calls gave.
    pub fn let_grow(&mut self, may_grow: bool) {
        if let Some(throttle) = &mut self.throttle {
            throttle.let_grow(may_grow);
        }
    }

    /// The memory that changed over to the throttle in the last [`DirtyTracker::take_dirty`], of its block.
    pub fn changed_over(&self) -> &[PageRange] {
        self.throttle.as_ref().map_or(&[], Throttle::changed_over)
    }

    /// What slowing it has done so far.
    pub fn throttle_figures(&self) -> ThrottleFigures {
        self.throttle.as_ref().map(Throttle::figures).unwrap_or_default()
    }

    /// The process that is tracked.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn block(&self, block: usize, within: PageRange) -> Result<&Block, TrackError> {
        match self.blocks.get(block) {
            Some(found) if within.end() <= found.pages.end() => Ok(found),
            _ => Err(TrackError::OutOfBounds { block, range: within }),
        }
    }

    /// A process that has ended has no page tables, and so nothing dirty. To be asked *after* a scan: an address space
    /// that is alive now was so during the scan.
    fn check_alive(&self) -> Result<(), TrackError> {
        self.throttle.as_ref().map_or(Ok(()), Throttle::check)?;
        match self.userfaultfd.is_alive(self.untracked_address) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TrackError::ProcessGone { pid: self.pid }),
            Err(errno) => Err(io_or_gone("ask for the address space", self.pid, errno)),
        }
    }
}

impl Drop for DirtyTracker {
    fn drop(&mut self) {
        // First: what it has is not the tracking's to unregister.
        self.throttle = None;
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            // Closing the userfaultfd does it too, and is all that is left where this fails.
            let _ = self.userfaultfd.unregister(mapping.address, mapping.count * PAGE_SIZE);
        }
    }
}

/// Whether this kernel can track dirty pages at all: Linux 6.7 or later, with userfaultfd and pages of 4 KiB. Tried out,
/// not read off the version, as distributions backport.
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

/// The running kernel has not what `missing` names.
fn kernel_too_old(missing: &'static str) -> TrackError {
    let found = rustix::system::uname();
    TrackError::KernelTooOld { found: format!("Linux {}", found.release().to_string_lossy()), missing }
}

pub(crate) fn io_or_gone(what: &'static str, pid: i32, errno: rustix::io::Errno) -> TrackError {
    match errno {
        rustix::io::Errno::SRCH => TrackError::ProcessGone { pid },
        _ => TrackError::Io { what, pid, source: errno.into() },
    }
}

/// /dev/userfaultfd, where this process may open it.
fn open_device() -> Result<OwnedFd, rustix::io::Errno> {
    rustix::fs::open(
        "/dev/userfaultfd",
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
}

#[cfg(test)]
mod tests {
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
