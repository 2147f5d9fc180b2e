//! The ioctls of a userfaultfd that tracking needs (linux/userfaultfd.h).

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MISSING_SHMEM,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_THREAD_ID, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, UFFD_USER_MODE_ONLY,
    UFFDIO_REGISTER_MODE_MINOR, UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP, uffdio_api,
    uffdio_continue, uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE,
    UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE,
};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::ioctl::Updater;
use rustix::mm::UserfaultfdFlags;

use super::kernel::{kernel_too_old, open_device};
use crate::error::TrackError;
use crate::pages::PAGE_SIZE;

/// `_UFFDIO_WRITEPROTECT_MODE_WP`.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// `USERFAULTFD_IOC_NEW`, Linux 6.1.
const IOC_NEW: libc::Ioctl = 0xAA00;

/// WP_ASYNC: Linux 6.7. The others come with it: write protection of shmem, and markers where there
/// is no page yet.
const FEATURES: u32 = UFFD_FEATURE_WP_ASYNC
    | UFFD_FEATURE_WP_UNPOPULATED
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_PAGEFAULT_FLAG_WP;

/// Features as above without WP_ASYNC: each write to a protected page waits for an answer. Linux
/// 6.4.
const FAULT_FEATURES: u32 = UFFD_FEATURE_WP_UNPOPULATED
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_THREAD_ID;

/// Features for page-in: an access to a page that is not mapped waits, whether the file holds the
/// page or not. Linux 5.14. Thread IDs are included.
const PAGE_IN_FEATURES: u32 =
    UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_THREAD_ID;

/// `sizeof(struct uffd_msg)`. The fields of a page fault begin at offset 8: flags, address, thread.
const MESSAGE_BYTES: usize = 32;
/// Number of messages read at a time.
const MESSAGES_A_READ: usize = 64;

/// Offset with which `preadv2` reads as `read` does.
const NO_OFFSET: u64 = u64::MAX;

/// Faults after which a call returns: a process that causes them without end gets answers between.
const MOST_FAULTS: usize = 1024;

/// Access that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Address in the other process, of the byte or of its page.
    pub(crate) address: u64,
    /// ID of the waiting thread, as its process numbers it.
    pub(crate) thread: u32,
}

