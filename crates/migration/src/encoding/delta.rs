//! Decides whether deltas pay: pages sent as differences from the versions sent before. The
//! decision uses the speed at which pages are copied, compared and packed, the share of pages that
//! were sent before and differ little, and the size of their deltas. The speed is measured on all
//! pages that are compared. The rest is measured only on the sample ([`godwit_lanes::is_sampled`]),
//! whose earlier content is always kept; of other pages nothing is kept before deltas pay.

use godwit_lanes::{Comparing, Differing};
use godwit_wire::PAGE_SIZE;

use super::{Otherwise, blend};

/// Minimum speed-up for deltas to be begun and kept. The first round in which they are in use gains
/// nothing, because the versions that it sends have yet to be kept.
const BEGIN: f64 = 1.15;
const KEEP: f64 = 1.05;
/// Fewer sampled pages than this say nothing.
const LEAST_SAMPLED: u64 = 16;
/// Figures are renewed by half within so many pages, of the sample or of all pages.
const SAMPLE_MEMORY_PAGES: f64 = 64.0;
const MEMORY_PAGES: f64 = 1024.0;

/// Decision about deltas.
#[derive(Clone, Debug, Default)]
pub(super) struct Delta {
    /// Whether deltas are possible.
    pub(super) possible: bool,
    /// Whether to use deltas always, whatever they yield.
    pub(super) always: bool,
    on: bool,
    /// Seconds per page.
    page_s: Option<f64>,
    sampled: u64,
    /// Fraction of the pages that go as deltas, and their size per byte.
    share: f64,
    ratio: f64,
}

impl Delta {
    /// Returns what a unit is to do, on a wire with this rate.
    pub(super) fn choose(&mut self, wire: Option<f64>, otherwise: Otherwise) -> Differing {
        if !self.possible {
            return Differing::No;
        }
        let bonus = if self.on { KEEP } else { BEGIN };
        let promised = wire.and_then(|wire| self.promised(wire, otherwise)).unwrap_or(0.0);
        self.on = self.always || promised > bonus * otherwise.brings;
        if self.on { Differing::All } else { Differing::Sample }
    }

    /// Returns the expected yield in guest bytes per second; `None`: the figures say nothing yet.
    fn promised(&self, wire: f64, otherwise: Otherwise) -> Option<f64> {
        let page_s = self.page_s.filter(|_| self.sampled >= LEAST_SAMPLED && self.share > 0.0)?;
        let rest = 1.0 - self.share;
        let work =
            page_s / f64::from(PAGE_SIZE) + otherwise.packed_per_s.map_or(0.0, |rate| rest / rate);
        let on_wire = self.share * self.ratio + rest * otherwise.ratio;
        Some((1.0 / work).min(wire / on_wire.max(1e-4)))
    }

    /// Returns whether the last unit was compared as a whole.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Learns from the comparison of a unit's pages.
    pub(super) fn note(&mut self, comparing: Comparing) {
        let Comparing { pages, time, sampled, deltas, delta_bytes } = comparing;
        if pages == 0 {
            return;
        }
        let half_in = |pages: u64, memory: f64| 1.0 - (-(pages as f64) / memory).exp2();
        let page_s = time.as_secs_f64() / pages as f64;
        self.page_s = Some(
            self.page_s.map_or(page_s, |known| blend(known, page_s, half_in(pages, MEMORY_PAGES))),
        );
        if sampled > 0 {
            let weight =
                if self.sampled == 0 { 1.0 } else { half_in(sampled, SAMPLE_MEMORY_PAGES) };
            self.share = blend(self.share, deltas as f64 / sampled as f64, weight);
            self.sampled = self.sampled.saturating_add(sampled);
        }
        if deltas > 0 {
            let ratio = delta_bytes as f64 / (deltas * u64::from(PAGE_SIZE)) as f64;
            let weight = if self.ratio == 0.0 { 1.0 } else { half_in(deltas, SAMPLE_MEMORY_PAGES) };
            self.ratio = blend(self.ratio, ratio, weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const GIGABIT: f64 = 118e6;

    fn raw(wire: f64) -> Otherwise {
        Otherwise { brings: wire, packed_per_s: None, ratio: 1.0, cpu_share: 1.0 }
    }

    /// Returns a unit of 512 pages, of which the 16 of the sample were sent before or not; 2 µs
    /// per page.
    fn unit(deltas: u64, delta_bytes: u64) -> Comparing {
        Comparing { pages: 16, time: Duration::from_micros(32), sampled: 16, deltas, delta_bytes }
    }

    fn after(units: &[Comparing], wire: f64) -> Differing {
        let mut delta = Delta { possible: true, ..Delta::default() };
        units.iter().for_each(|unit| delta.note(*unit));
        delta.choose(Some(wire), raw(wire))
    }

    #[test]
    fn slightly_changed_pages_are_sent_as_deltas_on_a_slow_link() {
        let little = [unit(16, 16 * 60), unit(15, 15 * 60)];
        assert_eq!(after(&little, GIGABIT), Differing::All);
        assert_eq!(after(&little, 2.4e9), Differing::Sample, "comparing takes longer than sending");
    }

    #[test]
    fn without_a_gain_only_the_sample_is_compared() {
        assert_eq!(after(&[], GIGABIT), Differing::Sample);
        assert_eq!(
            after(&[unit(0, 0), unit(0, 0)], GIGABIT),
            Differing::Sample,
            "none was sent before"
        );
        assert_eq!(after(&[unit(16, 16 * 2000)], GIGABIT), Differing::All);
        let mut delta = Delta { possible: true, ..Delta::default() };
        delta.note(unit(16, 16 * 2000));
        let zstd = Otherwise {
            brings: GIGABIT / 0.4,
            packed_per_s: Some(4e8),
            ratio: 0.4,
            ..raw(GIGABIT)
        };
        assert_eq!(
            delta.choose(Some(GIGABIT), zstd),
            Differing::Sample,
            "what is in use makes less of them"
        );
        assert_eq!(Delta::default().choose(Some(GIGABIT), raw(GIGABIT)), Differing::No);
    }

    #[test]
    fn it_ends_when_pages_change_wholly() {
        let mut delta = Delta { possible: true, ..Delta::default() };
        delta.note(unit(16, 16 * 60));
        assert_eq!(delta.choose(Some(GIGABIT), raw(GIGABIT)), Differing::All);
        (0..20).for_each(|_| delta.note(unit(0, 0)));
        assert_eq!(delta.choose(Some(GIGABIT), raw(GIGABIT)), Differing::Sample);
    }
}
