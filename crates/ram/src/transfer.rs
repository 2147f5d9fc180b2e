//! Guest pages through the mapping: copies out of it and into it, and from sockets by the kernel
//! itself.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use crate::error::RamError;
use crate::pages::{PAGE_SIZE, PageRange, push_merged};
use crate::region::Region;

/// Zeros are written in pieces of this many bytes.
const ZERO_BYTES: usize = 64 << 10;
/// [`ZERO_BYTES`] in pages.
const ZERO_PAGES: u64 = ZERO_BYTES as u64 / PAGE_SIZE;
static ZEROS: [u8; ZERO_BYTES] = [0; ZERO_BYTES];
/// From this size on, a copy through the mapping costs no more than `pwrite`.
const MAPPED_COPY_BYTES: usize = 64 << 10;
/// [`PAGE_SIZE`] as a `usize`, for offsets in buffers.
const PAGE_BYTES: usize = 4096;
const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);

impl Region {
    /// Copies pages that hold data as [`Region::copy_out`] does, in three quarters of the time,
    /// because it makes no system call. A hole is allocated, as by [`Region::is_zero`].
    pub fn copy_data_out(&self, offset_bytes: u64, to: &mut [u8]) -> Result<(), RamError> {
        self.check_bytes(offset_bytes, to.len() as u64)?;
        copy_from_mapping(self, offset_bytes, to);
        Ok(())
    }

    /// Copies `from` into the block, at `offset_bytes`.
    ///
    /// # Errors
    /// [`RamError::NoSpace`] if the pages were not allocated and the host has no memory left.
    pub fn copy_in(&self, offset_bytes: u64, from: &[u8]) -> Result<(), RamError> {
        self.check_bytes(offset_bytes, from.len() as u64)?;
        let write = || match from.len() {
            MAPPED_COPY_BYTES.. if copy_into_mapping(self, offset_bytes, from)? => Ok(()),
            _ => self.file.write_all_at(from, offset_bytes),
        };
        write().map_err(|source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory => {
                RamError::NoSpace { path: self.path.clone(), bytes: from.len() as u64 }
            }
            _ => RamError::io("write guest memory in", &self.path, source),
        })
    }

    /// Makes the pages read as zero. Holes stay holes, and pages that are already zero are not
    /// written. The pages are read through the file and not through the mapping, because a shadow's
    /// file may be emptied meanwhile.
    pub fn zero(&self, range: PageRange) -> Result<(), RamError> {
        self.check(range)?;
        let mut bytes =
            vec![0; usize::try_from(range.len_bytes()).unwrap_or(ZERO_BYTES).min(ZERO_BYTES)];
        let mut at = range.first;
        while at < range.end() {
            // Reading a hole is as fast as searching for it, unless it is long. The end of data is
            // not searched: the kernel would go through all of a run that other threads write to.
            if range.end() - at > ZERO_PAGES {
                let Some(data) = self.next_data(at)?.filter(|data| *data < range.end()) else {
                    break;
                };
                at = data;
            }
            let (piece, _) = PageRange::between(at, range.end()).split(ZERO_PAGES);
            self.zero_piece(
                piece,
                bytes
                    .get_mut(..usize::try_from(piece.len_bytes()).unwrap_or(0))
                    .unwrap_or_default(),
            )?;
            at = piece.end();
        }
        Ok(())
    }

    /// Zeroes a few pages as [`Region::zero`] does; they are read into `bytes`.
    fn zero_piece(&self, piece: PageRange, bytes: &mut [u8]) -> Result<(), RamError> {
        self.copy_out(piece.offset_bytes(), bytes)?;
        if *bytes == ZEROS[..bytes.len()] {
            return Ok(());
        }
        let mut stale = Vec::new();
        for (page, bytes) in (piece.first..).zip(bytes.chunks(PAGE_BYTES)) {
            if *bytes != ZEROS[..bytes.len()] {
                push_merged(&mut stale, 0, PageRange::new(page, 1));
            }
        }
        for run in stale {
            let len = usize::try_from(run.len_bytes()).unwrap_or(ZERO_BYTES);
            self.copy_in(run.offset_bytes(), ZEROS.get(..len).unwrap_or(&ZEROS))?;
        }
        Ok(())
    }

    /// Reads exactly the range's bytes from a blocking stream socket, directly into the block.
    ///
    /// # Errors
    /// `UnexpectedEof` if the stream ends early, `InvalidInput` if the pages are outside the block,
    /// `StorageFull` if the kernel could not store the bytes (pages not allocated, and no memory
    /// left), otherwise the socket's error, including its timeouts. The number of bytes taken is
    /// then unknown, and the stream is unusable.
    pub fn receive(&self, fd: BorrowedFd<'_>, range: PageRange) -> io::Result<()> {
        receive(self, fd, range)
    }
}

