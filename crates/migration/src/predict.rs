//! What a migration will take, before anything moves: the rounds played through by the policy that will decide on them, with what
//! was sampled of the guest and measured of the lanes. Pure arithmetic.
//!
//! The guest is known by a curve: how many different pages it writes within a time. A round that lasts *t* leaves what the curve
//! says for *t*, but that each page has only the time since it was sent: the mean over the round. A throttle bends the curve to
//! its limit.

use std::time::Duration;

use godwit_wire::PAGE_SIZE;

use crate::policy::{Convergence, Decision, FIXED_COST, Measured, Policy};

/// How finely a round is looked at.
const PARTS_OF_A_ROUND: u32 = 16;
/// What a page costs on the wire beside its bytes: frame headers, TLS records.
const OVERHEAD: f64 = 1.003;

/// How many different pages a guest writes within a time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DirtyCurve {
    /// Times since all pages were protected, ascending, and the pages written by then.
    points: Vec<(Duration, f64)>,
}

impl DirtyCurve {
    /// The curve through samples: times since all pages were protected, and the pages written by then. They may come in any order;
    /// what decreases is taken for what it was before, as written pages stay written.
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

    /// Pages written within a time: on straight lines between the samples, and beyond them as between the last two, as the
    /// curve only ever gets flatter: no less than it will be.
    #[must_use]
    pub fn pages_within(&self, time: Duration) -> f64 {
        let mut before = (Duration::ZERO, 0.0);
        let mut slope = 0.0;
        for &(at, pages) in &self.points {
            let span_s = at.saturating_sub(before.0).as_secs_f64();
            if span_s > 0.0 {
                slope = (pages - before.1) / span_s;
            }
            if time <= at {
                return before.1 + slope * time.saturating_sub(before.0).as_secs_f64();
            }
            before = (at, pages);
        }
        before.1 + slope * time.saturating_sub(before.0).as_secs_f64()
    }

    /// Pages a second at the beginning, when hardly any has been written twice.
    #[must_use]
    pub fn pages_per_s(&self) -> f64 {
        let first = self.points.iter().find(|(time, _)| !time.is_zero());
        first.map_or(0.0, |(time, pages)| pages / time.as_secs_f64())
    }

    /// Pages written within the longest time sampled: the working set, as far as it can be told.
    #[must_use]
    pub fn working_set_pages(&self) -> f64 {
        self.points.last().map_or(0.0, |(_, pages)| *pages)
    }

    /// What remains of a round that lasts so long, each page counting from its being sent.
    fn remaining_after(&self, round: Duration, limit_pages_per_s: Option<f64>) -> f64 {
        let parts = f64::from(PARTS_OF_A_ROUND);
        let mean = (0..PARTS_OF_A_ROUND)
            .map(|part| self.pages_within(round.mul_f64((f64::from(part) + 0.5) / parts)))
            .sum::<f64>()
            / parts;
        let limit = limit_pages_per_s.map_or(f64::INFINITY, |limit| limit * round.as_secs_f64());
        mean.min(limit)
    }
}

/// What is known of the guest and of the lanes.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The guest's writes.
    pub curve: DirtyCurve,
    /// Pages that hold something else than zeros.
    pub data_pages: u64,
    /// What the lanes carry, together, bytes a second.
    pub wire_bytes_per_s: f64,
    /// The shortest round trip.
    pub round_trip: Duration,
    /// From the request to the first page: checks, connections, the shadow VM.
    pub prepare: Duration,
    /// When to switch over, and by what means.
    pub policy: Policy,
}

/// By what a guest is brought to its switchover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Means {
    /// By rounds alone.
    Plain,
    /// Its writers are slowed.
    Throttle,
    /// Not at all: it writes too much.
    None,
}

/// What a migration will be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// From the request to the source's letting go.
    pub migration: Duration,
    /// The vCPUs' pause.
    pub switchover: Duration,
    /// Bytes on the wire.
    pub wire_bytes: f64,
    /// Rounds, the last one included.
    pub rounds: u32,
    /// By what it converges.
    pub means: Means,
    /// The lowest limit that its writers will be held to.
    pub throttled_to_pages_per_s: Option<f64>,
}

