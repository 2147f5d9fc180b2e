//! The chooser on simulated links.

#![allow(clippy::cast_possible_truncation)] // bytes of a simulated link fit

use godwit_lanes::{ENOUGH_FOUND, Effort, Hashing, Tally};
use proptest::prelude::*;

use super::*;

const UNIT_PAGES: u64 = 512;
const UNIT_BYTES: f64 = (UNIT_PAGES * PAGE_SIZE as u64) as f64;

/// Host, its wire and a guest's content. Bytes per second and ratios.
#[derive(Clone, Copy, Debug)]
struct Link {
    wire: f64,
    /// Cost of handing a byte to the socket.
    socket: f64,
    /// Room in the socket.
    buffer: f64,
    /// Speed and ratio of LZ4 and Zstandard.
    codecs: [(f64, f64); 2],
    /// Fraction of the pages that the destination holds, if references are possible.
    found: Option<f64>,
}

/// Guest bytes hashed per second.
const HASHING: f64 = 1500.0 * MB;

const MB: f64 = 1e6;
/// Number of pieces in which a unit's pages go to the socket.
const STEPS: u32 = 32;

impl Link {
    /// Returns a codec's wire bytes for guest bytes; pages that do not get smaller go raw.
    fn packed(&self, method: Option<Codec>, bytes: f64) -> f64 {
        let ratio = method.map_or(1.0, |codec| self.codecs[place(codec)].1);
        bytes * if ratio > 0.9 { 1.0 } else { ratio }
    }

    fn compressing(&self, method: Option<Codec>, bytes: f64) -> f64 {
        method.map_or(0.0, |codec| bytes / self.codecs[place(codec)].0)
    }

    /// Returns the yield of a method in continuous use, in guest bytes per second.
    fn rate(&self, method: Option<Codec>) -> f64 {
        let on_wire = self.packed(method, 1.0);
        1.0 / (self.compressing(method, 1.0) + on_wire / self.socket).max(on_wire / self.wire)
    }

    fn best(&self) -> f64 {
        METHODS.map(|method| self.rate(method)).into_iter().fold(0.0, f64::max)
    }

    /// Returns the yield of a method for pages that the destination does not hold, in guest bytes
    /// per second.
    fn rate_with_references(&self, method: Option<Codec>) -> f64 {
        let found = self.found.unwrap_or(0.0);
        let on_wire = (1.0 - found) * self.packed(method, 1.0) + found * 0.01;
        let work = 1.0 / HASHING + (1.0 - found) * self.compressing(method, 1.0);
        1.0 / (work + on_wire / self.socket).max(on_wire / self.wire)
    }
}

/// Stream that sends full units as its chooser decides.
#[derive(Debug)]
struct Stream {
    chooser: Chooser,
    queued: f64,
    /// Guest bytes sent by each method, raw first.
    bytes: [f64; 3],
    /// Guest bytes of units whose pages were all looked up.
    looked_for: f64,
    seconds: f64,
    /// How much the host's other work disturbs it: 0 not, 1 up to half or double the speed from one
    /// piece to the next.
    unrest: f64,
    /// How much the content of units differs: at 1 they shrink to half or double the usual size.
    variety: f64,
    /// Share of its time for which it has a CPU. The link's speeds are those that result.
    cpu_share: f64,
    drawn: u64,
}

impl Stream {
    fn new() -> Stream {
        Stream {
            chooser: Chooser::new(Compression::Auto),
            queued: 0.0,
            bytes: [0.0; 3],
            looked_for: 0.0,
            seconds: 0.0,
            unrest: 0.0,
            variety: 0.0,
            cpu_share: 1.0,
            drawn: 1,
        }
    }

    /// Returns the factor by which the next piece takes longer.
    fn disturbance(&mut self) -> f64 {
        self.factor(self.unrest)
    }

    /// Returns a random factor, from `2^-spread` to `2^spread`.
    fn factor(&mut self, spread: f64) -> f64 {
        self.drawn = self
            .drawn
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let even = (self.drawn >> 11) as f64 / (1u64 << 53) as f64;
        (spread * (2.0 * even - 1.0)).exp2()
    }

