//! How pages are encoded on their way: what an operator asks for, and, where that is left to the engine, the choice of what
//! pays on the measured link with the CPU that is free. No I/O and no clock; each data stream has a chooser of its own.
//!
//! What is known of a method is where its time goes. A codec has a speed and a ratio, measured each time that it is used: on
//! units, or on a probe, the first 64 pages of one in [`PROBE_INTERVAL`]. The wire has a rate, measured while it is what
//! units wait for. Sending and compressing overlap by the socket's buffer, so a codec brings
//! `min(speed, rate of the wire / ratio)` guest bytes a second, and raw pages the wire's rate. Where a codec in use brings
//! less than that, because sending costs the same CPU, it is believed that much less from then on.
//!
//! The socket's buffer is why a unit's wall time alone tells nothing: several MiB vanish in it at once, and a unit that follows
//! raw ones waits for them. So the kernel is asked before and after a unit how much it has not put on the wire: what the
//! queue grew by was not carried. Windows of several units smooth the rest, and the first unit after a change does not count.

mod delta;
mod experience;
mod referral;
mod report;
#[cfg(test)]
mod tests;

use std::time::Duration;

use godwit_lanes::{Differing, Packing, Referring, UnitSent};
use godwit_wire::{Codec, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use delta::Delta;
use referral::{Otherwise, Referral};

pub use experience::Experience;
pub use referral::Prospect;
pub use report::{EncodingName, EncodingReport, Encodings};

/// What compresses the pages of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// Whatever pays, and nothing where nothing does.
    #[default]
    Auto,
    /// Nothing.
    None,
    /// LZ4, where it makes pages smaller.
    Lz4,
    /// Zstandard, where it makes pages smaller.
    Zstd,
}

/// Every method, the cheapest first.
const METHODS: [Option<Codec>; 3] = [None, Some(Codec::Lz4), Some(Codec::Zstd)];

/// Units before the first that each codec is probed on.
const FIRST_PROBE: u64 = 1;
/// Units from one probe to the next: 64 of 16 × 512 pages are less than 1 % of the bytes.
const PROBE_INTERVAL: u64 = 16;
/// Of so many probes two, one of each codec, are made of those that are hopeless: at most this part of the rate in use.
const PROBES_SKIPPED: u64 = 8;
const HOPELESS: f64 = 0.5;
/// Fewer pages than this tell nothing of a codec.
const LEAST_PROBE_BYTES: u64 = 16 * PAGE_SIZE as u64;
/// The figures of a codec in use are renewed by half within so many bytes; those of another by half with each probe.
const CODEC_MEMORY_BYTES: f64 = 1e6;
/// A window is over after so many units, or after this time.
const WINDOW_UNITS: u32 = 4;
const WINDOW_TIME: Duration = Duration::from_millis(20);
/// Units smaller than this say more of the round trip than of the wire.
const LEAST_WINDOW_BYTES: u64 = 256 << 10;
/// Above this share of its time spent compressing, a unit did not wait for the wire.
const MOST_COMPRESSING: f64 = 0.7;
/// A socket that holds less than this part of a unit may run empty while the next one is compressed.
const LEAST_QUEUE_PART: u64 = 8;
/// Units in a row that go raw to learn the wire's rate, where the codec keeps it from being seen.
const RAW_TRIAL_UNITS: u32 = 3;
/// Units between two such trials; doubled each time that nothing new is learnt.
const FIRST_RAW_TRIAL: u32 = 16;
const LAST_RAW_TRIAL: u32 = 1024;
/// Units between trials of a wire half as fast as the codec, for each of [`FIRST_RAW_TRIAL`].
const RAW_TRIAL_COST: f64 = 8.0;
/// A wire that differs by less than this factor is the same.
const SAME_WIRE: f64 = 1.5;
/// The cheapest method with this part of the best rate is good enough.
const AS_FAST: f64 = 0.96;
/// What is in use counts as that much faster: a change costs something.
const IN_USE: f64 = 1.02;
/// How much of its lost trust a codec that is not in use gets back with each probe.
const FORGIVEN: f64 = 0.05;

/// What is known of a codec.
#[derive(Clone, Copy, Debug)]
struct CodecFigures {
    /// Guest bytes compressed in a second, with the copy.
    bytes_per_s: f64,
    /// What becomes of a byte.
    ratio: f64,
    /// The part of what is expected of it that it has brought.
    trust: f64,
}

/// Units of one method in a row.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    units: u32,
    guest_bytes: u64,
    wire_bytes: u64,
    /// What the wire carried of them, and of what was in the socket before.
    carried_bytes: i64,
    wall: Duration,
    /// Compressing, and looking for pages by their content.
    compressing: Duration,
    /// Before or after one of them the socket held so little that the wire may have had nothing to do meanwhile.
    idle: bool,
}

