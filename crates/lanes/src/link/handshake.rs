//! The handshake of TLS by rustls, up to the keys of both directions.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use godwit_pki::Peer;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{ConnectionTrafficSecrets, Error, ExtractedSecrets};

use crate::LaneError;

/// Time limit of a whole handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Most bytes of the peer's handshake that are held at a time. Its longest message is a chain of
/// certificates, at most 64 KiB.
const MOST_HANDSHAKE_BYTES: usize = 96 << 10;

/// Source of the keys that replace worn ones.
pub(super) enum Keys {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Keys {
    /// Returns the next key for sending, and the number of its first record.
    pub(super) fn next_sending(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Keys::Client(connection) => connection.update_tx_secret(),
            Keys::Server(connection) => connection.update_tx_secret(),
        }
    }

    /// Returns the next key for receiving, and the number of its first record.
    pub(super) fn next_receiving(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Keys::Client(connection) => connection.update_rx_secret(),
            Keys::Server(connection) => connection.update_rx_secret(),
        }
    }
}

/// Result of a handshake.
pub(super) struct Secured {
    pub(super) secrets: ExtractedSecrets,
    pub(super) keys: Keys,
    pub(super) peer: Option<Peer>,
    /// Plain bytes of the stream that arrived with the handshake.
    pub(super) plain: Vec<u8>,
    /// Bytes of records that arrived with the handshake.
    pub(super) sealed: Vec<u8>,
}

/// Either side of a handshake.
pub(super) trait Side: Sized {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn peer(&self) -> Option<Peer>;

    fn into_keys(self) -> Result<(ExtractedSecrets, Keys), Error>;
}

impl Side for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ClientConnectionData> {
        self.process_tls_records(incoming)
    }

    fn peer(&self) -> Option<Peer> {
        Peer::of(self.peer_certificates())
    }

    fn into_keys(self) -> Result<(ExtractedSecrets, Keys), Error> {
        let (secrets, connection) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Keys::Client(connection)))
    }
}

impl Side for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ServerConnectionData> {
        self.process_tls_records(incoming)
    }

    fn peer(&self) -> Option<Peer> {
        Peer::of(self.peer_certificates())
    }

    fn into_keys(self) -> Result<(ExtractedSecrets, Keys), Error> {
        let (secrets, connection) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Keys::Server(connection)))
    }
}

/// What the handshake needs next.
enum Next {
    /// It has something else to process.
    Process,
    /// Bytes from the peer.
    Read,
    /// Nothing: it is complete.
    Done,
}

/// Performs a handshake.
///
/// # Errors
/// [`LaneError::Handshake`] with the reason.
pub(super) fn shake_hands<S: Side>(
    mut socket: &TcpStream,
    side: Result<S, Error>,
) -> Result<Secured, LaneError> {
    let mut side = side.map_err(failed)?;
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    let mut incoming = vec![0; MOST_HANDSHAKE_BYTES];
    let mut end = 0;
    let (mut outgoing, mut plain) = (Vec::new(), Vec::new());
    loop {
        // Checks the time after each read, so that a peer that sends byte by byte gains no time.
        if Instant::now() > deadline {
            return Err(failed("the peer took too long"));
        }
        let UnbufferedStatus { mut discard, state, .. } = side.process(&mut incoming[..end]);
        let next = match state {
            Ok(ConnectionState::EncodeTlsData(data)) => {
                encode(data, &mut outgoing)?;
                Next::Process
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                socket.write_all(&outgoing).map_err(failed)?;
                outgoing.clear();
                data.done();
                Next::Process
            }
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(record) = traffic.next_record() {
                    let record = record.map_err(failed)?;
                    plain.extend_from_slice(record.payload);
                    discard += record.discard;
                }
                Next::Process
            }
            Ok(ConnectionState::BlockedHandshake) => Next::Read,
            Ok(ConnectionState::WriteTraffic(_)) => Next::Done,
            Ok(_) => return Err(failed("the peer hung up")),
            Err(error) => {
                send_reason(socket, &mut side, &mut incoming[discard..end]);
                return Err(failed(error));
            }
        };
        incoming.copy_within(discard..end, 0);
        end -= discard;
        match next {
            Next::Process => {}
            Next::Read if end == incoming.len() => {
                return Err(failed("the peer's handshake is too long"));
            }
            Next::Read => match socket.read(&mut incoming[end..]).map_err(failed)? {
                0 => return Err(failed("the peer hung up")),
                read => end += read,
            },
            Next::Done => break,
        }
    }
    let peer = side.peer();
    let (secrets, keys) = side.into_keys().map_err(failed)?;
    incoming.truncate(end);
    Ok(Secured { secrets, keys, peer, plain, sealed: incoming })
}

fn encode<Data>(
    mut data: EncodeTlsData<'_, Data>,
    outgoing: &mut Vec<u8>,
) -> Result<(), LaneError> {
    let Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) =
        data.encode(&mut [])
    else {
        return Ok(());
    };
    let start = outgoing.len();
    outgoing.resize(start + required_size, 0);
    data.encode(&mut outgoing[start..]).map_err(failed)?;
    Ok(())
}

/// Sends the peer the reason of a failure, on a best-effort basis. `incoming`: what it has sent and
/// was not processed.
fn send_reason<S: Side>(mut socket: &TcpStream, side: &mut S, incoming: &mut [u8]) {
    let mut outgoing = Vec::new();
    let mut start = 0;
    while let UnbufferedStatus {
        discard, state: Ok(ConnectionState::EncodeTlsData(data)), ..
    } = side.process(&mut incoming[start..])
    {
        if encode(data, &mut outgoing).is_err() {
            return;
        }
        start += discard;
    }
    let _ = socket.write_all(&outgoing);
}

fn failed(error: impl std::fmt::Display) -> LaneError {
    LaneError::Handshake(error.to_string())
}
