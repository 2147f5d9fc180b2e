//! Totals of how the pages of a migration were encoded.

use godwit_lanes::{Tally, UnitSent};
use godwit_wire::PAGE_SIZE;
use serde::{Deserialize, Serialize};

/// How pages were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum EncodingName {
    /// Told to be zero: a few bytes a run.
    Zero,
    /// As they are.
    Raw,
    /// Compressed by LZ4.
    Lz4,
    /// Compressed by Zstandard.
    Zstd,
    /// Told by their content, which the destination had.
    Reference,
    /// Told by what differed from what was sent of them before.
    Delta,
}

impl std::fmt::Display for EncodingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            EncodingName::Zero => "zero",
            EncodingName::Raw => "raw",
            EncodingName::Lz4 => "lz4",
            EncodingName::Zstd => "zstd",
            EncodingName::Reference => "reference",
            EncodingName::Delta => "delta",
        })
    }
}

/// Pages of one encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct EncodingReport {
    /// How they were sent.
    pub name: EncodingName,
    /// How many; what was sent again after a stream broke counts again.
    pub pages: u64,
    /// Bytes of the pages themselves.
    pub raw_bytes: u64,
    /// Bytes of the frames that carried them, before TLS adds its own.
    pub wire_bytes: u64,
}

/// Totals of all units sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Encodings {
    zero: Tally,
    raw: Tally,
    lz4: Tally,
    zstd: Tally,
    reference: Tally,
    delta: Tally,
}

impl Encodings {
    /// Adds a unit.
    pub fn add(&mut self, sent: &UnitSent) {
        let Encodings { zero, raw, lz4, zstd, reference, delta } = self;
        for (sum, new) in [
            (zero, sent.zero),
            (raw, sent.raw),
            (lz4, sent.lz4),
            (zstd, sent.zstd),
            (reference, sent.reference),
            (delta, sent.delta),
        ] {
            sum.pages += new.pages;
            sum.wire_bytes += new.wire_bytes;
        }
    }

    /// Returns the encodings that were used.
    #[must_use]
    pub fn report(&self) -> Vec<EncodingReport> {
        use EncodingName::{Delta, Lz4, Raw, Reference, Zero, Zstd};
        let sent = [(Zero, self.zero), (Raw, self.raw), (Lz4, self.lz4), (Zstd, self.zstd)];
        let told = [(Reference, self.reference), (Delta, self.delta)];
        sent.into_iter()
            .chain(told)
            .filter(|(_, tally)| tally.pages > 0)
            .map(|(name, Tally { pages, wire_bytes })| EncodingReport {
                name,
                pages,
                raw_bytes: pages * u64::from(PAGE_SIZE),
                wire_bytes,
            })
            .collect()
    }

    /// Returns the number of pages sent by reference or as deltas.
    #[must_use]
    pub fn told_pages(&self) -> u64 {
        self.reference.pages + self.delta.pages
    }

    /// Returns the number of pages sent by reference.
    #[must_use]
    pub fn referred_pages(&self) -> u64 {
        self.reference.pages
    }

    /// Returns the bytes of pages per byte on the wire, without zero pages; 1 if nothing was
    /// compressed or sent by reference or delta.
    #[must_use]
    pub fn expansion(&self) -> f64 {
        let sent = [self.raw, self.lz4, self.zstd, self.reference, self.delta];
        let pages: u64 = sent.iter().map(|tally| tally.pages).sum();
        let wire_bytes: u64 = sent.iter().map(|tally| tally.wire_bytes).sum();
        let raw_bytes = pages * u64::from(PAGE_SIZE);
        if wire_bytes == 0 { 1.0 } else { (raw_bytes as f64 / wire_bytes as f64).max(1.0) }
    }
}
