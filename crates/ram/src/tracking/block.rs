//! RAM blocks as QEMU maps them, and the units in which they are tracked.

use std::sync::Arc;

use super::maps::{Mapping, Segment};
use crate::pages::PageRange;
use crate::region::Region;

/// Write protection is applied in steps of this many pages (256 MiB, under a millisecond each),
/// because KVM blocks a guest that touches the range for the length of a step.
pub(super) const STEP_PAGES: u64 = 64 << 10;
/// Pages of a chunk: 2 MiB, aligned to its size.
pub const CHUNK_PAGES: u64 = 512;

/// RAM block as QEMU maps it.
pub(super) struct Block {
    pub(super) pages: PageRange,
    pub(super) region: Arc<Region>,
    pub(super) mappings: Vec<Mapping>,
    pub(super) segments: Vec<Segment>,
}
