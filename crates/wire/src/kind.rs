//! The kinds of frames, and the length bounds of each.

use crate::{
    MAX_BLOCKS, MAX_DETAIL, MAX_DEVICE_STATE_CHUNK, MAX_DIGESTS, MAX_DISK_BLOCKS,
    MAX_DISK_REFERENCES, MAX_PADDING, MAX_PAGES_PER_FRAME, MAX_REFERENCES, MAX_RUNS_PAYLOAD,
    MAX_STREAMS, PAGE_SIZE, WAIT_CLASSES,
};

/// Longest payload that a header can state, bytes.
pub(crate) const MAX_LENGTH: u32 = (1 << 24) - 1;

/// Bytes of a pages frame before its pages: round (4), block (2), codec or zero (1), reserved (1),
/// first page (8), page count (4), the pages' checksum (4).
pub(crate) const PAGES_HEADER: u32 = 24;
/// Bytes of a references frame before its hashes.
pub(crate) const REFERENCES_HEADER: u32 = 32;
/// Bytes of a delta frame before its bases.
pub(crate) const DELTA_HEADER: u32 = 20;
/// Bytes of a paged-in frame: seven numbers and the waits by their length.
pub(crate) const PAGED_IN_BYTES: u32 = 248;
const _: () = assert!(PAGED_IN_BYTES as usize == 8 * (7 + WAIT_CLASSES));
/// Bytes of a digests frame before its prefixes.
pub(crate) const DIGESTS_HEADER: u32 = 16;
/// Bytes of a frame of a disk's blocks before its content: disk (2), codec or zero (1), reserved
/// (1), uncompressed length (4), offset (8).
pub(crate) const DISK_BLOCKS_HEADER: u32 = 16;
/// Bytes of a frame of references to a disk's content before its hashes: disk (2), offset (8).
pub(crate) const DISK_REFERENCES_HEADER: u32 = 10;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $least:expr, $most:expr;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name = $code),* }

        impl Kind {
            pub const ALL: &[Kind] = &[$(Kind::$name),*];

            /// Returns the kind with this code, or `None` if this version does not know it.
            #[must_use]
            pub fn from_code(code: u8) -> Option<Kind> {
                match code { $($code => Some(Kind::$name),)* _ => None }
            }

            /// Returns the smallest and the largest payload of the kind, in bytes.
            #[must_use]
            pub const fn bounds(self) -> (u32, u32) {
                match self { $(Kind::$name => ($least, $most)),* }
            }
        }
    };
}

