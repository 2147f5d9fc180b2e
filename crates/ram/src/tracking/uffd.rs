//! The ioctls of a userfaultfd that tracking needs (linux/userfaultfd.h).

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range,
    uffdio_register, uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT};
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

/// A userfaultfd, which acts on the address space of the process that created it.
pub(super) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// One that came from another process.
    pub(super) fn new(fd: OwnedFd) -> Userfaultfd {
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

    /// Makes the range of the other address space one whose write protection this descriptor governs.
    pub(super) fn register(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_REGISTER, _>(&mut uffdio_register {
            range: range(address, len_bytes),
            mode: UFFDIO_REGISTER_MODE_WP.into(),
            ioctls: 0,
        })
    }

    /// Undoes [`Userfaultfd::register`], and the protection with it.
    pub(super) fn unregister(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
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

    /// Whether the address space still exists. `untracked` is a page that is not registered: protecting it fails with
    /// ENOENT where there is an address space, with ESRCH where there is none any more.
    pub(super) fn is_alive(&self, untracked: u64) -> Result<bool, Errno> {
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
        // no program can tell a difference but by its speed, as WP_ASYNC hands no fault to anybody.
        unsafe { rustix::ioctl::ioctl(&self.0, Updater::<REQUEST, T>::new(argument)) }
    }
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
