//! State of TCP sockets as the kernel reports it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Queries how much a TCP socket has not put on the wire for the first time (`SIOCOUTQNSD` of
/// linux/sockios.h).
const UNSENT_QUEUE: libc::c_ulong = 0x894b;
/// Offset of `tcpi_bytes_acked` in TCP_INFO (`struct tcp_info` of linux/tcp.h, since Linux 4.1).
const ACKED_AT: usize = 120;
/// Offset of `tcpi_retransmits` in TCP_INFO.
const RETRANSMITS_AT: usize = 2;

/// Returns the bytes that a TCP socket has accepted and not yet put on the wire. Bytes in flight to
/// the peer do not count.
///
/// # Errors
/// The kernel's error for a socket without such a queue.
pub fn unsent_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    queued(fd, UNSENT_QUEUE)
}

/// Returns the bytes that a TCP socket has accepted and its peer has not yet acknowledged.
///
/// # Errors
/// The kernel's error for a socket without such a queue.
pub fn unacked_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    queued(fd, libc::TIOCOUTQ)
}

fn queued(fd: BorrowedFd<'_>, queue: libc::c_ulong) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int, which outlives the call, and nothing else.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), queue, &raw mut bytes) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Returns the bytes that a TCP socket's peer has acknowledged since the connection began,
/// whichever call handed them over.
///
/// # Errors
/// The kernel's error for a socket that is not TCP.
pub fn acked_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(tcp_info(fd)?[ACKED_AT..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
}

/// Returns how many times in a row a TCP socket has retransmitted because its peer acknowledged
/// nothing in time.
///
/// # Errors
/// The kernel's error for a socket that is not TCP.
pub fn unanswered_timeouts(fd: BorrowedFd<'_>) -> io::Result<u8> {
    Ok(tcp_info(fd)?[RETRANSMITS_AT])
}

fn tcp_info(fd: BorrowedFd<'_>) -> io::Result<[u8; ACKED_AT + size_of::<u64>()]> {
    let mut info = [0_u8; ACKED_AT + size_of::<u64>()];
    let mut length = libc::socklen_t::try_from(info.len())
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    // SAFETY: the kernel writes at most `length` bytes, which `info` has, and the length; both
    // outlive the call.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(info)
}

/// Makes a TCP socket accept no more data while so many bytes wait to be put on the wire for the
/// first time. Bytes in flight do not count (`TCP_NOTSENT_LOWAT` of tcp(7)).
///
/// # Errors
/// The kernel's error for a socket that is not TCP.
pub fn limit_unsent_bytes(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    const LEN: libc::socklen_t = 4;
    let value = &raw const bytes;
    // SAFETY: the kernel reads one u32, which outlives the call, and nothing else.
    let set = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            value.cast(),
            LEN,
        )
    };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
