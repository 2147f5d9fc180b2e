//! # On faults of a guest that lacks pages
//!
//! A guest can run before all of its memory has arrived: a thread that accesses a missing page
//! waits until the page is there. For a shared mapping, userfaultfd offers this in two ways, and
//! the engine registers for both. An access to a page that the file does not hold is a *missing*
//! fault. An access to a page that the file holds, but that is not mapped at that address yet, is a
//! *minor* fault.
//!
//! QEMU at the destination has mapped almost none of the guest's memory before the guest runs. So
//! memory comes under control without being removed from the file. The agent writes missing pages
//! into the file through its own mapping, over stale bytes if there are any. No processor sees a
//! half-written page, because none has the page mapped until the agent maps it ([`PageIn::show`],
//! `UFFDIO_CONTINUE`).
//!
//! The alternative is to punch holes where memory is stale. It costs a system call per run of pages
//! while the guest is paused, and it fails silently if a huge page cannot be split.
//!
//! ## Watch only what is necessary
//!
//! In watched memory each page causes a wait at its first access, whether it is missing or not, and
//! is mapped individually. So the engine watches only chunks that have a missing page
//! ([`PageIn::watch`]), and each only while it has one ([`PageIn::release`]). The rest of the
//! guest's memory runs at native speed from the first moment, with huge pages. For the kernel,
//! neighbouring watched chunks are one mapping. In the worst case, when every other chunk is
//! watched, QEMU has one more mapping per chunk, out of `vm.max_map_count` (65530), at 4 us each.
//!
//! ## Who keeps the faults waiting
//!
//! A userfaultfd ends when no process has it open any more. All waiting threads then continue with
//! what the file holds: stale bytes. The death of an agent must not cause that. So the library
//! keeps a copy of the userfaultfd inside QEMU. Dropping a [`PageIn`] closes only the agent's copy:
//! watched memory stays watched, waiting threads go on waiting, and new accesses to it wait too.
//! [`PageIn::attach_again`] obtains the copy. The kernel reports an access once, perhaps to an
//! agent that has died since. So all waiting threads are made to retry: they fault again, and the
//! kernel reports them again. [`PageIn::end`] has the copy closed. The next [`PageIn::attach`] does
//! too, because the library then keeps another one.
//!
//! ## The order
//!
//! 1. **Watch, then run.** A chunk with a missing page is watched before the guest runs. From then
//!    on its bytes may arrive in the file at any time.
//! 2. **Watch, then query what is mapped.** [`PageIn::mapped`] returns the pages that QEMU has
//!    mapped already: its firmware was copied there, and a huge page is mapped as a whole. Watching
//!    unmaps nothing, except a huge page that the boundary of the watched range cuts (Linux 6.18).
//!    Mapped pages that are missing must arrive before the guest runs, because no access would wait
//!    for them.
//! 3. **Write, then show.** A page that was shown belongs to the guest and is never written again.
//! 4. **Show every page that is accessed, also if it was never missing.** In watched memory the
//!    first access to a page that was present from the start waits. So does the access to a page
//!    that the guest gave up (a balloon), and to one that the kernel unmapped to swap it out,
//!    whether it was shown before or not.
//! 5. **All present, then release.** An access to a page that is being released is either woken or
//!    does not begin to wait: unregistering prevents new faults, and waking comes after it.
//! 6. **Release all, then end.**

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::TrackError;
use crate::pages::{PAGE_SIZE, PageRange, normalise};
use crate::region::Region;
use crate::tracking::kernel::io_or_gone;
use crate::tracking::maps::{BlockMappings, Mapping};
use crate::tracking::pagemap::{EMPTY_RUN, Pagemap};
use crate::tracking::uffd::{Fault, Userfaultfd};
use crate::tracking::{find_blocks, library, open_pagemap};

/// Most runs of pages that one scan may return.
const RUNS_A_SCAN: usize = 1 << 10;

