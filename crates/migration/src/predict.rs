//! Predicts a migration before anything moves. It plays the rounds through, with the policy that
//! will decide on them, from samples of the guest and measurements of the lanes. Pure arithmetic,
//! except the survey of the guest's memory.
//!
//! The model of the guest is a curve: the number of different pages that it writes within a time. A
//! round of duration *t* leaves what the curve gives for *t*, except that each page has only the
//! time since it was sent: the mean over the round. A throttle bends the curve to its limit. The
//! cost of pages on the wire is kept separately for hot pages and for all others: a guest may write
//! data that compresses well and hold data that does not.
//!
//! The prediction leaves out: pages that the destination holds (references), pages of which little
//! was written (deltas), a guest that changes its behaviour, and hosts that become busier.

mod cost;
mod report;
mod survey;

use std::time::Duration;

use godwit_ram::CHUNK_PAGES;
use godwit_types::Means;
use godwit_wire::PAGE_SIZE;

use crate::dirty_rate::DirtyRate;
use crate::drive::{LEAST_LAST_PAGES, MOST_LAST_PAGES, SAMPLED_AFTER};
use crate::policy::{
    Convergence, Decision, LONG_ROUND_TRIP, Measured, Policy, TIME_TO_STOP, fixed_cost,
};

pub use cost::{Carry, Content, PageCost, Trial};
pub use survey::Survey;

/// Number of parts into which a round is divided.
const PARTS_OF_A_ROUND: u32 = 16;
/// Device state of a usual VM, which is sent while the guest is paused: 0.2 MiB measured
/// (`drive/source/windows.rs`).
const DEVICE_STATE_BYTES: f64 = 0.2 * 1_048_576.0;
/// Units of each stream that go raw before it knows the wire's rate and the codecs' effect: the
/// first, which does not count, and a window of four (`encoding.rs`). In the lab it was 2.3 to 4.7
/// units.
pub const LEARNING_UNITS: u64 = 4;
/// Time from the decision to the report that the guest runs at the destination, without pages and
/// network: QEMU's set-up, the stop, the load. In the lab (`phases[]`: `switchover`) it was some 25
/// ms more than the pause.
const HANDED_OVER: Duration = Duration::from_millis(33);
/// Time within which a guest shows how much it writes.
const BEGINNING: Duration = Duration::from_millis(100);
/// A shorter sample counts as one of this length, as in the ledger.
const LEAST_SAMPLE: Duration = Duration::from_millis(50);

/// Number of different pages that a guest writes within a time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DirtyCurve {
    /// Times since all pages were protected, ascending, and the pages written by then.
    points: Vec<(Duration, f64)>,
}

impl DirtyCurve {
    /// Creates the curve through samples: times since all pages were protected, and the pages
    /// written by then. They may come in any order. A value that decreases is replaced by the
    /// previous one, because written pages stay written.
    #[must_use]
    pub fn new(samples: impl IntoIterator<Item = (Duration, u64)>) -> DirtyCurve {
        let mut points: Vec<(Duration, f64)> =
            samples.into_iter().map(|(time, pages)| (time, pages as f64)).collect();
        points.sort_by_key(|(time, _)| *time);
        points.dedup_by_key(|(time, _)| *time);
        let mut most = 0.0_f64;
        for (_, pages) in &mut points {
            most = most.max(*pages);
            *pages = most;
        }
        DirtyCurve { points }
    }

    /// Returns the pages written within a time. Between samples the curve is linear. Beyond them it
    /// continues as the last three points, including the origin, suggest: a guest that writes all
    /// over a set approaches the whole set by the same share in each interval.
    #[must_use]
    pub fn pages_within(&self, time: Duration) -> f64 {
        let mut before = (Duration::ZERO, 0.0);
        let mut last: Option<Line> = None;
        let mut earlier = None;
        for &(at, pages) in &self.points {
            let line = Line::between(before, (at, pages));
            if let Some(line) = line {
                if time <= at {
                    return before.1 + line.slope * time.saturating_sub(before.0).as_secs_f64();
                }
                earlier = last.replace(line).or(earlier);
            }
            before = (at, pages);
        }
        let beyond_s = time.saturating_sub(before.0).as_secs_f64();
        before.1 + last.map_or(0.0, |last| last.beyond(earlier, before.0.as_secs_f64(), beyond_s))
    }

