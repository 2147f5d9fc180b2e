//! How pages are encoded on their way: the operator's choice or, if it is left to the engine, the
//! method that pays on the measured link with the CPU time that is free. No I/O and no clock; each
//! data stream has a chooser of its own.
//!
//! The chooser models where a method's time goes. A codec has a speed and a ratio, measured
//! whenever it is used: on units, or on a probe, the first 64 pages of one unit in
//! [`PROBE_INTERVAL`]. The speed is that of the thread's CPU time, multiplied by the share of its
//! time for which a compressing thread has a CPU, whatever the codec. Pages of memory in a probe
//! are packed by the codec in use as well, because the content of units differs more than codecs
//! do. The wire has a rate, measured while units wait for it. Sending and compressing overlap
//! thanks to the socket's buffer, so a codec yields `min(speed, rate of the wire / ratio)` guest
//! bytes per second, and raw pages yield the wire's rate. If a codec in use yields less than that,
//! because sending uses the same CPU, its expected yield is reduced accordingly from then on, but
//! not below what it would yield without any overlap.
//!
//! A unit's wall time alone is not informative, because of the socket's buffer: it absorbs several
//! MiB at once, and a unit that follows raw ones waits for them. So the kernel is queried before
//! and after a unit for the bytes that it has not put on the wire: the growth of the queue was not
//! carried. Windows of several units smooth the rest, and the first unit after a change does not
//! count.

mod delta;
mod experience;
mod referral;
mod report;
#[cfg(test)]
mod tests;

use std::time::Duration;

use godwit_lanes::{Differing, Packing, Probed, Referring, UnitSent};
use godwit_types::Compression;
use godwit_wire::{Codec, PAGE_SIZE};

use delta::Delta;
use referral::{Otherwise, PROBE_PAGES, Referral};

pub use experience::Experience;
pub use referral::Prospect;
pub use report::Encodings;

/// All methods, the cheapest first.
const METHODS: [Option<Codec>; 3] = [None, Some(Codec::Lz4), Some(Codec::Zstd)];

/// Number of units before the first probe of each codec.
const FIRST_PROBE: u64 = 1;
/// Units from one probe to the next: 64 of 16 × 512 pages are less than 1 % of the bytes.
const PROBE_INTERVAL: u64 = 16;
/// Out of this many probes, only two try a hopeless codec: one whose speed is
/// below [`HOPELESS`] times the rate in use.
const PROBES_SKIPPED: u64 = 8;
const HOPELESS: f64 = 0.5;
/// A probe of fewer pages than this says nothing about a codec.
const LEAST_PROBE_BYTES: u64 = 16 * PAGE_SIZE as u64;
/// The figures of the codec in use are renewed by half within so many bytes; those of another codec
/// by half with each probe.
const CODEC_MEMORY_BYTES: f64 = 1e6;
/// Fraction of what earlier probes found that counts when two codecs are compared.
const EARLIER_PROBES: f64 = 0.75;
/// Fraction of earlier units that counts in the share of time for which a thread has a CPU.
const EARLIER_UNITS: f64 = 0.8;
/// A window ends after so many units, or after [`WINDOW_TIME`].
const WINDOW_UNITS: u32 = 4;
const WINDOW_TIME: Duration = Duration::from_millis(20);
/// Units of fewer bytes than this say more about the round trip than about the wire.
const LEAST_WINDOW_BYTES: u64 = 256 << 10;
/// A unit that spent more than this share of its time compressing did not wait for the wire.
const MOST_COMPRESSING: f64 = 0.7;
/// A socket that holds less than this fraction of a unit may run empty while the next unit is
/// compressed.
const LEAST_QUEUE_PART: u64 = 8;
/// Consecutive units that go raw to measure the wire's rate, if the codec hides it.
const RAW_TRIAL_UNITS: u32 = 3;
/// Units between two such trials; doubled whenever a trial shows nothing new.
const FIRST_RAW_TRIAL: u32 = 16;
const LAST_RAW_TRIAL: u32 = 1024;
/// Units between trials on a wire half as fast as the codec, for each of [`FIRST_RAW_TRIAL`].
const RAW_TRIAL_COST: f64 = 8.0;
/// A wire whose rate differs by less than this factor is unchanged.
const SAME_WIRE: f64 = 1.5;
/// The cheapest method with this fraction of the best rate is chosen.
const AS_FAST: f64 = 0.96;
/// The method in use counts as that much faster, because a change has a cost.
const IN_USE: f64 = 1.02;
/// Fraction of its lost trust that a codec not in use regains with each probe.
const FORGIVEN: f64 = 0.05;

