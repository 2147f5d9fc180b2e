//! # On page-in
//!
//! A guest can run before all of its memory is there: whoever comes to a page that is not waits until it is. The kernel can
//! do that for a shared mapping by userfaultfd in two ways, and both are registered for. An access to a page that the file does
//! not hold is a *missing* fault. An access to one that the file holds and that is not mapped at that address yet is a *minor*
//! fault. QEMU at the destination has mapped next to nothing of the guest's memory before the guest runs. So memory comes
//! under control without being taken away: what is missing is written into the file, over stale bytes and all, by the agent's
//! own mapping, and no processor sees a page that is half written, as none has it mapped until the agent says so
//! ([`PageIn::show`], `UFFDIO_CONTINUE`).
//!
//! Punching holes for what is stale, the other way, costs a system call a run of pages while the guest stands still, and fails
//! silently where a huge page can't be split.
//!
//! ## Only what must be
//!
//! In memory that is watched each page waits for a first time, there or not, and is mapped by itself. So only those chunks are
//! watched that have a missing page ([`PageIn::watch`]), and each no longer than it has one ([`PageIn::release`]). The rest of
//! the guest's memory runs at native speed from the first moment, huge pages and all. Neighbours are one mapping to the
//! kernel; at the worst, where every other chunk is watched, QEMU has a mapping more a chunk, of `vm.max_map_count` (65530), at
//! 4 us each.
//!
//! ## Who keeps the waiting
//!
//! A userfaultfd ends when nobody has it open any more, and then everybody goes on with what the file holds: stale bytes.
//! An agent that dies must not do that to a guest. So the library keeps a copy inside QEMU. Dropping a [`PageIn`] closes the
//! agent's copy and nothing else: what is watched stays so, who waits goes on waiting, and who comes begins to.
//! [`PageIn::attach_again`] gets the copy. The kernel tells an access once, perhaps to an agent that is dead now; so all who wait
//! are sent to try again, miss their page again, and are told. [`PageIn::end`] has the copy closed; so has the next
//! [`PageIn::attach`], for which the library keeps another.
//!
//! ## The order
//!
//! 1. **Watch, then run.** Where a page is missing the chunk is watched before the guest runs. From then on its bytes may come
//!    into the file at any time.
//! 2. **Watch, then ask what is mapped.** [`PageIn::mapped`] tells the pages that QEMU has mapped all the same: its firmware was
//!    copied there, and a huge page is mapped as one. Watching unmaps nothing, but for a huge page that the border of what is
//!    watched cuts (Linux 6.18). Those of them that are missing must be there before the guest runs: nobody would wait for
//!    them.
//! 3. **Write, then show.** A page that is shown is the guest's: it is never written again.
//! 4. **Show whoever comes, what is there as well.** In watched memory pages that were there from the start wait for a first
//!    time. So does one that the guest gave up (a balloon), and one that the kernel has unmapped to swap it: shown before or not.
//! 5. **All there, then release.** Who comes to a page that is being released either is woken or does not begin to wait:
//!    unregistering keeps out new faults, and waking comes after it.
//! 6. **Release all, then end.**

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, normalise};
use crate::region::Region;
use crate::tracking::maps::{BlockMappings, Mapping};
use crate::tracking::pagemap::{EMPTY_RUN, Pagemap};
use crate::tracking::uffd::{Fault, Userfaultfd};
use crate::tracking::{find_blocks, io_or_gone, library, open_pagemap};

/// How many runs of pages one scan may return.
const RUNS_A_SCAN: usize = 1 << 10;

/// The memory of a QEMU whose guest runs while pages are missing. Blocks are numbered as the regions were given to
/// [`PageIn::attach`]. Several threads may use it at once.
///
/// Dropping it lets nobody go on: what is watched stays so, by the copy of the userfaultfd that the library in QEMU keeps, until
/// the next [`PageIn::attach_again`]. [`PageIn::end`] ends it, also where the migration fails before its guest has run.
pub struct PageIn {
    tracker_socket: PathBuf,
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
    /// Prepares to watch mappings that process `pid` has of `regions`, by the library that listens at `tracker_socket`. Nothing
    /// is watched yet. The library keeps a copy of the userfaultfd from now on, in place of that of an earlier page-in, whose
    /// memory is released by that.
    ///
    /// # Errors
    /// As [`crate::DirtyTracker::attach`], [`TrackError::NoKernelFaults`] and [`TrackError::LibraryTooOld`]; QEMU is then as it
    /// was.
    pub fn attach(tracker_socket: &Path, pid: i32, regions: &[Arc<Region>]) -> Result<PageIn, TrackError> {
        let request = library::request_kept_userfaultfd;
        let (page_in, handles_kernel) = PageIn::find(tracker_socket, pid, regions, request)?;
        page_in.try_out(handles_kernel, regions).inspect_err(|_| {
            // The first error says more. What is left in QEMU governs nothing.
            let _ = library::drop_kept(tracker_socket);
        })?;
        Ok(page_in)
    }