/// What is asked of each unit of one data stream.
#[derive(Clone, Debug)]
pub struct Chooser {
    compression: Compression,
    codecs: [Option<CodecFigures>; 2],
    /// Wire bytes a second.
    wire_bytes_per_s: Option<f64>,
    current: Option<Codec>,
    units: u64,
    window: Window,
    /// How the window's units were sent; none: the next one begins a run, and does not count.
    counted: Option<Method>,
    trial: RawTrial,
    referral: Referral,
    delta: Delta,
}

/// How units are sent whose figures are comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Method {
    codec: Option<Codec>,
    /// All pages are looked for by content.
    refers: bool,
    /// All pages are compared with what was sent of them before.
    differs: bool,
}

impl Method {
    fn of(packing: Packing) -> Method {
        Method {
            codec: packing.codec,
            refers: packing.reference == Referring::All,
            differs: packing.delta == Differing::All,
        }
    }

    /// Some pages may be told by what the destination has.
    fn tells(self) -> bool {
        self.refers || self.differs
    }
}

/// When raw units are sent although a codec is in use.
#[derive(Clone, Copy, Debug, Default)]
struct RawTrial {
    /// Raw units still to be sent.
    left: u32,
    /// Units since the wire's rate was seen.
    since: u32,
    interval: u32,
    /// The codec in use had to wait for the wire and does not any more.
    faster: bool,
    waited: bool,
}

impl Chooser {
    /// Before the first unit.
    #[must_use]
    pub fn new(compression: Compression) -> Self {
        Chooser {
            compression,
            codecs: [None; 2],
            wire_bytes_per_s: None,
            current: None,
            units: 0,
            window: Window::default(),
            counted: None,
            trial: RawTrial { interval: FIRST_RAW_TRIAL, ..RawTrial::default() },
            referral: Referral::default(),
            delta: Delta::default(),
        }
    }

    /// What is known of references and deltas, before each unit that may have them.
    pub fn prospect(&mut self, prospect: Prospect) {
        if self.wire_bytes_per_s.is_none() && (prospect.possible || prospect.deltas) {
            self.wire_bytes_per_s = prospect.wire_bytes_per_s;
        }
        self.referral.prospect = prospect;
        // Who asks for a codec gets that.
        let may_choose = self.compression == Compression::Auto || prospect.always_deltas;
        self.delta.possible = prospect.deltas && may_choose;
        self.delta.always = prospect.always_deltas;
    }

    /// How a unit of so many bytes is to be sent. `hurry`: the guest stands still, so nothing is tried out.
    #[must_use]
    pub fn packing(&mut self, bytes: u64, hurry: bool) -> Packing {
        let packing = match self.compression {
            Compression::Auto => self.choose(bytes, hurry),
            Compression::None => Packing::default(),
            Compression::Lz4 => Packing { codec: Some(Codec::Lz4), ..Packing::default() },
            Compression::Zstd => Packing { codec: Some(Codec::Zstd), ..Packing::default() },
        };
        // A trial is of raw pages as such.
        if hurry || self.trial.left > 0 {
            return packing;
        }
        if self.compression != Compression::Auto {
            self.current = packing.codec;
        }
        let otherwise = self.otherwise();
        let packing = Packing { delta: self.delta.choose(self.wire(), otherwise), ..packing };
        if bytes < LEAST_PROBE_BYTES && !self.referral.prospect.always {
            return packing;
        }
        Packing { reference: self.referral.choose(bytes, self.wire(), otherwise), ..packing }
    }

    /// The wire's rate, as far as it is known. Where a codec is given it may never show: then it counts as no obstacle.
    fn wire(&self) -> Option<f64> {
        let given = matches!(self.compression, Compression::Lz4 | Compression::Zstd);
        self.wire_bytes_per_s.or(given.then_some(f64::MAX))
    }

    /// The method in use, without references.
    fn otherwise(&self) -> Otherwise {
        let wire = self.wire().unwrap_or(0.0);
        match self.current.and_then(|codec| self.codecs[place(codec)]) {
            Some(known) => Otherwise {
                brings: known.trust * known.promised(wire),
                packed_per_s: Some(known.bytes_per_s),
                ratio: known.ratio,
            },
            None => Otherwise { brings: wire, packed_per_s: None, ratio: 1.0 },
        }
    }

