//! One RAM block of a guest: a file on tmpfs that QEMU maps shared and that the agent reads and
//! writes.
//!
//! The bytes belong to the guest, which changes them at any moment. So this module never hands out
//! a reference to them. The kernel copies bytes in and out (`pread`, `pwrite`, `recv` into the
//! mapping, `sendmsg` from it). A full or truncated file is therefore an error and not a SIGBUS.
//! Only the search for zero pages reads the mapping itself. Restrict it to pages that hold data
//! ([`Region::data_ranges`]): reading a hole through a shared mapping of tmpfs allocates the page.
//!
//! The tracker does not see the agent's own writes (see [`crate::tracking`]). Write only memory
//! that is not tracked, which is the destination's RAM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::ptr;

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::RamError;
use crate::pages::{PAGE_SIZE, PageRange, push_merged};
use crate::ramdir::TMPFS_MAGIC;
use crate::zero::is_zero_page;

/// One RAM block: a file in the [`crate::RamDir`], mapped shared by QEMU and by this process.
/// Dropping it unmaps the file, and the file remains. `transfer.rs` has the copies out of it and
/// into it.
#[derive(Debug)]
pub struct Region {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    base: *mut u8,
    len: usize,
    size_bytes: u64,
    file_id: (u64, u64),
    /// The last run of data that was found. Finding its end costs a look at each of its pages.
    data: Mutex<PageRange>,
}

