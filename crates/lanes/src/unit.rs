//! Parameters and results of sending a unit.

use std::time::{Duration, Instant};

use godwit_ram::{PageRange, Region};
use godwit_wire::Codec;
use rustix::time::{ClockId, clock_gettime};

/// Pages of one block that are sent together, with their present content.
#[derive(Clone, Copy, Debug)]
pub struct UnitPages<'a> {
    /// The round that the pages belong to.
    pub round: u32,
    pub block: u16,
    /// The block.
    pub region: &'a Region,
    /// Runs of pages to send, ascending.
    pub pages: &'a [PageRange],
    /// Runs of pages that are zero.
    pub zeros: &'a [PageRange],
}

/// Form in which a unit's pages are sent; raw by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Codec of the pages; `None`: they go raw.
    pub codec: Option<Codec>,
    /// Codec tried on the first 64 pages instead, to measure its effect.
    pub probe: Option<Codec>,
    /// Which pages are looked up in what the destination holds.
    pub reference: Referring,
    /// Which pages are sent as deltas against the versions sent before.
    pub delta: Differing,
}

/// Share of a unit's first pages that the destination has to hold so that [`Referring::ProbeFirst`]
/// looks up the rest.
pub const ENOUGH_FOUND: f64 = 0.75;

/// Selects the pages of a unit that are sent by reference if the destination holds their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Referring {
    /// No pages: nothing is hashed.
    #[default]
    No,
    /// The first 64 pages, to measure the gain.
    Probe,
    /// The first 64 pages, and the rest if the destination holds [`ENOUGH_FOUND`] of these.
    ProbeFirst,
    /// All pages.
    All,
}

/// Selects the pages of a unit that are sent as deltas if the version sent before is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Differing {
    /// No pages: the versions sent are not kept.
    #[default]
    No,
    /// Pages of the sample ([`is_sampled`](crate::is_sampled)), to measure the gain.
    Sample,
    /// All pages.
    All,
}

/// Results of sending a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitSent {
    /// Bytes handed to the kernel.
    pub wire_bytes: u64,
    /// Zero pages.
    pub zero: Tally,
    /// Pages sent raw.
    pub raw: Tally,
    /// Pages sent compressed with LZ4.
    pub lz4: Tally,
    /// Pages sent compressed with Zstandard.
    pub zstd: Tally,
    /// Pages sent by reference.
    pub reference: Tally,
    /// Pages sent as deltas.
    pub delta: Tally,
    /// Effort and result of looking up pages.
    pub hashing: Hashing,
    /// Effort and result of comparing pages with the versions sent before.
    pub comparing: Comparing,
    /// Effort and result of LZ4.
    pub lz4_effort: Effort,
    /// Effort and result of Zstandard.
    pub zstd_effort: Effort,
    /// Comparison of the probed codec with the codec in use, if there is one.
    pub probed: Option<Probed>,
    /// Unsent bytes in the socket before the unit.
    pub unsent_before_bytes: u64,
    /// Unsent bytes in the socket after the unit.
    pub unsent_after_bytes: u64,
}

impl UnitSent {
    /// Returns the effort and result of a codec.
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

/// Sizes of the probe's pages as two codecs pack them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// Bytes by the probed codec.
    pub probe_bytes: u64,
    /// Bytes by the codec in use, which are not sent.
    pub in_use_bytes: u64,
    /// Time that the codec in use took.
    pub time: Duration,
}

impl Probed {
    pub(crate) fn add(&mut self, probe_bytes: usize, in_use_bytes: usize, time: Duration) {
        self.probe_bytes += probe_bytes as u64;
        self.in_use_bytes += in_use_bytes as u64;
        self.time += time;
    }
}

/// Total of the pages sent in one form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of pages.
    pub pages: u64,
    /// Bytes of their frames, before TLS.
    pub wire_bytes: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, pages: u64, wire_bytes: usize) {
        self.pages += pages;
        self.wire_bytes += wire_bytes as u64;
    }
}

/// Effort and result of looking up pages by their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hashing {
    pub pages: u64,
    /// Pages among them that the destination holds.
    pub found: u64,
    /// Time taken, including the copy that is hashed.
    pub time: Duration,
    /// CPU time of the thread meanwhile.
    pub cpu: Duration,
}

impl Hashing {
    /// Adds work that was begun with the watch.
    pub(crate) fn add(&mut self, pages: u32, found: u64, watch: Stopwatch) {
        self.pages += u64::from(pages);
        self.found += found;
        self.time += watch.elapsed();
        self.cpu += watch.cpu();
    }

    /// Returns whether the destination holds [`ENOUGH_FOUND`] of the pages.
    pub(crate) fn finds_enough(&self) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "pages of one unit")]
        let found = self.found as f64 / self.pages.max(1) as f64;
        found >= ENOUGH_FOUND
    }
}

/// Effort and result of comparing pages with the versions sent before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparing {
    pub pages: u64,
    /// Time taken, including the copy that is compared and the compression of the differences.
    pub time: Duration,
    /// Pages among them that belong to the sample.
    pub sampled: u64,
    /// Pages of the sample that were sent as deltas.
    pub deltas: u64,
    /// Bytes of those deltas.
    pub delta_bytes: u64,
}

/// Effort and result of compression, pages that were sent raw in the end included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effort {
    /// Bytes of the pages before compression.
    pub raw_bytes: u64,
    /// Bytes of the pages after compression.
    pub packed_bytes: u64,
    /// Time taken, including the copy that is compressed.
    pub time: Duration,
    /// CPU time of the thread meanwhile.
    pub cpu: Duration,
}

impl Effort {
    /// Adds work that was begun with the watch.
    pub(crate) fn add(&mut self, raw_bytes: usize, packed_bytes: usize, watch: Stopwatch) {
        self.raw_bytes += raw_bytes as u64;
        self.packed_bytes += packed_bytes as u64;
        self.time += watch.elapsed();
        self.cpu += watch.cpu();
    }
}

/// Measures a piece of work of this thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    begun: Instant,
    cpu: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Stopwatch {
        Stopwatch { begun: Instant::now(), cpu: thread_cpu() }
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.begun.elapsed()
    }

    /// Returns the CPU time that the thread has used since. Reading it is a system call.
    pub(crate) fn cpu(self) -> Duration {
        thread_cpu().saturating_sub(self.cpu)
    }
}

/// Returns the CPU time of this thread.
fn thread_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