    /// Sends so many units, and returns the guest bytes per second.
    fn run(&mut self, link: &Link, units: u32) -> f64 {
        (self.bytes, self.looked_for, self.seconds) = ([0.0; 3], 0.0, 0.0);
        for _ in 0..units {
            self.unit(link);
        }
        // What is left in the socket has not been sent.
        f64::from(units) * UNIT_BYTES / self.seconds
    }

    fn part(&self, method: Option<Codec>) -> f64 {
        let of = METHODS
            .iter()
            .position(|known| *known == method)
            .map_or(0.0, |place| self.bytes[place]);
        of / self.bytes.iter().sum::<f64>()
    }

    fn unit(&mut self, link: &Link) {
        let content = self.factor(self.variety);
        let link =
            &Link { codecs: link.codecs.map(|(speed, ratio)| (speed, ratio * content)), ..*link };
        let possible = link.found.is_some();
        self.chooser.prospect(Prospect { possible, foreign: possible, ..Prospect::default() });
        let packing = self.chooser.packing(UNIT_BYTES as u64, false);
        let mut sent = UnitSent { unsent_before_bytes: self.queued as u64, ..UnitSent::default() };
        let refers_first = matches!(packing.reference, Referring::Probe | Referring::ProbeFirst);
        let probes = packing.probe.is_some() || refers_first;
        let probed = if probes { PROBE_PAGES } else { 0 };
        let mut wall = 0.0;
        let first = (packing.probe.or(packing.codec), probed, packing.reference != Referring::No);
        let refers = match packing.reference {
            Referring::ProbeFirst => link.found.is_some_and(|found| found >= ENOUGH_FOUND),
            reference => reference == Referring::All,
        };
        let rest = (packing.codec, UNIT_PAGES - probed, refers);
        for (method, pages, refers) in [first, rest] {
            let (found, hashing) =
                if refers { self.look_for(link, pages, &mut sent) } else { (0, 0.0) };
            wall += hashing + self.pages(link, method, pages - found, &mut sent);
        }
        if let (Some(probe), Some(in_use)) = (packing.probe, packing.codec) {
            wall += self.compare(link, probe, in_use, &mut sent);
        }
        if refers {
            self.looked_for += UNIT_BYTES;
        }
        sent.unsent_after_bytes = self.queued as u64;
        self.seconds += wall;
        self.chooser.sent(packing, &sent, Duration::from_secs_f64(wall));
    }

    /// Packs the pages that the probed codec has packed with the codec in use, too. Returns the
    /// time taken.
    fn compare(&mut self, link: &Link, probe: Codec, in_use: Codec, sent: &mut UnitSent) -> f64 {
        let bytes = sent.effort(probe).raw_bytes as f64;
        let seconds = link.compressing(Some(in_use), bytes);
        self.queued = (self.queued - seconds * link.wire).max(0.0);
        sent.probed = Some(Probed {
            probe_bytes: link.packed(Some(probe), bytes) as u64,
            in_use_bytes: link.packed(Some(in_use), bytes) as u64,
            time: Duration::from_secs_f64(seconds),
        });
        seconds
    }

    /// Hashes pages. Returns how many of them the destination holds, and the time taken.
    fn look_for(&mut self, link: &Link, pages: u64, sent: &mut UnitSent) -> (u64, f64) {
        let disturbance = self.disturbance();
        let seconds = (pages * u64::from(PAGE_SIZE)) as f64 / HASHING * disturbance;
        #[allow(clippy::cast_sign_loss)]
        let found = (pages as f64 * link.found.unwrap_or(0.0)).round() as u64;
        self.queued = (self.queued - seconds * link.wire).max(0.0) + found as f64 * 40.0;
        sent.hashing.pages += pages;
        sent.hashing.found += found;
        sent.hashing.time += Duration::from_secs_f64(seconds);
        sent.hashing.cpu += Duration::from_secs_f64(seconds / disturbance * self.cpu_share);
        sent.reference.pages += found;
        sent.reference.wire_bytes += found * 40;
        sent.wire_bytes += found * 40;
        (found, seconds)
    }

