//! Whether it pays to look for pages by their content. What is known of it: how fast pages are copied and hashed, how many of
//! them the destination has, and how many of those it then misses. Both are measured each time, on units or on the first 64
//! pages of some. Hashing and sending overlap as compressing and sending do.

use std::time::Duration;

use godwit_lanes::{Hashing, Referring};
use godwit_wire::PAGE_SIZE;

use super::blend;

/// Units from one probe to the next where hashing costs as much as sending.
const PROBE_INTERVAL: u64 = 16;
/// Every unit is probed where that takes less than this part of its time.
const CHEAP: f64 = 0.02;
/// Bytes of a probe.
const PROBE_BYTES: f64 = (64 * PAGE_SIZE) as f64;
/// In use, figures are renewed by half within so many bytes; by a probe by half.
const MEMORY_BYTES: f64 = 4e6;
/// What a page that is told costs on the wire, of its own bytes: hash and fields.
const TOLD: f64 = 0.012;
/// It must be that much faster to be begun, and to be kept.
const BEGIN: f64 = 1.04;
const KEEP: f64 = 1.02;
/// Units that are looked for before the wire's rate is known, or what they find, where the destination has told of content: they cost
/// little, and raw ones sent to learn that rate would be most of a short way back. On a wire as fast as memory they are the price.
const BLIND_UNITS: u32 = 64;
/// They must find so many of their pages.
const LEAST_FOUND: f64 = 0.1;
/// How much of its lost trust it gets back with each probe.
const FORGIVEN: f64 = 0.05;

/// What a chooser is told of references and deltas before each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prospect {
    /// Pages may be told by their content at all.
    pub possible: bool,
    /// Always, whatever it brings.
    pub always: bool,
    /// The destination has told of content.
    pub foreign: bool,
    /// The part of what was told that was missing then.
    pub missing: f64,
    /// What another stream has seen of the wire.
    pub wire_bytes_per_s: Option<f64>,
    /// Pages may be told by what differs from what was sent of them before.
    pub deltas: bool,
    /// Always, whatever it brings.
    pub always_deltas: bool,
}

/// The method that it is compared with, and that the rest goes by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Otherwise {
    /// Guest bytes a second that it brings.
    pub(super) brings: f64,
    /// Guest bytes that are compressed in a second; none where nothing is.
    pub(super) packed_per_s: Option<f64>,
    /// What becomes of a byte.
    pub(super) ratio: f64,
}

#[derive(Clone, Copy, Debug)]
struct Figures {
    bytes_per_s: f64,
    /// The part of the pages that the destination has.
    found: f64,
    trust: f64,
}

/// The judgement.
#[derive(Clone, Debug, Default)]
pub(super) struct Referral {
    pub(super) prospect: Prospect,
    figures: Option<Figures>,
    on: bool,
    units: u64,
    /// Units looked for without knowing the wire.
    blind: u32,
}

impl Referral {
    /// What a unit of so many bytes is to do, on a wire of such a rate.
    pub(super) fn choose(&mut self, bytes: u64, wire: Option<f64>, otherwise: Otherwise) -> Referring {
        if !self.prospect.possible {
            return Referring::No;
        }
        if self.prospect.always {
            return Referring::All;
        }
        let finds =
            self.figures.is_none_or(|figures| figures.found * (1.0 - self.prospect.missing) >= LEAST_FOUND);
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
        let probe = self.probe_is_cheap(bytes, otherwise.brings) || self.units % PROBE_INTERVAL == 2;
        if probe { Referring::Probe } else { Referring::No }
    }

    /// Looking among the guest's own pages alone brings too little for each unit's while.
    fn probe_is_cheap(&self, bytes: u64, brings: f64) -> bool {
        let Some(figures) = self.figures.filter(|_| self.prospect.foreign) else {
            return self.prospect.foreign;
        };
        PROBE_BYTES / figures.bytes_per_s * brings < CHEAP * bytes as f64
    }

    /// Guest bytes a second, as the figures say.
    fn promised(&self, wire: f64, otherwise: Otherwise) -> f64 {
        let Some(figures) = self.figures else { return 0.0 };
        let rest = 1.0 - figures.found;
        let work = 1.0 / figures.bytes_per_s + otherwise.packed_per_s.map_or(0.0, |rate| rest / rate);
        let on_wire = figures.found * (TOLD + self.prospect.missing) + rest * otherwise.ratio;
        (1.0 / work).min(wire / on_wire.max(1e-4))
    }

    /// Whether the last unit was looked for as a whole.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// What a unit's looking came to.
    pub(super) fn note(&mut self, hashing: Hashing, in_use: bool) {
        let (bytes, seconds) = ((hashing.pages * u64::from(PAGE_SIZE)) as f64, hashing.time.as_secs_f64());
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

    /// Units in use brought so many guest bytes in such a time.
    pub(super) fn brought(&mut self, guest_bytes: f64, wall: Duration, wire: f64, otherwise: Otherwise) {
        let promised = self.promised(wire, otherwise);
        if let Some(figures) = self.figures.as_mut().filter(|_| promised > 0.0) {
            let brought = guest_bytes / wall.as_secs_f64().max(1e-9);
            figures.trust = blend(figures.trust, (brought / promised).clamp(0.05, 1.0), 0.5);
        }
    }
}
