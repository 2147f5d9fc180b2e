//! The migration protocol of a lane: messages, framing and bounds. It does no I/O and touches no
//! guest memory.
//!
//! A lane carries frames in both directions. A frame consists of a header of [`HEADER_LEN`] bytes
//! (kind, length, checksums) and a payload. The kind bounds the payload's length before anything is
//! allocated. Numbers are little-endian. A frame takes effect only after its checksum was verified.
//! docs/protocol.md specifies the protocol; `tests/document.rs` keeps document and code consistent.

mod bounds;
mod codec;
mod cursor;
mod delta;
mod disk;
mod disk_reference;
mod error;
mod frame;
mod kind;
mod message;
mod migration_id;
mod reference;
mod runs;
mod sum;
mod version;

pub use bounds::{
    CONTROL_STREAM, DISK_UNIT_BYTES, FIRST_WAIT_CLASS_NS, MAX_BLOCKS, MAX_DETAIL,
    MAX_DEVICE_STATE_CHUNK, MAX_DIGESTS, MAX_DISK_BLOCKS, MAX_DISK_REFERENCES, MAX_DISKS,
    MAX_PADDING, MAX_PAGE_IN_STREAMS, MAX_PAGES_PER_FRAME, MAX_REFERENCES, MAX_RUNS_PAYLOAD,
    MAX_STREAMS, PAGE_IN_STREAM, PAGE_SIZE, WAIT_CLASSES,
};
pub use codec::Codec;
pub use delta::Delta;
pub use disk::{DiskBlocks, DiskBlocksHeader, DiskZeros};
pub use disk_reference::{DiskHash, DiskMissing, DiskReferences};
pub use error::WireError;
pub use frame::{FrameHeader, HEADER_LEN};
pub use kind::Kind;
pub use message::{
    Begin, Encoding, Message, PageRun, PagedIn, PagesEnd, PagesHeader, Reason, Running, Zeros,
};
pub use migration_id::MigrationId;
pub use reference::{Digests, PageHash, Place, References, prefix};
pub use runs::BlockRun;
pub use sum::{Checksum, checksum};
pub use version::{Incompatible, SUPPORTED, VersionRange, negotiate};