    /// Returns the pages written per second at the beginning, when hardly any page has been written
    /// twice; or later, if the guest wrote more then.
    #[must_use]
    pub fn pages_per_s(&self) -> f64 {
        let mean = |time: Duration| self.pages_within(time) / time.as_secs_f64();
        let sampled = self.points.iter().map(|(time, _)| *time).filter(|time| *time > BEGINNING);
        sampled.map(mean).fold(mean(BEGINNING), f64::max)
    }

    /// Returns the pages written within the longest time sampled: the working set, as far as it is
    /// known.
    #[must_use]
    pub fn working_set_pages(&self) -> f64 {
        self.points.last().map_or(0.0, |(_, pages)| *pages)
    }

    /// Returns the samples of the curve.
    pub fn samples(&self) -> impl Iterator<Item = (Duration, u64)> {
        self.points.iter().map(|&(time, pages)| (time, whole(pages)))
    }

    /// Returns the dirty pages at time `after` after the end of a round of duration `round` that
    /// sent `sent_pages`. Each of these pages counts from the time of its protection. A share
    /// `ahead` of them is protected at the round's start, and each of the others is protected that
    /// much ahead of being sent. The guest's other writes count from the round's start.
    fn remaining_after(
        &self,
        sent_pages: f64,
        ahead: f64,
        round: Duration,
        after: Duration,
    ) -> f64 {
        let parts = f64::from(PARTS_OF_A_ROUND);
        let place = |part: u32| ahead + (1.0 - ahead) * (f64::from(part) + 0.5) / parts;
        let since = |part: u32| after.saturating_add(round.mul_f64(place(part)));
        let mean =
            (0..PARTS_OF_A_ROUND).map(|part| self.pages_within(since(part))).sum::<f64>() / parts;
        let all = self.pages_within(round.saturating_add(after));
        let one_by_one = (1.0 - ahead) * (sent_pages / self.working_set_pages().max(1.0)).min(1.0);
        one_by_one * mean + (1.0 - one_by_one) * all
    }
}

/// Linear part of the curve.
#[derive(Clone, Copy)]
struct Line {
    /// Its middle, in seconds.
    middle_s: f64,
    /// Slope in pages per second.
    slope: f64,
}

impl Line {
    /// Returns the line between two points, or `None` if no time lies between them.
    fn between(from: (Duration, f64), to: (Duration, f64)) -> Option<Line> {
        let (from_s, to_s) = (from.0.as_secs_f64(), to.0.as_secs_f64());
        let slope = (to.1 - from.1) / (to_s - from_s);
        (to_s > from_s).then(|| Line { middle_s: f64::midpoint(from_s, to_s), slope })
    }

    /// Returns the growth within a time after the line's end, if the curve flattens as it has
    /// flattened since the line before.
    fn beyond(self, before: Option<Line>, end_s: f64, beyond_s: f64) -> f64 {
        let straight = self.slope * beyond_s;
        let Some(before) = before.filter(|before| before.slope > self.slope) else {
            return straight;
        };
        if self.slope <= 0.0 {
            return 0.0;
        }
        let decay = (before.slope / self.slope).ln() / (self.middle_s - before.middle_s).max(1e-6);
        let slope = self.slope * (-decay * (end_s - self.middle_s)).exp();
        (slope / decay * (1.0 - (-decay * beyond_s).exp())).min(straight)
    }
}