    /// Goes on where an agent that died, or was started anew, has left off: what is watched still is. Accesses that wait are told
    /// by [`PageIn::accesses`], those that the other agent was told of included.
    ///
    /// # Errors
    /// As [`PageIn::attach`], and [`TrackError::NothingKept`] where the library has no userfaultfd: nothing is watched then.
    pub fn attach_again(
        tracker_socket: &Path,
        pid: i32,
        regions: &[Arc<Region>],
    ) -> Result<PageIn, TrackError> {
        let (page_in, handles_kernel) =
            PageIn::find(tracker_socket, pid, regions, library::kept_userfaultfd)?;
        if !handles_kernel {
            return Err(TrackError::NoKernelFaults);
        }
        match page_in.userfaultfd.enable_page_in_again() {
            // The other agent may have died before it did.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(io_or_gone("enable the userfaultfd", pid, errno)),
        }
        for mapping in page_in.mappings() {
            page_in.wake(mapping.address, mapping.count * PAGE_SIZE)?;
        }
        Ok(page_in)
    }

    fn find(
        tracker_socket: &Path,
        pid: i32,
        regions: &[Arc<Region>],
        userfaultfd: impl FnOnce(&Path) -> Result<(OwnedFd, bool), TrackError>,
    ) -> Result<(PageIn, bool), TrackError> {
        let pagemap = open_pagemap(pid)?;
        let blocks = find_blocks(pid, regions)?;
        let (userfaultfd, handles_kernel) = userfaultfd(tracker_socket)?;
        let userfaultfd = Userfaultfd::new(userfaultfd);
        let tracker_socket = tracker_socket.to_owned();
        Ok((PageIn { tracker_socket, pid, userfaultfd, pagemap, blocks }, handles_kernel))
    }