#[derive(Clone, Copy, Debug)]
struct CodecFigures {
    /// Guest bytes compressed per second of CPU time, including the copy; in
    /// [`Chooser::figures`], per second.
    bytes_per_s: f64,
    /// Compressed bytes per guest byte.
    ratio: f64,
    /// Fraction of the expected yield that the codec has achieved.
    trust: f64,
}

/// Consecutive units of one method.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    units: u32,
    guest_bytes: u64,
    wire_bytes: u64,
    /// Bytes of them, and of what was in the socket before, that the wire carried.
    carried_bytes: i64,
    wall: Duration,
    /// Time spent compressing, and looking up pages by their content.
    compressing: Duration,
    /// Pages looked up, and those of them that the destination holds.
    looked_up: u64,
    found: u64,
    /// Whether the socket held so little, before or after one of them, that the wire may have been
    /// idle meanwhile.
    idle: bool,
}

/// Chooser of the encoding for each unit of one data stream.
#[derive(Clone, Debug)]
pub struct Chooser {
    compression: Compression,
    codecs: [Option<CodecFigures>; 2],
    /// The wire's rate, bytes per second.
    wire_bytes_per_s: Option<f64>,
    current: Option<Codec>,
    units: u64,
    window: Window,
    /// Bytes to which Zstandard packs pages, and to which LZ4 packs the same pages.
    zstd_of_lz4: Quotient,
    /// CPU time of compressing, and time that it took.
    cpu_share: Quotient,
    /// How the window's units were sent; `None`: the next unit begins a run, and does not count.
    counted: Option<Method>,
    trial: RawTrial,
    referral: Referral,
    delta: Delta,
}

/// Method of sending units. Figures of units with the same method are comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Method {
    codec: Option<Codec>,
    /// Whether all pages are looked up by content.
    refers: bool,
    /// Whether all pages are compared with the versions sent before.
    differs: bool,
}

impl Method {
    fn of(packing: Packing, sent: &UnitSent) -> Method {
        Method {
            codec: packing.codec,
            // [`Referring::ProbeFirst`] may have looked up all.
            refers: packing.reference == Referring::All || sent.hashing.pages > PROBE_PAGES,
            differs: packing.delta == Differing::All,
        }
    }

    /// Returns whether some pages may be sent by reference or as deltas.
    fn rebuilds(self) -> bool {
        self.refers || self.differs
    }
}

/// State of trials that send raw units although a codec is in use.
#[derive(Clone, Copy, Debug, Default)]
struct RawTrial {
    /// Raw units left to send.
    left: u32,
    /// Units since the wire's rate was last seen.
    since: u32,
    interval: u32,
    /// Whether the codec in use had to wait for the wire and no longer does.
    faster: bool,
    waited: bool,
}

impl Chooser {
    /// Creates a chooser that has seen no unit.
    #[must_use]
    pub fn new(compression: Compression) -> Self {
        Chooser {
            compression,
            codecs: [None; 2],
            wire_bytes_per_s: None,
            current: None,
            units: 0,
            window: Window::default(),
            zstd_of_lz4: Quotient::default(),
            cpu_share: Quotient::default(),
            counted: None,
            trial: RawTrial { interval: FIRST_RAW_TRIAL, ..RawTrial::default() },
            referral: Referral::default(),
            delta: Delta::default(),
        }
    }

    /// Takes in what is known about references and deltas, before each unit that may use them.
    pub fn prospect(&mut self, prospect: Prospect) {
        if self.wire_bytes_per_s.is_none() && (prospect.possible || prospect.deltas) {
            self.wire_bytes_per_s = prospect.wire_bytes_per_s;
        }
        self.referral.prospect = prospect;
        // A codec that the operator requests is used.
        let may_choose = self.compression == Compression::Auto || prospect.always_deltas;
        self.delta.possible = prospect.deltas && may_choose;
        self.delta.always = prospect.always_deltas;
    }