/// Knowledge about the guest and the lanes.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The guest's writes.
    pub curve: DirtyCurve,
    /// Pages that hold data other than zeros.
    pub data_pages: u64,
    /// Cost of those pages.
    pub data: PageCost,
    /// Pages that go raw while each stream learns what pays.
    pub learning_pages: u64,
    /// Cost of raw pages.
    pub raw: PageCost,
    /// Cost of the pages that the guest writes.
    pub hot: PageCost,
    /// Cost of those pages while the guest is paused: the migration's own limit does not apply
    /// then.
    pub last: PageCost,
    /// Chunks that contain those pages; each is a unit of work.
    pub hot_chunks: u64,
    /// Units that a sweep has protected before they are sent.
    pub units_ahead: u64,
    pub round_trip: Duration,
    /// Time from the request to the first page: checks, connections, the shadow VM.
    pub prepare: Duration,
    /// Part of that time in which the guest's writes are tracked. What it writes then is left to
    /// round 1.
    pub tracked: Duration,
    /// Time for examining all of the memory for dirty pages.
    pub scan: Duration,
    /// Time from the guest's start at the destination until the source has released it.
    pub let_go: Duration,
    /// When to switch over, and with which means.
    pub policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Time from the request until the source has released the guest.
    pub migration: Duration,
    /// Pause of the vCPUs.
    pub switchover: Duration,
    pub wire_bytes: f64,
    /// Number of rounds, the last one included.
    pub rounds: u32,
    pub means: Means,
    /// Lowest limit on the guest's writers.
    pub throttled_to_pages_per_s: Option<f64>,
    pub round_trip: Duration,
}

/// Plays a migration through.
#[must_use]
pub fn predict(conditions: &Conditions) -> Prediction {
    let mut play = Play::begin(conditions);
    let means = loop {
        match play.decide() {
            Decision::Switchover if play.least_limit.is_some() => break Means::Throttle,
            Decision::Switchover => break Means::Plain,
            Decision::PageIn => {
                play.drain_before_page_in();
                break Means::PageIn;
            }
            Decision::GiveUp => break Means::None,
            Decision::NextRound => play.next_round(),
        }
    };
    play.end(means)
}

/// Migration played up to some point.
struct Play<'a> {
    conditions: &'a Conditions,
    convergence: Convergence,
    /// Time since the request, and since the round's start.
    took: Duration,
    round: Duration,
    /// Pages that the round sent.
    sent_pages: f64,
    wire_bytes: f64,
    number: u32,
    /// Pages that are dirty now.
    remaining: f64,
    dirty_rate: DirtyRate,
    /// Whether everything sent is applied.
    is_drained: bool,
    /// Whether the round is brief: its report is not awaited.
    is_brief: bool,
    /// Lowest limit so far.
    least_limit: Option<f64>,
}

