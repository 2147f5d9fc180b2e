//! Totals of how the pages of a migration were encoded.

use godwit_lanes::{Tally, UnitSent};
use godwit_types::{EncodingName, EncodingReport};
use godwit_wire::PAGE_SIZE;

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
        let rebuilt = [(Reference, self.reference), (Delta, self.delta)];
        sent.into_iter()
            .chain(rebuilt)
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
    pub fn rebuilt_pages(&self) -> u64 {
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
