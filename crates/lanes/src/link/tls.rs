//! A stream's bytes over TLS.
//!
//! One thread may read while another writes: each direction has a key and a lock of its own.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_pki::Peer;
use parking_lot::Mutex;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::{
    AlertDescription, ClientConfig, ContentType, Error, HandshakeType, InvalidMessage, ServerConfig,
};

use super::handshake::{Keys, Secured, shake_hands};
use super::records::{
    HEADER_BYTES, MOST_PLAIN_BYTES, MOST_RECORD_BYTES, Opened, Opener, Sealed, Sealer, record_bytes,
};
use crate::LaneError;

/// Plain bytes encrypted and handed to the socket at a time: few enough to stay in the CPU's cache.
const SEAL_BYTES: usize = 128 << 10;
/// Encrypted bytes read at a time into the caller's memory, where they are opened.
const READ_BYTES: usize = 256 << 10;
/// Least memory of the caller for that. With less, records are opened here and copied.
const LEAST_READ_BYTES: usize = 64 << 10;
const _: () = assert!(LEAST_READ_BYTES > 2 * MOST_RECORD_BYTES);
/// Encrypted bytes that are held at a time.
const OPEN_BYTES: usize = 2 * MOST_RECORD_BYTES;
/// A KeyUpdate that requests none in return (RFC 8446, section 4.6.3).
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
/// Level of an alert that ends the connection, and of one that does not matter.
const FATAL: u8 = 2;
const WARNING: u8 = 1;

/// TLS connection over a socket.
pub(crate) struct Tls {
    socket: TcpStream,
    keys: Mutex<Keys>,
    /// The lock is held while records are sent, so that they leave in order.
    sealing: Mutex<Sealing>,
    opening: Mutex<Opening>,
    /// Whether the peer has requested another key for what it receives: the next bytes have it.
    is_key_requested: AtomicBool,
}

struct Sealing {
    sealer: Sealer,
    /// Records to be sent.
    records: Sealed,
}

