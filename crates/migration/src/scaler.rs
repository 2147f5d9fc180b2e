//! Number of TCP streams per lane, found by measurement. A flow may be capped on its path (by a
//! policer, by a bond that puts each flow on one of its links, by one core at either end), and then
//! more flows carry more. No I/O, no clock.
//!
//! A lane begins with [`first_streams`]. If twice as many carried at least [`WORTH`] times as much,
//! the number is doubled again. Streams opened in vain stay: an idle stream costs nothing.

use std::time::Duration;

/// Initial number of streams of a lane: one for each of the two cores that most hosts can spare.
pub const FIRST_STREAMS: usize = 2;
/// Initial number of streams from a round trip of [`FAR`] on: each window opens one round trip at a
/// time, so twice as many open together.
const FIRST_STREAMS_FAR: usize = 4;
const FAR: Duration = Duration::from_millis(5);
/// Number of streams of a lane beyond which more never gained anything.
pub const MOST_STREAMS: usize = 8;
/// Factor from which more streams are worthwhile.
const WORTH: f64 = 1.1;
/// Time for new streams, in addition to [`SETTLE_ROUND_TRIPS`], to open their windows before their
/// rate counts.
const SETTLE: Duration = Duration::from_millis(150);
/// Slow start from ten segments to 10 MiB.
const SETTLE_ROUND_TRIPS: u32 = 10;
/// Minimum time over which the rate is measured.
const WINDOW: Duration = Duration::from_millis(250);
/// Average bytes that each stream must have carried in that time: fewer say more about single
/// bursts than about a rate.
const WINDOW_BYTES: u64 = 128 << 10;
/// Time after which a window counts, whatever was carried. A window begins with the first byte: a
/// path that is cut for a while has no rate.
const LONGEST_WINDOW: Duration = Duration::from_secs(5);

/// Returns the initial number of streams of a lane on a path with this round trip.
#[must_use]
pub fn first_streams(round_trip: Duration) -> usize {
    if round_trip < FAR { FIRST_STREAMS } else { FIRST_STREAMS_FAR }
}

/// State of a lane at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneSample {
    /// Bytes that TCP has carried on its streams since the start. Bytes handed to sockets are no
    /// substitute: they come in steps of whole units, of which a slow stream sends less than one in
    /// a window.
    pub bytes: u64,
    /// Number of its streams that take work or are being connected.
    pub streams: usize,
    /// Whether some streams are being connected.
    pub connecting: bool,
}

/// Streams to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub lane: usize,
    /// Number of additional streams.
    pub streams: usize,
}

#[derive(Clone, Debug, Default)]
struct Trial {
    /// Time since which all streams are connected.
    connected_at: Option<Duration>,
    /// Start of the window, and the lane's bytes at that time.
    window: Option<(Duration, u64)>,
    /// Rate that half as many streams carried, bytes per second.
    before: Option<f64>,
    settled: bool,
}

/// Decides the number of streams for all lanes of a migration.
#[derive(Clone, Debug)]
pub struct Scaler {
    lanes: Vec<Trial>,
    /// Maximum streams of all lanes together.
    most: usize,
}

impl Scaler {
    /// Creates a scaler for so many lanes, which may have `most` streams together.
    #[must_use]
    pub fn new(lanes: usize, most: usize) -> Self {
        Scaler { lanes: vec![Trial::default(); lanes], most }
    }

    /// Evaluates all lanes, in their order. `is_busy`: since the last call there was always
    /// something to send.
    pub fn evaluate(
        &mut self,
        now: Duration,
        round_trip: Duration,
        samples: &[LaneSample],
        is_busy: bool,
    ) -> Vec<Opening> {
        let mut left = self.most.saturating_sub(samples.iter().map(|sample| sample.streams).sum());
        let mut openings = Vec::new();
        for (lane, (trial, sample)) in self.lanes.iter_mut().zip(samples).enumerate() {
            if let Some(more) = trial.evaluate(now, round_trip, sample, is_busy) {
                let streams = more.min(left);
                left -= streams;
                if streams > 0 {
                    openings.push(Opening { lane, streams });
                }
            }
        }
        openings
    }
}