kinds! {
    /// Source → destination, first frame of a stream: magic, versions, migration ID, the stream's
    /// number.
    Hello = 1, 30, 30;
    /// Destination → source: the protocol version to use.
    Welcome = 2, 2, 2;
    /// Source → destination: epoch, whether the guest runs after the switchover, size of each RAM
    /// block, incarnation.
    Begin = 3, 11 + 8, 11 + 8 * MAX_BLOCKS as u32 + 16;
    /// Destination → source: the shadow VM exists.
    Ready = 4, 0, 0;
    /// Source → destination: pages, uncompressed.
    Pages = 5, PAGES_HEADER + PAGE_SIZE, PAGES_HEADER + PAGE_SIZE * MAX_PAGES_PER_FRAME;
    /// Source → destination: runs of zero pages.
    Zeros = 6, 4 + 3, 4 + MAX_RUNS_PAYLOAD;
    /// Source → destination, on a data stream: the unit's last page has been sent.
    UnitEnd = 7, 0, 0;
    /// Destination → source: number of units of a data stream that are in memory.
    UnitsApplied = 8, 10, 10;
    /// Source → destination: the sender's clock.
    Ping = 9, 8, 8;
    /// Destination → source: the ping's clock value and the destination's own.
    Pong = 10, 16, 16;
    /// Source → destination: a piece of QEMU's device state stream.
    DeviceState = 11, 1, MAX_DEVICE_STATE_CHUNK;
    /// Source → destination: the device state stream has ended; its length.
    DeviceStateEnd = 12, 8, 8;
    /// Source → destination: ownership of the guest passes to the destination. The commit point.
    Commit = 13, 8, 8 + 16;
    /// Destination → source: the guest runs here.
    Running = 14, 24, 24;
    /// Destination → source: the guest does not and will not run here; the source may run it.
    Refused = 15, 3, 3 + MAX_DETAIL;
    /// Source → destination, before the commit: discard the migration.
    Abort = 16, 3, 3 + MAX_DETAIL;
    /// Source → destination: bytes without content, which open the congestion window before the
    /// switchover.
    Padding = 17, 1, MAX_PADDING;
    /// Source → destination: a data stream broke; accept no more of it and report what was
    /// accepted.
    CloseStream = 18, 2, 2;
    /// Destination → source: a data stream is closed; number of its units that are in memory.
    StreamClosed = 19, 10, 10;
    /// Source → destination: all pages have been sent; their number, and the units of each data
    /// stream.
    PagesEnd = 20, 10, 10 + 8 * MAX_STREAMS as u32;
    /// Source → destination: pages, compressed to fewer bytes than they have.
    CompressedPages = 21, PAGES_HEADER + 1, PAGES_HEADER + PAGE_SIZE * MAX_PAGES_PER_FRAME - 1;
    /// Source → destination: pages whose content the destination already holds, with their
    /// hashes.
    References = 22, REFERENCES_HEADER + 32, REFERENCES_HEADER + 32 * MAX_REFERENCES;
    /// Destination → source: pages that could not be reconstructed from what a data stream
    /// carried.
    Missing = 23, 3, MAX_RUNS_PAYLOAD;
    /// Destination → source: the content that it holds, as prefixes of page hashes.
    Digests = 24, DIGESTS_HEADER + 8, DIGESTS_HEADER + 8 * MAX_DIGESTS;
    /// Source → destination: pages as differences from the versions sent before.
    Delta = 25, DELTA_HEADER + 8 + 1, DELTA_HEADER + (8 + PAGE_SIZE / 2) * MAX_PAGES_PER_FRAME;
    /// Source → destination: prepare to run the guest while some of its pages are missing.
    PreparePageIn = 26, 0, 0;
    /// Destination → source: whether it is prepared for page-in.
    PageInReady = 27, 1, 1;
    /// Pages that the guest will lack, or lacks. Source → destination before the commit;
    /// destination → source when page-in resumes.
    Remaining = 28, 3, MAX_RUNS_PAYLOAD;
    /// End of the list of remaining pages, with their number. On a page-in stream from the source:
    /// no more pages follow on this stream.
    RemainingEnd = 29, 8, 8;
    /// Destination → source: pages that a vCPU or a device waits for.
    Fetch = 30, 3, MAX_RUNS_PAYLOAD;
    /// Destination → source: all pages have arrived; how page-in went.
    PagedIn = 31, PAGED_IN_BYTES, PAGED_IN_BYTES;
    /// Source → destination, on a stream for disks: bytes of a disk, raw or compressed.
    DiskBlocks = 32, DISK_BLOCKS_HEADER + 1, DISK_BLOCKS_HEADER + MAX_DISK_BLOCKS;
    /// Source → destination, on a stream for disks: bytes of a disk that are zero.
    DiskZeros = 33, 18, 18;
    /// Source → destination, on a stream for disks: report when everything before it is on the
    /// destination's disks.
    DiskMark = 34, 8, 8;
    /// Destination → source, on a stream for disks: everything before the mark is on the
    /// destination's disks.
    DiskMarked = 35, 8, 8;
    /// Source → destination, on a stream for disks: the stream has ended; the number of streams
    /// that ended so, and the last mark.
    DiskEnd = 36, 10, 10;
    /// Source → destination, on a stream for disks: hashes of bytes that the destination may hold
    /// already.
    DiskReferences = 37, DISK_REFERENCES_HEADER + 32,
        DISK_REFERENCES_HEADER + 32 * MAX_DISK_REFERENCES;
    /// Destination → source, on a stream for disks: what it has not got of a DiskReferences.
    DiskMissing = 38, 12, 12;
}

const _: () = {
    let mut kind = 0;
    while kind < Kind::ALL.len() {
        assert!(Kind::ALL[kind].bounds().1 < MAX_LENGTH);
        kind += 1;
    }
};