    fn pages(
        &mut self,
        link: &Link,
        method: Option<Codec>,
        pages: u64,
        sent: &mut UnitSent,
    ) -> f64 {
        let bytes = (pages * u64::from(PAGE_SIZE)) as f64;
        let disturbance = self.disturbance();
        let link = &Link { socket: link.socket / disturbance, ..*link };
        let compressing = link.compressing(method, bytes) * disturbance;
        let packed = link.packed(method, bytes);
        let mut seconds = 0.0;
        for _ in 0..STEPS {
            let (packed, step) = (
                packed / f64::from(STEPS),
                (compressing + packed / link.socket) / f64::from(STEPS),
            );
            self.queued = (self.queued - step * link.wire).max(0.0) + packed;
            // Pieces without room wait.
            let too_much = (self.queued - link.buffer).max(0.0);
            self.queued -= too_much;
            seconds += step + too_much / link.wire;
        }
        if link.wire >= link.socket {
            self.queued = 0.0;
        }
        let place = METHODS.iter().position(|known| *known == method).unwrap_or(0);
        self.bytes[place] += bytes;
        sent.wire_bytes += packed as u64;
        let shrunk = packed < bytes;
        let tally = match method {
            Some(Codec::Lz4) if shrunk => &mut sent.lz4,
            Some(Codec::Zstd) if shrunk => &mut sent.zstd,
            _ => &mut sent.raw,
        };
        *tally = Tally { pages: tally.pages + pages, wire_bytes: tally.wire_bytes + packed as u64 };
        let time = Duration::from_secs_f64(compressing);
        let cpu = Duration::from_secs_f64(compressing / disturbance * self.cpu_share);
        let effort = Effort { raw_bytes: bytes as u64, packed_bytes: packed as u64, time, cpu };
        if pages == 0 {
            return 0.0;
        }
        match method {
            Some(Codec::Lz4) => sent.lz4_effort = effort,
            Some(Codec::Zstd) => sent.zstd_effort = effort,
            None => {}
        }
        seconds
    }
}

/// Half of the memory's bandwidth, as two streams have it on loopback.
fn loopback() -> Link {
    Link {
        wire: 100_000.0 * MB,
        socket: 800.0 * MB,
        buffer: 4.0 * MB,
        codecs: [(500.0 * MB, 0.5), (280.0 * MB, 0.4)],
        found: None,
    }
}

/// One of two streams on 1 Gb/s.
fn gigabit() -> Link {
    Link { wire: 59.0 * MB, socket: 1500.0 * MB, ..loopback() }
}

fn random(link: Link) -> Link {
    Link { codecs: [(2000.0 * MB, 1.0), (900.0 * MB, 1.0)], ..link }
}

#[test]
fn loopback_is_left_raw() {
    let mut stream = Stream::new();
    let rate = stream.run(&loopback(), 256);
    assert!(stream.part(None) > 0.98, "{}", stream.part(None));
    assert!(rate > 0.97 * loopback().best(), "{rate}");
}

#[test]
fn on_a_gigabit_link_the_smaller_is_the_faster() {
    let mut stream = Stream::new();
    let rate = stream.run(&gigabit(), 128);
    assert!(stream.part(Some(Codec::Zstd)) > 0.9, "{:?}", stream.bytes);
    assert!(rate > 0.9 * gigabit().best(), "{rate} of {}", gigabit().best());
}

#[test]
fn random_content_goes_raw_on_any_link() {
    for link in
        [random(loopback()), random(gigabit()), Link { wire: 5.0 * MB, ..random(gigabit()) }]
    {
        let mut stream = Stream::new();
        let rate = stream.run(&link, 256);
        assert!(stream.part(None) > 0.98, "{link:?}: {:?}", stream.bytes);
        assert!(rate > 0.97 * link.best(), "{link:?}: {rate}");
    }
}

#[test]
fn of_two_equally_fast_methods_the_cheaper_is_chosen() {
    // The wire carries what either produces.
    let link = Link { codecs: [(700.0 * MB, 0.31), (350.0 * MB, 0.3)], ..gigabit() };
    let mut stream = Stream::new();
    stream.run(&link, 128);
    assert!(stream.part(Some(Codec::Lz4)) > 0.9, "{:?}", stream.bytes);
}