    fn choose(&mut self, bytes: u64, hurry: bool) -> Packing {
        self.decide();
        let settled = Packing { codec: self.current, ..Packing::default() };
        if hurry || bytes < LEAST_PROBE_BYTES {
            return settled;
        }
        let unit = self.units;
        self.units += 1;
        if self.trial.left > 0 {
            return Packing::default();
        }
        // Where most is told by its content the wire is hardly waited for, and its rate of little consequence.
        let due = self.current.is_some() && !self.referral.is_on() && !self.delta.is_on();
        if due && f64::from(self.trial.since) >= self.raw_trial_due() {
            self.trial.left = RAW_TRIAL_UNITS;
            return Packing::default();
        }
        let turn = unit.wrapping_sub(FIRST_PROBE);
        // Both at the beginning, then in turns.
        let probe = match turn {
            0 => Codec::Lz4,
            1 => Codec::Zstd,
            _ if !turn.is_multiple_of(PROBE_INTERVAL) => return settled,
            _ => Codec::ALL[usize::from((turn / PROBE_INTERVAL).is_multiple_of(2))],
        };
        let rarely = turn / PROBE_INTERVAL % PROBES_SKIPPED > 1 && self.is_hopeless(probe);
        Packing { probe: Some(probe).filter(|probe| self.current != Some(*probe) && !rarely), ..settled }
    }

    /// Whether a codec would be too slow, however small it made the pages.
    fn is_hopeless(&self, codec: Codec) -> bool {
        let rate = self.expected(self.current).unwrap_or(0.0);
        self.codecs[place(codec)].is_some_and(|known| known.bytes_per_s < HOPELESS * rate)
    }

    /// Units until raw ones are tried: the more, the slower the wire was when it was last seen, so that they cost at most some
    /// 2 % of the time; at once where it has become faster.
    fn raw_trial_due(&self) -> f64 {
        let rate = self.expected(self.current).unwrap_or(0.0);
        let raw = self.expected(None).unwrap_or(0.0).max(1.0);
        let cost = if self.trial.faster { 1.0 } else { ((rate / raw - 1.0) * RAW_TRIAL_COST).max(1.0) };
        (f64::from(self.trial.interval) * cost).min(f64::from(LAST_RAW_TRIAL))
    }

    /// Takes the method that pays by what is known now.
    fn decide(&mut self) {
        if self.trial.left > 0 {
            return;
        }
        let rate = |method: Option<Codec>| {
            let bonus = if method == self.current { IN_USE } else { 1.0 };
            self.expected(method).unwrap_or(0.0) * bonus
        };
        let best = METHODS.map(rate).into_iter().fold(0.0, f64::max);
        let chosen = METHODS.into_iter().find(|method| rate(*method) >= AS_FAST * best).flatten();
        if chosen != self.current {
            self.current = chosen;
            self.trial = RawTrial { interval: FIRST_RAW_TRIAL, ..RawTrial::default() };
        }
    }

    /// Guest bytes a second that a method is believed to bring.
    fn expected(&self, method: Option<Codec>) -> Option<f64> {
        let wire = self.wire_bytes_per_s?;
        let Some(codec) = method else { return Some(wire) };
        let figures = self.codecs[place(codec)]?;
        Some(figures.trust * figures.promised(wire))
    }

    /// A unit that [`Chooser::packing`] has told of was sent, and took so long.
    pub fn sent(&mut self, packing: Packing, sent: &UnitSent, wall: Duration) {
        if self.compression != Compression::Auto && !self.referral.prospect.possible {
            return;
        }
        let method = Method::of(packing);
        self.referral.note(sent.hashing, method.refers);
        self.delta.note(sent.comparing);
        for codec in Codec::ALL {
            self.note_effort(codec, sent);
        }
        let pages =
            sent.raw.pages + sent.lz4.pages + sent.zstd.pages + sent.reference.pages + sent.delta.pages;
        let guest_bytes = pages * u64::from(PAGE_SIZE);
        if guest_bytes < LEAST_WINDOW_BYTES {
            return;
        }
        self.trial.since = self.trial.since.saturating_add(1);
        if self.counted != Some(method) {
            // The socket still has what was sent by another method, or a connection has just begun.
            (self.counted, self.window) = (Some(method), Window::default());
        } else {
            let mut probing = packing.probe.map_or(Duration::ZERO, |probe| sent.effort(probe).time);
            let mut compressing = packing.codec.map_or(Duration::ZERO, |codec| sent.effort(codec).time);
            *(if method.refers { &mut compressing } else { &mut probing }) += sent.hashing.time;
            *(if method.differs { &mut compressing } else { &mut probing }) += sent.comparing.time;
            self.window.add(guest_bytes, sent, wall.saturating_sub(probing), compressing);
        }
        let in_trial = self.trial.left > 0;
        self.trial.left = self.trial.left.saturating_sub(1);
        let trial_over = in_trial && self.trial.left == 0;
        let Window { units, wall, .. } = self.window;
        if trial_over || (!in_trial && (units >= WINDOW_UNITS || (units > 0 && wall >= WINDOW_TIME))) {
            self.close_window(method, trial_over);
        }
    }

