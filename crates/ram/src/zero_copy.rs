//! Guest pages to a socket without any copy: the network card reads them (`MSG_ZEROCOPY`, Documentation/networking/msg_zerocopy.rst
//! of Linux). The guest may write meanwhile, also between a segment and its repetition: what arrives then is torn, and is sent again,
//! as the page was protected before.
//!
//! Where the kernel has to copy after all (loopback, a veth pair, a card that can't gather) this costs more than it brings; the
//! kernel says so with each completion, and that is the end of it for that socket.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Shorter runs of pages are copied: pinning them and hearing of their completion costs as much (10 KiB by the kernel's document,
/// more by the pages' scattering).
pub(crate) const LEAST_BYTES: u64 = 64 << 10;
/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` of linux/errqueue.h.
const ORIGIN_ZERO_COPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// What is known of a socket's sending without a copy.
#[derive(Debug, Default)]
pub struct ZeroCopy {
    on: AtomicBool,
    /// Sends that the kernel has not reported on, to know when there is nothing to ask.
    pending: AtomicU32,
}

impl ZeroCopy {
    /// Asks the kernel for it; off where it does not know it.
    #[must_use]
    pub fn ask(fd: BorrowedFd<'_>) -> ZeroCopy {
        let on: libc::c_int = 1;
        let length = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or(0);
        // SAFETY: the kernel reads one int, which outlives the call, and nothing else.
        let set = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ZEROCOPY,
                (&raw const on).cast(),
                length,
            )
        };
        ZeroCopy { on: AtomicBool::new(set == 0), pending: AtomicU32::new(0) }
    }

    /// Whether pages are sent without a copy.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(crate) fn end(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self) {
        self.pending.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the kernel's reports that have come, without waiting.
    pub(crate) fn take_reports(&self, fd: BorrowedFd<'_>) {
        while self.pending.load(Ordering::Relaxed) > 0 {
            let Some(report) = read_report(fd) else { return };
            let sends = report.last.wrapping_sub(report.first).wrapping_add(1);
            let less = |pending: u32| Some(pending.saturating_sub(sends));
            let _ = self.pending.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            if report.copied {
                self.end();
            }
        }
    }
}

/// Sends of these numbers are done.
struct Report {
    first: u32,
    last: u32,
    copied: bool,
}

/// None: there is none yet, or it is of something else.
fn read_report(fd: BorrowedFd<'_>) -> Option<Report> {
    // Room for one report: header, error, and the address that follows it.
    let mut control = [0_u64; 16];
    // SAFETY: a msghdr of zeros is valid, and names no data and no address.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the kernel writes at most `msg_controllen` bytes to `control`, which outlives the call.
    let received =
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if received < 0 {
        return None;
    }
    // SAFETY: the kernel has filled `control` as far as `msg_controllen` now says; it is aligned as a cmsghdr has to be.
    let message = unsafe { libc::CMSG_FIRSTHDR(&raw const header).as_ref() }?;
    let is_error = matches!(
        (message.cmsg_level, message.cmsg_type),
        (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
    );
    // SAFETY: a message of these types holds a sock_extended_err, which is plain data; it is read wherever it lies.
    let error: libc::sock_extended_err = unsafe {
        is_error.then(|| libc::CMSG_DATA(message).cast::<libc::sock_extended_err>().read_unaligned())
    }?;
    (error.ee_origin == ORIGIN_ZERO_COPY && error.ee_errno == 0).then_some(Report {
        first: error.ee_info,
        last: error.ee_data,
        copied: error.ee_code & CODE_COPIED != 0,
    })
}

/// Whether the kernel has no room for more pinned pages at the moment, or none at all.
pub(crate) fn lacks_room(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOBUFS)
}
