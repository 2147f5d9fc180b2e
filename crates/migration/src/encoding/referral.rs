//! Decides whether it pays to look up pages by their content. The decision uses the speed at which
//! pages are copied and hashed, the share of them that the destination holds, and the share of
//! those that it then misses. They are measured each time, on units or on the first 64 pages of
//! some. The speed is that of the thread's CPU time, as a codec's is: a thread that waits for a CPU
//! would seem to hash at a hundredth of its speed. Hashing and sending overlap as compressing and
//! sending do.

use godwit_lanes::{ENOUGH_FOUND, Hashing, Referring};
use godwit_wire::{MAX_PAGES_PER_FRAME, PAGE_SIZE};

use super::blend;

/// Maximum units from one probe to the next. They are fewer if the destination has announced
/// content.
const PROBE_INTERVAL: u64 = 16;
/// Share of the time that probes may take, as far as [`PROBE_INTERVAL`] allows.
const CHEAP: f64 = 0.02;
/// Pages of a probe: one frame.
pub(super) const PROBE_PAGES: u64 = MAX_PAGES_PER_FRAME as u64;
const PROBE_BYTES: u64 = PROBE_PAGES * PAGE_SIZE as u64;
/// In use, figures are renewed by half within so many bytes; a probe renews them by half.
const MEMORY_BYTES: f64 = 4e6;
/// Cost of a reference on the wire, as a fraction of the page: hash and fields.
const REFERENCE_COST: f64 = 0.012;
/// Minimum speed-up for references to be begun and kept.
const BEGIN: f64 = 1.04;
const KEEP: f64 = 1.02;
/// Number of units that are looked up before the wire's rate or the share of hits is known, if the
/// destination has announced content. They cost little; raw units sent to measure that rate would
/// be most of a short way back. On a wire as fast as memory they are the price.
const BLIND_UNITS: u32 = 64;
/// Minimum share of hits in those units.
const LEAST_FOUND: f64 = 0.1;
/// Fraction of the lost trust that references regain with each probe.
const FORGIVEN: f64 = 0.05;

/// What a chooser learns about references and deltas before each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prospect {
    /// Whether pages may be sent by reference.
    pub possible: bool,
    /// Whether to use references always, whatever they yield.
    pub always: bool,
    /// Whether the destination has announced content.
    pub foreign: bool,
    /// Fraction of the pages sent by reference that were then missing.
    pub missing: f64,
    /// The wire's rate as another stream has seen it.
    pub wire_bytes_per_s: Option<f64>,
    /// Whether pages may be sent as deltas.
    pub deltas: bool,
    /// Whether to use deltas always, whatever they yield.
    pub always_deltas: bool,
}

/// Method that references are compared with, and that sends the other pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Otherwise {
    /// Yield in guest bytes per second.
    pub(super) brings: f64,
    /// Guest bytes compressed per second; `None` without compression.
    pub(super) packed_per_s: Option<f64>,
    /// Compressed bytes per guest byte.
    pub(super) ratio: f64,
    /// Share of its time for which a thread that hashes has a CPU.
    pub(super) cpu_share: f64,
}

#[derive(Clone, Copy, Debug)]
struct Figures {
    /// Guest bytes looked up per second of CPU time, including the copy.
    bytes_per_s: f64,
    /// Fraction of the pages that the destination holds.
    found: f64,
    trust: f64,
}

/// Decision about references.
#[derive(Clone, Debug, Default)]
pub(super) struct Referral {
    pub(super) prospect: Prospect,
    figures: Option<Figures>,
    on: bool,
    /// Units since the last probe, without those looked up; `None`: there was none.
    unprobed: Option<u64>,
    /// Units looked up without knowing the wire.
    blind: u32,
}

impl Referral {
    /// Returns what a unit of so many bytes is to do, on a wire with this rate.
    pub(super) fn choose(
        &mut self,
        bytes: u64,
        wire: Option<f64>,
        otherwise: Otherwise,
    ) -> Referring {
        if !self.prospect.possible {
            return Referring::No;
        }
        if self.prospect.always {
            return Referring::All;
        }
        let finds = self
            .figures
            .is_none_or(|figures| figures.found * (1.0 - self.prospect.missing) >= LEAST_FOUND);
        let is_blind = wire.is_none() || self.figures.is_none();
        if is_blind && self.prospect.foreign && finds && self.blind < BLIND_UNITS {
            self.blind += 1;
            self.on = true;
            return Referring::All;
        }
        let bonus = if self.on { KEEP } else { BEGIN };
        self.on = self.pays(self.figures, wire, otherwise, bonus);
        if self.on {
            return Referring::All;
        }
        let units = self.unprobed.map(|units| units + 1);
        if units.is_some_and(|units| units < self.probe_interval(bytes, otherwise)) {
            self.unprobed = units;
            return Referring::No;
        }
        self.unprobed = Some(0);
        // Memory differs from place to place: what a probe finds says most about its own unit.
        let if_found = self.figures.map(|known| Figures { found: ENOUGH_FOUND, ..known });
        match self.pays(if_found, wire, otherwise, BEGIN) {
            true => Referring::ProbeFirst,
            false => Referring::Probe,
        }
    }

