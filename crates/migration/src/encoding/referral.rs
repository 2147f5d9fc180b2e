//! Decides whether it pays to look up pages by their content. The decision uses the speed at which
//! pages are copied and hashed, the share of them that the destination holds, and the share of
//! those that it then misses. They are measured each time, on units or on the first 64 pages of
//! some. Hashing and sending overlap as compressing and sending do.

use std::time::Duration;

use godwit_lanes::{Hashing, Referring};
use godwit_wire::PAGE_SIZE;

use super::blend;

/// Units from one probe to the next if hashing costs as much as sending.
const PROBE_INTERVAL: u64 = 16;
/// Every unit is probed if that takes less than this fraction of its time.
const CHEAP: f64 = 0.02;
const PROBE_BYTES: f64 = (64 * PAGE_SIZE) as f64;
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
}

#[derive(Clone, Copy, Debug)]
struct Figures {
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
    units: u64,
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
        let promised = wire.map_or(0.0, |wire| self.promised(wire, otherwise));
        let trust = self.figures.map_or(1.0, |figures| figures.trust);
        self.on = trust * promised > bonus * otherwise.brings;
        if self.on {
            return Referring::All;
        }
        self.units += 1;
        let probe =
            self.probe_is_cheap(bytes, otherwise.brings) || self.units % PROBE_INTERVAL == 2;
        if probe { Referring::Probe } else { Referring::No }
    }

    /// Returns whether probing every unit is cheap. Looking only among the guest's own pages yields
    /// too little for that.
    fn probe_is_cheap(&self, bytes: u64, brings: f64) -> bool {
        let Some(figures) = self.figures.filter(|_| self.prospect.foreign) else {
            return self.prospect.foreign;
        };
        PROBE_BYTES / figures.bytes_per_s * brings < CHEAP * bytes as f64
    }

    /// Returns the expected yield in guest bytes per second.
    fn promised(&self, wire: f64, otherwise: Otherwise) -> f64 {
        let Some(figures) = self.figures else { return 0.0 };
        let rest = 1.0 - figures.found;
        let work =
            1.0 / figures.bytes_per_s + otherwise.packed_per_s.map_or(0.0, |rate| rest / rate);
        let on_wire =
            figures.found * (REFERENCE_COST + self.prospect.missing) + rest * otherwise.ratio;
        (1.0 / work).min(wire / on_wire.max(1e-4))
    }

    /// Returns whether the last unit was looked up as a whole.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Learns from the lookup of a unit's pages.
    pub(super) fn note(&mut self, hashing: Hashing, in_use: bool) {
        let (bytes, seconds) =
            ((hashing.pages * u64::from(PAGE_SIZE)) as f64, hashing.time.as_secs_f64());
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

    /// Learns the actual yield: units in use carried so many guest bytes in this time.
    pub(super) fn brought(
        &mut self,
        guest_bytes: f64,
        wall: Duration,
        wire: f64,
        otherwise: Otherwise,
    ) {
        let promised = self.promised(wire, otherwise);
        if let Some(figures) = self.figures.as_mut().filter(|_| promised > 0.0) {
            let brought = guest_bytes / wall.as_secs_f64().max(1e-9);
            figures.trust = blend(figures.trust, (brought / promised).clamp(0.05, 1.0), 0.5);
        }
    }
}