/// Userfaultfd. It acts on the address space of the process that created it.
pub(crate) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// Wraps a userfaultfd that came from another process.
    pub(crate) fn new(fd: OwnedFd) -> Userfaultfd {
        Userfaultfd(fd)
    }

    /// Creates a userfaultfd of this process, to find out what the kernel can do.
    pub(super) fn of_this_process() -> Result<Userfaultfd, TrackError> {
        let device = open_device().and_then(|device| {
            // SAFETY: the argument is a number; the descriptor returned has no other owner.
            let fd = unsafe {
                libc::ioctl(device.as_raw_fd(), IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK)
            };
            owned(fd)
        });
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        device
            .or_else(|device_error| {
                // SAFETY: the descriptor serves only to query the available features.
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

    /// Enables tracking. Call it once for each userfaultfd, before anything else.
    pub(super) fn enable_tracking(&self) -> Result<(), TrackError> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: FEATURES.into(), ioctls: 0 };
        // The kernel refuses unknown features with EINVAL.
        self.update::<UFFDIO_API, _>(&mut api).map_err(|_| kernel_too_old("userfaultfd's WP_ASYNC"))
    }

    /// Makes every write to a protected page wait until it is answered. Replaces
    /// [`Userfaultfd::enable_tracking`].
    pub(super) fn enable_faults(&self) -> Result<(), TrackError> {
        let mut api =
            uffdio_api { api: UFFD_API.into(), features: FAULT_FEATURES.into(), ioctls: 0 };
        self.update::<UFFDIO_API, _>(&mut api)
            .map_err(|_| kernel_too_old("userfaultfd's thread ids"))
    }

    /// Makes every access to a page that is not mapped wait until it is answered. Replaces
    /// [`Userfaultfd::enable_tracking`].
    pub(crate) fn enable_page_in(&self) -> Result<(), TrackError> {
        self.enable_page_in_again()
            .map_err(|_| kernel_too_old("userfaultfd's minor faults of shmem"))
    }

    /// Enables page-in on a userfaultfd of another agent, which may have died before it did so.
    ///
    /// # Errors
    /// `EINVAL` if it is enabled already, as it should be.
    pub(crate) fn enable_page_in_again(&self) -> Result<(), Errno> {
        let mut api =
            uffdio_api { api: UFFD_API.into(), features: PAGE_IN_FEATURES.into(), ioctls: 0 };
        self.update::<UFFDIO_API, _>(&mut api)
    }

    /// Registers a range of the other address space, so that this descriptor governs its write
    /// protection.
    pub(super) fn register(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.register_for(UFFDIO_REGISTER_MODE_WP, address, len_bytes)
    }

    /// Registers the range, so that this descriptor maps its pages. Pages that are mapped stay
    /// mapped.
    pub(crate) fn register_page_in(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.register_for(
            UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR,
            address,
            len_bytes,
        )
    }

    fn register_for(&self, mode: u32, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_REGISTER, _>(&mut uffdio_register {
            range: range(address, len_bytes),
            mode: mode.into(),
            ioctls: 0,
        })
    }

    /// Maps pages that the file holds, at least the first of them, and wakes the threads that wait
    /// for them. Returns how many bytes were mapped.
    ///
    /// # Errors
    /// `EEXIST`: the first page is mapped already. `EFAULT`: the file does not hold it.
    pub(crate) fn map_held(&self, address: u64, len_bytes: u64) -> Result<u64, Errno> {
        let mut request = uffdio_continue { range: range(address, len_bytes), mode: 0, mapped: 0 };
        let result = self.update::<UFFDIO_CONTINUE, _>(&mut request);
        mapped(result, request.mapped)
    }

    /// Maps pages that the file does not hold, as [`Userfaultfd::map_held`] does: they hold zeros
    /// from then on.
    pub(crate) fn map_zeros(&self, address: u64, len_bytes: u64) -> Result<u64, Errno> {
        let mut request =
            uffdio_zeropage { range: range(address, len_bytes), mode: 0, zeropage: 0 };
        let result = self.update::<UFFDIO_ZEROPAGE, _>(&mut request);
        mapped(result, request.zeropage)
    }

    /// Undoes [`Userfaultfd::register`], and removes the protection.
    pub(crate) fn unregister(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_UNREGISTER, _>(&mut range(address, len_bytes))
    }

    /// Protects the range, which must be registered. After the return no processor writes to it
    /// without a fault.
    pub(super) fn write_protect(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        loop {
            // EAGAIN: the mappings were changing.
            match self.write_protect_once(address, len_bytes) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return result,
            }
        }
    }

    /// Makes the range writable again, and wakes the threads that wait for it.
    pub(super) fn release(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        loop {
            let mut request = uffdio_writeprotect { range: range(address, len_bytes), mode: 0 };
            match self.update::<UFFDIO_WRITEPROTECT, _>(&mut request) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return result,
            }
        }
    }

    /// Makes the threads that wait for the range retry.
    pub(crate) fn wake(&self, address: u64, len_bytes: u64) -> Result<(), Errno> {
        self.update::<UFFDIO_WAKE, _>(&mut range(address, len_bytes))
    }

    /// Appends the writes that have begun to wait since the last call, until `out` has
    /// [`MOST_FAULTS`]; the next call returns the rest.
    pub(crate) fn read_faults(&self, out: &mut Vec<Fault>) -> Result<(), Errno> {
        let mut messages = [0; MESSAGE_BYTES * MESSAGES_A_READ];
        loop {
            let len = match self.read_without_waiting(&mut messages) {
                Ok(len) => len,
                // A wait on a blocking descriptor ends at once.
                Err(Errno::AGAIN) if out.is_empty() => {
                    return fcntl_setfl(&self.0, OFlags::NONBLOCK);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            let read = messages.get(..len).unwrap_or_default();
            out.extend(read.chunks_exact(MESSAGE_BYTES).filter_map(fault_of));
            if len < messages.len() || out.len() >= MOST_FAULTS {
                return Ok(());
            }
        }
    }

    /// Reads what is there, even if the hypervisor, which has the descriptor too, has made it
    /// blocking. Kernels before 6.10 cannot do this, and read as the descriptor says.
    fn read_without_waiting(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let mut buffers = [IoSliceMut::new(into)];
        match preadv2(&self.0, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP) => rustix::io::read(&self.0, into),
            result => result,
        }
    }

    /// Returns the descriptor, to wait for faults.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns whether the address space still exists. `untracked` is a page that is not
    /// registered: protecting it fails with ENOENT if the address space exists, and with ESRCH if
    /// it does not.
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
        // SAFETY: each caller pairs the request with the kernel's type for it. The ioctls change
        // page tables, which a program can notice only by its speed: WP_ASYNC delivers no fault to
        // user space, and a thread that waits for an answer goes on when the answer comes, at the
        // latest when this descriptor is closed.
        unsafe { rustix::ioctl::ioctl(&self.0, Updater::<REQUEST, T>::new(argument)) }
    }
}