#[test]
fn a_codec_that_costs_what_sending_costs_is_found_out() {
    // LZ4 alone is faster than sending raw pages; the two together are not.
    let link = Link { codecs: [(1000.0 * MB, 0.3), (300.0 * MB, 0.25)], ..loopback() };
    assert!(link.rate(Some(Codec::Lz4)) < 0.95 * link.rate(None));
    let mut stream = Stream::new();
    stream.run(&link, 128);
    let rate = stream.run(&link, 512);
    assert!(rate > 0.95 * link.best(), "{rate} of {}: {:?}", link.best(), stream.bytes);
}

#[test]
fn a_busy_host_does_not_confuse_it() {
    for link in [loopback(), gigabit(), random(gigabit())] {
        let mut stream = Stream { unrest: 1.0, ..Stream::new() };
        stream.run(&link, 64);
        // The cheapest of the best.
        let by_rate =
            |a: &Option<Codec>, b: &Option<Codec>| link.rate(*a).total_cmp(&link.rate(*b));
        let method = METHODS.into_iter().rev().max_by(by_rate).flatten();
        stream.run(&link, 1024);
        assert!(stream.part(method) > 0.9, "{link:?}: {:?}", stream.bytes);
    }
}

#[test]
fn content_that_varies_does_not_confuse_it() {
    // One of eight streams on 1 Gb/s, with a page cache: units differ more than the codecs do, and
    // other threads take the CPU now and then.
    let link =
        Link { wire: 15.0 * MB, codecs: [(400.0 * MB, 0.43), (250.0 * MB, 0.335)], ..loopback() };
    for drawn in 1..20 {
        let mut stream = Stream { unrest: 2.0, variety: 1.0, drawn, ..Stream::new() };
        stream.run(&link, 32);
        stream.run(&link, 128);
        assert!(stream.part(Some(Codec::Zstd)) > 0.9, "{:?}", stream.bytes);
    }
}

#[test]
fn a_codec_that_lacks_cpu_is_not_used() {
    // Each stream has a fifth of a CPU.
    let starved = |lz4, zstd| Link {
        socket: 80.0 * MB,
        codecs: [lz4, zstd].map(|(speed, ratio)| (speed * MB / 5.0, ratio)),
        ..loopback()
    };
    for link in [starved((1000.0, 0.85), (300.0, 0.8)), starved((500.0, 0.5), (280.0, 0.4))] {
        let mut stream = Stream { cpu_share: 0.2, unrest: 0.5, ..Stream::new() };
        stream.run(&link, 64);
        let rate = stream.run(&link, 1024);
        assert!(rate > 0.9 * link.best(), "{rate} of {}: {:?}", link.best(), stream.bytes);
    }
}

#[test]
fn it_follows_the_link() {
    let slow = Link { wire: 12.0 * MB, ..gigabit() };
    let mut stream = Stream::new();
    for link in [loopback(), slow, gigabit(), loopback(), slow, loopback()] {
        stream.run(&link, 128);
        let rate = stream.run(&link, 256);
        assert!(
            rate > 0.9 * link.best(),
            "{link:?}: {rate} of {}: {:?}",
            link.best(),
            stream.bytes
        );
    }
}

#[test]
fn it_follows_the_content() {
    let mut stream = Stream::new();
    for link in [gigabit(), random(gigabit()), gigabit()] {
        stream.run(&link, 128);
        let rate = stream.run(&link, 128);
        assert!(
            rate > 0.9 * link.best(),
            "{link:?}: {rate} of {}: {:?}",
            link.best(),
            stream.bytes
        );
    }
}

#[test]
fn a_short_deadline_skips_trials() {
    let mut stream = Stream::new();
    stream.run(&gigabit(), 64);
    let known = stream.chooser.packing(1 << 20, true);
    assert_eq!(known, Packing { codec: Some(Codec::Zstd), ..Packing::default() });
    assert!((0..200).all(|_| stream.chooser.packing(1 << 20, true) == known));
}

#[test]
fn a_request_is_carried_out() {
    for (compression, codec) in [
        (Compression::None, None),
        (Compression::Lz4, Some(Codec::Lz4)),
        (Compression::Zstd, Some(Codec::Zstd)),
    ] {
        let mut stream = Stream { chooser: Chooser::new(compression), ..Stream::new() };
        stream.run(&gigabit(), 100);
        assert!(stream.part(codec) > 0.999, "{compression:?}");
    }
}