/// Memory of a QEMU whose guest runs while pages are missing. Blocks are numbered in the order of
/// the regions given to [`PageIn::attach`]. Several threads may use it at once.
///
/// Dropping it releases no waiting thread. Watched memory stays watched, through the copy of the
/// userfaultfd that the library in QEMU keeps, until the next [`PageIn::attach_again`]. To end it
/// call [`PageIn::end`], also if the migration fails before its guest has run.
pub struct PageIn {
    tracker_socket: PathBuf,
    pid: i32,
    userfaultfd: Userfaultfd,
    pagemap: Pagemap,
    blocks: Vec<BlockMappings>,
}

/// Access that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The page's block.
    pub block: usize,
    /// The page's number in the block.
    pub page: u64,
    /// ID of the waiting thread.
    pub thread: u32,
}

impl PageIn {
    /// Prepares to watch the mappings of `regions` in process `pid`, with the library that listens
    /// at `tracker_socket`. Nothing is watched yet. From now on the library keeps a copy of the
    /// userfaultfd. It replaces the copy of an earlier page-in and thereby releases that one's
    /// memory.
    ///
    /// # Errors
    /// As [`crate::DirtyTracker::attach`], [`TrackError::NoKernelFaults`] and
    /// [`TrackError::LibraryTooOld`]. QEMU is then unchanged.
    pub fn attach(
        tracker_socket: &Path,
        pid: i32,
        regions: &[Arc<Region>],
    ) -> Result<PageIn, TrackError> {
        let request = library::request_kept_userfaultfd;
        let (page_in, handles_kernel) = PageIn::find(tracker_socket, pid, regions, request)?;
        page_in.try_out(handles_kernel, regions).inspect_err(|_| {
            // The first error says more. What remains in QEMU governs nothing.
            let _ = library::drop_kept(tracker_socket);
        })?;
        Ok(page_in)
    }

    /// Resumes the page-in of an agent that died or was restarted: watched memory is still watched.
    /// [`PageIn::accesses`] reports the accesses that wait, including those reported to the other
    /// agent.
    ///
    /// # Errors
    /// As [`PageIn::attach`], and [`TrackError::NothingKept`] if the library has no userfaultfd:
    /// nothing is watched then.
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
            // The other agent may have died before it enabled the features.
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

    /// Registers everything for a moment, so that an obstacle shows now and not while the guest is
    /// paused.
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