impl<'a> Play<'a> {
    /// Plays round 0 until its last page is handed to the wire.
    fn begin(conditions: &'a Conditions) -> Play<'a> {
        let Conditions { data, raw, prepare, .. } = conditions;
        let data_pages = conditions.data_pages as f64;
        // Chunks with dirty pages come last, and pages that are dirty by then are left out
        // (`drive/sweep.rs`).
        let put_off = (conditions.hot_chunks * CHUNK_PAGES) as f64;
        let put_off = put_off.min(data_pages);
        let others = data.time_of(data_pages - put_off);
        let left = put_off - conditions.written_by(others).min(put_off);
        let left_out =
            conditions.written_by(others.saturating_add(data.time_of(left) / 2)).min(put_off);
        let sent_pages = data_pages - left_out;
        let learning = (conditions.learning_pages as f64).min(sent_pages);
        let settled = sent_pages - learning;
        let round = raw.time_of(learning).saturating_add(data.time_of(settled));
        Play {
            conditions,
            convergence: Convergence::new(conditions.policy),
            took: prepare.saturating_add(round),
            round,
            sent_pages,
            wire_bytes: learning * raw.wire_bytes + settled * data.wire_bytes,
            number: 0,
            // Includes the pages left out.
            remaining: conditions.written_by(round).max(left_out),
            dirty_rate: DirtyRate::default(),
            is_drained: false,
            is_brief: false,
            least_limit: None,
        }
    }

    fn next_round(&mut self) {
        let limit = self.convergence.throttle_pages_per_s();
        self.dirty_rate.round_begins(limit);
        let lowest = self.least_limit.unwrap_or(f64::INFINITY);
        self.least_limit = limit.map(|limit| lowest.min(limit)).or(self.least_limit);
        let hot = &self.conditions.hot;
        self.number += 1;
        (self.sent_pages, self.round) = (self.remaining, hot.time_of(self.remaining));
        self.wire_bytes += self.sent_pages * hot.wire_bytes;
        self.took = self.took.saturating_add(self.round);
        self.count_remaining(Duration::ZERO);
    }

    /// Computes the dirty pages at a time after the round's last page was handed to the wire.
    fn count_remaining(&mut self, after: Duration) {
        let Conditions { curve, data_pages, hot_chunks, units_ahead, .. } = self.conditions;
        let ahead = (*units_ahead as f64 / (*hot_chunks).max(1) as f64).min(1.0);
        let since = self.round.saturating_add(after);
        self.remaining = match self.number {
            0 => self.conditions.written_by(since).max(self.remaining),
            _ => {
                let unlimited = curve.remaining_after(self.sent_pages, ahead, self.round, after);
                let limit = self.convergence.throttle_pages_per_s().unwrap_or(f64::INFINITY);
                unlimited.min(limit * since.as_secs_f64()).min(*data_pages as f64)
            }
        };
    }

    /// Decides as the engine does: at once if a switchover is far or the round brief, otherwise
    /// when the destination has applied everything sent.
    fn decide(&mut self) -> Decision {
        let mut measured = self.measured(Duration::ZERO);
        if std::mem::take(&mut self.is_brief) {
            self.is_drained = false;
            return self.convergence.decide(&Measured { is_brief_over: true, ..measured });
        }
        self.is_drained = !self.convergence.is_far(&measured);
        if self.is_drained {
            let drain = self.drain();
            self.took = self.took.saturating_add(drain);
            self.count_remaining(drain);
            measured = self.measured(drain);
            self.is_brief = measured.is_brief();
        }
        self.convergence.decide(&measured)
    }

    /// Plays the application of everything sent while the destination prepares. It takes no time if
    /// that was already waited for.
    fn drain_before_page_in(&mut self) {
        if !self.is_drained {
            let drain = self.drain();
            self.took = self.took.saturating_add(drain);
            self.count_remaining(drain);
        }
    }

    fn measured(&mut self, after: Duration) -> Measured {
        let Conditions { curve, data, hot, round_trip, tracked, scan, .. } = self.conditions;
        let since = self.round.saturating_add(after);
        let seen = if since > Duration::ZERO { self.remaining / since.as_secs_f64() } else { 0.0 };
        // The count from before round 0, or from some time into it, says more than round 0, which
        // counts repeated writes once.
        let rate_of =
            |sample: Duration| curve.pages_within(sample) / sample.max(LEAST_SAMPLE).as_secs_f64();
        let into_round = if self.round >= SAMPLED_AFTER { SAMPLED_AFTER } else { Duration::ZERO };
        let sampled = rate_of(*tracked).max(rate_of(tracked.saturating_add(into_round)));
        let (seen, cost) = if self.number == 0 { (seen.max(sampled), data) } else { (seen, hot) };
        self.dirty_rate.counted(since, seen);
        Measured {
            remaining_pages: whole(self.remaining),
            dirty_pages_per_s: self.dirty_rate.pages_per_s(),
            bandwidth_bytes_per_s: cost.carried_bytes_per_s(),
            round_trip: *round_trip,
            elapsed: self.took,
            scan: *scan,
            is_brief_over: false,
        }
    }

    /// Returns the time from handing a round's last page to the wire to the report that it is
    /// applied, including the padding that opens windows over a long path
    /// (`drive/source/windows.rs`).
    fn drain(&self) -> Duration {
        let Conditions { hot, round_trip, .. } = self.conditions;
        if *round_trip < LONG_ROUND_TRIP {
            return *round_trip;
        }
        let wire_bytes_per_s = hot.wire_bytes / hot.time_s.max(1e-12);
        let padding = (self.remaining * f64::from(PAGE_SIZE))
            .clamp(LEAST_LAST_PAGES as f64, MOST_LAST_PAGES as f64);
        let padding_s = (padding / wire_bytes_per_s.max(1.0)).min(4.0 * round_trip.as_secs_f64());
        round_trip.saturating_add(Duration::from_secs_f64(padding_s))
    }

    fn end(self, means: Means) -> Prediction {
        let Conditions { hot, last, round_trip, let_go, scan, .. } = self.conditions;
        let at_stop = self.remaining + self.dirty_rate.pages_per_s() * TIME_TO_STOP.as_secs_f64();
        // A limit of the migration's own applies to pages that follow a running guest, but not
        // while the guest is paused.
        let pages = if means == Means::PageIn { hot } else { last };
        let carried = pages.time_of(at_stop);
        // A guest whose pages follow it is not paused for them.
        let within_the_pause = if means == Means::PageIn { Duration::ZERO } else { carried };
        let wire_bytes_per_s = last.wire_bytes / last.time_s.max(1e-12);
        let device_state =
            Duration::try_from_secs_f64(DEVICE_STATE_BYTES / wire_bytes_per_s.max(1.0))
                .unwrap_or(Duration::MAX);
        let switchover = [*round_trip / 2, device_state, within_the_pause]
            .into_iter()
            .fold(fixed_cost(*scan), Duration::saturating_add);
        let all = [HANDED_OVER, *round_trip, device_state, carried, *let_go];
        let gave_up = means == Means::None;
        Prediction {
            migration: match gave_up {
                true => self.took,
                false => all.into_iter().fold(self.took, Duration::saturating_add),
            },
            switchover,
            wire_bytes: self.wire_bytes + if gave_up { 0.0 } else { at_stop * last.wire_bytes },
            rounds: self.number + if gave_up { 1 } else { 2 },
            means,
            throttled_to_pages_per_s: self.least_limit.filter(|_| means != Means::PageIn),
            round_trip: *round_trip,
        }
    }
}

impl Conditions {
    /// Returns the pages written since tracking began, at a time after round 0's start.
    fn written_by(&self, time: Duration) -> f64 {
        self.curve.pages_within(self.tracked.saturating_add(time)).min(self.data_pages as f64)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a count of pages, never negative"
)]
fn whole(pages: f64) -> u64 {
    pages as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::PageIn;

    const DATA_PAGES: u64 = 131_072;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns the samples of a guest that writes all over `set_pages` at `pages_per_s`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of pages")]
    fn all_over(set_pages: f64, pages_per_s: f64) -> DirtyCurve {
        let within = |time: Duration| {
            set_pages * (1.0 - (-pages_per_s * time.as_secs_f64() / set_pages).exp())
        };
        DirtyCurve::new([100, 300, 1000, 3000].map(|at| (ms(at), within(ms(at)).round() as u64)))
    }

    fn conditions(curve: DirtyCurve, mb_per_s: f64) -> Conditions {
        let raw = PageCost::raw(mb_per_s * 1e6);
        Conditions {
            curve,
            data_pages: DATA_PAGES,
            data: raw,
            learning_pages: 0,
            raw,
            hot: raw,
            last: raw,
            hot_chunks: 128,
            units_ahead: 12,
            round_trip: ms(0),
            prepare: ms(300),
            tracked: ms(50),
            scan: ms(1),
            let_go: ms(50),
            policy: Policy::default(),
        }
    }

    #[test]
    fn an_idle_guest_takes_one_pass_over_its_memory() {
        let prediction = predict(&conditions(DirtyCurve::default(), 118.0));
        let once = DATA_PAGES as f64 * 4096.0 / 118e6;
        assert_eq!((prediction.means, prediction.rounds), (Means::Plain, 2));
        let took = prediction.migration.as_secs_f64();
        assert!((took - once - 0.35).abs() < 0.05 * once, "{took} s, once {once} s");
        assert!(prediction.switchover < ms(20));
    }

    #[test]
    fn a_guest_that_writes_too_much_is_throttled_and_sent_little_more_than_once() {
        for (times, mb_per_s) in
            [(2.0, 23.6), (5.0, 23.6), (20.0, 23.6), (2.0, 118.0), (20.0, 118.0)]
        {
            let writes = times * mb_per_s * 1e6 / 4096.0;
            let prediction = predict(&conditions(all_over(65_536.0, writes), mb_per_s));
            let once = DATA_PAGES as f64 * 4096.0 / (mb_per_s * 1e6);
            assert_eq!(prediction.means, Means::Throttle);
            let took = prediction.migration.as_secs_f64();
            assert!(
                (once..1.6 * once).contains(&took),
                "{times} times at {mb_per_s}: {took} s, once {once} s"
            );
        }
    }

    #[test]
    fn a_guest_that_writes_little_is_not_throttled() {
        let prediction = predict(&conditions(all_over(65_536.0, 5000.0), 118.0));
        assert_eq!((prediction.means, prediction.throttled_to_pages_per_s), (Means::Plain, None));
    }

    #[test]
    fn without_permission_to_throttle_the_guest_does_not_move() {
        let policy = Policy { may_throttle: false, page_in: PageIn::Never, ..Policy::default() };
        let busy = conditions(all_over(65_536.0, 100_000.0), 23.6);
        assert_eq!(predict(&Conditions { policy, ..busy }).means, Means::None);
    }

    #[test]
    fn samples_need_no_order_and_never_decrease() {
        let curve = DirtyCurve::new([(ms(300), 20), (ms(100), 30), (ms(1000), 100)]);
        assert_eq!(curve.pages_within(ms(300)).round(), 30.0);
        assert_eq!(curve.pages_within(ms(50)).round(), 15.0);
        assert_eq!((curve.working_set_pages(), curve.pages_per_s().round()), (100.0, 300.0));
        // Steeper at the end than before: it continues at that rate.
        assert_eq!(curve.pages_within(ms(2000)).round(), 200.0);
        assert_eq!(DirtyCurve::default().pages_within(ms(5)), 0.0);
    }

    #[test]
    fn a_set_shows_before_all_of_it_is_written() {
        // 60,000 pages per second all over 16,384, counted for a quarter of a second.
        let within =
            |at: Duration| 16_384.0 * (1.0 - (-60_000.0 * at.as_secs_f64() / 16_384.0).exp());
        let samples =
            |until: u64| (1..=until / 50).map(|n| (ms(50 * n), whole(within(ms(50 * n)))));
        let curve = DirtyCurve::new(samples(250));
        for at in [500, 1000, 10_000] {
            let (predicted, actual) = (curve.pages_within(ms(at)), within(ms(at)));
            assert!((predicted / actual - 1.0).abs() < 0.1, "{at} ms: {predicted}, is {actual}");
        }
        // A guest that goes through its memory in order and begins again has covered all of it at
        // once.
        let curve = DirtyCurve::new([
            (ms(100), 5000),
            (ms(300), 15_000),
            (ms(1000), 16_384),
            (ms(3000), 16_384),
        ]);
        assert_eq!(curve.pages_within(ms(60_000)), 16_384.0);
    }

    #[test]
    fn compressible_memory_takes_less() {
        let idle = conditions(DirtyCurve::default(), 118.0);
        let half = PageCost {
            wire_bytes: idle.data.wire_bytes / 2.0,
            time_s: idle.data.time_s / 2.0,
            ..idle.data
        };
        let less = predict(&Conditions { data: half, ..idle.clone() });
        let all = predict(&idle);
        assert!((less.wire_bytes / all.wire_bytes - 0.5).abs() < 0.01, "{less:?}");
        assert!(less.migration < all.migration.mul_f64(0.6));
        // While it is unknown what pays, pages go raw.
        let learnt =
            predict(&Conditions { data: half, learning_pages: DATA_PAGES / 4, ..idle.clone() });
        assert!((learnt.wire_bytes / all.wire_bytes - 0.625).abs() < 0.01, "{learnt:?}");
        // What the guest writes differs from what it holds.
        let busy = conditions(all_over(65_536.0, 5000.0), 118.0);
        let costs = |hot| predict(&Conditions { hot, ..busy.clone() }).wire_bytes;
        assert!(costs(half) < costs(busy.hot));
    }

    #[test]
    fn pages_protected_long_before_sending_are_written_again() {
        let curve = all_over(16_384.0, 20_000.0);
        let remaining = |ahead| curve.remaining_after(16_384.0, ahead, ms(1000), ms(0));
        assert!(remaining(0.0) < remaining(0.3) && remaining(0.3) < remaining(1.0));
        assert_eq!(remaining(1.0), curve.pages_within(ms(1000)));
    }

    #[test]
    fn a_long_distance_costs_its_round_trips() {
        let near = conditions(all_over(65_536.0, 5000.0), 118.0);
        let far = predict(&Conditions { round_trip: ms(40), ..near.clone() });
        let near = predict(&near);
        assert!(far.migration > near.migration + ms(40), "{far:?}, {near:?}");
        // Half a round trip. It may have fewer last pages: brief rounds are not awaited.
        assert!(far.switchover >= ms(8 + 20), "{far:?}, {near:?}");
    }

    #[test]
    fn with_page_in_the_guest_does_not_wait_for_later_pages() {
        let busy = conditions(all_over(65_536.0, 100_000.0), 23.6);
        let policy = Policy { page_in: PageIn::Now, ..Policy::default() };
        let at_once = predict(&Conditions { policy, ..busy.clone() });
        assert_eq!((at_once.means, at_once.rounds), (Means::PageIn, 2));
        assert!(at_once.switchover < ms(20), "{at_once:?}");
        // What remains after round 0 is carried once; slowing its writers takes longer.
        let slowed = predict(&busy);
        assert!(at_once.migration < slowed.migration && at_once.wire_bytes < slowed.wire_bytes);
        let idle = conditions(DirtyCurve::default(), 118.0);
        assert_eq!(predict(&Conditions { policy, ..idle }).means, Means::Plain);
    }

    #[test]
    fn the_means_are_reported_with_the_reason() {
        let why = |conditions: &Conditions| predict(conditions).why(conditions);
        let idle = conditions(DirtyCurve::default(), 118.0);
        assert!(why(&idle).contains("writes 0 pages/s") && why(&idle).contains("by themselves"));
        let busy = conditions(all_over(65_536.0, 100_000.0), 23.6);
        assert!(
            why(&busy).contains("throttled to") && why(&busy).contains(" % of that"),
            "{}",
            why(&busy)
        );
        let policy = Policy { may_throttle: false, page_in: PageIn::Never, ..Policy::default() };
        assert!(why(&Conditions { policy, ..busy }).contains("cannot be throttled here"));
        let report = predict(&idle).to_report();
        assert_eq!(serde_json::to_value(report).unwrap()["means"], "plain");
        assert_eq!(serde_json::to_value(Means::PageIn).unwrap(), Means::PageIn.name());
    }

    proptest! {
        #[test]
        fn it_always_ends(
            samples in prop::collection::vec((1u64..5000, 0u64..1 << 24), 0..6),
            data_pages in 0u64..1 << 28, mb in 0.0f64..20_000.0, rtt in 0u64..500
        ) {
            let curve = DirtyCurve::new(samples.into_iter().map(|(at, pages)| (ms(at), pages)));
            let all = Conditions {
                data_pages,
                round_trip: ms(rtt),
                tracked: ms(rtt / 2),
                ..conditions(curve, mb)
            };
            let prediction = predict(&all);
            prop_assert!(prediction.rounds >= 1 && prediction.wire_bytes >= 0.0);
            prop_assert!(
                prediction.to_report().migration_time_ms >= prediction.to_report().switchover_ms
                    || prediction.means == Means::None
            );
        }

        #[test]
        fn more_bandwidth_never_takes_longer_for_an_idle_guest(
            mb in 1.0f64..5000.0,
            more in 1.0f64..10.0,
        ) {
            let took = |mb| predict(&conditions(DirtyCurve::default(), mb)).migration;
            prop_assert!(took(mb * more) <= took(mb));
        }
    }
}
