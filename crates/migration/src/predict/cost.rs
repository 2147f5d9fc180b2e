//! What a page of a guest costs on its way: bytes on the wire, and time, by what was sampled of its memory and measured of the
//! lanes. Pure.

use std::time::Duration;

use godwit_lanes::Effort;
use godwit_wire::PAGE_SIZE;

use crate::encoding::{Compression, EncodingName};

/// What a page costs on the wire beside its bytes: frame headers, TLS records.
const OVERHEAD: f64 = 1.003;
/// The cheapest method with this part of the best rate is good enough, as in `encoding.rs`.
const AS_FAST: f64 = 0.96;

/// Pages of one kind on their way, in the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCost {
    /// Bytes on the wire.
    pub wire_bytes: f64,
    /// Seconds.
    pub time_s: f64,
    /// As what they go.
    pub sent_as: EncodingName,
}

/// What a sample of pages shows: how many hold anything, and what the codecs make of those.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Content {
    /// Of pages that were ever written, those that hold something else than zeros.
    pub data_share: f64,
    /// What LZ4 makes of them; none: it was not tried.
    pub lz4: Option<Trial>,
    /// What Zstandard makes of them.
    pub zstd: Option<Trial>,
}

/// What a codec makes of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Bytes compressed in a second, by one thread.
    pub bytes_per_s: f64,
    /// What becomes of a byte.
    pub ratio: f64,
}

impl Trial {
    /// What it made of pieces that were drawn by their pages, each by one: a long piece is drawn more often than a short one, and
    /// counts no more each time. None where nothing was tried.
    #[must_use]
    pub fn of(ratios: &[f64], effort: Effort) -> Option<Trial> {
        let (raw, seconds) = (effort.raw_bytes as f64, effort.time.as_secs_f64());
        let ratio = ratios.iter().sum::<f64>() / ratios.len() as f64;
        (raw > 0.0 && seconds > 0.0 && ratio.is_finite()).then(|| Trial { bytes_per_s: raw / seconds, ratio })
    }
}

impl PageCost {
    /// Pages that go as they are.
    #[must_use]
    pub fn raw(wire_bytes_per_s: f64) -> PageCost {
        let wire_bytes = f64::from(PAGE_SIZE) * OVERHEAD;
        PageCost { wire_bytes, time_s: wire_bytes / wire_bytes_per_s.max(1.0), sent_as: EncodingName::Raw }
    }

    /// Pages of such content on lanes that carry `wire_bytes_per_s`, compressed as a migration would: by what is asked for, or by
    /// what brings most of them over. A codec has half of `cores`: the other half sends what it made.
    #[must_use]
    pub fn of(content: &Content, compression: Compression, wire_bytes_per_s: f64, cores: usize) -> PageCost {
        let raw = PageCost::raw(wire_bytes_per_s);
        let by = |trial: Option<Trial>, sent_as| {
            let Trial { bytes_per_s, ratio } = trial?;
            let compressing = bytes_per_s * (cores as f64 / 2.0).max(1.0);
            let wire_bytes = raw.wire_bytes * ratio;
            let time_s =
                (wire_bytes / wire_bytes_per_s.max(1.0)).max(f64::from(PAGE_SIZE) / compressing.max(1.0));
            Some(PageCost { wire_bytes, time_s, sent_as })
        };
        let (lz4, zstd) = (by(content.lz4, EncodingName::Lz4), by(content.zstd, EncodingName::Zstd));
        let candidates = match compression {
            Compression::None => return raw,
            Compression::Lz4 => return lz4.unwrap_or(raw),
            Compression::Zstd => return zstd.unwrap_or(raw),
            Compression::Auto => [Some(raw), lz4, zstd],
        };
        let least = candidates.iter().flatten().map(|cost| cost.time_s).fold(f64::INFINITY, f64::min);
        candidates.into_iter().flatten().find(|cost| cost.time_s * AS_FAST <= least).unwrap_or(raw)
    }

    /// The time of so many of them.
    #[must_use]
    pub fn time_of(&self, pages: f64) -> Duration {
        Duration::try_from_secs_f64(pages * self.time_s).unwrap_or(Duration::MAX)
    }

    /// Bytes of pages that are carried in a second.
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

    #[test]
    fn what_brings_most_over_is_taken() {
        let sent_as = |wire: f64| PageCost::of(&SHRINKS, Compression::Auto, wire, 2).sent_as;
        assert_eq!(sent_as(25e6), EncodingName::Zstd);
        assert_eq!(sent_as(300e6), EncodingName::Lz4);
        assert_eq!(sent_as(2e9), EncodingName::Raw);
        let cost = PageCost::of(&SHRINKS, Compression::Auto, 25e6, 2);
        assert!((cost.carried_bytes_per_s() - 25e6 / 0.4 / OVERHEAD).abs() < 1.0, "{cost:?}");
    }

    #[test]
    fn what_is_asked_for_holds_whatever_it_brings() {
        let cost = |compression| PageCost::of(&SHRINKS, compression, 2e9, 2);
        assert_eq!(cost(Compression::Zstd).sent_as, EncodingName::Zstd);
        assert_eq!(cost(Compression::None), PageCost::raw(2e9));
        assert!((cost(Compression::Zstd).carried_bytes_per_s() - 300e6).abs() < 1.0);
        // Nothing was tried, as there was nothing to try it on.
        assert_eq!(PageCost::of(&Content::default(), Compression::Zstd, 2e9, 2), PageCost::raw(2e9));
    }

    #[test]
    fn a_trial_of_nothing_tells_nothing() {
        assert_eq!(Trial::of(&[], Effort::default()), None);
        let time = Duration::from_millis(10);
        let trial = Trial::of(&[0.1, 0.4], Effort { raw_bytes: 4096, packed_bytes: 1024, time }).unwrap();
        assert!((trial.ratio - 0.25).abs() < 1e-9 && (trial.bytes_per_s - 409_600.0).abs() < 1e-3);
    }
}
