//! The migration protocol of a lane: messages, framing, bounds. No I/O and no memory of a guest.
//!
//! A lane carries frames in both directions. A frame is a header of [`HEADER_LEN`] bytes (kind, length, checksums) and a
//! payload whose length is bounded by its kind before anything is allocated. Numbers are little-endian. Nothing of a frame is acted
//! upon before its checksum was right. The document is docs/protocol.md; `tests/document.rs` holds both together.

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
    Begin, BlockRun, Codec, Encoding, Message, PageRun, PagedIn, PagesEnd, PagesHeader, Reason, Running,
    Zeros,
};
pub use reference::{Digests, PageHash, Place, References, prefix};
pub use runs::MAX_RUNS_PAYLOAD;
pub use sum::{Checksum, checksum};
pub use version::{Incompatible, SUPPORTED, VersionRange, negotiate};

/// The most pages that one frame carries, raw or compressed: 256 KiB, what a sender sums and a receiver unpacks in one go.
pub const MAX_PAGES_PER_FRAME: u32 = 64;
/// The most pages that one references frame names.
pub const MAX_REFERENCES: u32 = 64;
/// The most pages that one digests frame tells of.
pub const MAX_DIGESTS: u32 = 4096;
/// Guest page size on x86-64, bytes.
pub const PAGE_SIZE: u32 = 4096;
/// The most RAM blocks of one VM.
pub const MAX_BLOCKS: u16 = 64;
/// The most data streams of one migration, broken ones included.
pub const MAX_STREAMS: u16 = 256;
/// The number of the stream that carries everything but pages; the others, from 1 on, carry pages.
pub const CONTROL_STREAM: u16 = 0;
/// The number of the page-in stream on which pages are asked for, and come that were. Those that follow it carry all others.
pub const PAGE_IN_STREAM: u16 = 1024;
/// The most page-in streams, that one included.
pub const MAX_PAGE_IN_STREAMS: u16 = 64;
/// How many classes [`PagedIn::waits`] has.
pub const WAIT_CLASSES: usize = 24;
/// The upper bound of the first of them.
pub const FIRST_WAIT_CLASS_NS: u64 = 16_384;
/// The most bytes of device state in one frame.
pub const MAX_DEVICE_STATE_CHUNK: u32 = 256 * 1024;
/// The most bytes of padding in one frame.
pub const MAX_PADDING: u32 = 1024 * 1024;
/// The longest text in a refusal, bytes of UTF-8.
pub const MAX_DETAIL: u32 = 1024;

/// Identifies one migration: 16 random bytes, given out by the destination's agent and shown by the source's lane.
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
            let pair = std::str::from_utf8(pair).map_err(|_| WireError::BadValue { what: "migration id" })?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| WireError::BadValue { what: "migration id" })?;
        }
        Ok(MigrationId(id))
    }
}

/// What is wrong with bytes that a peer sent. Every variant ends the lane: after one bad frame nothing that follows
/// can be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Bytes are not what was sent, or were sent by something else.
    #[error(
        "the checksum of {what} is wrong: its bytes changed on their way (a network card, a switch or a host's memory is at fault), or \
         the peer does not speak this protocol"
    )]
    Corrupted {
        /// What is summed up.
        what: &'static str,
    },
    /// The first bytes are not this protocol's.
    #[error(
        "the peer does not speak Godwit's migration protocol: check that the address is an agent's lane port"
    )]
    NotOurs,
    /// A frame of a kind that this version does not know.
    #[error("unknown frame kind {kind}: the peer does not keep to the negotiated version")]
    UnknownKind {
        /// The kind's code.
        kind: u8,
    },
    /// A frame longer than its kind may be, or shorter than it must be.
    #[error("a {kind:?} frame of {length} bytes is out of bounds ({least} to {most})")]
    BadLength {
        /// The frame's kind.
        kind: Kind,
        /// The length in its header.
        length: u32,
        /// The least that the kind allows.
        least: u32,
        /// The most that the kind allows.
        most: u32,
    },
    /// The payload ends before its fields do.
    #[error("a frame ends in the middle of {what}")]
    Truncated {
        /// The field.
        what: &'static str,
    },
    /// The payload goes on after its last field.
    #[error("{unread} bytes are left after the last field of a {kind:?} frame")]
    Unread {
        /// The frame's kind.
        kind: Kind,
        /// How many bytes.
        unread: usize,
    },
    /// A field has a value that it can't have.
    #[error("{what} has a value out of bounds")]
    BadValue {
        /// The field.
        what: &'static str,
    },
}