impl Trial {
    /// Returns how many more streams the lane should have.
    fn evaluate(
        &mut self,
        now: Duration,
        round_trip: Duration,
        sample: &LaneSample,
        is_busy: bool,
    ) -> Option<usize> {
        if self.settled || sample.streams == 0 {
            return None;
        }
        if sample.connecting {
            (self.connected_at, self.window) = (None, None);
            return None;
        }
        let connected_at = *self.connected_at.get_or_insert(now);
        let settle = SETTLE.saturating_add(round_trip.saturating_mul(SETTLE_ROUND_TRIPS));
        if !is_busy || now.saturating_sub(connected_at) < settle {
            self.window = None;
            return None;
        }
        let (since, bytes) = *self.window.get_or_insert((now, sample.bytes));
        let (took, carried) = (now.saturating_sub(since), sample.bytes.saturating_sub(bytes));
        if carried == 0 {
            self.window = Some((now, sample.bytes));
            return None;
        }
        let enough = carried >= WINDOW_BYTES.saturating_mul(sample.streams as u64);
        if took < WINDOW || (took < LONGEST_WINDOW && !enough) {
            return None;
        }
        let rate = carried as f64 / took.as_secs_f64();
        let worth = self.before.is_none_or(|before| rate >= before * WORTH);
        let more = sample.streams.min(MOST_STREAMS.saturating_sub(sample.streams));
        if !worth || more == 0 {
            self.settled = true;
            return None;
        }
        *self = Trial { before: Some(rate), ..Trial::default() };
        Some(more)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: Duration = Duration::from_millis(50);

    /// Lane of so many bytes per second, of which a flow gets at most `cap`.
    struct Wire {
        rate: f64,
        cap: f64,
        sample: LaneSample,
    }

    impl Wire {
        fn new(rate: f64, cap: f64) -> Wire {
            Wire {
                rate,
                cap,
                sample: LaneSample { streams: FIRST_STREAMS, ..LaneSample::default() },
            }
        }

        fn carry(&mut self) {
            let rate = self.rate.min(self.cap * self.sample.streams as f64);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "small and positive"
            )]
            let bytes = (rate * TICK.as_secs_f64()) as u64;
            self.sample.bytes += bytes;
        }
    }

    fn settle(wires: &mut [Wire], most: usize, ticks: u32) {
        let mut scaler = Scaler::new(wires.len(), most);
        for tick in 0..ticks {
            wires.iter_mut().for_each(Wire::carry);
            let samples: Vec<_> = wires.iter().map(|wire| wire.sample).collect();
            for Opening { lane, streams } in
                scaler.evaluate(TICK * tick, Duration::ZERO, &samples, true)
            {
                wires[lane].sample.streams += streams;
            }
        }
    }

    #[test]
    fn a_capped_flow_gets_company_and_a_full_wire_none() {
        let mut wires = [Wire::new(125e6, 25e6), Wire::new(125e6, 1e9), Wire::new(125e6, 50e6)];
        settle(&mut wires, 64, 200);
        // The full wire keeps the streams of one trial; the second trial filled the last wire.
        assert_eq!(wires.map(|wire| wire.sample.streams), [8, 4, 8]);
    }

    #[test]
    fn all_lanes_together_stay_below_the_most() {
        let mut wires = [Wire::new(1e9, 1e6), Wire::new(1e9, 1e6), Wire::new(1e9, 1e6)];
        settle(&mut wires, 12, 200);
        assert_eq!(wires.iter().map(|wire| wire.sample.streams).sum::<usize>(), 12);
    }

    #[test]
    fn slow_flows_are_distinguished_too() {
        // A flow of 200 kbit/s, and a wire of 400 kbit/s.
        let mut wires = [Wire::new(1e6, 25e3), Wire::new(50e3, 1e9)];
        settle(&mut wires, 64, 800);
        assert_eq!(wires.map(|wire| wire.sample.streams), [8, 4]);
    }

    #[test]
    fn a_temporarily_stalled_lane_draws_no_conclusion() {
        let (mut scaler, mut wire) = (Scaler::new(1, 64), Wire::new(250e6, 25e6));
        let mut cut_at = None;
        for tick in 0..800 {
            // Cut for twenty seconds as soon as it has got more streams.
            let is_cut = cut_at.is_some_and(|cut_at| tick - cut_at < 400);
            if !is_cut {
                wire.carry();
            }
            for opening in scaler.evaluate(TICK * tick, Duration::ZERO, &[wire.sample], true) {
                assert!(!is_cut, "nothing is known meanwhile");
                wire.sample.streams += opening.streams;
                cut_at.get_or_insert(tick);
            }
        }
        assert_eq!(wire.sample.streams, 8);
    }

    #[test]
    fn idle_streams_give_no_sample() {
        let mut scaler = Scaler::new(1, 64);
        let sample = [LaneSample { streams: 2, bytes: 5, connecting: false }];
        for tick in 0..100 {
            assert_eq!(scaler.evaluate(TICK * tick, Duration::ZERO, &sample, tick % 4 > 0), []);
        }
    }

    #[test]
    fn streams_that_are_being_connected_are_waited_for() {
        let mut scaler = Scaler::new(1, 64);
        for tick in 0..100u32 {
            let sample =
                [LaneSample { streams: 4, bytes: u64::from(tick) << 20, connecting: true }];
            assert_eq!(scaler.evaluate(TICK * tick, Duration::ZERO, &sample, true), []);
        }
    }

    proptest! {
        #[test]
        fn it_comes_to_rest(rate in 1e6..1e10, cap in 1e5..1e10, rtt in 0u64..300) {
            let mut wires = [Wire::new(rate, cap)];
            settle(&mut wires, 64, 400);
            let [wire] = wires;
            prop_assert!(wire.sample.streams <= MOST_STREAMS);
            let reached = rate.min(cap * wire.sample.streams as f64);
            let best = rate.min(cap * MOST_STREAMS as f64);
            prop_assert!(reached * WORTH >= best || rtt > 300, "{reached} of {best}");
        }
    }
}
