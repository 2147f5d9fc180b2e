//! The ioctls of a userfaultfd that tracking needs (linux/userfaultfd.h).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MISSING_SHMEM,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, UFFD_USER_MODE_ONLY,
    UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP, uffdio_api,
    uffdio_continue, uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::io::Errno;
use rustix::ioctl::Updater;
use rustix::mm::UserfaultfdFlags;

use super::{kernel_too_old, open_device};
use crate::error::TrackError;
use crate::pages::PAGE_SIZE;

/// `_UFFDIO_WRITEPROTECT_MODE_WP`.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// `USERFAULTFD_IOC_NEW`, Linux 6.1.
const IOC_NEW: libc::Ioctl = 0xAA00;

/// WP_ASYNC: Linux 6.7. The others come with it: write protection of shmem, and markers where there is no page yet.
const FEATURES: u32 = UFFD_FEATURE_WP_ASYNC
    | UFFD_FEATURE_WP_UNPOPULATED
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_PAGEFAULT_FLAG_WP;

/// As above without WP_ASYNC: each write to a protected page waits for an answer. Linux 6.4.
const FAULT_FEATURES: u32 = UFFD_FEATURE_WP_UNPOPULATED
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_THREAD_ID;

/// Whoever comes to a page that is not mapped waits, whether the file holds it or not. Linux 5.14, and thread ids.
const PAGE_IN_FEATURES: u32 = UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_THREAD_ID;

/// `sizeof(struct uffd_msg)`; the fields of a page fault in it begin at 8: flags, address, thread.
const MESSAGE_BYTES: usize = 32;
/// How many messages are read at once.
const MESSAGES_A_READ: usize = 64;

/// An access that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Where, in the other process; of the byte, or of its page.
    pub(crate) address: u64,
    /// The thread that waits, as its process numbers it.
    pub(crate) thread: u32,
}

