//! Rate at which a guest dirties its memory, computed from the most recent rounds. Pure.
//!
//! Hot pages that were just protected are dirtied again at once: a round of a few milliseconds
//! shows that burst, and not a sustained rate. So the rate is the mean over the last [`WITHIN`], in
//! which a short round is weighted by its own duration.

use std::collections::VecDeque;
use std::time::Duration;

/// Time over which the rate is averaged if rounds were shorter.
const WITHIN: Duration = Duration::from_millis(100);

/// Dirty rate over the last rounds.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirtyRate {
    /// The rounds before the current one, the latest first: duration, and rate in pages per second.
    earlier: VecDeque<(Duration, f64)>,
    current: Option<(Duration, f64)>,
    /// The rate that was reported before the window was restarted.
    last_pages_per_s: f64,
    hold: Hold,
}

/// How the guest's writers are held. A rate while they are held says nothing about the rate while
/// they are not, and vice versa.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Hold {
    #[default]
    Free,
    /// In the first round, memory comes under the throttle only when the sweep reaches it.
    Begins,
    /// Held to so many pages per second.
    Held(f64),
}

/// A guest held to less than this fraction of its former limit shows another rate.
const LESS: f64 = 0.9;

impl DirtyRate {
    /// Begins a round, in which the guest's writers are held to so many pages per second, or are
    /// not.
    pub(crate) fn round_begins(&mut self, limit_pages_per_s: Option<f64>) {
        let hold = match (limit_pages_per_s, self.hold) {
            (None, _) => Hold::Free,
            (Some(_), Hold::Free) => Hold::Begins,
            (Some(limit), _) => Hold::Held(limit),
        };
        self.last_pages_per_s = self.pages_per_s();
        if let Some(over) = self.current.take() {
            self.earlier.push_front(over);
        }
        let is_the_same = match (self.hold, hold) {
            (Hold::Held(before), Hold::Held(now)) => now > LESS * before,
            (before, now) => before == now,
        };
        if !is_the_same {
            self.earlier.clear();
        }
        self.hold = hold;
        let mut reaches_back = Duration::ZERO;
        self.earlier.retain(|(lasted, _)| {
            let is_near = reaches_back < WITHIN;
            reaches_back += *lasted;
            is_near
        });
    }

    /// Notes that the guest is not held after all.
    pub(crate) fn not_held(&mut self) {
        self.hold = Hold::Free;
    }

    /// Updates the duration and the rate of the current round.
    pub(crate) fn counted(&mut self, lasted: Duration, pages_per_s: f64) {
        self.current = Some((lasted, pages_per_s));
    }

    /// Returns the mean rate of the last rounds, in pages per second. Until the first round of a
    /// new kind has a result, returns the previous rate.
    pub(crate) fn pages_per_s(&self) -> f64 {
        let (mut left, mut pages) = (WITHIN, 0.0);
        for (lasted, pages_per_s) in self.current.iter().chain(&self.earlier) {
            let counts = left.min(*lasted);
            pages += pages_per_s * counts.as_secs_f64();
            left -= counts;
        }
        let over = WITHIN.saturating_sub(left).as_secs_f64();
        if over > 0.0 { pages / over } else { self.last_pages_per_s }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: Option<f64> = Some(2000.0);

    /// Returns the rate after rounds of so many milliseconds that left so many pages, each with its
    /// limit.
    fn after(rounds: &[(u64, u64, Option<f64>)]) -> f64 {
        let mut rate = DirtyRate::default();
        for &(ms, pages, held) in rounds {
            let lasted = Duration::from_millis(ms);
            rate.round_begins(held);
            rate.counted(lasted, pages as f64 / lasted.as_secs_f64());
        }
        rate.pages_per_s().round()
    }

    #[test]
    fn a_burst_in_a_short_round_is_not_a_rate_sample() {
        assert_eq!(after(&[(5000, 5000, None)]), 1000.0);
        // 60 pages in 4 ms, as in every round that short.
        assert_eq!(after(&[(5000, 5000, None), (4, 60, None)]), 1560.0);
        assert_eq!(after(&[(5000, 5000, None), (50, 60, None), (50, 60, None)]), 1200.0);
        assert_eq!(after(&[(5000, 5000, None), (200, 60, None)]), 300.0);
        assert_eq!(after(&[(4, 60, None)]), 15_000.0, "nothing else is known");
    }

    #[test]
    fn a_throttled_guest_shows_another_rate() {
        assert_eq!(after(&[(5000, 500_000, None), (10, 100, HELD)]), 10_000.0);
        assert_eq!(after(&[(5000, 500_000, None), (50, 500, HELD), (10, 20, HELD)]), 2000.0);
        assert_eq!(after(&[(5000, 500_000, HELD), (10, 20, HELD), (10, 40, HELD)]), 3000.0);
        assert_eq!(after(&[(5000, 500, HELD), (10, 1000, None)]), 100_000.0);
        let lower = Some(1000.0);
        assert_eq!(
            after(&[(5000, 500, HELD), (25, 50, HELD), (25, 25, lower), (25, 25, lower)]),
            1000.0
        );
    }

    #[test]
    fn a_new_count_replaces_the_old_one() {
        let mut rate = DirtyRate::default();
        rate.round_begins(None);
        assert_eq!(rate.pages_per_s(), 0.0);
        rate.counted(Duration::ZERO, 0.0);
        assert_eq!(rate.pages_per_s(), 0.0);
        rate.counted(Duration::from_millis(10), 500.0);
        rate.counted(Duration::from_millis(30), 300.0);
        assert_eq!(rate.pages_per_s(), 300.0);
    }
}
