//! Reasons why lanes end.

use std::net::SocketAddr;

/// Reason why a lane ended.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The address is unreachable.
    #[error(
        "can't connect the lane to {to}: {source}; check the migration network and the \
        destination's migration_addresses"
    )]
    Connect {
        /// The destination's address.
        to: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The address cannot be listened on.
    #[error(
        "can't listen for lanes on {on}: {source}; check migration_addresses in this agent's \
        configuration"
    )]
    Listen {
        /// The address.
        on: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The TLS handshake failed.
    #[error("the TLS handshake failed: {0}; check the certificates with `godwit pki show`")]
    Handshake(String),
    /// The peer ended the secure connection and stated the reason.
    #[error(
        "the peer refuses the secure connection: {0}; check the certificates with `godwit pki show`"
    )]
    Alert(String),
    /// The peer closed the connection.
    #[error("the peer closed the lane")]
    Closed,
    /// The peer was silent for longer than the lane's time limit.
    #[error("the peer has been silent for too long")]
    Silent,
    /// The connection broke.
    #[error("the lane broke: {0}")]
    Io(std::io::Error),
    /// The peer violated the protocol.
    #[error(transparent)]
    Wire(#[from] godwit_wire::WireError),
    /// The peer named pages that the VM does not have.
    #[error(
        "the peer sent pages that the VM does not have (block {block}, {count} pages from {first})"
    )]
    OutOfBounds {
        block: u16,
        /// The first page's number.
        first: u64,
        /// Number of pages.
        count: u64,
    },
    /// The peer sent compressed pages whose content does not match the header.
    #[error(
        "the peer sent {count} compressed pages that can't be unpacked (block {block}, from page \
        {first})"
    )]
    Garbled {
        block: u16,
        /// The first page's number.
        first: u64,
        /// Number of pages.
        count: u64,
    },
    /// The peer sent compressed blocks of a disk whose content does not match the header.
    #[error(
        "the peer sent {bytes} compressed bytes of a disk that can't be unpacked (disk {disk}, \
        from byte {offset})"
    )]
    GarbledBlocks {
        /// The disk's number.
        disk: u16,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        bytes: u32,
    },
    /// The peer sent pages of an older round after those of a newer one.
    #[error(
        "the peer sent pages of round {round} after those of a later one (block {block}, page \
        {first})"
    )]
    OldRound {
        block: u16,
        /// The first page's number.
        first: u64,
        round: u32,
    },
    /// The peer sent a message that does not belong on this stream.
    #[error("the peer sent a {0:?} message on a stream that does not carry it")]
    Unexpected(godwit_wire::Kind),
    /// Guest memory could not be written.
    #[error("guest memory could not be written: {0}")]
    Memory(String),
}

impl From<std::io::Error> for LaneError {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{TimedOut, UnexpectedEof, WouldBlock};
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        if let Some(rustls::Error::AlertReceived(alert)) = inner {
            return LaneError::Alert(meaning(*alert));
        }
        match error.kind() {
            UnexpectedEof => LaneError::Closed,
            // A receive timeout appears as WouldBlock; TCP_USER_TIMEOUT and keep-alive appear as
            // TimedOut.
            WouldBlock | TimedOut => LaneError::Silent,
            _ => LaneError::Io(error),
        }
    }
}

/// Describes what a peer's alert says about this host. In TLS 1.3 the connecting side receives it
/// only after its own handshake.
fn meaning(alert: rustls::AlertDescription) -> String {
    use rustls::AlertDescription;
    match alert {
        AlertDescription::CertificateExpired => "this host's certificate has ended".to_owned(),
        AlertDescription::UnknownCA => {
            "it does not know the authority of this host's certificate".to_owned()
        }
        AlertDescription::CertificateRequired => "this host showed no certificate".to_owned(),
        other => format!("{other:?}"),
    }
}
