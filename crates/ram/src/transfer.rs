//! Guest pages through the mapping: copies out of it and into it, from sockets by the kernel itself. And what TCP sockets tell.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::pages::PageRange;
use crate::region::Region;

/// Asks a TCP socket how much it has not put on the wire for the first time (`SIOCOUTQNSD` of linux/sockios.h).
const UNSENT_QUEUE: libc::c_ulong = 0x894b;
/// Where `tcpi_bytes_acked` lies in what TCP_INFO tells (`struct tcp_info` of linux/tcp.h, since Linux 4.1).
const ACKED_AT: usize = 120;
/// Where `tcpi_retransmits` lies there.
const RETRANSMITS_AT: usize = 2;

/// Bytes that a TCP socket has taken and not put on the wire yet; what is on its way to the peer does not count.
///
/// # Errors
/// What the kernel says of a socket that has no such queue.
pub fn unsent_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    queued(fd, UNSENT_QUEUE)
}

/// Bytes that a TCP socket has taken and its peer has not acknowledged yet.
///
/// # Errors
/// What the kernel says of a socket that has no such queue.
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

/// Bytes that a TCP socket's peer has acknowledged since the connection's begin, whatever call handed them over.
///
/// # Errors
/// What the kernel says of a socket that is not TCP's.
pub fn acked_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(tcp_info(fd)?[ACKED_AT..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes)))
}

/// How often in a row a TCP socket has sent the same anew, since its peer acknowledged nothing in time.
///
/// # Errors
/// What the kernel says of a socket that is not TCP's.
pub fn unanswered_timeouts(fd: BorrowedFd<'_>) -> io::Result<u8> {
    Ok(tcp_info(fd)?[RETRANSMITS_AT])
}

fn tcp_info(fd: BorrowedFd<'_>) -> io::Result<[u8; ACKED_AT + size_of::<u64>()]> {
    let mut info = [0_u8; ACKED_AT + size_of::<u64>()];
    let mut length = libc::socklen_t::try_from(info.len()).map_err(outside)?;
    // SAFETY: the kernel writes at most `length` bytes, which `info` has, and the length; both outlive the call.
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

/// Has a TCP socket take no more while so many bytes wait to be put on the wire for the first time; what is on its way does
/// not count (`TCP_NOTSENT_LOWAT` of tcp(7)).
///
/// # Errors
/// What the kernel says of a socket that is not TCP.
pub fn limit_unsent_bytes(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    const LEN: libc::socklen_t = 4;
    let value = &raw const bytes;
    // SAFETY: the kernel reads one u32, which outlives the call, and nothing else.
    let set = unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, value.cast(), LEN)
    };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(crate) fn receive(region: &Region, fd: BorrowedFd<'_>, range: PageRange) -> io::Result<()> {
    region.check(range).map_err(outside)?;
    let len = usize::try_from(range.len_bytes()).map_err(outside)?;
    let base = region.address(range.offset_bytes());
    let mut filled = 0;
    while filled < len {
        // SAFETY: the bytes lie within the region's mapping, which the borrow keeps alive; the kernel writes them, and no
        // reference to them exists in this process.
        let count = unsafe {
            libc::recv(fd.as_raw_fd(), base.wrapping_add(filled).cast(), len - filled, libc::MSG_WAITALL)
        };
        match usize::try_from(count) {
            Ok(0) => {
                let message = format!("the stream ended {} bytes before the end of a page run", len - filled);
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
            }
            Ok(count) => filled += count,
            Err(_) => retry_interrupted()?,
        }
    }
    Ok(())
}

/// Copies bytes of the block that the caller has checked to lie within it.
pub(crate) fn copy_from_mapping(region: &Region, offset_bytes: u64, to: &mut [u8]) {
    // SAFETY: the bytes lie within the region's mapping, which the borrow keeps alive, and no reference to them exists in this
    // process, so that `to` is elsewhere. Other processes may write them meanwhile: what is copied is of no single moment then.
    unsafe { ptr::copy_nonoverlapping(region.address(offset_bytes), to.as_mut_ptr(), to.len()) };
}

/// Copies bytes into the block through its mapping, by the kernel: it takes no lock of the file, so threads that write different
/// pages do not wait for each other as they do in `pwrite`, and memory that can't be had is an error and not a SIGBUS. False:
/// this kernel doesn't let it.
pub(crate) fn copy_into_mapping(region: &Region, offset_bytes: u64, from: &[u8]) -> io::Result<bool> {
    let this_process = rustix::process::getpid().as_raw_nonzero().get();
    let mut copied = 0;
    while let Some(rest) = from.get(copied..).filter(|rest| !rest.is_empty()) {
        let to = region.address(offset_bytes).wrapping_add(copied);
        let local = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        let remote = libc::iovec { iov_base: to.cast(), iov_len: rest.len() };
        // SAFETY: the kernel reads the slice and writes bytes of the region's mapping, which the caller has checked to lie
        // within it and which the borrow keeps alive; no reference to them exists in this process.
        let count =
            unsafe { libc::process_vm_writev(this_process, &raw const local, 1, &raw const remote, 1, 0) };
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

/// After a call that failed: nothing where it was only interrupted, the error otherwise.
fn retry_interrupted() -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINTR) => Ok(()),
        // The kernel found no memory behind the mapping: the tmpfs is full, or the file was cut short.
        Some(libc::EFAULT) => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "no memory behind a page of guest RAM: the host is out of memory, or QEMU cut the RAM file short",
        )),
        _ => Err(error),
    }
}

fn outside(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
