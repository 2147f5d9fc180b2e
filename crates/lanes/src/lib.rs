//! Paths between two hosts: a lane is a pair of addresses, with any number of TCP streams of the migration protocol. Blocking,
//! for plain threads.
//!
//! Pages leave from a copy: the guest writes while they are read, and what is summed up must be what is sent. In the clear long runs of
//! them go from the socket straight to guest memory, and are summed up there. This crate knows
//! frames and sockets; what a message means is the migration's.

mod codec;
#[cfg(test)]
mod corruption_tests;
mod delta;
#[doc(hidden)]
pub mod fuzzing;
mod interrupt;
#[cfg(test)]
mod lane_tests;
mod link;
pub mod pacing;
mod probe;
mod rate;
mod receiver;
mod reference;
mod sender;
mod socket;
mod unit;

pub use codec::try_codec;
pub use delta::{is_sampled, xor};
pub use interrupt::Interrupt;
pub use probe::connect_sized;
pub use rate::{BitRate, LEAST_LIMIT, RateError, RateLimit, parse_scaled};
pub use receiver::{Incoming, StreamReceiver};
pub use reference::{Knowledge, hash_page};
pub use sender::StreamSender;
pub use socket::{
    CONNECT_LIMIT, Carries, Lane, Near, SAFE_SEGMENT_BYTES, Stream, accept, connect, listen, pair,
};
pub use unit::{Comparing, Differing, Effort, Hashing, Packing, Referring, Tally, UnitPages, UnitSent};

use std::net::SocketAddr;

/// Why a lane ended.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The address can't be reached.
    #[error(
        "can't connect the lane to {to}: {source}; check the migration network and the destination's migration_addresses"
    )]
    Connect {
        /// The destination's address.
        to: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The address can't be listened on.
    #[error(
        "can't listen for lanes on {on}: {source}; check migration_addresses in this agent's configuration"
    )]
    Listen {
        /// The address.
        on: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// No secure connection came to be.
    #[error("the TLS handshake failed: {0}; check the certificates with `godwit pki show`")]
    Handshake(String),
    /// The peer ended the secure connection, and said why.
    #[error("the peer refuses the secure connection: {0}; check the certificates with `godwit pki show`")]
    Alert(String),
    /// The peer closed the connection.
    #[error("the peer closed the lane")]
    Closed,
    /// Nothing came for longer than the lane's time limit.
    #[error("the peer has been silent for too long")]
    Silent,
    /// The connection broke.
    #[error("the lane broke: {0}")]
    Io(std::io::Error),
    /// The peer broke the protocol.
    #[error(transparent)]
    Wire(#[from] godwit_wire::WireError),
    /// The peer named pages that the VM does not have.
    #[error("the peer sent pages that the VM does not have (block {block}, {count} pages from {first})")]
    OutOfBounds {
        /// The block.
        block: u16,
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The peer sent compressed pages that do not hold what they claim.
    #[error(
        "the peer sent {count} compressed pages that can't be unpacked (block {block}, from page {first})"
    )]
    Garbled {
        /// The block.
        block: u16,
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The peer sent pages of a round after those of a later one.
    #[error("the peer sent pages of round {round} after those of a later one (block {block}, page {first})")]
    OldRound {
        /// The block.
        block: u16,
        /// The first page.
        first: u64,
        /// The round.
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
            // A receive timeout shows as WouldBlock, TCP_USER_TIMEOUT and keep-alive as TimedOut.
            WouldBlock | TimedOut => LaneError::Silent,
            _ => LaneError::Io(error),
        }
    }
}

/// What a peer's alert says of this host. In TLS 1.3 who connects hears it only after its own handshake.
fn meaning(alert: rustls::AlertDescription) -> String {
    use rustls::AlertDescription;
    match alert {
        AlertDescription::CertificateExpired => "this host's certificate has ended".to_owned(),
        AlertDescription::UnknownCA => "it does not know the authority of this host's certificate".to_owned(),
        AlertDescription::CertificateRequired => "this host showed no certificate".to_owned(),
        other => format!("{other:?}"),
    }
}
