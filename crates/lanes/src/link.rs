//! Transport of a stream's bytes: the socket itself, or TLS over it.
//!
//! One thread may read while another writes. A TLS connection has one state for both directions,
//! and therefore a lock. The lock is held while bytes are encrypted or decrypted, and never while a
//! thread waits for the socket.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_pki::Peer;
use godwit_ram::{acked_bytes, unacked_bytes, unanswered_timeouts, unsent_bytes};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::LaneError;

/// Plain bytes encrypted and handed to the socket at a time: few enough to stay in the CPU's cache.
const SEAL_BYTES: usize = 128 << 10;
/// Time limit of a whole handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Encrypted bytes read from the socket in one call.
const OPEN_BYTES: usize = 256 << 10;

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
            Link::Tls(tls) => &tls.socket,
        }
    }

    /// Sends all bytes. Returns how many bytes the socket received for them.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<u64, LaneError> {
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
            && tls.opening.lock().rest() > 0
        {
            return false;
        }
        let mut ready = [PollFd::new(self.socket(), PollFlags::IN)];
        matches!(poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Signals the peer that no more bytes follow.
    pub(crate) fn finish(&self) {
        if let Link::Tls(tls) = self {
            let mut sealed = tls.sealed.lock();
            tls.connection.lock().send_close_notify();
            // The end of the socket's stream signals it as well.
            let _ = tls.flush(&mut sealed);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Tls {
    socket: TcpStream,
    connection: Mutex<Connection>,
    /// Encrypted bytes to be sent. The lock is held while they are sent, so that records leave in
    /// order.
    sealed: Mutex<Vec<u8>>,
    opening: Mutex<Opening>,
}

/// Encrypted bytes that were received and not decrypted yet.
#[derive(Debug)]
struct Opening {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Opening {
    fn rest(&self) -> usize {
        self.end - self.start
    }
}

impl Tls {
    /// Performs the handshake as the connecting side; the peer must be `name`.
    pub(crate) fn connect(
        socket: TcpStream,
        config: &Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Tls, LaneError> {
        let connection = ClientConnection::new(Arc::clone(config), name);
        Tls::shake_hands(socket, connection.map(Connection::Client)).map(|(tls, _)| tls)
    }

    /// Performs the handshake as the accepting side.
    pub(crate) fn accept(
        socket: TcpStream,
        config: &Arc<ServerConfig>,
    ) -> Result<(Tls, Peer), LaneError> {
        let connection = ServerConnection::new(Arc::clone(config));
        let (tls, peer) = Tls::shake_hands(socket, connection.map(Connection::Server))?;
        let unknown = || LaneError::Handshake("its certificate has no name".to_owned());
        Ok((tls, peer.ok_or_else(unknown)?))
    }

    fn shake_hands(
        socket: TcpStream,
        connection: Result<Connection, rustls::Error>,
    ) -> Result<(Tls, Option<Peer>), LaneError> {
        let failed = |error: &dyn std::fmt::Display| LaneError::Handshake(error.to_string());
        let mut connection = connection.map_err(|error| failed(&error))?;
        // Encrypted bytes leave at once.
        connection.set_buffer_limit(None);
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        while connection.is_handshaking() || connection.wants_write() {
            if Instant::now() > deadline {
                return Err(failed(&"the peer took too long"));
            }
            // Checks the time after each read, so that a peer that sends byte by byte gains no
            // time.
            if connection.wants_write() {
                connection.write_tls(&mut &socket).map_err(|error| failed(&error))?;
            } else {
                if connection.read_tls(&mut &socket).map_err(|error| failed(&error))? == 0 {
                    return Err(failed(&"the peer hung up"));
                }
                if let Err(error) = connection.process_new_packets() {
                    // Sends the peer the reason, on a best-effort basis.
                    let _ = connection.write_tls(&mut &socket);
                    return Err(failed(&error));
                }
            }
        }
        let peer = Peer::of(connection.peer_certificates());
        let opening = Opening { bytes: vec![0; OPEN_BYTES].into(), start: 0, end: 0 };
        let tls = Tls {
            socket,
            connection: Mutex::new(connection),
            sealed: Mutex::default(),
            opening: Mutex::new(opening),
        };
        Ok((tls, peer))
    }

    /// Encrypts and sends all bytes. Returns the number of encrypted bytes.
    fn write(&self, bytes: &[u8]) -> io::Result<u64> {
        let mut sealed = self.sealed.lock();
        let mut total = 0;
        for piece in bytes.chunks(SEAL_BYTES) {
            let mut rest = piece;
            while !rest.is_empty() {
                let taken = self.connection.lock().writer().write(rest)?;
                rest = &rest[taken..];
            }
            total += self.flush(&mut sealed)?;
        }
        Ok(total)
    }

    fn flush(&self, sealed: &mut Vec<u8>) -> io::Result<u64> {
        sealed.clear();
        {
            let mut connection = self.connection.lock();
            while connection.wants_write() {
                connection.write_tls(&mut *sealed)?;
            }
        }
        (&self.socket).write_all(sealed)?;
        Ok(sealed.len() as u64)
    }

    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut opening = self.opening.lock();
        loop {
            match self.connection.lock().reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A peer that closes without close_notify has ended the stream nevertheless: frames
                // delimit themselves.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            if opening.rest() == 0 {
                let Opening { bytes, start, end } = &mut *opening;
                (*start, *end) = (0, (&self.socket).read(bytes)?);
                if *end == 0 {
                    return Ok(0);
                }
            }
            self.open(&mut opening)?;
        }
    }

    /// Decrypts as much as the connection takes at a time, about one record.
    fn open(&self, opening: &mut Opening) -> io::Result<()> {
        let mut connection = self.connection.lock();
        let mut rest = &opening.bytes[opening.start..opening.end];
        let taken = connection.read_tls(&mut rest)?;
        opening.start += taken;
        let opened = connection.process_new_packets();
        let answers = connection.wants_write();
        drop(connection);
        if answers {
            // An alert with the reason, or the answer to a key update.
            let mut sealed = self.sealed.lock();
            let _ = self.flush(&mut sealed);
        }
        opened.map(|_| ()).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}
