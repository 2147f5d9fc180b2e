//! Guest pages through the mapping: copies out of it and into it, and from sockets by the kernel
//! itself. It also reads the state of TCP sockets.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::pages::PageRange;
use crate::region::Region;

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
    let told = unsafe { libc::ioctl(fd.as_raw_fd(), queue, &raw mut bytes) };
    if told < 0 {
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
    let mut length = libc::socklen_t::try_from(info.len()).map_err(outside)?;
    // SAFETY: the kernel writes at most `length` bytes, which `info` has, and the length; both
    // outlive the call.
    let told = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if told < 0 {
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

pub(crate) fn receive(region: &Region, fd: BorrowedFd<'_>, range: PageRange) -> io::Result<()> {
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
pub(crate) fn copy_from_mapping(region: &Region, offset_bytes: u64, to: &mut [u8]) {
    // SAFETY: the bytes lie within the region's mapping, which the borrow keeps alive. No reference
    // to them exists in this process, so `to` is elsewhere. Other processes may write them
    // meanwhile; the copy is then of no single moment.
    unsafe { ptr::copy_nonoverlapping(region.address(offset_bytes), to.as_mut_ptr(), to.len()) };
}

/// Copies bytes into the block through its mapping, done by the kernel. The kernel takes no lock of
/// the file, so threads that write different pages do not wait for each other as they do in
/// `pwrite`. Lack of memory is an error and not a SIGBUS. Returns false if this kernel does not
/// permit it.
pub(crate) fn copy_into_mapping(
    region: &Region,
    offset_bytes: u64,
    from: &[u8],
) -> io::Result<bool> {
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
