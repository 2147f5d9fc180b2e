//! What is asked of a unit's sending, and what came of it.

use std::time::Duration;

use godwit_wire::Codec;

/// How a unit's pages are to be sent; by default raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// What compresses them; none: they go raw.
    pub codec: Option<Codec>,
    /// What compresses the first 64 of them instead, to learn what it does.
    pub probe: Option<Codec>,
}

/// What came of sending a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitSent {
    /// Bytes handed to the kernel.
    pub wire_bytes: u64,
    /// Pages told to be zero.
    pub zero: Tally,
    /// Pages sent as they are.
    pub raw: Tally,
    /// Pages sent compressed by LZ4.
    pub lz4: Tally,
    /// Pages sent compressed by Zstandard.
    pub zstd: Tally,
    /// What LZ4 was tried on.
    pub lz4_effort: Effort,
    /// What Zstandard was tried on.
    pub zstd_effort: Effort,
    /// Bytes that the socket had taken before and not put on the wire.
    pub unsent_before_bytes: u64,
    /// The same, afterwards.
    pub unsent_after_bytes: u64,
}

impl UnitSent {
    /// What a codec was tried on.
    #[must_use]
    pub fn effort(&self, codec: Codec) -> Effort {
        match codec {
            Codec::Lz4 => self.lz4_effort,
            Codec::Zstd => self.zstd_effort,
        }
    }

    pub(crate) fn effort_mut(&mut self, codec: Codec) -> &mut Effort {
        match codec {
            Codec::Lz4 => &mut self.lz4_effort,
            Codec::Zstd => &mut self.zstd_effort,
        }
    }

    pub(crate) fn tally_mut(&mut self, codec: Option<Codec>) -> &mut Tally {
        match codec {
            None => &mut self.raw,
            Some(Codec::Lz4) => &mut self.lz4,
            Some(Codec::Zstd) => &mut self.zstd,
        }
    }
}

/// What was sent in one form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pages.
    pub pages: u64,
    /// Bytes of their frames, before TLS adds its own.
    pub wire_bytes: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, pages: u64, wire_bytes: usize) {
        self.pages += pages;
        self.wire_bytes += wire_bytes as u64;
    }
}

/// What compressing came to, pages that went raw in the end included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Bytes of the pages.
    pub raw_bytes: u64,
    /// Bytes that they became.
    pub packed_bytes: u64,
    /// How long it took, with the copy that is compressed.
    pub time: Duration,
}

impl Effort {
    pub(crate) fn add(&mut self, raw_bytes: usize, packed_bytes: usize, time: Duration) {
        self.raw_bytes += raw_bytes as u64;
        self.packed_bytes += packed_bytes as u64;
        self.time += time;
    }
}