    /// Returns whether looking up pages yields more than `bonus` times what the other method does.
    fn pays(
        &self,
        figures: Option<Figures>,
        wire: Option<f64>,
        otherwise: Otherwise,
        bonus: f64,
    ) -> bool {
        let Some((figures, wire)) = figures.zip(wire) else { return false };
        let promised = figures.promised(self.prospect.missing, wire, otherwise);
        figures.trust * promised > bonus * otherwise.brings
    }

    /// Returns the units from one probe to the next. Looking only among the guest's own pages
    /// yields too little for many probes.
    fn probe_interval(&self, bytes: u64, otherwise: Otherwise) -> u64 {
        if !self.prospect.foreign {
            return PROBE_INTERVAL;
        }
        let Some(figures) = self.figures else { return 1 };
        let probed = PROBE_BYTES.min(bytes) as f64;
        let seconds = probed / (figures.bytes_per_s * otherwise.cpu_share);
        let of_unit = seconds * otherwise.brings / bytes.max(1) as f64;
        (1..PROBE_INTERVAL).find(|units| of_unit < CHEAP * *units as f64).unwrap_or(PROBE_INTERVAL)
    }

    /// Returns whether units are looked up without a probe.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Learns from the lookup of a unit's pages.
    pub(super) fn note(&mut self, hashing: Hashing, in_use: bool) {
        let (bytes, seconds) =
            ((hashing.pages * u64::from(PAGE_SIZE)) as f64, hashing.cpu.as_secs_f64());
        if hashing.pages == 0 || seconds <= 0.0 {
            return;
        }
        let (bytes_per_s, found) = (bytes / seconds, hashing.found as f64 / hashing.pages as f64);
        match &mut self.figures {
            Some(known) => {
                let new = if in_use { 1.0 - (-bytes / MEMORY_BYTES).exp2() } else { 0.5 };
                known.bytes_per_s = 1.0 / blend(1.0 / known.bytes_per_s, 1.0 / bytes_per_s, new);
                known.found = blend(known.found, found, new);
                if !in_use {
                    known.trust = blend(known.trust, 1.0, FORGIVEN);
                }
            }
            unknown => *unknown = Some(Figures { bytes_per_s, found, trust: 1.0 }),
        }
    }

    /// Learns the actual yield of units that were looked up, in guest bytes per second. `found`:
    /// the share of their pages that the destination holds.
    pub(super) fn brought(&mut self, brought: f64, found: f64, wire: f64, otherwise: Otherwise) {
        let Some(figures) = &mut self.figures else { return };
        // Of the content of these units.
        let here = Figures { found, ..*figures };
        let promised = here.promised(self.prospect.missing, wire, otherwise);
        if promised > 0.0 {
            figures.trust = blend(figures.trust, (brought / promised).clamp(0.05, 1.0), 0.5);
        }
    }
}

impl Figures {
    /// Returns the expected yield in guest bytes per second. `missing`: fraction of the pages found
    /// that the destination then lacks.
    fn promised(self, missing: f64, wire: f64, otherwise: Otherwise) -> f64 {
        let rest = 1.0 - self.found;
        let work = 1.0 / (self.bytes_per_s * otherwise.cpu_share)
            + otherwise.packed_per_s.map_or(0.0, |rate| rest / rate);
        let on_wire = self.found * (REFERENCE_COST + missing) + rest * otherwise.ratio;
        (1.0 / work).min(wire / on_wire.max(1e-4))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const UNIT_BYTES: u64 = 2 << 20;
    const GIGABIT: f64 = 118e6;

    fn raw() -> Otherwise {
        Otherwise { brings: GIGABIT, packed_per_s: None, ratio: 1.0, cpu_share: 0.5 }
    }

    fn after(probes: &[Hashing]) -> Referral {
        let prospect = Prospect { possible: true, foreign: true, ..Prospect::default() };
        let mut referral = Referral { prospect, ..Referral::default() };
        probes.iter().for_each(|probe| referral.note(*probe, false));
        referral
    }

    /// Returns a probe that hashed at 2.6 GB/s of CPU time, and waited for a CPU.
    fn probe(found: u64) -> Hashing {
        let (time, cpu) = (Duration::from_millis(30), Duration::from_micros(100));
        Hashing { pages: PROBE_PAGES, found, time, cpu }
    }

    #[test]
    fn a_thread_that_waited_for_a_cpu_does_not_seem_slow() {
        let mut referral = after(&[probe(60)]);
        assert_eq!(referral.choose(UNIT_BYTES, Some(GIGABIT), raw()), Referring::All);
    }

    #[test]
    fn a_unit_whose_beginning_is_there_is_looked_up_where_that_would_pay() {
        let mut referral = after(&[probe(0), probe(0)]);
        assert_eq!(referral.choose(UNIT_BYTES, Some(GIGABIT), raw()), Referring::ProbeFirst);
        // The wire is as fast as hashing.
        let fast = Otherwise { brings: 1.5e9, ..raw() };
        let chosen: Vec<_> =
            (0..16).map(|_| referral.choose(UNIT_BYTES, Some(1.5e9), fast)).collect();
        assert!(chosen.contains(&Referring::Probe), "{chosen:?}");
        assert!(!chosen.contains(&Referring::ProbeFirst), "{chosen:?}");
    }
}