fn receive(region: &Region, fd: BorrowedFd<'_>, range: PageRange) -> io::Result<()> {
    region.check(range).map_err(outside)?;
    let len = usize::try_from(range.len_bytes()).map_err(outside)?;
    let base = region.address(range.offset_bytes());
    let mut filled = 0;
    while filled < len {
        // SAFETY: the bytes lie within the region's mapping, which the borrow keeps alive. The
        // kernel writes them, and no reference to them exists in this process.
        let count = unsafe {
            libc::recv(
                fd.as_raw_fd(),
                base.wrapping_add(filled).cast(),
                len - filled,
                libc::MSG_WAITALL,
            )
        };
        match usize::try_from(count) {
            Ok(0) => {
                let message =
                    format!("the stream ended {} bytes before the end of a page run", len - filled);
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
            }
            Ok(count) => filled += count,
            Err(_) => retry_interrupted()?,
        }
    }
    Ok(())
}

/// Copies bytes of the block. The caller has checked that they lie within it.
fn copy_from_mapping(region: &Region, offset_bytes: u64, to: &mut [u8]) {
    // SAFETY: the bytes lie within the region's mapping, which the borrow keeps alive. No reference
    // to them exists in this process, so `to` is elsewhere. Other processes may write them
    // meanwhile; the copy is then of no single moment.
    unsafe { ptr::copy_nonoverlapping(region.address(offset_bytes), to.as_mut_ptr(), to.len()) };
}

/// Copies bytes into the block through its mapping, done by the kernel. The kernel takes no lock of
/// the file, so threads that write different pages do not wait for each other as they do in
/// `pwrite`. Lack of memory is an error and not a SIGBUS. Returns false if this kernel does not
/// permit it.
fn copy_into_mapping(region: &Region, offset_bytes: u64, from: &[u8]) -> io::Result<bool> {
    let this_process = rustix::process::getpid().as_raw_nonzero().get();
    let mut copied = 0;
    while let Some(rest) = from.get(copied..).filter(|rest| !rest.is_empty()) {
        let to = region.address(offset_bytes).wrapping_add(copied);
        let local = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: to.cast(), iov_len: rest.len() };
        // SAFETY: the kernel reads the slice and writes bytes of the region's mapping. The caller
        // has checked that they lie within it, and the borrow keeps it alive. No reference to them
        // exists in this process.
        let count = unsafe {
            libc::process_vm_writev(this_process, &raw const local, 1, &raw const remote, 1, 0)
        };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => copied += count,
            Err(_) => match io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOSYS | libc::EPERM) if copied == 0 => return Ok(false),
                _ => retry_interrupted()?,
            },
        }
    }
    Ok(true)
}

/// Handles a call that failed: returns no error if it was only interrupted, otherwise the error.
fn retry_interrupted() -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINTR) => Ok(()),
        // The kernel found no memory behind the mapping: the tmpfs is full, or the file was
        // truncated.
        Some(libc::EFAULT) => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "no memory behind a page of guest RAM: the host is out of memory, or QEMU cut the RAM \
            file short",
        )),
        _ => Err(error),
    }
}

fn outside(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
