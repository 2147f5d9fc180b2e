//! `PAGEMAP_SCAN` (linux/fs.h, Linux 6.7): finds pages by their page table entries, and protects
//! them.

use std::ffi::c_void;
use std::os::fd::OwnedFd;

use linux_raw_sys::general::{
    PAGE_IS_PRESENT, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, page_region,
    pm_scan_arg,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};

use super::kernel::kernel_too_old;
use crate::error::TrackError;
use crate::pages::PAGE_SIZE;

/// Action of a scan on the dirty pages that it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// Leaves them dirty. Memory that is not tracked with WP_ASYNC is an error.
    Look,
    /// Leaves them dirty, whatever tracks the memory.
    LookAnywhere,
    /// Protects them, so that the next write is seen again.
    Claim,
}

/// Result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    /// Number of runs filled in.
    pub(crate) runs: usize,
    /// Address up to which the scan came.
    pub(crate) end: u64,
}

/// Open /proc/PID/pagemap. It refers to the address space that it was opened for, whatever becomes
/// of the process.
pub(crate) struct Pagemap {
    file: OwnedFd,
    /// Pages that [`Pagemap::scan`] went over.
    #[cfg(test)]
    pub(super) scanned_pages: std::sync::atomic::AtomicU64,
}

impl Pagemap {
    /// Opens the page map of a process; `self` or a number.
    pub(crate) fn open(process: &str) -> Result<Pagemap, Errno> {
        let path = format!("/proc/{process}/pagemap");
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Pagemap {
            file,
            #[cfg(test)]
            scanned_pages: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// Finds the dirty pages from address `start` to `end`, at most `max_pages` of them (0: no
    /// limit), and fills `runs` with them, ascending and disjoint. Stops when `runs` or the limit
    /// is full.
    ///
    /// With PAGE_IS_WRITTEN as the only category and return mask, the kernel takes its short path.
    /// It tests only the mark, and in doubt (an entry that is empty and has no marker) reports a
    /// page as written.
    ///
    /// # Errors
    /// `EPERM` if a mapping in the range is not registered for WP_ASYNC, except with
    /// [`Scan::LookAnywhere`].
    pub(super) fn scan(
        &self,
        scan: Scan,
        start: u64,
        end: u64,
        max_pages: u64,
        runs: &mut [page_region],
    ) -> Result<Scanned, Errno> {
        let flags = match scan {
            Scan::Look => PM_SCAN_CHECK_WPASYNC,
            Scan::LookAnywhere => 0,
            Scan::Claim => PM_SCAN_CHECK_WPASYNC | PM_SCAN_WP_MATCHING,
        };
        let mut scanned = self.ioctl(PAGE_IS_WRITTEN, flags.into(), start, end, max_pages, runs)?;
        // If one of the kernel's own buffers of 512 runs was full and the rest of the scan fitted
        // into the next, it reports the end of the former (seen on Linux 6.18). The runs that it
        // filled in were scanned, and claimed, nevertheless.
        if let Some(last) = scanned.runs.checked_sub(1).and_then(|last| runs.get(last)) {
            scanned.end = scanned.end.max(last.end);
        }
        #[cfg(test)]
        self.scanned_pages.fetch_add(
            scanned.end.saturating_sub(start) / PAGE_SIZE,
            std::sync::atomic::Ordering::SeqCst,
        );
        Ok(scanned)
    }

    /// Finds the pages that are mapped, whatever governs the memory.
    pub(crate) fn scan_present(
        &self,
        start: u64,
        end: u64,
        runs: &mut [page_region],
    ) -> Result<Scanned, Errno> {
        let scanned = self.ioctl(PAGE_IS_PRESENT, 0, start, end, 0, runs)?;
        let last =
            scanned.runs.checked_sub(1).and_then(|last| runs.get(last)).map_or(0, |last| last.end);
        Ok(Scanned { end: scanned.end.max(last), ..scanned })
    }

    fn ioctl(
        &self,
        category: u32,
        flags: u64,
        start: u64,
        end: u64,
        max_pages: u64,
        runs: &mut [page_region],
    ) -> Result<Scanned, Errno> {
        let request = PagemapScan {
            argument: pm_scan_arg {
                size: size_of::<pm_scan_arg>() as u64,
                flags,
                start,
                end,
                walk_end: 0,
                vec: runs.as_mut_ptr() as u64,
                vec_len: runs.len() as u64,
                max_pages,
                category_inverted: 0,
                category_mask: category.into(),
                category_anyof_mask: 0,
                return_mask: category.into(),
            },
        };
        // SAFETY: the argument is the kernel's structure for this request. `vec` and `vec_len`
        // describe `runs`, which is borrowed for the call, and into which the kernel writes at most
        // `vec_len` elements.
        unsafe { rustix::ioctl::ioctl(&self.file, request) }
    }
}

/// Checks whether the kernel knows `PAGEMAP_SCAN`, by a scan of a page of this process.
pub(super) fn check_kernel() -> Result<(), TrackError> {
    let own = Pagemap::open("self").map_err(|errno| TrackError::Io {
        what: "open the page map",
        pid: rustix::process::getpid().as_raw_nonzero().get(),
        source: errno.into(),
    })?;
    let page = (&raw const own) as u64 & !(PAGE_SIZE - 1);
    let mut run = [EMPTY_RUN];
    own.ioctl(PAGE_IS_WRITTEN, 0, page, page + PAGE_SIZE, 0, &mut run)
        .map(|_| ())
        .map_err(|_| kernel_too_old("PAGEMAP_SCAN"))
}

/// Run to be filled in by the kernel.
pub(crate) const EMPTY_RUN: page_region = page_region { start: 0, end: 0, categories: 0 };

struct PagemapScan {
    argument: pm_scan_arg,
}

// SAFETY: the kernel reads and writes a pm_scan_arg behind the pointer and returns the number of
// runs it filled in.
unsafe impl Ioctl for PagemapScan {
    type Output = Scanned;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read_write::<pm_scan_arg>(b'f', 16)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.argument).cast()
    }

    unsafe fn output_from_ptr(runs: IoctlOutput, argument: *mut c_void) -> Result<Scanned, Errno> {
        // SAFETY: `argument` is what as_ptr gave, and the call has succeeded.
        let argument = unsafe { argument.cast::<pm_scan_arg>().read() };
        Ok(Scanned { runs: usize::try_from(runs).map_err(|_| Errno::IO)?, end: argument.walk_end })
    }
}