/// Plays a migration through.
#[must_use]
pub fn predict(conditions: &Conditions) -> Prediction {
    let Conditions { curve, policy, round_trip, prepare, .. } = conditions;
    let page_bytes = f64::from(PAGE_SIZE) * OVERHEAD;
    let carried_pages_per_s = (conditions.wire_bytes_per_s / page_bytes).max(1e-3);
    let time_of =
        |pages: f64| Duration::try_from_secs_f64(pages / carried_pages_per_s).unwrap_or(Duration::MAX);
    let data_pages = conditions.data_pages as f64;
    // Round 0 leaves out what was written before it comes to it.
    let left_out = |time: Duration| curve.pages_within(prepare.saturating_add(time)).min(data_pages);
    let untouched = data_pages - left_out(time_of(data_pages) / 2);
    let mut round = time_of(untouched);
    // What was left out is among what remains.
    let mut remaining = left_out(round).max(data_pages - untouched);
    let (mut took, mut sent_pages, mut rounds) = (prepare.saturating_add(round), untouched, 1);
    let mut convergence = Convergence::new(*policy);
    let mut least_limit: Option<f64> = None;
    let mut dirty_pages_per_s = curve.pages_per_s();
    let means = loop {
        let measured = Measured {
            remaining_pages: whole(remaining),
            dirty_pages_per_s,
            bandwidth_bytes_per_s: conditions.wire_bytes_per_s,
            round_trip: *round_trip,
            elapsed: took,
        };
        match convergence.decide(&measured) {
            Decision::Switchover if least_limit.is_some() => break Means::Throttle,
            Decision::Switchover => break Means::Plain,
            Decision::GiveUp | Decision::PageIn => break Means::None,
            Decision::NextRound => {}
        }
        let limit = convergence.throttle_pages_per_s();
        least_limit = limit.map(|limit| least_limit.unwrap_or(f64::INFINITY).min(limit)).or(least_limit);
        round = time_of(remaining).max(*round_trip);
        sent_pages += remaining;
        took = took.saturating_add(round);
        rounds += 1;
        remaining = curve.remaining_after(round, limit).min(data_pages);
        dirty_pages_per_s = remaining / round.as_secs_f64().max(1e-6);
    };
    let switchover = FIXED_COST.saturating_add(*round_trip / 2).saturating_add(time_of(remaining));
    Prediction {
        migration: took.saturating_add(switchover),
        switchover,
        wire_bytes: (sent_pages + remaining) * page_bytes,
        rounds: rounds + 1,
        means,
        throttled_to_pages_per_s: least_limit,
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

    const DATA_PAGES: u64 = 131_072;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The samples of a guest that writes all over `set_pages` at `pages_per_s`.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of pages")]
    fn all_over(set_pages: f64, pages_per_s: f64) -> DirtyCurve {
        let within =
            |time: Duration| set_pages * (1.0 - (-pages_per_s * time.as_secs_f64() / set_pages).exp());
        DirtyCurve::new([100, 300, 1000, 3000].map(|at| (ms(at), within(ms(at)).round() as u64)))
    }

    fn conditions(curve: DirtyCurve, mb_per_s: f64) -> Conditions {
        Conditions {
            curve,
            data_pages: DATA_PAGES,
            wire_bytes_per_s: mb_per_s * 1e6,
            round_trip: ms(0),
            prepare: ms(300),
            policy: Policy::default(),
        }
    }

    #[test]
    fn an_idle_guest_takes_what_its_memory_takes_once() {
        let prediction = predict(&conditions(DirtyCurve::default(), 118.0));
        let once = DATA_PAGES as f64 * 4096.0 / 118e6;
        assert_eq!((prediction.means, prediction.rounds), (Means::Plain, 2));
        let took = prediction.migration.as_secs_f64();
        assert!((took - once - 0.3).abs() < 0.05 * once, "{took} s, once {once} s");
        assert!(prediction.switchover < ms(20));
    }

    #[test]
    fn a_guest_that_writes_too_much_is_throttled_and_takes_little_more_than_once() {
        for (times, mb_per_s) in [(2.0, 23.6), (5.0, 23.6), (20.0, 23.6), (2.0, 118.0), (20.0, 118.0)] {
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
    fn where_it_may_not_be_throttled_it_does_not_move() {
        let policy = Policy { may_throttle: false, ..Policy::default() };
        let busy = conditions(all_over(65_536.0, 100_000.0), 23.6);
        assert_eq!(predict(&Conditions { policy, ..busy }).means, Means::None);
    }

    #[test]
    fn samples_need_no_order_and_never_decrease() {
        let curve = DirtyCurve::new([(ms(300), 20), (ms(100), 30), (ms(1000), 100)]);
        assert_eq!(curve.pages_within(ms(300)).round(), 30.0);
        assert_eq!(curve.pages_within(ms(50)).round(), 15.0);
        assert_eq!((curve.working_set_pages(), curve.pages_per_s()), (100.0, 300.0));
        assert_eq!(curve.pages_within(ms(2000)).round(), 200.0);
        assert_eq!(DirtyCurve::default().pages_within(ms(5)), 0.0);
    }

    proptest! {
        #[test]
        fn it_always_ends(
            samples in prop::collection::vec((1u64..5000, 0u64..1 << 24), 0..6),
            data_pages in 0u64..1 << 28, mb in 0.0f64..20_000.0, rtt in 0u64..500
        ) {
            let curve = DirtyCurve::new(samples.into_iter().map(|(at, pages)| (ms(at), pages)));
            let all = Conditions { data_pages, round_trip: ms(rtt), ..conditions(curve, mb) };
            let prediction = predict(&all);
            prop_assert!(prediction.rounds >= 2 && prediction.wire_bytes >= 0.0);
        }

        #[test]
        fn more_bandwidth_never_takes_longer_for_an_idle_guest(mb in 1.0f64..5000.0, more in 1.0f64..10.0) {
            let took = |mb| predict(&conditions(DirtyCurve::default(), mb)).migration;
            prop_assert!(took(mb * more) <= took(mb));
        }
    }
}
