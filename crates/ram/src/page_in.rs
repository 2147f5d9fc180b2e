//! # On page-in
//!
//! A guest can run before all of its memory is there: whoever comes to a page that is not waits until it is. The kernel can
//! do that for a shared mapping by userfaultfd in two ways, and both are registered for. An access to a page that the file does
//! not hold is a *missing* fault. An access to one that the file holds and that is not mapped at that address yet is a *minor*
//! fault. QEMU at the destination has mapped next to nothing of the guest's memory before the guest runs. So all of it is
//! under control without any of it being taken away: what is missing is written into the file, stale bytes and all, by
//! the agent's own mapping, and no processor sees a page that is half written, as none has it mapped until the agent says so
//! ([`PageIn::show`], `UFFDIO_CONTINUE`).
//!
//! Punching holes for what is stale, the other way, costs a system call a run of pages while the guest stands still, and fails
//! silently where a huge page can't be split.
//!
//! ## The order
//!
//! 1. **Register, then ask what is mapped.** [`PageIn::mapped`] tells the pages that QEMU has mapped all the same (its firmware
//!    was copied there, and a huge page is mapped as one). Those of them that are missing must be there before the guest runs:
//!    nobody would wait for them.
//! 2. **Write, then show.** A page that is shown is the guest's: it is never written again.
//! 3. **Show all, then drop.** Dropping lets everybody go on with what the file holds.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, normalise};
use crate::region::Region;
use crate::tracking::maps::BlockMappings;
use crate::tracking::pagemap::{EMPTY_RUN, Pagemap};
use crate::tracking::uffd::{Fault, Userfaultfd};
use crate::tracking::{find_blocks, io_or_gone, library, open_pagemap};

/// How many runs of pages one scan may return.
const RUNS_A_SCAN: usize = 1 << 10;

/// The memory of a QEMU whose guest runs while pages are missing. Blocks are numbered as the regions were given to
/// [`PageIn::attach`]. Dropping it lets everybody go on, with what the file holds.
pub struct PageIn {
    pid: i32,
    userfaultfd: Userfaultfd,
    pagemap: Pagemap,
    blocks: Vec<BlockMappings>,
}

/// An access that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The block that the page is of.
    pub block: usize,
    /// The page.
    pub page: u64,
    /// The thread that waits.
    pub thread: u32,
}

impl PageIn {
    /// Takes control of all mappings that process `pid` has of `regions`, by the library that listens at `tracker_socket`. From
    /// the return on every access to a page that is not mapped yet waits.
    ///
    /// # Errors
    /// As [`crate::DirtyTracker::attach`], and [`TrackError::NoKernelFaults`]; QEMU is then as it was.
    pub fn attach(tracker_socket: &Path, pid: i32, regions: &[Arc<Region>]) -> Result<PageIn, TrackError> {
        let pagemap = open_pagemap(pid)?;
        let blocks = find_blocks(pid, regions)?;
        let (userfaultfd, handles_kernel) = library::request_userfaultfd(tracker_socket)?;
        if !handles_kernel {
            return Err(TrackError::NoKernelFaults);
        }
        let userfaultfd = Userfaultfd::new(userfaultfd);
        userfaultfd.enable_page_in()?;
        // From here on, dropping it undoes what was registered.
        let page_in = PageIn { pid, userfaultfd, pagemap, blocks };
        for (block, region) in page_in.blocks.iter().zip(regions) {
            for mapping in &block.mappings {
                let registered =
                    page_in.userfaultfd.register_page_in(mapping.address, mapping.count * PAGE_SIZE);
                registered.map_err(|errno| match errno {
                    Errno::BUSY => TrackError::AlreadyTracked { path: region.path().to_owned() },
                    Errno::INVAL => TrackError::WrongProcess { pid },
                    _ => io_or_gone("register the RAM", pid, errno),
                })?;
            }
        }
        Ok(page_in)
    }