    /// Returns how to send a unit of so many bytes. `plain`: the guest is paused, or about to be,
    /// so no method is tried out, and nothing goes by reference or as a delta.
    #[must_use]
    pub fn packing(&mut self, bytes: u64, plain: bool) -> Packing {
        let packing = match self.compression {
            Compression::Auto => self.choose(bytes, plain),
            Compression::None => Packing::default(),
            Compression::Lz4 => Packing { codec: Some(Codec::Lz4), ..Packing::default() },
            Compression::Zstd => Packing { codec: Some(Codec::Zstd), ..Packing::default() },
        };
        // A trial must consist of raw pages.
        if plain || self.trial.left > 0 {
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

    /// Returns the wire's rate, as far as it is known. With a fixed codec it may never show; then
    /// the wire counts as no limit.
    fn wire(&self) -> Option<f64> {
        let given = matches!(self.compression, Compression::Lz4 | Compression::Zstd);
        self.wire_bytes_per_s.or(given.then_some(f64::MAX))
    }

    /// Returns the figures of the method in use, without references.
    fn otherwise(&self) -> Otherwise {
        let wire = self.wire().unwrap_or(0.0);
        // Without a codec in use, only short probes of codecs would show the share.
        let cpu_share = self.current.map_or(1.0, |_| self.cpu_share());
        match self.current.and_then(|codec| self.figures(codec)) {
            Some(known) => Otherwise {
                brings: known.trust * known.promised(wire),
                packed_per_s: Some(known.bytes_per_s),
                ratio: known.ratio,
                cpu_share,
            },
            None => Otherwise { brings: wire, packed_per_s: None, ratio: 1.0, cpu_share },
        }
    }

    fn choose(&mut self, bytes: u64, plain: bool) -> Packing {
        self.decide();
        let in_use = Packing { codec: self.current, ..Packing::default() };
        if plain || bytes < LEAST_PROBE_BYTES {
            return in_use;
        }
        let unit = self.units;
        self.units += 1;
        if self.trial.left > 0 {
            return Packing::default();
        }
        // If most pages go by reference, units hardly wait for the wire, and its rate matters
        // little.
        let due = self.current.is_some() && !self.referral.is_on() && !self.delta.is_on();
        if due && f64::from(self.trial.since) >= self.raw_trial_due() {
            self.trial.left = RAW_TRIAL_UNITS;
            return Packing::default();
        }
        let turn = unit.wrapping_sub(FIRST_PROBE);
        // Both at the beginning, then the one that is not in use.
        let probe = match turn {
            0 => Codec::Lz4,
            1 => Codec::Zstd,
            _ if !turn.is_multiple_of(PROBE_INTERVAL) => return in_use,
            _ => match self.current {
                Some(Codec::Lz4) => Codec::Zstd,
                Some(Codec::Zstd) => Codec::Lz4,
                None => Codec::ALL[usize::from((turn / PROBE_INTERVAL).is_multiple_of(2))],
            },
        };
        let rarely = turn / PROBE_INTERVAL % PROBES_SKIPPED > 1 && self.is_hopeless(probe);
        Packing {
            probe: Some(probe).filter(|probe| self.current != Some(*probe) && !rarely),
            ..in_use
        }
    }

    /// Returns whether a codec would be too slow, however small it made the pages.
    fn is_hopeless(&self, codec: Codec) -> bool {
        let rate = self.expected(self.current).unwrap_or(0.0);
        self.figures(codec).is_some_and(|known| known.bytes_per_s < HOPELESS * rate)
    }

    /// Returns the number of units until raw ones are tried. It is higher the slower the wire was
    /// when last seen, so that trials cost at most some 2 % of the time. A trial is due at once if
    /// the wire has become faster.
    fn raw_trial_due(&self) -> f64 {
        let rate = self.expected(self.current).unwrap_or(0.0);
        let raw = self.expected(None).unwrap_or(0.0).max(1.0);
        let cost =
            if self.trial.faster { 1.0 } else { ((rate / raw - 1.0) * RAW_TRIAL_COST).max(1.0) };
        (f64::from(self.trial.interval) * cost).min(f64::from(LAST_RAW_TRIAL))
    }

    /// Selects the method that pays by present knowledge.
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

    /// Returns the expected yield of a method, in guest bytes per second.
    fn expected(&self, method: Option<Codec>) -> Option<f64> {
        let wire = self.wire_bytes_per_s?;
        let Some(codec) = method else { return Some(wire) };
        let figures = self.figures(codec)?;
        Some(figures.trust * figures.promised(wire))
    }

    /// Returns a codec's figures under the present load and on the present content: the ratio of a
    /// codec not in use follows from pages that both packed, if there were any.
    fn figures(&self, codec: Codec) -> Option<CodecFigures> {
        let own = self.codecs[place(codec)]?;
        let in_use = self.current.and_then(|codec| self.codecs[place(codec)]);
        let ratio = match (self.current.zip(in_use), self.zstd_of_lz4.value()) {
            (Some((Codec::Lz4, lz4)), Some(factor)) if codec == Codec::Zstd => lz4.ratio * factor,
            (Some((Codec::Zstd, zstd)), Some(factor)) if codec == Codec::Lz4 => zstd.ratio / factor,
            _ => own.ratio,
        };
        Some(CodecFigures { bytes_per_s: own.bytes_per_s * self.cpu_share(), ratio, ..own })
    }

    /// Returns the share of its time for which a compressing thread has a CPU. It is the best guess
    /// for a hashing one.
    fn cpu_share(&self) -> f64 {
        self.cpu_share.value().unwrap_or(1.0).min(1.0)
    }

    /// Learns from pages that both codecs packed.
    fn note_probed(&mut self, probe: Codec, probed: Probed) {
        let (zstd, lz4) = match probe {
            Codec::Zstd => (probed.probe_bytes, probed.in_use_bytes),
            Codec::Lz4 => (probed.in_use_bytes, probed.probe_bytes),
        };
        self.zstd_of_lz4.add(zstd as f64, lz4 as f64, EARLIER_PROBES);
    }

    /// Learns from a unit how much of the CPU compressing threads get. Hashing takes too little
    /// time to show that: one wait for a CPU would distort it.
    fn note_cpu_share(&mut self, sent: &UnitSent) {
        let [lz4, zstd] = Codec::ALL.map(|codec| sent.effort(codec));
        let (cpu, time) = (lz4.cpu + zstd.cpu, lz4.time + zstd.time);
        if !cpu.is_zero() && !time.is_zero() {
            self.cpu_share.add(cpu.as_secs_f64(), time.as_secs_f64(), EARLIER_UNITS);
        }
    }

    /// Learns from a unit that was sent as [`Chooser::packing`] chose, and from its duration.
    pub fn sent(&mut self, packing: Packing, sent: &UnitSent, wall: Duration) {
        if self.compression != Compression::Auto && !self.referral.prospect.possible {
            return;
        }
        let method = Method::of(packing, sent);
        self.referral.note(sent.hashing, method.refers);
        self.delta.note(sent.comparing);
        for codec in Codec::ALL {
            self.note_effort(codec, sent);
        }
        self.note_cpu_share(sent);
        if let (Some(probe), Some(probed)) = (packing.probe, sent.probed) {
            self.note_probed(probe, probed);
        }
        let pages = sent.raw.pages
            + sent.lz4.pages
            + sent.zstd.pages
            + sent.reference.pages
            + sent.delta.pages;
        let guest_bytes = pages * u64::from(PAGE_SIZE);
        if guest_bytes < LEAST_WINDOW_BYTES {
            return;
        }
        self.trial.since = self.trial.since.saturating_add(1);
        if self.counted != Some(method) {
            // The socket still holds data sent by another method, or a connection has just begun.
            (self.counted, self.window) = (Some(method), Window::default());
        } else {
            let mut probing = packing.probe.map_or(Duration::ZERO, |probe| sent.effort(probe).time);
            probing += sent.probed.map_or(Duration::ZERO, |probed| probed.time);
            let mut compressing =
                packing.codec.map_or(Duration::ZERO, |codec| sent.effort(codec).time);
            // While a probe waited for a CPU, the wire went on carrying.
            match method.refers {
                true => compressing += sent.hashing.time,
                false => probing += sent.hashing.cpu,
            }
            *(if method.differs { &mut compressing } else { &mut probing }) += sent.comparing.time;
            self.window.add(guest_bytes, sent, wall.saturating_sub(probing), compressing);
        }
        let in_trial = self.trial.left > 0;
        self.trial.left = self.trial.left.saturating_sub(1);
        let trial_over = in_trial && self.trial.left == 0;
        let Window { units, wall, .. } = self.window;
        if trial_over
            || (!in_trial && (units >= WINDOW_UNITS || (units > 0 && wall >= WINDOW_TIME)))
        {
            self.close_window(method, trial_over);
        }
    }

    fn note_effort(&mut self, codec: Codec, sent: &UnitSent) {
        let effort = sent.effort(codec);
        let (raw_bytes, seconds) = (effort.raw_bytes as f64, effort.cpu.as_secs_f64());
        if effort.raw_bytes == 0 || seconds <= 0.0 {
            return;
        }
        let (bytes_per_s, ratio) = (raw_bytes / seconds, effort.packed_bytes as f64 / raw_bytes);
        let in_use = self.current == Some(codec);
        match &mut self.codecs[place(codec)] {
            Some(known) => {
                let new = if in_use { 1.0 - (-raw_bytes / CODEC_MEMORY_BYTES).exp2() } else { 0.5 };
                // Times add up, speeds do not.
                known.bytes_per_s = 1.0 / blend(1.0 / known.bytes_per_s, 1.0 / bytes_per_s, new);
                known.ratio = blend(known.ratio, ratio, new);
                if !in_use {
                    known.trust = blend(known.trust, 1.0, FORGIVEN);
                }
            }
            unknown => *unknown = Some(CodecFigures { bytes_per_s, ratio, trust: 1.0 }),
        }
    }

    /// Notes the rate of the wire while units waited for it, in bytes per second.
    fn wire_seen(&mut self, seen: f64, trial_over: bool) {
        let before = self.wire_bytes_per_s.unwrap_or(0.0);
        // A trial is rare, and too short to be smoothed.
        let now = if before > 0.0 && !trial_over { blend(before, seen, 0.5) } else { seen };
        self.wire_bytes_per_s = Some(now);
        let same = seen < before * SAME_WIRE && before < seen * SAME_WIRE;
        if !same {
            // A low yield of a codec may have been this wire's fault.
            self.codecs.iter_mut().flatten().for_each(|known| known.trust = 1.0);
        }
        if trial_over {
            let next = if same { self.trial.interval * 2 } else { FIRST_RAW_TRIAL };
            self.trial.interval = next.min(LAST_RAW_TRIAL);
        }
        self.trial.since = 0;
        self.trial.faster = false;
    }

    /// Learns from consecutive units of one method.
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
        if (method.codec.is_none() && !method.rebuilds()) || waited {
            self.wire_seen(seen, trial_over);
            wire = seen;
        } else if method.rebuilds() && seen > wire && wire > 0.0 {
            // The wire carried that without making units wait.
            self.wire_bytes_per_s = Some(seen);
        }
        if method.rebuilds() {
            let otherwise = self.otherwise();
            // The common yield of both says nothing about either.
            if !method.differs {
                let found = window.found as f64 / window.looked_up.max(1) as f64;
                let yields = window.guest_bytes as f64 / seconds;
                self.referral.brought(yields, found, wire, otherwise);
            }
            return;
        }
        if method.codec.is_some() {
            self.trial.faster |= self.trial.waited && !waited;
            self.trial.waited = waited;
        }
        let Some(codec) = method.codec else { return };
        let Some(figures) = self.figures(codec) else { return };
        let in_steady_state = (carried / window.wire_bytes.max(1) as f64).min(1.0);
        let brought = window.guest_bytes as f64 * in_steady_state / seconds;
        // Of the content of this window.
        let ratio = window.wire_bytes as f64 / window.guest_bytes.max(1) as f64;
        let here = CodecFigures { ratio, ..figures };
        let promised = here.promised(wire);
        if let Some(known) = self.codecs[place(codec)].as_mut().filter(|_| promised > 0.0) {
            let least = (here.without_overlap(wire) / promised).clamp(0.05, 1.0);
            known.trust = blend(known.trust, (brought / promised).clamp(least, 1.0), 0.5);
        }
    }
}

impl CodecFigures {
    /// Returns the yield in guest bytes per second on a wire of so many bytes per second.
    fn promised(&self, wire_bytes_per_s: f64) -> f64 {
        self.bytes_per_s.min(wire_bytes_per_s / self.ratio.max(1e-4))
    }

    /// Returns the yield in guest bytes per second if compressing and sending never overlap. A
    /// lower yield has another cause than the codec.
    fn without_overlap(&self, wire_bytes_per_s: f64) -> f64 {
        1.0 / (1.0 / self.bytes_per_s + self.ratio.max(1e-4) / wire_bytes_per_s)
    }
}

/// Quotient of two sums in which newer figures count more.
#[derive(Clone, Copy, Debug, Default)]
struct Quotient {
    over: f64,
    under: f64,
}

impl Quotient {
    /// Adds figures, after both sums were reduced to the fraction `earlier`.
    fn add(&mut self, over: f64, under: f64, earlier: f64) {
        self.over = self.over * earlier + over;
        self.under = self.under * earlier + under;
    }

    fn value(self) -> Option<f64> {
        (self.over > 0.0 && self.under > 0.0).then(|| self.over / self.under)
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
        self.looked_up += sent.hashing.pages;
        self.found += sent.hashing.found;
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
