//! Bounds and numbers that both ends share.

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
/// Number of classes in [`PagedIn::waits`](crate::PagedIn::waits).
pub const WAIT_CLASSES: usize = 24;
/// Upper bound of the first class of [`PagedIn::waits`](crate::PagedIn::waits).
pub const FIRST_WAIT_CLASS_NS: u64 = 16_384;
/// Maximum bytes of device state in one frame.
pub const MAX_DEVICE_STATE_CHUNK: u32 = 256 * 1024;
/// Maximum bytes of padding in one frame.
pub const MAX_PADDING: u32 = 1024 * 1024;
/// Longest text of a refusal, in bytes of UTF-8.
pub const MAX_DETAIL: u32 = 1024;

/// Maximum disks of one transfer.
pub const MAX_DISKS: u16 = 32;
/// Maximum bytes of a disk in one frame, before compression.
pub const MAX_DISK_BLOCKS: u32 = 256 * 1024;
/// Bytes of a disk that one reference names. References begin at multiples of it.
pub const DISK_UNIT_BYTES: u32 = 64 * 1024;
/// Maximum references to content of a disk in one frame.
pub const MAX_DISK_REFERENCES: u32 = 16;

/// Maximum bytes of runs in one frame.
pub const MAX_RUNS_PAYLOAD: u32 = 64 * 1024;
