//! The migration protocol of a lane: messages, framing and bounds. It does no I/O and touches no
//! guest memory.
//!
//! A lane carries frames in both directions. A frame consists of a header of [`HEADER_LEN`] bytes
//! (kind, length, checksums) and a payload. The kind bounds the payload's length before anything is
//! allocated. Numbers are little-endian. A frame takes effect only after its checksum was verified.
//! docs/protocol.md specifies the protocol; `tests/document.rs` keeps document and code consistent.

mod cursor;
mod delta;
mod frame;
mod message;
mod reference;
mod runs;
mod sum;
mod version;

pub use delta::Delta;
pub use frame::{FrameHeader, HEADER_LEN, Kind};
pub use message::{
    Begin, BlockRun, Codec, Encoding, Message, PageRun, PagedIn, PagesEnd, PagesHeader, Reason,
    Running, Zeros,
};
pub use reference::{Digests, PageHash, Place, References, prefix};
pub use runs::MAX_RUNS_PAYLOAD;
pub use sum::{Checksum, checksum};
pub use version::{Incompatible, SUPPORTED, VersionRange, negotiate};

/// Maximum pages of one frame, raw or compressed: 256 KiB. A sender checksums, and a receiver
/// unpacks, this much in one piece.
pub const MAX_PAGES_PER_FRAME: u32 = 64;
/// Maximum pages of one references frame.
pub const MAX_REFERENCES: u32 = 64;
/// Maximum pages described by one digests frame.
pub const MAX_DIGESTS: u32 = 4096;
/// Guest page size on x86-64, bytes.
pub const PAGE_SIZE: u32 = 4096;
/// Maximum RAM blocks of one VM.
pub const MAX_BLOCKS: u16 = 64;
/// Maximum data streams of one migration, broken ones included.
pub const MAX_STREAMS: u16 = 256;
/// Number of the stream that carries everything except pages. The other streams, from 1 on, carry
/// pages.
pub const CONTROL_STREAM: u16 = 0;
/// Number of the page-in stream that carries requests for pages and the pages requested. The
/// streams numbered after it carry all other pages.
pub const PAGE_IN_STREAM: u16 = 1024;
/// Maximum page-in streams, [`PAGE_IN_STREAM`] included.
pub const MAX_PAGE_IN_STREAMS: u16 = 64;
/// Number of classes in [`PagedIn::waits`].
pub const WAIT_CLASSES: usize = 24;
/// Upper bound of the first class of [`PagedIn::waits`].
pub const FIRST_WAIT_CLASS_NS: u64 = 16_384;
/// Maximum bytes of device state in one frame.
pub const MAX_DEVICE_STATE_CHUNK: u32 = 256 * 1024;
/// Maximum bytes of padding in one frame.
pub const MAX_PADDING: u32 = 1024 * 1024;
/// Longest text of a refusal, in bytes of UTF-8.
pub const MAX_DETAIL: u32 = 1024;

/// Identifier of one migration: 16 random bytes. The destination's agent issues it, and the
/// source's lane presents it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MigrationId(pub [u8; 16]);

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MigrationId({self})")
    }
}

impl std::str::FromStr for MigrationId {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let digits = text.as_bytes();
        let mut id = [0; 16];
        if digits.len() != 32 || !text.is_ascii() {
            return Err(WireError::BadValue { what: "migration id" });
        }
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair)
                .map_err(|_| WireError::BadValue { what: "migration id" })?;
            *byte = u8::from_str_radix(pair, 16)
                .map_err(|_| WireError::BadValue { what: "migration id" })?;
        }
        Ok(MigrationId(id))
    }
}

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