#[test]
fn pages_at_the_destination_are_referenced_where_faster() {
    for link in [gigabit(), random(gigabit())] {
        let link = Link { found: Some(0.98), ..link };
        let mut stream = Stream::new();
        // The wire is not examined before that.
        stream.run(&link, 96);
        let rate = stream.run(&link, 128);
        assert!(
            stream.looked_for > 0.95 * 128.0 * UNIT_BYTES,
            "{}",
            stream.looked_for / UNIT_BYTES
        );
        assert!(rate > 0.9 * link.rate_with_references(None), "{rate}");
    }
}

#[test]
fn a_short_way_back_is_not_spent_on_learning_the_wire() {
    for link in [gigabit(), random(gigabit())] {
        let link = Link { found: Some(0.99), ..link };
        let mut stream = Stream::new();
        stream.run(&link, 100);
        assert!(
            stream.looked_for > 93.0 * UNIT_BYTES,
            "{link:?}: {}",
            stream.looked_for / UNIT_BYTES
        );
    }
}

#[test]
fn a_link_as_fast_as_memory_needs_no_search() {
    for found in [0.0, 0.3, 0.98] {
        let link = Link { found: Some(found), socket: 2500.0 * MB, ..random(loopback()) };
        let mut stream = Stream::new();
        stream.run(&link, 64);
        let rate = stream.run(&link, 512);
        assert!(rate > 0.96 * link.best(), "{found}: {rate} of {}: {:?}", link.best(), stream);
    }
}

#[test]
fn pages_missing_at_the_destination_cost_almost_nothing() {
    for link in [gigabit(), random(gigabit()), loopback()] {
        let link = Link { found: Some(0.0), ..link };
        let mut stream = Stream::new();
        stream.run(&link, 64);
        let rate = stream.run(&link, 256);
        assert!(
            stream.looked_for < 0.02 * 256.0 * UNIT_BYTES,
            "{link:?}: {}",
            stream.looked_for / UNIT_BYTES
        );
        assert!(rate > 0.9 * link.best(), "{link:?}: {rate} of {}", link.best());
    }
}

#[test]
fn references_follow_what_the_destination_has() {
    let mut stream = Stream::new();
    for found in [0.0, 0.9, 0.0, 0.9] {
        let link = Link { found: Some(found), ..random(gigabit()) };
        stream.run(&link, 16);
        stream.run(&link, 64);
        let part = stream.looked_for / (64.0 * UNIT_BYTES);
        assert!(if found > 0.5 { part > 0.9 } else { part < 0.1 }, "{found}: {part}");
    }
}

#[test]
fn references_that_keep_missing_stop() {
    let link = Link { found: Some(0.9), ..random(gigabit()) };
    let mut stream = Stream::new();
    stream.run(&link, 32);
    let prospect = Prospect { possible: true, foreign: true, missing: 1.0, ..Prospect::default() };
    stream.chooser.prospect(prospect);
    assert_ne!(stream.chooser.packing(2 << 20, false).reference, Referring::All);
}

#[test]
fn a_given_codec_is_kept_with_references() {
    let mut stream = Stream { chooser: Chooser::new(Compression::Lz4), ..Stream::new() };
    let link = Link { found: Some(0.9), ..gigabit() };
    stream.run(&link, 64);
    assert!(
        stream.part(Some(Codec::Lz4)) > 0.999 && stream.looked_for > 56.0 * UNIT_BYTES,
        "{stream:?}"
    );
}

#[test]
fn a_stream_begins_with_what_others_have_learnt() {
    let (experience, mut first) = (Experience::default(), Stream::new());
    let begins = |experience: &Experience| {
        let mut chooser = Chooser::new(Compression::Auto).experienced(experience);
        chooser.packing(2 << 20, false).codec
    };
    assert_eq!(begins(&experience), None);
    first.run(&gigabit(), 64);
    first.chooser.pass_on(&experience);
    assert!(begins(&experience).is_some(), "{experience:?}");
    // A chooser that knows nothing removes nothing.
    Chooser::new(Compression::Auto).pass_on(&experience);
    assert!(begins(&experience).is_some(), "{experience:?}");
}

