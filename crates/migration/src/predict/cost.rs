//! Cost of a guest's page on the wire, in bytes and time, from samples of its memory and
//! measurements of the lanes. Pure.

use std::time::Duration;

use godwit_lanes::Effort;
use godwit_wire::PAGE_SIZE;

use godwit_types::{Compression, EncodingName};

/// Overhead of a page on the wire: frame headers, TLS records.
const OVERHEAD: f64 = 1.003;
/// The cheapest method with this fraction of the best rate is chosen, as in `encoding.rs`.
const AS_FAST: f64 = 0.96;

/// Capacity of the lanes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Carry {
    /// Bytes per second on the wire.
    pub bytes_per_s: f64,
    /// Rate that the CPUs would permit, if sending alone uses them up: compression competes with
    /// it. `None`: the wire is the limit.
    pub of_cpus_bytes_per_s: Option<f64>,
}

/// Average cost of pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCost {
    pub wire_bytes: f64,
    /// Time in seconds.
    pub time_s: f64,
    /// Encoding of the pages.
    pub sent_as: EncodingName,
}

/// Content of a sample of pages: how many hold data, and how well those compress.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Content {
    /// Of pages that were ever written, the fraction that holds data other than zeros.
    pub data_share: f64,
    /// Result of LZ4 on them; `None`: it was not tried.
    pub lz4: Option<Trial>,
    /// Result of Zstandard on them; `None`: it was not tried.
    pub zstd: Option<Trial>,
}

/// Result of a codec on pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Bytes compressed per second by one thread.
    pub bytes_per_s: f64,
    /// Compressed bytes per byte.
    pub ratio: f64,
}

impl Trial {
    /// Computes the result from pieces that were drawn by drawing single pages: a long piece is
    /// drawn more often than a short one, and counts no more each time. Returns `None` if nothing
    /// was tried.
    #[must_use]
    pub fn of(ratios: &[f64], effort: Effort) -> Option<Trial> {
        let (raw, seconds) = (effort.raw_bytes as f64, effort.time.as_secs_f64());
        let ratio = ratios.iter().sum::<f64>() / ratios.len() as f64;
        (raw > 0.0 && seconds > 0.0 && ratio.is_finite())
            .then(|| Trial { bytes_per_s: raw / seconds, ratio })
    }
}

impl PageCost {
    /// Returns the cost of raw pages.
    #[must_use]
    pub fn raw(wire_bytes_per_s: f64) -> PageCost {
        let wire_bytes = f64::from(PAGE_SIZE) * OVERHEAD;
        PageCost {
            wire_bytes,
            time_s: wire_bytes / wire_bytes_per_s.max(1.0),
            sent_as: EncodingName::Raw,
        }
    }

    /// Returns the cost of pages with this content on lanes of this capacity. They are compressed
    /// as in a migration: with the codec requested, or with the one that yields most, as far as a
    /// stream can see it, which compresses while the wire carries what came before. A codec has
    /// half of `cores`; the other half sends its output. If sending alone uses up the CPUs, the two
    /// take turns.
    #[must_use]
    pub fn of(content: &Content, compression: Compression, carry: Carry, cores: usize) -> PageCost {
        let raw = PageCost::raw(carry.bytes_per_s);
        let by = |trial: Option<Trial>, sent_as| {
            let Trial { bytes_per_s, ratio } = trial?;
            let compressing = bytes_per_s * (cores as f64 / 2.0).max(1.0);
            let compressing_s = f64::from(PAGE_SIZE) / compressing.max(1.0);
            let wire_bytes = raw.wire_bytes * ratio;
            let seen =
                PageCost { wire_bytes, time_s: (raw.time_s * ratio).max(compressing_s), sent_as };
            let in_turns_s = carry
                .of_cpus_bytes_per_s
                .map_or(0.0, |rate| compressing_s + wire_bytes / rate.max(1.0));
            Some((seen, PageCost { time_s: seen.time_s.max(in_turns_s), ..seen }))
        };
        let raw = (raw, raw);
        let (lz4, zstd) =
            (by(content.lz4, EncodingName::Lz4), by(content.zstd, EncodingName::Zstd));
        let candidates = match compression {
            Compression::None => return raw.1,
            Compression::Lz4 => return lz4.unwrap_or(raw).1,
            Compression::Zstd => return zstd.unwrap_or(raw).1,
            Compression::Auto => [Some(raw), lz4, zstd],
        };
        let least =
            candidates.iter().flatten().map(|(seen, _)| seen.time_s).fold(f64::INFINITY, f64::min);
        let taken =
            candidates.into_iter().flatten().find(|(seen, _)| seen.time_s * AS_FAST <= least);
        taken.unwrap_or(raw).1
    }