struct Opening {
    opener: Opener,
    bytes: Box<[u8]>,
    /// Plain bytes that have not been taken.
    plain: Range<usize>,
    /// Records that are not opened; behind the plain bytes.
    sealed: Range<usize>,
    is_over: bool,
    /// Error behind bytes that were returned; it is returned next.
    error: Option<Error>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Tls {
    /// Performs the handshake as the connecting side; the peer must be `name`.
    pub(crate) fn connect(
        socket: TcpStream,
        config: &Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Tls, LaneError> {
        let side = UnbufferedClientConnection::new(Arc::clone(config), name);
        let secured = shake_hands(&socket, side)?;
        Tls::new(socket, secured).map(|(tls, _)| tls)
    }

    /// Performs the handshake as the accepting side.
    pub(crate) fn accept(
        socket: TcpStream,
        config: &Arc<ServerConfig>,
    ) -> Result<(Tls, Peer), LaneError> {
        let secured = shake_hands(&socket, UnbufferedServerConnection::new(Arc::clone(config)))?;
        let (tls, peer) = Tls::new(socket, secured)?;
        let unknown = || LaneError::Handshake("its certificate has no name".to_owned());
        Ok((tls, peer.ok_or_else(unknown)?))
    }

    fn new(socket: TcpStream, secured: Secured) -> Result<(Tls, Option<Peer>), LaneError> {
        let Secured { secrets, keys, peer, plain, sealed } = secured;
        let failed = |error: Error| LaneError::Handshake(error.to_string());
        let opener = Opener::new(secrets.rx).map_err(failed)?;
        let sealer = Sealer::new(secrets.tx).map_err(failed)?;
        let tls = Tls {
            socket,
            keys: Mutex::new(keys),
            sealing: Mutex::new(Sealing { sealer, records: Sealed::default() }),
            opening: Mutex::new(Opening::new(opener, &plain, &sealed)),
            is_key_requested: AtomicBool::new(false),
        };
        Ok((tls, peer))
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Encrypts all bytes where they are, and sends them. Returns the number of encrypted bytes.
    pub(super) fn write(&self, bytes: &mut [u8]) -> io::Result<u64> {
        let mut sealing = self.sealing.lock();
        let (mut rest, mut total) = (bytes, 0);
        while !rest.is_empty() {
            let count = piece_bytes(rest.len());
            let Sealing { sealer, records } = &mut *sealing;
            records.clear();
            if self.is_key_requested.swap(false, Ordering::Relaxed) || sealer.is_worn() {
                let kind = ContentType::Handshake;
                records.begin_with(sealer, kind, &KEY_UPDATE).map_err(invalid)?;
                let next = self.keys.lock().next_sending().map_err(invalid)?;
                *sealer = Sealer::new(next).map_err(invalid)?;
            }
            records.seal(sealer, rest, count).map_err(invalid)?;
            total += write_all(&self.socket, &mut records.parts(rest))?;
            rest = &mut rest[count..];
        }
        Ok(total)
    }

    /// Reads the bytes available, at least one. Returns 0 at the end. Bytes behind those returned
    /// are undefined.
    ///
    /// # Errors
    /// `Interrupted` after a record without bytes, or a part of one, so that the caller may check
    /// its deadline: a peer may send such records without end.
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut opening = self.opening.lock();
        if let Some(error) = opening.error.take() {
            return Err(self.fail(&mut opening, error));
        }
        loop {
            let taken = opening.take(into);
            if taken > 0 || opening.is_over {
                return Ok(taken);
            }
            match opening.next_record() {
                Ok(None) if into.len() >= LEAST_READ_BYTES => {
                    return self.read_directly(&mut opening, into);
                }
                // Frames delimit themselves: a peer that closes without close_notify has ended the
                // stream nevertheless.
                Ok(None) => opening.is_over = opening.read(&self.socket)? == 0,
                Ok(Some(record)) => match self.open(&mut opening, record) {
                    Ok(()) if opening.plain.is_empty() && !opening.is_over => {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    Ok(()) => {}
                    Err(error) => return Err(self.fail(&mut opening, error)),
                },
                Err(error) => return Err(self.fail(&mut opening, error)),
            }
        }
    }

    /// Reads records into `into` and opens them there. What is not a whole record is held.
    fn read_directly(&self, opening: &mut Opening, into: &mut [u8]) -> io::Result<usize> {
        let room = into.len().min(READ_BYTES);
        let held = opening.sealed.len();
        into[..held].copy_from_slice(&opening.bytes[opening.sealed.clone()]);
        let mut socket = &self.socket;
        let read = socket.read(&mut into[held..room])?;
        opening.is_over = read == 0;
        let (mut opened, mut at, end) = (0, 0, held + read);
        while !opening.is_over {
            let next = match record_bytes(&into[at..end]) {
                Ok(Some(length)) if length <= end - at => self
                    .open_to_start(opening, &mut into[opened..at + length], at - opened)
                    .map(|plain| Some((plain, length))),
                Ok(_) => Ok(None),
                Err(error) => Err(error),
            };
            match next {
                Ok(Some((plain, length))) => (opened, at) = (opened + plain, at + length),
                Ok(None) => break,
                Err(error) if opened == 0 => return Err(self.fail(opening, error)),
                Err(error) => {
                    opening.error = Some(error);
                    return Ok(opened);
                }
            }
        }
        // What follows the end is not authenticated, may be longer than a record, and is not read.
        let rest = if opening.is_over { 0 } else { end - at };
        opening.bytes[..rest].copy_from_slice(&into[at..at + rest]);
        opening.sealed = 0..rest;
        match opened {
            0 if !opening.is_over => Err(io::ErrorKind::Interrupted.into()),
            opened => Ok(opened),
        }
    }

    /// Ends the reading because of what the peer sent, and tells the peer.
    fn fail(&self, opening: &mut Opening, error: Error) -> io::Error {
        opening.is_over = true;
        self.refuse(&error);
        invalid(error)
    }

    /// Returns whether plain bytes, or a whole record, are held.
    pub(super) fn holds_bytes(&self) -> bool {
        let opening = self.opening.lock();
        !opening.plain.is_empty()
            || opening.error.is_some()
            || !matches!(opening.next_record(), Ok(None))
    }

    /// Signals the peer that no more bytes follow.
    pub(super) fn finish(&self) {
        // The end of the socket's stream signals it as well.
        let _ = self.alert(&mut self.sealing.lock(), WARNING, AlertDescription::CloseNotify);
    }

    /// Opens a record that is held.
    fn open(&self, opening: &mut Opening, record: Range<usize>) -> Result<(), Error> {
        let Opening { opener, bytes, plain, sealed, is_over, .. } = &mut *opening;
        let opened = opener.open(&mut bytes[record.clone()])?;
        sealed.start = record.end;
        if opened.kind == ContentType::ApplicationData {
            let first = record.start + HEADER_BYTES;
            *plain = first..first + opened.plain.len();
            return Ok(());
        }
        if self.other_record(&opened, is_over)? {
            *opener = Opener::new(self.keys.lock().next_receiving()?)?;
        }
        Ok(())
    }

    /// Opens the record that begins at `at` and ends with `bytes`. Returns the number of its plain
    /// bytes, which are at the start of `bytes` then.
    fn open_to_start(
        &self,
        opening: &mut Opening,
        bytes: &mut [u8],
        at: usize,
    ) -> Result<usize, Error> {
        let Opening { opener, is_over, .. } = opening;
        let opened = opener.open_to_start(bytes, at)?;
        if opened.kind == ContentType::ApplicationData {
            return Ok(opened.plain.len());
        }
        if self.other_record(&opened, is_over)? {
            *opener = Opener::new(self.keys.lock().next_receiving()?)?;
        }
        Ok(0)
    }

    /// Handles a record without application data. Returns whether the peer's next record has
    /// another key.
    fn other_record(&self, opened: &Opened<'_>, is_over: &mut bool) -> Result<bool, Error> {
        match (opened.kind, opened.plain) {
            (ContentType::Alert, [_, code]) => match AlertDescription::from(*code) {
                AlertDescription::CloseNotify => {
                    *is_over = true;
                    Ok(false)
                }
                alert => Err(Error::AlertReceived(alert)),
            },
            (ContentType::Handshake, messages) => self.key_update(messages),
            _ => Err(InvalidMessage::InvalidContentType.into()),
        }
    }

    /// Handles messages of the handshake that follow it. Returns whether the peer's next record has
    /// another key.
    fn key_update(&self, messages: &[u8]) -> Result<bool, Error> {
        let mut rest = messages;
        while let [kind, a, b, c, behind @ ..] = rest {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            let (body, after) =
                behind.split_at_checked(length).ok_or(InvalidMessage::MessageTooShort)?;
            match (HandshakeType::from(*kind), body, after) {
                // No record may hold messages of two keys.
                (HandshakeType::KeyUpdate, [requested @ (0 | 1)], []) => {
                    self.is_key_requested.fetch_or(*requested == 1, Ordering::Relaxed);
                    return Ok(true);
                }
                // Sessions are not resumed.
                (HandshakeType::NewSessionTicket, _, _) => rest = after,
                _ => return Err(InvalidMessage::InvalidKeyUpdate.into()),
            }
        }
        if rest.is_empty() { Ok(false) } else { Err(InvalidMessage::MessageTooShort.into()) }
    }

    /// Sends the peer the reason why its bytes are refused, unless the other direction is busy.
    fn refuse(&self, error: &Error) {
        let reason = match error {
            Error::AlertReceived(_) => return,
            Error::DecryptError => AlertDescription::BadRecordMac,
            Error::PeerSentOversizedRecord => AlertDescription::RecordOverflow,
            _ => AlertDescription::UnexpectedMessage,
        };
        if let Some(mut sealing) = self.sealing.try_lock() {
            let _ = self.alert(&mut sealing, FATAL, reason);
        }
    }

    fn alert(&self, sealing: &mut Sealing, level: u8, alert: AlertDescription) -> io::Result<()> {
        let Sealing { sealer, records } = sealing;
        records.clear();
        let alert = [level, u8::from(alert)];
        records.begin_with(sealer, ContentType::Alert, &alert).map_err(invalid)?;
        write_all(&self.socket, &mut records.parts(&[])).map(drop)
    }
}

impl Opening {
    /// Begins with what arrived with the handshake.
    fn new(opener: Opener, plain: &[u8], sealed: &[u8]) -> Opening {
        let held = plain.len() + sealed.len();
        let mut bytes = vec![0; OPEN_BYTES.max(held)].into_boxed_slice();
        bytes[..plain.len()].copy_from_slice(plain);
        bytes[plain.len()..held].copy_from_slice(sealed);
        let (plain, sealed) = (0..plain.len(), plain.len()..held);
        Opening { opener, bytes, plain, sealed, is_over: false, error: None }
    }

    /// Takes plain bytes. Returns their number.
    fn take(&mut self, into: &mut [u8]) -> usize {
        let taken = into.len().min(self.plain.len());
        let end = self.plain.start + taken;
        into[..taken].copy_from_slice(&self.bytes[self.plain.start..end]);
        self.plain.start = end;
        taken
    }

    /// Returns the place of the next record, if all of it is held.
    fn next_record(&self) -> Result<Option<Range<usize>>, Error> {
        let length = record_bytes(&self.bytes[self.sealed.clone()])?;
        let whole = length.filter(|length| *length <= self.sealed.len());
        Ok(whole.map(|length| self.sealed.start..self.sealed.start + length))
    }

    /// Reads from the socket. All plain bytes have been taken, and no whole record is held, so
    /// there is room for it. Returns the number of bytes.
    fn read(&mut self, mut socket: &TcpStream) -> io::Result<usize> {
        self.bytes.copy_within(self.sealed.clone(), 0);
        self.sealed = 0..self.sealed.len();
        let read = socket.read(&mut self.bytes[self.sealed.end..])?;
        self.sealed.end += read;
        Ok(read)
    }
}

/// Returns how many of `left` bytes are encrypted and handed to the socket at a time. Less than a
/// record goes with what is before it: a call costs more. The rest of most frames of pages is so
/// small, because a header precedes a multiple of [`SEAL_BYTES`].
fn piece_bytes(left: usize) -> usize {
    if left < SEAL_BYTES + MOST_PLAIN_BYTES { left } else { SEAL_BYTES }
}

/// Writes all parts. Returns the number of their bytes.
fn write_all(mut socket: &TcpStream, parts: &mut [IoSlice<'_>]) -> io::Result<u64> {
    let (mut rest, mut total) = (parts, 0);
    // Parts without bytes would look like a socket that takes none.
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        match socket.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                total += written as u64;
                IoSlice::advance_slices(&mut rest, written);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

fn invalid(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests;