    /// Registers everything for a moment: what can't be done shows now, and not when the guest stands still.
    fn try_out(&self, handles_kernel: bool, regions: &[Arc<Region>]) -> Result<(), TrackError> {
        if !handles_kernel {
            return Err(TrackError::NoKernelFaults);
        }
        self.userfaultfd.enable_page_in()?;
        for (block, region) in self.blocks.iter().zip(regions) {
            for mapping in &block.mappings {
                let (address, len_bytes) = (mapping.address, mapping.count * PAGE_SIZE);
                self.register(address, len_bytes).map_err(|error| match error {
                    TrackError::Io { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => {
                        TrackError::AlreadyTracked { path: region.path().to_owned() }
                    }
                    error => error,
                })?;
                self.unregister(address, len_bytes)?;
            }
        }
        Ok(())
    }

    /// Watches pages of `block`: from the return on every access to one that is not mapped yet waits. Those that are watched
    /// already stay so. Meant for chunks of 2 MiB or more, as many as it takes.
    ///
    /// # Errors
    /// [`TrackError::TooManyMappings`] where chunks lie too scattered, [`TrackError::ProcessGone`], and others; some of the pages may
    /// be watched then.
    pub fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| self.register(address, len_bytes))
    }

    /// Watches pages of `block` no more, and goes on with whoever waits for them: from now on the process has what the file holds.
    /// Those that are not watched stay so.
    ///
    /// Where a stretch in the middle can't be released, as the kernel allows QEMU no more mappings, it stays watched until
    /// [`PageIn::end`]: accesses to it are told, and to be shown, as before.
    ///
    /// # Errors
    /// [`TrackError::ProcessGone`], and others.
    pub fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| match self.unregister(address, len_bytes) {
            Err(TrackError::TooManyMappings { .. }) => self.wake(address, len_bytes),
            result => result,
        })
    }

    /// Releases everything, and has the library close its copy. What could not be released is when this is dropped.
    ///
    /// # Errors
    /// [`TrackError::ProcessGone`], and where memory may still be watched, or the library keeps its copy.
    pub fn end(&self) -> Result<(), TrackError> {
        let released = self
            .mappings()
            .map(|mapping| self.unregister(mapping.address, mapping.count * PAGE_SIZE))
            .fold(Ok(()), Result::and);
        if let Err(gone @ TrackError::ProcessGone { .. }) = released {
            return Err(gone);
        }
        // With the last copy closed, which this one is when it is dropped, the kernel releases whatever is left.
        library::drop_kept(&self.tracker_socket).map_err(|kept| released.err().unwrap_or(kept))
    }

    /// The pages of `block` within `within` that the process has mapped, as a normal list: accesses to them wait for nothing,
    /// watched or not.
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
        // One that has ended has nothing mapped. To be asked after the scan.
        self.check_alive()?;
        Ok(mapped)
    }

    /// Appends the accesses that have begun to wait since the last call. Returns at once; [`PageIn::as_fd`] is readable when there
    /// are any.
    pub fn accesses(&self, out: &mut Vec<Access>) -> Result<(), TrackError> {
        let mut faults = Vec::new();
        self.userfaultfd
            .read_faults(&mut faults)
            .map_err(|errno| io_or_gone("read the accesses", self.pid, errno))?;
        if faults.is_empty() {
            // In one that has ended nobody waits.
            return self.check_alive();
        }
        out.extend(faults.into_iter().filter_map(|fault| self.access_of(fault)));
        Ok(())
    }

    /// Lets the process have pages whose bytes are there: maps them, wherever it has them, and goes on with whoever waits for
    /// them. Pages that the file does not hold read as zero. Those that are mapped already stay as they are, and those that are
    /// not watched (any more) too: whoever comes to them has them.
    pub fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| {
            self.map(address, len_bytes).map_err(|errno| io_or_gone("map the RAM", self.pid, errno))
        })
    }

    /// Readable when accesses wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }

    /// Calls `act` with address and length, in bytes, of all that the process has of the pages.
    fn each_stretch(
        &self,
        block: usize,
        pages: PageRange,
        act: impl Fn(u64, u64) -> Result<(), TrackError>,
    ) -> Result<(), TrackError> {
        for segment in &self.block(block, pages)?.segments {
            let pages = segment.pages.intersect(pages);
            for address in segment.addresses_of(pages).filter(|_| !pages.is_empty()) {
                act(address, pages.len_bytes())?;
            }
        }
        Ok(())
    }

    fn mappings(&self) -> impl Iterator<Item = &Mapping> {
        self.blocks.iter().flat_map(|block| &block.mappings)
    }

    fn register(&self, address: u64, len_bytes: u64) -> Result<(), TrackError> {
        self.userfaultfd.register_page_in(address, len_bytes).map_err(|errno| match errno {
            // The file is of a kind that can be registered, so what is at this address over there is something else.
            Errno::INVAL => TrackError::WrongProcess { pid: self.pid },
            errno => self.refused("register the RAM", errno),
        })
    }

    fn unregister(&self, address: u64, len_bytes: u64) -> Result<(), TrackError> {
        self.userfaultfd
            .unregister(address, len_bytes)
            .map_err(|errno| self.refused("unregister the RAM", errno))?;
        // Some kernels wake before they unregister, and who begins to wait in between would for ever.
        self.wake(address, len_bytes)
    }

    /// What the kernel means by its answer to registering or unregistering: `ENOMEM` as well where the process has ended as where it
    /// has too many mappings.
    fn refused(&self, what: &'static str, errno: Errno) -> TrackError {
        match (errno, self.check_alive()) {
            (Errno::NOMEM, Ok(())) => TrackError::TooManyMappings { pid: self.pid },
            (Errno::NOMEM, Err(gone)) => gone,
            _ => io_or_gone(what, self.pid, errno),
        }
    }

    fn wake(&self, address: u64, len_bytes: u64) -> Result<(), TrackError> {
        self.userfaultfd
            .wake(address, len_bytes)
            .map_err(|errno| io_or_gone("wake who waits for the RAM", self.pid, errno))
    }

    /// Nothing else tells that a process has ended: its memory is unmapped, and nobody comes to it.
    fn check_alive(&self) -> Result<(), TrackError> {
        // Write protection is not what any of it is registered for, so the question changes nothing.
        let address = self.mappings().map(|mapping| mapping.address).next().unwrap_or(PAGE_SIZE);
        match self.userfaultfd.is_alive(address) {
            Ok(true) => Ok(()),
            Ok(false) => Err(TrackError::ProcessGone { pid: self.pid }),
            Err(errno) => Err(io_or_gone("ask for the address space", self.pid, errno)),
        }
    }

    fn map(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        let (mut at, end) = (address, address + len_bytes);
        let mut most_bytes = len_bytes;
        while at < end {
            let len_bytes = most_bytes.min(end - at);
            let mapped = match self.userfaultfd.map_held(at, len_bytes) {
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
                // Part of it is not watched, or a mapping of its own: in smaller steps.
                Err(Errno::NOENT) if len_bytes > PAGE_SIZE => {
                    most_bytes = (len_bytes / PAGE_SIZE).div_ceil(2) * PAGE_SIZE;
                    0
                }
                Err(Errno::EXIST | Errno::NOENT) => {
                    // Whoever came just before it was mapped, or released, waits all the same.
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