/// Interprets the kernel's answer if it stopped in the middle: EAGAIN, and how far it came.
fn mapped(result: Result<(), Errno>, bytes: i64) -> Result<u64, Errno> {
    match (result, u64::try_from(bytes)) {
        (Ok(()) | Err(Errno::AGAIN), Ok(bytes)) => Ok(bytes),
        (Ok(()), Err(_)) => Err(Errno::IO),
        (Err(errno), _) => Err(errno),
    }
}

/// Reads a `struct uffd_msg`. Returns `None` if it is not a page fault; no other events were
/// requested.
fn fault_of(message: &[u8]) -> Option<Fault> {
    let (event, fields) = (message.first()?, message.get(8..)?);
    let address = fields.get(8..16)?.first_chunk()?;
    let thread = fields.get(16..20)?.first_chunk()?;
    (u32::from(*event) == UFFD_EVENT_PAGEFAULT).then(|| Fault {
        address: u64::from_ne_bytes(*address),
        thread: u32::from_ne_bytes(*thread),
    })
}

fn range(address: u64, len_bytes: u64) -> uffdio_range {
    uffdio_range { start: address, len: len_bytes }
}

fn owned(fd: RawFd) -> Result<OwnedFd, Errno> {
    if fd < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    // SAFETY: callers pass a descriptor that a system call has just created for them.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hypervisor has the descriptor too, and may make it blocking: no reader may then hang.
    #[test]
    fn no_read_blocks() {
        let Ok(userfaultfd) = Userfaultfd::of_this_process() else {
            eprintln!("skipped: no userfaultfd here");
            return;
        };
        userfaultfd.enable_faults().unwrap();
        fcntl_setfl(&userfaultfd.0, OFlags::empty()).unwrap();
        let mut message = [0; MESSAGE_BYTES];
        let mut buffers = [IoSliceMut::new(&mut message)];
        let read = preadv2(&userfaultfd.0, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT);
        if read == Err(Errno::OPNOTSUPP) {
            eprintln!("skipped: this kernel reads a userfaultfd only as the descriptor says");
            return;
        }
        let mut faults = Vec::new();
        userfaultfd.read_faults(&mut faults).unwrap();
        assert_eq!(faults, []);
        let flags = rustix::fs::fcntl_getfl(&userfaultfd.0).unwrap();
        assert!(flags.contains(OFlags::NONBLOCK), "{flags:?}");
    }
}
