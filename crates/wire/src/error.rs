//! Errors in what a peer sent.

use crate::Kind;

/// Error in bytes that a peer sent. Every variant ends the lane, because nothing after one bad
/// frame can be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Bytes differ from what was sent, or another program sent them.
    #[error(
        "the checksum of {what} is wrong: its bytes changed on their way (a network card, a switch \
        or a host's memory is at fault), or the peer does not speak this protocol"
    )]
    Corrupted {
        /// What the checksum covers.
        what: &'static str,
    },
    /// The first bytes do not belong to this protocol.
    #[error(
        "the peer does not speak Godwit's migration protocol: check that the address is an agent's \
        lane port"
    )]
    NotOurs,
    /// This version does not know the frame's kind.
    #[error("unknown frame kind {kind}: the peer does not keep to the negotiated version")]
    UnknownKind { kind: u8 },
    /// The frame's length is outside the bounds of its kind.
    #[error("a {kind:?} frame of {length} bytes is out of bounds ({least} to {most})")]
    BadLength {
        kind: Kind,
        /// The length stated in the header.
        length: u32,
        /// The smallest length that the kind allows.
        least: u32,
        /// The largest length that the kind allows.
        most: u32,
    },
    /// The payload ends before its last field.
    #[error("a frame ends in the middle of {what}")]
    Truncated {
        /// The name of the field.
        what: &'static str,
    },
    /// The payload continues after its last field.
    #[error("{unread} bytes are left after the last field of a {kind:?} frame")]
    Unread {
        kind: Kind,
        /// Number of bytes left over.
        unread: usize,
    },
    /// A field has an invalid value.
    #[error("{what} has a value out of bounds")]
    BadValue {
        /// The name of the field.
        what: &'static str,
    },
}