    /// Watches pages of `block`: from the return on, every access to one that is not mapped yet
    /// waits. Pages that are watched already stay watched. The call is meant for chunks of 2 MiB or
    /// more, in any number.
    ///
    /// # Errors
    /// [`TrackError::TooManyMappings`] if the chunks are too scattered,
    /// [`TrackError::ProcessGone`], and others. Some of the pages may be watched then.
    pub fn watch(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| self.register(address, len_bytes))
    }

    /// Stops watching pages of `block` and wakes the threads that wait for them: from now on the
    /// process sees what the file holds. Pages that are not watched stay so.
    ///
    /// If a stretch in the middle cannot be released, because the kernel allows QEMU no more
    /// mappings, it stays watched until [`PageIn::end`]. Accesses to it are reported and must be
    /// shown as before.
    ///
    /// # Errors
    /// [`TrackError::ProcessGone`], and others.
    pub fn release(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| {
            match self.unregister(address, len_bytes) {
                Err(TrackError::TooManyMappings { .. }) => self.wake(address, len_bytes),
                result => result,
            }
        })
    }

    /// Releases everything, and has the library close its copy. Dropping the value releases what
    /// could not be released here.
    ///
    /// # Errors
    /// [`TrackError::ProcessGone`], and others if memory may still be watched or the library keeps
    /// its copy.
    pub fn end(&self) -> Result<(), TrackError> {
        let released = self
            .mappings()
            .map(|mapping| self.unregister(mapping.address, mapping.count * PAGE_SIZE))
            .fold(Ok(()), Result::and);
        if let Err(gone @ TrackError::ProcessGone { .. }) = released {
            return Err(gone);
        }
        // This descriptor is closed when the value is dropped. With the last copy closed, the
        // kernel releases whatever is left.
        library::drop_kept(&self.tracker_socket).map_err(|kept| released.err().unwrap_or(kept))
    }

    /// Returns the pages of `block` within `within` that the process has mapped, as a normal list.
    /// Accesses to them never wait, watched or not.
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
                    mapped.extend(
                        found.map(|run| PageRange::between(page(run.start), page(run.end))),
                    );
                    at = scanned.end.max(at + PAGE_SIZE);
                }
            }
        }
        normalise(&mut mapped);
        // A process that has ended has nothing mapped, so check this after the scan.
        self.check_alive()?;
        Ok(mapped)
    }

    /// Appends the accesses that have begun to wait since the last call. Returns at once;
    /// [`PageIn::as_fd`] is readable when there are any.
    pub fn accesses(&self, out: &mut Vec<Access>) -> Result<(), TrackError> {
        let mut faults = Vec::new();
        self.userfaultfd
            .read_faults(&mut faults)
            .map_err(|errno| io_or_gone("read the accesses", self.pid, errno))?;
        if faults.is_empty() {
            // In a process that has ended no thread waits.
            return self.check_alive();
        }
        out.extend(faults.into_iter().filter_map(|fault| self.access_of(fault)));
        Ok(())
    }

    /// Makes pages available to the process whose bytes are in place: maps them wherever the
    /// process has them, and wakes the threads that wait for them. Pages that the file does not
    /// hold read as zero. Pages that are already mapped, and pages that are not or no longer
    /// watched, stay unchanged; they are accessible anyway.
    pub fn show(&self, block: usize, pages: PageRange) -> Result<(), TrackError> {
        self.each_stretch(block, pages, |address, len_bytes| {
            self.map(address, len_bytes).map_err(|errno| io_or_gone("map the RAM", self.pid, errno))
        })
    }

    /// Returns the descriptor that is readable when accesses wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.as_fd()
    }

    /// Calls `act` with address and length, in bytes, of every mapping of the pages in the process.
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
            // This kind of file can be registered, so another kind of mapping is at this address in
            // the process.
            Errno::INVAL => TrackError::WrongProcess { pid: self.pid },
            errno => self.refused("register the RAM", errno),
        })
    }

    fn unregister(&self, address: u64, len_bytes: u64) -> Result<(), TrackError> {
        self.userfaultfd
            .unregister(address, len_bytes)
            .map_err(|errno| self.refused("unregister the RAM", errno))?;
        // Some kernels wake before they unregister. A thread that begins to wait in between would
        // wait forever.
        self.wake(address, len_bytes)
    }

    /// Interprets the kernel's error on registering or unregistering: `ENOMEM` means that the
    /// process has ended, or that it has too many mappings.
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

    /// Checks that the process has not ended. Nothing else reports that: its memory is unmapped,
    /// and no access occurs.
    fn check_alive(&self) -> Result<(), TrackError> {
        // None of the memory is registered for write protection, so the request changes nothing.
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
                // Not in the file: map a page of zeros, unless the page arrives in the file at this
                // moment.
                Err(Errno::FAULT) => match self.userfaultfd.map_zeros(at, PAGE_SIZE) {
                    // The page has arrived in the file: try again.
                    Err(Errno::EXIST) => Ok(0),
                    other => other,
                },
                other => other,
            };
            at += match mapped {
                Ok(bytes) => bytes,
                // Part of the range is not watched, or is another mapping: go on in smaller steps.
                Err(Errno::NOENT) if len_bytes > PAGE_SIZE => {
                    most_bytes = (len_bytes / PAGE_SIZE).div_ceil(2) * PAGE_SIZE;
                    0
                }
                Err(Errno::EXIST | Errno::NOENT) => {
                    // A thread that accessed the page just before it was mapped or released still
                    // waits.
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
        let end =
            |block: &BlockMappings| block.segments.last().map_or(0, |segment| segment.pages.end());
        match self.blocks.get(block) {
            Some(found) if within.end() <= end(found) => Ok(found),
            _ => Err(TrackError::OutOfBounds { block, range: within }),
        }
    }
}
