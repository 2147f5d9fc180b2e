//! The running kernel: its device for userfaultfds, and what its errors mean.

use std::os::fd::OwnedFd;

use crate::error::TrackError;

/// Returns the error that the running kernel lacks `missing`.
pub(crate) fn kernel_too_old(missing: &'static str) -> TrackError {
    let found = rustix::system::uname();
    TrackError::KernelTooOld {
        found: format!("Linux {}", found.release().to_string_lossy()),
        missing,
    }
}

pub(crate) fn io_or_gone(what: &'static str, pid: i32, errno: rustix::io::Errno) -> TrackError {
    match errno {
        rustix::io::Errno::SRCH => TrackError::ProcessGone { pid },
        _ => TrackError::Io { what, pid, source: errno.into() },
    }
}

/// Opens /dev/userfaultfd, if this process may.
pub(crate) fn open_device() -> Result<OwnedFd, rustix::io::Errno> {
    rustix::fs::open(
        "/dev/userfaultfd",
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
}
