//! The agent's side of the tracker library: the socket that QEMU inherits, and the request for a
//! userfaultfd.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::kernel::{kernel_too_old, open_device};
use crate::error::TrackError;

#[path = "../../../tracker/src/protocol.rs"]
pub mod protocol;

use protocol::{MESSAGE_LEN, Origin, Request};

/// Time limit for QEMU's answer. The library's thread has nothing else to do, but a debugger may
/// have stopped QEMU.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum pending connections; the agent makes one at a time.
const BACKLOG: i32 = 4;

/// Creates the listening socket at `path` that QEMU inherits (its number is in
/// `GODWIT_TRACKER_FD`). Only the agent may enter the directory. A socket left by an earlier QEMU
/// is replaced. The agent must close its own descriptor once QEMU runs: while a process holds it, a
/// missing library shows as silence and not as a refusal.
pub fn tracker_listener(path: &Path) -> io::Result<OwnedFd> {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => std::fs::remove_file(path)?,
        _ => {}
    }
    let listener = socket()?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Requests a userfaultfd of QEMU's process from the library behind `path`. The flag returned is
/// true if it can also deliver faults that occur in the kernel (in KVM or in system calls).
pub(crate) fn request_userfaultfd(path: &Path) -> Result<(OwnedFd, bool), TrackError> {
    request(path, Request::New)?.ok_or_else(|| lost("was not sent"))
}

/// Requests a userfaultfd as [`request_userfaultfd`] does. The library keeps a copy of it until it
/// is asked to drop it.
///
/// # Errors
/// Also [`TrackError::LibraryTooOld`].
pub(crate) fn request_kept_userfaultfd(path: &Path) -> Result<(OwnedFd, bool), TrackError> {
    request(path, Request::NewKept)?.ok_or_else(|| lost("was not sent"))
}

/// Returns the userfaultfd of which the library keeps a copy, as [`request_userfaultfd`] does.
///
/// # Errors
/// Also [`TrackError::LibraryTooOld`], and [`TrackError::NothingKept`].
pub(crate) fn kept_userfaultfd(path: &Path) -> Result<(OwnedFd, bool), TrackError> {
    request(path, Request::Kept)?.ok_or_else(|| lost("was not sent"))
}

/// Has the library close its copy, if it keeps one.
pub(crate) fn drop_kept(path: &Path) -> Result<(), TrackError> {
    request(path, Request::DropKept).map(|_| ())
}

fn request(path: &Path, wanted: Request) -> Result<Option<(OwnedFd, bool)>, TrackError> {
    let missing =
        |errno: Errno| TrackError::LibraryMissing { socket: path.to_owned(), source: errno.into() };
    let connection = connect(path).map_err(missing)?;
    // If the agent may not open it either, the library tries other ways.
    let device = open_device();
    send_request(&connection, wanted, device.as_ref().ok().map(AsFd::as_fd)).map_err(missing)?;
    let (answer, userfaultfd) = receive_answer(&connection).map_err(missing)?;
    let version = || TrackError::LibraryVersion { socket: path.to_owned() };
    match (protocol::parse_answer(&answer).ok_or_else(version)?, userfaultfd) {
        ((Origin::None, 0), _) if wanted == Request::DropKept => Ok(None),
        ((Origin::None, errno), _) => Err(match (Errno::from_raw_os_error(errno.into()), device) {
            (Errno::PROTO, _) if wanted != Request::New => {
                TrackError::LibraryTooOld { socket: path.to_owned() }
            }
            (Errno::PROTO, _) => version(),
            (Errno::NOENT, _) if wanted == Request::Kept => {
                TrackError::NothingKept { socket: path.to_owned() }
            }
            (Errno::NOSYS, _) => kernel_too_old("userfaultfd"),
            (refused, Ok(_)) => TrackError::NoUserfaultfd {
                reason: format!("QEMU's attempt with the agent's /dev/userfaultfd: {refused}"),
            },
            (refused, Err(device)) => TrackError::NoUserfaultfd {
                reason: format!("/dev/userfaultfd: {device}; QEMU's own attempt: {refused}"),
            },
        }),
        ((origin, _), Some(userfaultfd)) => Ok(Some((userfaultfd, origin != Origin::UserModeOnly))),
        // The descriptor was sent and lost on the way: this process has no free descriptor.
        (_, None) => Err(lost("found no file descriptor left in the agent")),
    }
}

fn lost(how: &str) -> TrackError {
    TrackError::NoUserfaultfd { reason: format!("the library's answer {how}") }
}

/// Uses SOCK_SEQPACKET: a message arrives whole and with its descriptor, or not.
fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let connection = socket()?;
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&connection, direction, Some(ANSWER_TIMEOUT))?;
    }
    rustix::net::connect(&connection, &SocketAddrUnix::new(path)?)?;
    Ok(connection)
}

fn send_request(
    connection: &OwnedFd,
    wanted: Request,
    device: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let request = protocol::request(wanted);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let device = device.as_slice();
    if !device.is_empty() && !control.push(SendAncillaryMessage::ScmRights(device)) {
        return Err(Errno::NOBUFS);
    }
    rustix::net::sendmsg(connection, &[IoSlice::new(&request)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive_answer(connection: &OwnedFd) -> Result<([u8; MESSAGE_LEN], Option<OwnedFd>), Errno> {
    let mut answer = [0; MESSAGE_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        connection,
        &mut [IoSliceMut::new(&mut answer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let userfaultfd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match received.bytes {
        // The library closed the connection: it answers only this agent's user, and only requests.
        0 => Err(Errno::CONNRESET),
        MESSAGE_LEN => Ok((answer, userfaultfd)),
        // Makes a short answer be refused as one of another version.
        _ => Ok(([0; MESSAGE_LEN], None)),
    }
}