    /// The pages of `block` within `within` that the process has mapped, as a normal list: accesses to them wait for nothing.
    pub fn mapped(&self, block: usize, within: PageRange) -> Result<Vec<PageRange>, TrackError> {
        let mut runs = vec![EMPTY_RUN; RUNS_A_SCAN];
        let mut mapped = Vec::new();
        for segment in &self.block(block, within)?.segments {
            let pages = segment.pages.intersect(within);
            for start in segment.addresses_of(pages).filter(|_| !pages.is_empty()) {
                let (mut at, end) = (start, start + pages.len_bytes());
                while at < end {
                    let scanned = self
                        .pagemap
                        .scan_present(at, end, &mut runs)
                        .map_err(|errno| io_or_gone("scan the page map", self.pid, errno))?;
                    let page = |address: u64| pages.first + (address - start) / PAGE_SIZE;
                    let found = runs.iter().take(scanned.runs);
                    mapped.extend(found.map(|run| PageRange::between(page(run.start), page(run.end))));
                    at = scanned.end.max(at + PAGE_SIZE);
                }
            }
        }
        normalise(&mut mapped);
        Ok(mapped)
    }

    /// Appends the accesses that have begun to wait since the last call. Returns at once; [`PageIn::as_fd`] is readable when there
    /// are any.
    pub fn accesses(&self, out: &mut Vec<Access>) -> Result<(), TrackError> {
        let mut faults = Vec::new();
        self.userfaultfd
            .read_faults(&mut faults)
            .map_err(|errno| io_or_gone("read the accesses", self.pid, errno))?;
        out.extend(faults.into_iter().filter_map(|fault| self.access_of(fault)));
        Ok(())
    }

    /// Lets the process have pages whose bytes are there: maps them, wherever it has them, and goes on with whoever waits for
    /// them. Pages that the file does not hold read as zero. Those that are mapped already stay as they are.
    pub fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        for segment in &self.block(block, pages)?.segments {
            let pages = segment.pages.intersect(pages);
            for address in segment.addresses_of(pages).filter(|_| !pages.is_empty()) {
                self.map(address, pages.len_bytes())
                    .map_err(|errno| io_or_gone("map the RAM", self.pid, errno))?;
            }
        }
        Ok(())
    }

    /// Readable when accesses wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }

    fn map(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        let (mut at, end) = (address, address + len_bytes);
        while at < end {
            let mapped = match self.userfaultfd.map_held(at, end - at) {
                // Not in the file: a page of zeros, unless it comes into it at this moment.
                Err(Errno::FAULT) => match self.userfaultfd.map_zeros(at, PAGE_SIZE) {
                    // It has come into the file: once more.
                    Err(Errno::EXIST) => Ok(0),
                    other => other,
                },
                other => other,
            };
            at += match mapped {
                Ok(bytes) => bytes,
                Err(Errno::EXIST) => {
                    // Whoever came just before it was mapped waits all the same.
                    self.userfaultfd.wake(at, PAGE_SIZE)?;
                    PAGE_SIZE
                }
                Err(Errno::AGAIN | Errno::INTR) => 0,
                Err(errno) => return Err(errno),
            };
        }
        Ok(())
    }

    fn access_of(&self, fault: Fault) -> Option<Access> {
        let blocks = self.blocks.iter().enumerate();
        let mut found =
            blocks.flat_map(|(block, of)| of.mappings.iter().map(move |mapping| (block, mapping)));
        let (block, mapping) = found.find(|(_, mapping)| {
            (mapping.address..mapping.address + mapping.count * PAGE_SIZE).contains(&fault.address)
        })?;
        let page = mapping.first + (fault.address - mapping.address) / PAGE_SIZE;
        Some(Access { block, page, thread: fault.thread })
    }

    fn block(&self, block: usize, within: PageRange) -> Result<&BlockMappings, TrackError> {
        let end = |block: &BlockMappings| block.segments.last().map_or(0, |segment| segment.pages.end());
        match self.blocks.get(block) {
            Some(found) if within.end() <= end(found) => Ok(found),
            _ => Err(TrackError::OutOfBounds { block, range: within }),
        }
    }
}

impl Drop for PageIn {
    fn drop(&mut self) {
        for mapping in self.blocks.iter().flat_map(|block| &block.mappings) {
            // Closing the userfaultfd does both, and is all that is left where this fails.
            let len_bytes = mapping.count * PAGE_SIZE;
            let _ = self.userfaultfd.unregister(mapping.address, len_bytes);
            let _ = self.userfaultfd.wake(mapping.address, len_bytes);
        }
    }
}