fn link() -> impl Strategy<Value = Link> {
    let wire = (1.0..4.0f64).prop_map(|log| 10f64.powf(log) * MB);
    let lz4 = (300.0..1500.0f64, 0.1..1.0f64).prop_map(|(speed, ratio)| (speed * MB, ratio));
    let zstd = (0.2..0.8f64, 0.5..1.0f64);
    (wire, 500.0..2500.0f64, 0.2..8.0f64, lz4, zstd).prop_map(
        |(wire, socket, buffer, lz4, (slower, smaller))| Link {
            wire,
            socket: socket * MB,
            buffer: buffer * MB,
            codecs: [lz4, (lz4.0 * slower, lz4.1 * smaller)],
            found: None,
        },
    )
}

proptest! {
    #[test]
    fn it_comes_near_the_best_method(link in link()) {
        let mut stream = Stream::new();
        stream.run(&link, 128);
        let rate = stream.run(&link, 384);
        prop_assert!(rate >= 0.9 * link.best(), "{} of {}: {:?}", rate, link.best(), stream);
    }

    #[test]
    fn it_comes_near_the_best_method_of_another_link(links in [link(), link()]) {
        let mut stream = Stream::new();
        stream.run(&links[0], 256);
        stream.run(&links[1], 1280);
        let rate = stream.run(&links[1], 512);
        prop_assert!(
            rate >= 0.85 * links[1].best(),
            "{} of {}: {:?}",
            rate,
            links[1].best(),
            stream
        );
    }

    #[test]
    fn no_figures_confuse_it(
        bytes in prop::collection::vec(
            (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>()), 1..200,
        ),
    ) {
        let mut chooser = Chooser::new(Compression::Auto);
        for (pages, wire, queued, ns) in bytes {
            let packing = chooser.packing(u64::from(pages), false);
            let tally = Tally { pages: u64::from(pages), wire_bytes: u64::from(wire) };
            let time = Duration::from_nanos(u64::from(ns));
            let effort = Effort {
                raw_bytes: u64::from(wire),
                packed_bytes: u64::from(pages),
                time,
                cpu: time / (pages % 5 + 1),
            };
            let probed =
                Probed { probe_bytes: u64::from(wire), in_use_bytes: u64::from(queued), time };
            let sent = UnitSent {
                wire_bytes: u64::from(wire),
                raw: tally,
                lz4_effort: effort,
                zstd_effort: Effort { raw_bytes: u64::from(ns), ..effort },
                probed: Some(probed),
                unsent_before_bytes: u64::from(queued),
                unsent_after_bytes: u64::from(pages),
                ..UnitSent::default()
            };
            chooser.sent(packing, &sent, time);
            prop_assert!(
                chooser.wire_bytes_per_s.is_none_or(|rate| rate.is_finite() && rate >= 0.0)
            );
            for method in METHODS {
                prop_assert!(chooser.expected(method).is_none_or(|rate| rate >= 0.0));
            }
        }
    }
}

#[test]
fn one_wait_for_a_cpu_keeps_no_stream_from_looking_up() {
    for link in [gigabit(), random(gigabit())] {
        let mut stream = Stream::new();
        stream.run(&Link { found: Some(0.0), ..link }, 64);
        let current = stream.chooser.current;
        // A probe waits 30 ms for a CPU, and finds all.
        let packing = Packing { codec: current, reference: Referring::Probe, ..Packing::default() };
        let (time, cpu) = (Duration::from_millis(30), Duration::from_micros(100));
        let hashing = Hashing { pages: PROBE_PAGES, found: PROBE_PAGES, time, cpu };
        let bytes = PROBE_PAGES * u64::from(PAGE_SIZE);
        let lz4_effort = Effort { raw_bytes: bytes, packed_bytes: bytes / 2, time, cpu };
        // So does a probe of a codec, if none is in use.
        let lz4_effort = if current.is_none() { lz4_effort } else { Effort::default() };
        let sent = UnitSent { hashing, lz4_effort, ..UnitSent::default() };
        stream.chooser.sent(packing, &sent, time);
        let rate = stream.run(&Link { found: Some(0.98), ..link }, 64);
        assert!(
            stream.looked_for > 0.9 * 64.0 * UNIT_BYTES,
            "{link:?}: {}",
            stream.looked_for / UNIT_BYTES
        );
        assert!(rate > 0.0 && stream.chooser.current == current, "{:?}", stream.chooser);
    }
}