/// A userfaultfd, which acts on the address space of the process that created it.
pub(crate) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// One that came from another process.
    pub(crate) fn new(fd: OwnedFd) -> Userfaultfd {
        Userfaultfd(fd)
    }

    /// One of this process, to try out what the kernel can do.
    pub(super) fn of_this_process() -> Result<Userfaultfd, TrackError> {
        let device = open_device().and_then(|device| {
            // SAFETY: the argument is a number; the descriptor that comes back belongs to nobody else.
            let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
            owned(fd)
        });
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        device
            .or_else(|device_error| {
                // SAFETY: the descriptor is used for nothing but the question which features there are.
                unsafe { rustix::mm::userfaultfd(flags) }.map_err(|errno| (device_error, errno))
            })
            .map(Userfaultfd)
            .map_err(|(device, call)| match call {
                Errno::NOSYS => kernel_too_old("userfaultfd"),
                _ => TrackError::NoUserfaultfd {
                    reason: format!("/dev/userfaultfd: {device}; the system call: {call}"),
                },
            })
    }

    /// Turns tracking on; once for each userfaultfd, before anything else.
    pub(super) fn enable_tracking(&self) -> Result<(), TrackError> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: FEATURES.into(), ioctls: 0 };
        // The kernel refuses features it does not know with EINVAL.
        self.update::<UFFDIO_API, _>(&mut api).map_err(|_| kernel_too_old("userfaultfd's WP_ASYNC"))
    }

    /// Has every write to a protected page wait until it is answered; in place of [`Userfaultfd::enable_tracking`].
    pub(super) fn enable_faults(&self) -> Result<(), TrackError> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: FAULT_FEATURES.into(), ioctls: 0 };
        self.update::<UFFDIO_API, _>(&mut api).map_err(|_| kernel_too_old("userfaultfd's thread ids"))
    }

    /// Has every access to a page that is not mapped wait until it is answered; in place of [`Userfaultfd::enable_tracking`].
    pub(crate) fn enable_page_in(&self) -> Result<(), TrackError> {
        self.enable_page_in_again().map_err(|_| kernel_too_old("userfaultfd's minor faults of shmem"))
    }

    /// The same for one that another agent had, and may have died before it came to that.
    ///
    /// # Errors
    /// `EINVAL` where it is enabled, as it should be.
    pub(crate) fn enable_page_in_again(&self) -> Result<(), Errno> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: PAGE_IN_FEATURES.into(), ioctls: 0 };
        self.update::<UFFDIO_API, _>(&mut api)
    }

    /// Makes the range of the other address space one whose write protection this descriptor governs.
    pub(super) fn register(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.register_for(UFFDIO_REGISTER_MODE_WP, address, len_bytes)
    }

    /// Makes the range one whose pages this descriptor maps; those that are mapped stay so.
    pub(crate) fn register_page_in(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.register_for(UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR, address, len_bytes)
    }

    fn register_for(&self, mode: u32, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_REGISTER, _>(&mut uffdio_register {
            range: range(address, len_bytes),
            mode: mode.into(),
            ioctls: 0,
        })
    }

    /// Maps pages that the file holds, the first of them at least, and goes on with whoever waits for them. Gives how many
    /// bytes were mapped.
    ///
    /// # Errors
    /// `EEXIST`: the first is mapped already. `EFAULT`: the file does not hold it.
    pub(crate) fn map_held(&self, address: u64, len_bytes: u64) -> Result<u64, Errno> {
        let mut request = uffdio_continue { range: range(address, len_bytes), mode: 0, mapped: 0 };
        let result = self.update::<UFFDIO_CONTINUE, _>(&mut request);
        mapped(result, request.mapped)
    }

    /// The same for pages that the file does not hold: they hold zeros from then on.
    pub(crate) fn map_zeros(&self, address: u64, len_bytes: u64) -> Result<u64, Errno> {
        let mut request = uffdio_zeropage { range: range(address, len_bytes), mode: 0, zeropage: 0 };
        let result = self.update::<UFFDIO_ZEROPAGE, _>(&mut request);
        mapped(result, request.zeropage)
    }

    /// Undoes [`Userfaultfd::register`], and the protection with it.
    pub(crate) fn unregister(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_UNREGISTER, _>(&mut range(address, len_bytes))
    }

    /// Protects the range, which must be registered. When it returns, no processor writes without a fault.
    pub(super) fn write_protect(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        loop {
            // EAGAIN: the mappings were changing.
            match self.write_protect_once(address, len_bytes) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return result,
            }
        }
    }

    /// Lets the range be written again, and goes on with whoever waits for it.
    pub(super) fn release(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        loop {
            let mut request = uffdio_writeprotect { range: range(address, len_bytes), mode: 0 };
            match self.update::<UFFDIO_WRITEPROTECT, _>(&mut request) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return result,
            }
        }
    }

    /// Has whoever waits for the range try again.
    pub(crate) fn wake(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_WAKE, _>(&mut range(address, len_bytes))
    }

    /// Appends the writes that have begun to wait since the last call. Returns at once.
    pub(crate) fn read_faults(&self, out: &mut Vec<Fault>) -> Result<(), Errno> {
        let mut messages = [0; MESSAGE_BYTES * MESSAGES_A_READ];
        loop {
            let len = match rustix::io::read(&self.0, &mut messages) {
                Ok(len) => len,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            let read = messages.get(..len).unwrap_or_default();
            out.extend(read.chunks_exact(MESSAGE_BYTES).filter_map(fault_of));
            if len < messages.len() {
                return Ok(());
            }
        }
    }

    /// The descriptor, to wait for faults.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Whether the address space still exists. `untracked` is a page that is not registered: protecting it fails with
    /// ENOENT where there is an address space, with ESRCH where there is none any more.
    pub(crate) fn is_alive(&self, untracked: u64) -> Result<bool, Errno> {
        match self.write_protect_once(untracked, PAGE_SIZE) {
            Ok(()) | Err(Errno::NOENT | Errno::AGAIN) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn write_protect_once(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_WRITEPROTECT, _>(&mut uffdio_writeprotect {
            range: range(address, len_bytes),
            mode: WRITEPROTECT_MODE_WP,
        })
    }

    fn update<const REQUEST: u32, T>(&self, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: each caller pairs the request with the kernel's type for it. The ioctls change page tables, of which
        // no program can tell a difference but by its speed: WP_ASYNC hands no fault to anybody, and who waits for an
        // answer goes on when it comes, at the latest when this descriptor is closed.
        unsafe { rustix::ioctl::ioctl(&self.0, Updater::<REQUEST, T>::new(argument)) }
    }
}

/// The kernel's answer where it may have stopped in the middle: EAGAIN, and how far it came.
fn mapped(result: Result<(), Errno>, bytes: i64) -> Result<u64, Errno> {
    match (result, u64::try_from(bytes)) {
        (Ok(()) | Err(Errno::AGAIN), Ok(bytes)) => Ok(bytes),
        (Ok(()), Err(_)) => Err(Errno::IO),
        (Err(errno), _) => Err(errno),
    }
}

/// Reads a `struct uffd_msg`; `None` where it tells no page fault, as nothing else was asked for.
fn fault_of(message: &[u8]) -> Option<Fault> {
    let (event, fields) = (message.first()?, message.get(8..)?);
    let address = fields.get(8..16)?.first_chunk()?;
    let thread = fields.get(16..20)?.first_chunk()?;
    (u32::from(*event) == UFFD_EVENT_PAGEFAULT)
        .then(|| Fault { address: u64::from_ne_bytes(*address), thread: u32::from_ne_bytes(*thread) })
}

fn range(address: u64, len_bytes: u64) -> uffdio_range {
    uffdio_range { start: address, len: len_bytes }
}

fn owned(fd: RawFd) -> Result<OwnedFd, Errno> {
    if fd < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    // SAFETY: the callers pass what a system call has just made for them.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
