//! The thread: it serves one connection at a time, with one request and one answer each.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::protocol::{MESSAGE_LEN, Origin, Request, answer, parse_request};

/// Time limit for a connected peer, in seconds.
const PEER_TIMEOUT_S: libc::time_t = 2;
/// Pause before the next accept in a process that has exhausted its resources.
const EXHAUSTED_MS: libc::c_int = 100;
/// `_IO(0xAA, 0)` of linux/userfaultfd.h, Linux 6.1.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;
/// linux/userfaultfd.h, Linux 5.11.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
/// Room for one descriptor, aligned as a control message must be.
type ControlBuffer = [u64; 4];

/// State that the constructor hands to the thread.
pub(crate) struct Server {
    pub(crate) listener: RawFd,
    pub(crate) device: Option<RawFd>,
    pub(crate) peer_uid: u32,
}

/// The userfaultfd handed out with the request to keep it. The memory stays governed while any
/// process has it open.
type Kept = Option<(OwnedFd, Origin)>;

/// Serves until the listener is gone, which in practice is until QEMU ends.
pub(crate) fn run(server: &Server) {
    let mut kept = None;
    loop {
        match accept(server.listener) {
            Ok(connection) => serve(server, &mut kept, &connection),
            Err(libc::EINTR | libc::ECONNABORTED | libc::EAGAIN) => {}
            Err(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => pause(),
            Err(_) => return,
        }
    }
}

fn accept(listener: RawFd) -> Result<OwnedFd, libc::c_int> {
    // A non-blocking listener would make the thread spin, so wait explicitly.
    let mut readable = libc::pollfd { fd: listener, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which lives through the call. accept4 without an address touches no
    // memory. A descriptor that it returns has no other owner.
    unsafe {
        if libc::poll(&raw mut readable, 1, -1) < 0 {
            return Err(errno());
        }
        let fd = libc::accept4(listener, ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC);
        if fd < 0 {
            return Err(errno());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn pause() {
    // SAFETY: with no descriptors poll only waits.
    unsafe { libc::poll(ptr::null_mut(), 0, EXHAUSTED_MS) };
}

fn serve(server: &Server, kept: &mut Kept, connection: &OwnedFd) {
    limit_waiting(connection.as_raw_fd());
    if peer_uid(connection.as_raw_fd()) != Some(server.peer_uid) {
        return;
    }
    let Some((message, device)) = receive(connection.as_raw_fd()) else {
        return;
    };
    let device = device.as_ref().map(AsRawFd::as_raw_fd).or(server.device);
    let refuse = |errno| {
        send(connection.as_raw_fd(), answer(Origin::None, errno_u16(errno)), None);
    };
    let give = |userfaultfd: &OwnedFd, origin| {
        send(connection.as_raw_fd(), answer(origin, 0), Some(userfaultfd))
    };
    match parse_request(&message) {
        None => refuse(libc::EPROTO),
        Some(wanted @ (Request::New | Request::NewKept)) => match new_userfaultfd(device) {
            Ok((userfaultfd, origin)) => {
                // A userfaultfd that could not be sent belongs to no agent: the copy kept stays the
                // last one that an agent has.
                if give(&userfaultfd, origin) && wanted == Request::NewKept {
                    *kept = Some((userfaultfd, origin));
                }
            }
            Err(errno) => refuse(errno),
        },
        Some(Request::Kept) => match kept {
            Some((userfaultfd, origin)) => {
                give(userfaultfd, *origin);
            }
            None => refuse(libc::ENOENT),
        },
        Some(Request::DropKept) => {
            *kept = None;
            refuse(0);
        }
    }
}

/// Creates a userfaultfd of this process's own address space.
fn new_userfaultfd(device: Option<RawFd>) -> Result<(OwnedFd, Origin), libc::c_int> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: neither the ioctl, whose argument is a plain number, nor the system call touches
    // memory. A descriptor that they return has no other owner.
    unsafe {
        if let Some(device) = device {
            let fd = libc::ioctl(device, USERFAULTFD_IOC_NEW, flags);
            if fd >= 0 {
                return Ok((OwnedFd::from_raw_fd(fd), Origin::Device));
            }
        }
        for (extra, origin) in [(0, Origin::Syscall), (UFFD_USER_MODE_ONLY, Origin::UserModeOnly)] {
            let fd = libc::syscall(libc::SYS_userfaultfd, flags | extra);
            if let (true, Ok(fd)) = (fd >= 0, RawFd::try_from(fd)) {
                return Ok((OwnedFd::from_raw_fd(fd), origin));
            }
        }
    }
    Err(errno())
}

fn limit_waiting(connection: RawFd) {
    let limit = libc::timeval { tv_sec: PEER_TIMEOUT_S, tv_usec: 0 };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        // SAFETY: the option's value is a timeval that lives through the call, of the length given.
        unsafe {
            libc::setsockopt(
                connection,
                libc::SOL_SOCKET,
                option,
                (&raw const limit).cast(),
                length_of::<libc::timeval>(),
            )
        };
    }
}

fn peer_uid(connection: RawFd) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = length_of::<libc::ucred>();
    // SAFETY: the kernel writes at most `length` bytes, the size of `peer`.
    let failed = unsafe {
        libc::getsockopt(
            connection,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    (failed == 0 && length == length_of::<libc::ucred>()).then_some(peer.uid)
}

/// Receives one request, in however many pieces it arrives, and the descriptor that came with it.
fn receive(connection: RawFd) -> Option<([u8; MESSAGE_LEN], Option<OwnedFd>)> {
    let mut message = [0u8; MESSAGE_LEN];
    let mut filled = 0;
    let mut device = None;
    while filled < MESSAGE_LEN {
        let rest = message.get_mut(filled..)?;
        let mut part = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let mut control: ControlBuffer = [0; 4];
        // SAFETY: the header describes `rest` and `control`, which live through the call. A
        // descriptor in a control message that the kernel wrote is new and has no other owner.
        let count = unsafe {
            let mut header: libc::msghdr = mem::zeroed();
            header.msg_iov = &raw mut part;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&control) as _;
            let count = libc::recvmsg(connection, &raw mut header, libc::MSG_CMSG_CLOEXEC);
            if count > 0 {
                take_descriptors(&raw const header, &mut device);
            }
            count
        };
        match usize::try_from(count) {
            Ok(0) => return None,
            Ok(count) => filled = filled.saturating_add(count),
            Err(_) if errno() == libc::EINTR => {}
            Err(_) => return None,
        }
    }
    Some((message, device))
}

/// Takes every descriptor that came, so that none leaks into QEMU, and keeps the last.
///
/// # Safety
/// `header` was filled by a successful recvmsg, and its control buffer is alive.
unsafe fn take_descriptors(header: *const libc::msghdr, keep: &mut Option<OwnedFd>) {
    // SAFETY: the CMSG walk stays inside the control buffer, as the header says how much of it was
    // filled.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(header);
        while let Some(message) = control.as_ref() {
            if message.cmsg_level == libc::SOL_SOCKET && message.cmsg_type == libc::SCM_RIGHTS {
                let bytes = message.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let first = libc::CMSG_DATA(control).cast::<RawFd>();
                for index in 0..bytes / size_of::<RawFd>() {
                    *keep = Some(OwnedFd::from_raw_fd(first.wrapping_add(index).read_unaligned()));
                }
            }
            control = libc::CMSG_NXTHDR(header, control);
        }
    }
}

/// Sends the answer and returns whether it was sent. A peer that has gone does not matter to QEMU.
fn send(connection: RawFd, mut message: [u8; MESSAGE_LEN], userfaultfd: Option<&OwnedFd>) -> bool {
    let mut part = libc::iovec { iov_base: message.as_mut_ptr().cast(), iov_len: message.len() };
    let mut control: ControlBuffer = [0; 4];
    let fd_length = length_of::<RawFd>();
    // SAFETY: the header describes `message` and `control`, which live through the call. The
    // control message that is written fits into `control` (24 bytes of 32).
    unsafe {
        let mut header: libc::msghdr = mem::zeroed();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        if let Some(userfaultfd) = userfaultfd {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(fd_length) as _;
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            if message.is_null() {
                return false;
            }
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(fd_length) as _;
            libc::CMSG_DATA(message).cast::<RawFd>().write_unaligned(userfaultfd.as_raw_fd());
        }
        loop {
            match libc::sendmsg(connection, &raw const header, libc::MSG_NOSIGNAL) {
                0.. => return true,
                _ if errno() == libc::EINTR => {}
                _ => return false,
            }
        }
    }
}

fn length_of<T>() -> libc::socklen_t {
    // The types passed are a few bytes long.
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

fn errno() -> libc::c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn errno_u16(errno: libc::c_int) -> u16 {
    u16::try_from(errno).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::protocol::{parse_answer, request};

    fn server() -> Server {
        // SAFETY: getuid has no failure and touches no memory.
        Server { listener: -1, device: None, peer_uid: unsafe { libc::getuid() } }
    }

    fn ask(
        server: &Server,
        kept: &mut Kept,
        wanted: [u8; MESSAGE_LEN],
    ) -> Option<(Origin, libc::c_int)> {
        let (mut agent, connection) = UnixStream::pair().unwrap();
        agent.write_all(&wanted).unwrap();
        serve(server, kept, &connection.into());
        let mut answer = [0; MESSAGE_LEN];
        // The descriptor that comes along is closed, because no test needs it.
        agent.read_exact(&mut answer).ok()?;
        parse_answer(&answer).map(|(origin, errno)| (origin, errno.into()))
    }

    #[test]
    fn a_kept_userfaultfd_is_kept_until_dropped() {
        let (server, mut kept) = (server(), None);
        let Some((origin, 0)) = ask(&server, &mut kept, request(Request::New)) else {
            eprintln!("skipped: no userfaultfd available");
            return;
        };
        assert!(kept.is_none());
        assert_eq!(
            ask(&server, &mut kept, request(Request::Kept)),
            Some((Origin::None, libc::ENOENT))
        );
        assert_eq!(ask(&server, &mut kept, request(Request::NewKept)), Some((origin, 0)));
        let first = kept.as_ref().map(|(userfaultfd, _)| userfaultfd.as_raw_fd());
        assert!(first.is_some());
        for wanted in [Request::Kept, Request::New] {
            assert_eq!(ask(&server, &mut kept, request(wanted)), Some((origin, 0)));
            assert_eq!(kept.as_ref().map(|(userfaultfd, _)| userfaultfd.as_raw_fd()), first);
        }
        for _ in 0..2 {
            assert_eq!(
                ask(&server, &mut kept, request(Request::DropKept)),
                Some((Origin::None, 0))
            );
            assert!(kept.is_none());
        }
    }

    #[test]
    fn an_undelivered_userfaultfd_is_not_kept() {
        let (mut agent, connection) = UnixStream::pair().unwrap();
        agent.write_all(&request(Request::NewKept)).unwrap();
        drop(agent);
        let mut kept = None;
        serve(&server(), &mut kept, &connection.into());
        assert!(kept.is_none());
    }

    #[test]
    fn unknown_and_invalid_input_changes_nothing() {
        let mut kept = None;
        assert_eq!(ask(&server(), &mut kept, *b"nonsense"), Some((Origin::None, libc::EPROTO)));
        let mut later = request(Request::NewKept);
        later[4] += 1;
        assert_eq!(ask(&server(), &mut kept, later), Some((Origin::None, libc::EPROTO)));
        let other = Server { peer_uid: server().peer_uid + 1, ..server() };
        assert_eq!(ask(&other, &mut kept, request(Request::NewKept)), None);
        assert!(kept.is_none());
    }
}