    fn note_effort(&mut self, codec: Codec, sent: &UnitSent) {
        let effort = sent.effort(codec);
        let (raw_bytes, seconds) = (effort.raw_bytes as f64, effort.time.as_secs_f64());
        if effort.raw_bytes == 0 || seconds <= 0.0 {
            return;
        }
        let (bytes_per_s, ratio) = (raw_bytes / seconds, effort.packed_bytes as f64 / raw_bytes);
        let in_use = self.current == Some(codec);
        match &mut self.codecs[place(codec)] {
            Some(known) => {
                let new = if in_use { 1.0 - (-raw_bytes / CODEC_MEMORY_BYTES).exp2() } else { 0.5 };
                // Times add up, not speeds.
                known.bytes_per_s = 1.0 / blend(1.0 / known.bytes_per_s, 1.0 / bytes_per_s, new);
                known.ratio = blend(known.ratio, ratio, new);
                if !in_use {
                    known.trust = blend(known.trust, 1.0, FORGIVEN);
                }
            }
            unknown => *unknown = Some(CodecFigures { bytes_per_s, ratio, trust: 1.0 }),
        }
    }

    /// The wire carried so many bytes a second, and was waited for.
    fn wire_seen(&mut self, seen: f64, trial_over: bool) {
        let before = self.wire_bytes_per_s.unwrap_or(0.0);
        // A trial is rare, and too short to be smoothed.
        let now = if before > 0.0 && !trial_over { blend(before, seen, 0.5) } else { seen };
        self.wire_bytes_per_s = Some(now);
        let same = seen < before * SAME_WIRE && before < seen * SAME_WIRE;
        if !same {
            // What a codec did not bring may have been this wire's fault.
            self.codecs.iter_mut().flatten().for_each(|known| known.trust = 1.0);
        }
        if trial_over {
            let next = if same { self.trial.interval * 2 } else { FIRST_RAW_TRIAL };
            self.trial.interval = next.min(LAST_RAW_TRIAL);
        }
        self.trial.since = 0;
        self.trial.faster = false;
    }

    /// Learns from units of one method in a row.
    fn close_window(&mut self, method: Method, trial_over: bool) {
        let window = std::mem::take(&mut self.window);
        let seconds = window.wall.as_secs_f64();
        if window.units == 0 || seconds <= 0.0 {
            return;
        }
        let carried = window.carried_bytes.max(0) as f64;
        let waited = !window.idle && window.compressing.as_secs_f64() < MOST_COMPRESSING * seconds;
        let mut wire = self.wire_bytes_per_s.unwrap_or(0.0);
        let seen = carried / seconds;
        if (method.codec.is_none() && !method.tells()) || waited {
            self.wire_seen(seen, trial_over);
            wire = seen;
        } else if method.tells() && seen > wire && wire > 0.0 {
            // It carried that without being waited for.
            self.wire_bytes_per_s = Some(seen);
        }
        if method.tells() {
            let otherwise = self.otherwise();
            // What both brought together says nothing of either.
            if !method.differs {
                self.referral.brought(window.guest_bytes as f64, window.wall, wire, otherwise);
            }
            return;
        }
        if method.codec.is_some() {
            self.trial.faster |= self.trial.waited && !waited;
            self.trial.waited = waited;
        }
        if let Some(known) = method.codec.and_then(|codec| self.codecs[place(codec)].as_mut()) {
            let in_steady_state = (carried / window.wire_bytes.max(1) as f64).min(1.0);
            let brought = window.guest_bytes as f64 * in_steady_state / seconds;
            let promised = known.promised(wire);
            if promised > 0.0 {
                known.trust = blend(known.trust, (brought / promised).clamp(0.05, 1.0), 0.5);
            }
        }
    }
}

impl CodecFigures {
    /// Guest bytes a second on a wire of so many bytes a second.
    fn promised(&self, wire_bytes_per_s: f64) -> f64 {
        self.bytes_per_s.min(wire_bytes_per_s / self.ratio.max(1e-4))
    }
}

impl Window {
    fn add(&mut self, guest_bytes: u64, sent: &UnitSent, wall: Duration, compressing: Duration) {
        let queued = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let (before, after) = (sent.unsent_before_bytes, sent.unsent_after_bytes);
        self.units += 1;
        self.guest_bytes += guest_bytes;
        self.wire_bytes += sent.wire_bytes;
        self.carried_bytes += queued(sent.wire_bytes) + queued(before) - queued(after);
        self.wall += wall;
        self.compressing += compressing;
        self.idle |= before.min(after) < sent.wire_bytes / LEAST_QUEUE_PART;
    }
}

fn blend(old: f64, new: f64, share: f64) -> f64 {
    old + (new - old) * share
}

fn place(codec: Codec) -> usize {
    match codec {
        Codec::Lz4 => 0,
        Codec::Zstd => 1,
    }
}