    /// Returns the time for so many pages.
    #[must_use]
    pub fn time_of(&self, pages: f64) -> Duration {
        Duration::try_from_secs_f64(pages * self.time_s).unwrap_or(Duration::MAX)
    }

    /// Returns the bytes of pages carried per second.
    #[must_use]
    pub fn carried_bytes_per_s(&self) -> f64 {
        f64::from(PAGE_SIZE) / self.time_s.max(1e-12)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHRINKS: Content = Content {
        data_share: 1.0,
        lz4: Some(Trial { bytes_per_s: 800e6, ratio: 0.6 }),
        zstd: Some(Trial { bytes_per_s: 300e6, ratio: 0.4 }),
    };

    /// Returns lanes whose limit is the wire.
    fn wire(bytes_per_s: f64) -> Carry {
        Carry { bytes_per_s, of_cpus_bytes_per_s: None }
    }

    #[test]
    fn when_sending_is_cpu_bound_a_codec_slows_it() {
        let carry = Carry { of_cpus_bytes_per_s: Some(400e6), ..wire(400e6) };
        let cost = PageCost::of(&SHRINKS, Compression::Auto, carry, 2);
        let alone = PageCost::of(&SHRINKS, Compression::Auto, wire(400e6), 2);
        assert_eq!((cost.sent_as, cost.wire_bytes), (alone.sent_as, alone.wire_bytes));
        assert!((cost.time_s - 4096.0 / 800e6 - cost.wire_bytes / 400e6).abs() < 1e-9, "{cost:?}");
        // Under a limit there is time to compress.
        let held = Carry { bytes_per_s: 100e6, ..carry };
        assert_eq!(
            PageCost::of(&SHRINKS, Compression::Lz4, held, 2),
            PageCost::of(&SHRINKS, Compression::Lz4, wire(100e6), 2)
        );
        assert_eq!(PageCost::of(&SHRINKS, Compression::None, carry, 2), PageCost::raw(400e6));
    }

    #[test]
    fn the_method_with_the_highest_throughput_is_chosen() {
        let sent_as = |rate: f64| PageCost::of(&SHRINKS, Compression::Auto, wire(rate), 2).sent_as;
        assert_eq!(sent_as(25e6), EncodingName::Zstd);
        assert_eq!(sent_as(300e6), EncodingName::Lz4);
        assert_eq!(sent_as(2e9), EncodingName::Raw);
        let cost = PageCost::of(&SHRINKS, Compression::Auto, wire(25e6), 2);
        assert!((cost.carried_bytes_per_s() - 25e6 / 0.4 / OVERHEAD).abs() < 1.0, "{cost:?}");
    }

    #[test]
    fn a_requested_codec_is_used_whatever_its_benefit() {
        let cost = |compression| PageCost::of(&SHRINKS, compression, wire(2e9), 2);
        assert_eq!(cost(Compression::Zstd).sent_as, EncodingName::Zstd);
        assert_eq!(cost(Compression::None), PageCost::raw(2e9));
        assert!((cost(Compression::Zstd).carried_bytes_per_s() - 300e6).abs() < 1.0);
        // No codec was tried, because there was nothing to try it on.
        assert_eq!(
            PageCost::of(&Content::default(), Compression::Zstd, wire(2e9), 2),
            PageCost::raw(2e9)
        );
    }

    #[test]
    fn an_empty_trial_gives_no_result() {
        assert_eq!(Trial::of(&[], Effort::default()), None);
        let time = Duration::from_millis(10);
        let trial =
            Trial::of(&[0.1, 0.4], Effort { raw_bytes: 4096, packed_bytes: 1024, time, cpu: time })
                .unwrap();
        assert!((trial.ratio - 0.25).abs() < 1e-9 && (trial.bytes_per_s - 409_600.0).abs() < 1e-3);
    }
}
