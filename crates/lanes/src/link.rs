//! Transport of a stream's bytes: the socket itself, or TLS over it.

mod handshake;
mod records;
mod tls;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use godwit_ram::{acked_bytes, unacked_bytes, unanswered_timeouts, unsent_bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::LaneError;
pub(crate) use tls::Tls;

#[derive(Clone, Debug)]
pub(crate) enum Link {
    /// The socket carries the stream's bytes unencrypted.
    Plain(Arc<TcpStream>),
    Tls(Arc<Tls>),
}

impl Link {
    pub(crate) fn plain_over(socket: TcpStream) -> Link {
        Link::Plain(Arc::new(socket))
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Link::Plain(socket) => socket,
            Link::Tls(tls) => tls.socket(),
        }
    }

    /// Sends all bytes, and may encrypt them where they are. Returns how many bytes the socket
    /// received for them.
    pub(crate) fn send(&self, bytes: &mut [u8]) -> Result<u64, LaneError> {
        match self {
            Link::Plain(socket) => {
                socket.as_ref().write_all(bytes)?;
                Ok(bytes.len() as u64)
            }
            Link::Tls(tls) => Ok(tls.write(bytes)?),
        }
    }

    /// Reads the bytes available, at least one. Returns 0 at the end.
    pub(crate) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Link::Plain(socket) => socket.as_ref().read(into),
            Link::Tls(tls) => tls.read(into),
        }
    }

    /// Returns the socket if it carries the stream's bytes unencrypted.
    pub(crate) fn plain(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Link::Plain(socket) => Some(socket.as_fd()),
            Link::Tls(_) => None,
        }
    }

    /// Returns the bytes that the socket has accepted and not yet put on the wire; 0 if the kernel
    /// does not report it.
    pub(crate) fn unsent_bytes(&self) -> u64 {
        unsent_bytes(self.socket().as_fd()).unwrap_or(0)
    }

    /// Returns the bytes that the peer has acknowledged; 0 if the kernel does not report it.
    pub(crate) fn acked_bytes(&self) -> u64 {
        acked_bytes(self.socket().as_fd()).unwrap_or(0)
    }

    /// Returns the bytes that the socket has accepted and the peer has not acknowledged; 0 if the
    /// kernel does not report it.
    pub(crate) fn unacked_bytes(&self) -> u64 {
        unacked_bytes(self.socket().as_fd()).unwrap_or(0)
    }

    /// Returns the number of consecutive unanswered retransmissions; 0 if the kernel does not
    /// report it.
    pub(crate) fn unanswered_timeouts(&self) -> u8 {
        unanswered_timeouts(self.socket().as_fd()).unwrap_or(0)
    }

    /// Returns whether a read would block.
    pub(crate) fn is_idle(&self) -> bool {
        if let Link::Tls(tls) = self
            && tls.holds_bytes()
        {
            return false;
        }
        let mut ready = [PollFd::new(self.socket(), PollFlags::IN)];
        matches!(poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Signals the peer that no more bytes follow.
    pub(crate) fn finish(&self) {
        if let Link::Tls(tls) = self {
            tls.finish();
        }
    }
}
