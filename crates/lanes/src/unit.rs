//! What is asked of a unit's sending, and what came of it.

use std::time::Duration;

use godwit_ram::{PageRange, Region};
use godwit_wire::Codec;

/// What is sent in one go: pages of one block, as they are in memory now.
#[derive(Clone, Copy, Debug)]
pub struct UnitPages<'a> {
    /// The round that they belong to.
    pub round: u32,
    /// The block's number.
    pub block: u16,
    /// The block.
    pub region: &'a Region,
    /// Runs of pages that are sent, ascending.
    pub pages: &'a [PageRange],
    /// Runs of pages that are zero.
    pub zeros: &'a [PageRange],
}

/// How a unit's pages are to be sent; by default raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// What compresses them; none: they go raw.
    pub codec: Option<Codec>,
    /// What compresses the first 64 of them instead, to learn what it does.
    pub probe: Option<Codec>,
    /// Which of them are looked for among what the destination has.
    pub reference: Referring,
    /// Which of them are told by what differs from what was sent before.
    pub delta: Differing,
}

/// Which pages of a unit are told by their content, where the destination has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Referring {
    /// None: nothing is hashed.
    #[default]
    No,
    /// The first 64, to learn what it brings.
    Probe,
    /// All.
    All,
}

/// Which pages of a unit are told by what differs in them from what was sent before, where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Differing {
    /// None: what is sent of them is not kept.
    #[default]
    No,
    /// Those of the sample ([`is_sampled`](crate::is_sampled)), to learn what it brings.
    Sample,
    /// All.
    All,
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
    /// Pages told by their content.
    pub reference: Tally,
    /// Pages told by what differs.
    pub delta: Tally,
    /// What looking for pages came to.
    pub hashing: Hashing,
    /// What comparing them with what was sent before came to.
    pub comparing: Comparing,
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

/// What looking for pages by their content came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hashing {
    /// Pages hashed.
    pub pages: u64,
    /// Pages of them that the destination has.
    pub found: u64,
    /// How long it took, with the copy that is hashed.
    pub time: Duration,
}

impl Hashing {
    pub(crate) fn add(&mut self, pages: u32, found: u64, time: Duration) {
        self.pages += u64::from(pages);
        self.found += found;
        self.time += time;
    }
}

/// What comparing pages with what was sent of them before came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparing {
    /// Pages compared.
    pub pages: u64,
    /// How long it took, with the copy that is compared and the compression of what differs.
    pub time: Duration,
    /// Pages of the sample among them.
    pub sampled: u64,
    /// Pages of the sample that were told by what differs.
    pub told: u64,
    /// Bytes that told of those.
    pub told_bytes: u64,
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
