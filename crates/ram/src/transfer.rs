//! Guest pages to and from sockets without a copy in this process: the kernel reads and writes the mapping.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::pages::PageRange;
use crate::region::Region;
use crate::zero_copy::{LEAST_BYTES, ZeroCopy, lacks_room};

/// How many parts one sendmsg takes (`UIO_MAXIOV` of linux/uio.h).
const MAX_PARTS_A_CALL: usize = 1024;
/// Asks a TCP socket how much it has not put on the wire for the first time (`SIOCOUTQNSD` of linux/sockios.h).
const UNSENT_QUEUE: libc::c_ulong = 0x894b;
/// Where `tcpi_bytes_acked` lies in what TCP_INFO tells (`struct tcp_info` of linux/tcp.h, since Linux 4.1).
const ACKED_AT: usize = 120;
/// Where `tcpi_retransmits` lies there.
const RETRANSMITS_AT: usize = 2;

/// A piece of what is to be sent.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Bytes of this process.
    Bytes(&'a [u8]),
    /// Pages of a guest, as they are at the moment the kernel reads them.
    Pages(&'a Region, PageRange),
}

impl Part<'_> {
    /// How many bytes it is.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Pages(_, range) => range.len_bytes(),
        }
    }

    /// Whether the kernel may read it after the call: it stays where it is, and is long enough for that to be worth while.
    fn may_stay(&self) -> bool {
        matches!(self, Part::Pages(_, range) if range.len_bytes() >= LEAST_BYTES)
    }

    fn to_iovec(self) -> io::Result<libc::iovec> {
        let (base, len) = match self {
            Part::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            Part::Pages(region, range) => {
                region.check(range).map_err(outside)?;
                let len = usize::try_from(range.len_bytes()).map_err(outside)?;
                (region.address(range.offset_bytes()), len)
            }
        };
        Ok(libc::iovec { iov_base: base.cast(), iov_len: len })
    }
}

/// Sends all parts, in order, over a blocking stream socket, and gives the number of bytes sent. Pages that are holes are
/// allocated by being read; leave them out ([`Region::data_ranges`]). With `zero_copy`, long runs of pages leave without a copy
/// where the kernel can do that.
///
/// # Errors
/// `InvalidInput` before anything is sent, where pages lie outside their region; `BrokenPipe` where the peer has gone (no
/// SIGPIPE is raised); otherwise what the socket gave. How much was sent is then not known.
pub fn send_parts(fd: BorrowedFd<'_>, parts: &[Part<'_>], zero_copy: Option<&ZeroCopy>) -> io::Result<u64> {
    let vectors = parts
        .iter()
        .filter(|part| part.len_bytes() > 0)
        .map(|part| Ok((part.to_iovec()?, part.may_stay())))
        .collect::<io::Result<Vec<_>>>()?;
    zero_copy.into_iter().for_each(|zero_copy| zero_copy.take_reports(fd));
    let on = zero_copy.filter(|zero_copy| zero_copy.is_on());
    let mut sent = 0;
    let mut rest = vectors.as_slice();
    while let Some((_, may_stay)) = rest.first() {
        // What may change once this returns must be copied, so it goes by itself.
        let alike = if on.is_some() {
            rest.iter().take_while(|(_, other)| other == may_stay).count()
        } else {
            rest.len()
        };
        let (group, after) = rest.split_at(alike);
        let mut group: Vec<libc::iovec> = group.iter().map(|(vector, _)| *vector).collect();
        let more = if after.is_empty() { 0 } else { libc::MSG_MORE };
        sent += send_group(fd, &mut group, more, on.filter(|_| *may_stay))?;
        rest = after;
    }
    Ok(sent)
}

/// Sends vectors whole.
fn send_group(
    fd: BorrowedFd<'_>,
    vectors: &mut [libc::iovec],
    flags: libc::c_int,
    zero_copy: Option<&ZeroCopy>,
) -> io::Result<u64> {
    let (mut first, mut total) = (0, 0);
    while let Some(rest) = vectors.get_mut(first..).filter(|rest| !rest.is_empty()) {
        let batch = rest.len().min(MAX_PARTS_A_CALL);
        let Some(batch) = rest.get_mut(..batch) else {
            break;
        };
        let sent = match zero_copy.filter(|zero_copy| zero_copy.is_on()) {
            Some(zero_copy) => {
                zero_copy.take_reports(fd);
                match send_once(fd, batch, flags | libc::MSG_ZEROCOPY) {
                    // As much is pinned as may be at the moment.
                    Err(error) if lacks_room(&error) => send_once(fd, batch, flags)?,
                    sent => {
                        zero_copy.sent();
                        sent?
                    }
                }
            }
            None => send_once(fd, batch, flags)?,
        };
        total += sent as u64;
        first += advance(batch, sent);
    }
    Ok(total)
}

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

fn send_once(fd: BorrowedFd<'_>, vectors: &mut [libc::iovec], flags: libc::c_int) -> io::Result<usize> {
    loop {
        // SAFETY: a msghdr of zeros is valid. The vectors describe byte slices that the caller borrows and pages within
        // mappings whose regions the caller borrows; the kernel only reads them. With MSG_ZEROCOPY it holds on to the pages
        // of the mappings themselves, beyond the call and the mapping.
        let sent = unsafe {
            let mut header: libc::msghdr = mem::zeroed();
            header.msg_iov = vectors.as_mut_ptr();
            header.msg_iovlen = vectors.len() as _;
            libc::sendmsg(fd.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL | flags)
        };
        match usize::try_from(sent) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => return Ok(sent),
            Err(_) => retry_interrupted()?,
        }
    }
}

/// Takes `sent` bytes off the front of the vectors and gives the number of vectors that are done.
fn advance(vectors: &mut [libc::iovec], mut sent: usize) -> usize {
    for (index, vector) in vectors.iter_mut().enumerate() {
        if sent < vector.iov_len {
            vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(sent).cast();
            vector.iov_len -= sent;
            return index;
        }
        sent -= vector.iov_len;
    }
    vectors.len()
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