// SAFETY: the mapping is valid until it is dropped, by whichever thread. Its bytes are accessed
// only through raw pointers and system calls, which threads may do concurrently: a torn read of
// guest memory is possible with one thread as well.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates the file with `size_bytes` (a multiple of [`PAGE_SIZE`]). Only its owner may read
    /// and write it (`owner`: uid and gid of QEMU, if they differ from the agent's). All pages are
    /// holes, which read as zero.
    ///
    /// # Errors
    /// [`RamError::Exists`] if the file exists already. No file remains after an error.
    pub fn create(
        path: &Path,
        size_bytes: u64,
        owner: Option<(u32, u32)>,
    ) -> Result<Region, RamError> {
        check_size(path, size_bytes)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(path)
            .map_err(|source| match source.kind() {
                io::ErrorKind::AlreadyExists => RamError::Exists { path: path.to_owned() },
                _ => RamError::io("create the RAM file", path, source),
            })?;
        let undo = |error| {
            // The file was created above; if it cannot be removed, the first error says more.
            let _ = std::fs::remove_file(path);
            error
        };
        file.set_len(size_bytes)
            .map_err(|source| undo(RamError::io("size the RAM file", path, source)))?;
        if let Some((uid, gid)) = owner {
            fchown(&file, Some(uid), Some(gid)).map_err(|source| {
                undo(RamError::io("give QEMU's user the RAM file", path, source))
            })?;
        }
        Region::map(file, path, size_bytes).map_err(undo)
    }

    /// Opens a file that [`Region::create`] made, in this process or another.
    pub fn open(path: &Path) -> Result<Region, RamError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(path)
            .map_err(|source| RamError::io("open the RAM file", path, source))?;
        let size_bytes = file
            .metadata()
            .map_err(|source| RamError::io("look at the RAM file", path, source))?
            .len();
        check_size(path, size_bytes)?;
        Region::map(file, path, size_bytes)
    }

    fn map(file: File, path: &Path, size_bytes: u64) -> Result<Region, RamError> {
        let failed = |source| RamError::io("map the RAM file", path, source);
        let metadata = file.metadata().map_err(failed)?;
        let len = usize::try_from(size_bytes).map_err(|_| failed(Errno::NOMEM.into()))?;
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(|errno| failed(errno.into()))?;
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // Guest memory must be neither in a core dump of the agent nor in its children. A
            // failure of the advice affects nothing else. SAFETY: the range is the mapping just
            // made; neither advice changes its bytes.
            let _ = unsafe { rustix::mm::madvise(base, len, advice) };
        }
        Ok(Region {
            file,
            path: path.to_owned(),
            base: base.cast(),
            len,
            size_bytes,
            file_id: (metadata.dev(), metadata.ino()),
            data: Mutex::new(PageRange::new(0, 0)),
        })
    }

    /// Returns the block's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the block's size in pages.
    pub fn pages(&self) -> u64 {
        self.size_bytes / PAGE_SIZE
    }

    /// Returns the run of all pages.
    pub fn all_pages(&self) -> PageRange {
        PageRange::new(0, self.pages())
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the file's device and inode number, which identify its mappings in /proc/PID/maps.
    pub fn file_id(&self) -> (u64, u64) {
        self.file_id
    }

    /// Allocates memory for the pages, so that writing them later is faster and cannot fail for
    /// lack of memory.
    ///
    /// # Errors
    /// [`RamError::NoSpace`] if the host has not enough memory.
    pub fn allocate(&self, range: PageRange) -> Result<(), RamError> {
        self.check(range)?;
        if range.is_empty() {
            return Ok(());
        }
        loop {
            match rustix::fs::fallocate(
                &self.file,
                FallocateFlags::empty(),
                range.offset_bytes(),
                range.len_bytes(),
            ) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC | Errno::NOMEM) => {
                    return Err(RamError::NoSpace {
                        path: self.path.clone(),
                        bytes: range.len_bytes(),
                    });
                }
                Err(errno) => return Err(RamError::io("allocate memory for", &self.path, errno)),
            }
        }
    }

    /// Appends to `out` the runs of `within` that may hold data other than zeros: everything that
    /// was ever written. The rest, holes and pages that were allocated but never touched, is known
    /// to be zero without reading it. A page that the guest touches for the first time during the
    /// call may be absent from the result; the tracker then reports it as dirty.
    pub fn data_ranges(&self, within: PageRange, out: &mut Vec<PageRange>) -> Result<(), RamError> {
        self.check(within)?;
        let floor = out.len();
        let mut at = within.first;
        while at < within.end() {
            let Some(run) = self.data_at_or_after(at, within.end())? else { break };
            push_merged(out, floor, run.intersect(within));
            // The hole may have been filled since, so make sure to advance.
            at = run.end().max(at + 1);
        }
        Ok(())
    }

    /// Returns the run of data that contains `page`, or the next one that begins before `end`.
    ///
    /// A page that held data once counts as data from then on. The kernel has no bound for its
    /// search for a hole, and goes through a run page by page. Starting it anew at each 2 MiB of a
    /// long run would be quadratic (34 s for 3 GiB).
    fn data_at_or_after(&self, page: u64, end: u64) -> Result<Option<PageRange>, RamError> {
        let failed = |errno| RamError::io("look for data in", &self.path, errno);
        let known = *self.data.lock();
        if (known.first..known.end()).contains(&page) {
            return Ok(Some(known));
        }
        let Some(data) = self.next_data(page)?.filter(|data| *data < end) else { return Ok(None) };
        let hole =
            rustix::fs::seek(&self.file, SeekFrom::Hole(data * PAGE_SIZE)).map_err(failed)?;
        let run = PageRange::between(data, hole.div_ceil(PAGE_SIZE));
        *self.data.lock() = run;
        Ok(Some(run))
    }

    /// Returns the first page from `page` on that is not a hole, or `None` if only holes follow up
    /// to the end of the block.
    pub(crate) fn next_data(&self, page: u64) -> Result<Option<u64>, RamError> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(page * PAGE_SIZE)) {
            Ok(data) => Ok(Some(data / PAGE_SIZE)),
            // No data from here to the end of the file.
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(RamError::io("look for data in", &self.path, errno)),
        }
    }

    /// Appends to `out` the runs of `within` that hold data other than zeros. It reads the pages
    /// that [`Region::data_ranges`] finds.
    pub fn nonzero_ranges(
        &self,
        within: PageRange,
        out: &mut Vec<PageRange>,
    ) -> Result<(), RamError> {
        let mut data = Vec::new();
        self.data_ranges(within, &mut data)?;
        let floor = out.len();
        for page in data.iter().flat_map(|run| run.first..run.end()) {
            if !self.is_zero(page) {
                push_merged(out, floor, PageRange::new(page, 1));
            }
        }
        Ok(())
    }

    /// Returns whether the page holds only zeros at this moment. A hole is allocated by the read. A
    /// page outside the block is not zero.
    pub fn is_zero(&self, page: u64) -> bool {
        if page >= self.pages() {
            return false;
        }
        // SAFETY: the page lies within the mapping, which starts at a page boundary.
        unsafe { is_zero_page(self.address(page * PAGE_SIZE).cast()) }
    }

    /// Returns whether all of the pages hold only zeros; see [`Region::is_zero`].
    pub fn is_range_zero(&self, range: PageRange) -> bool {
        (range.first..range.end()).all(|page| self.is_zero(page))
    }

    /// Copies bytes of the block, from `offset_bytes` on, into `to`. A hole reads as zeros and
    /// stays a hole.
    pub fn copy_out(&self, offset_bytes: u64, to: &mut [u8]) -> Result<(), RamError> {
        self.check_bytes(offset_bytes, to.len() as u64)?;
        self.file
            .read_exact_at(to, offset_bytes)
            .map_err(|source| RamError::io("read guest memory in", &self.path, source))
    }

    /// Returns whether the file is on a tmpfs, the only file system besides hugetlbfs whose
    /// mappings userfaultfd protects.
    pub(crate) fn is_on_tmpfs(&self) -> bool {
        rustix::fs::fstatfs(&self.file).is_ok_and(|stat| stat.f_type.cast_unsigned() == TMPFS_MAGIC)
    }

    /// Returns the address of the byte at `offset_bytes` in this process. It is valid for system
    /// calls and raw reads while the region lives.
    pub(crate) fn address(&self, offset_bytes: u64) -> *mut u8 {
        debug_assert!(offset_bytes <= self.size_bytes);
        #[allow(
            clippy::cast_possible_truncation,
            reason = "callers have checked the offset, and a mapping of that size exists"
        )]
        self.base.wrapping_add(offset_bytes as usize)
    }

    /// Refuses pages outside the block.
    pub(crate) fn check(&self, range: PageRange) -> Result<(), RamError> {
        self.check_bytes(range.offset_bytes(), range.len_bytes())
    }

    pub(crate) fn check_bytes(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), RamError> {
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        if end_bytes > self.size_bytes {
            return Err(RamError::OutOfBounds {
                path: self.path.clone(),
                offset_bytes,
                end_bytes,
                size_bytes: self.size_bytes,
            });
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping with this length, and no pointer into it outlives the
        // region.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

fn check_size(path: &Path, size_bytes: u64) -> Result<(), RamError> {
    if size_bytes == 0
        || !size_bytes.is_multiple_of(PAGE_SIZE)
        || i64::try_from(size_bytes).is_err()
    {
        return Err(RamError::Size { path: path.to_owned(), size_bytes });
    }
    Ok(())
}
