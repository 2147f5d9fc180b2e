//! How fast a guest dirties its memory, by the rounds that have just been. Pure.
//!
//! What was just protected is dirtied again at once where it is hot: a round of a few milliseconds shows that burst, and no rate
//! that lasts. So the rate is the mean over the last [`WITHIN`], and a short round counts for its own time in it.

use std::collections::VecDeque;
use std::time::Duration;

/// The time over which the rate is told, where rounds were shorter.
const WITHIN: Duration = Duration::from_millis(100);

/// The rate by the last rounds.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirtyRate {
    /// Before the round under way, the latest first: how long each lasted, and what it showed, pages a second.
    earlier: VecDeque<(Duration, f64)>,
    current: Option<(Duration, f64)>,
    hold: Hold,
}

/// What a guest writes while it is held says nothing of what it writes while it is not, and the other way round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Hold {
    #[default]
    Free,
    /// In the first round memory comes under the throttle only as the sweep comes to it.
    Begins,
    Held,
}

impl DirtyRate {
    /// A round begins, in which the guest's writers are slowed, or are not.
    pub(crate) fn round_begins(&mut self, throttled: bool) {
        let hold = match (throttled, self.hold) {
            (false, _) => Hold::Free,
            (true, Hold::Free) => Hold::Begins,
            (true, _) => Hold::Held,
        };
        if let Some(over) = self.current.take() {
            self.earlier.push_front(over);
        }
        if hold != self.hold {
            (self.hold, self.earlier) = (hold, VecDeque::new());
        }
        let mut reaches_back = Duration::ZERO;
        self.earlier.retain(|(lasted, _)| {
            let is_near = reaches_back < WITHIN;
            reaches_back += *lasted;
            is_near
        });
    }

    /// The round under way has shown this so far.
    pub(crate) fn counted(&mut self, lasted: Duration, pages_per_s: f64) {
        self.current = Some((lasted, pages_per_s));
    }

    /// Pages a second, in the mean of the last rounds.
    pub(crate) fn pages_per_s(&self) -> f64 {
        let (mut left, mut pages) = (WITHIN, 0.0);
        for (lasted, pages_per_s) in self.current.iter().chain(&self.earlier) {
            let counts = left.min(*lasted);
            pages += pages_per_s * counts.as_secs_f64();
            left -= counts;
        }
        let over = WITHIN.saturating_sub(left).as_secs_f64();
        if over > 0.0 { pages / over } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of so many milliseconds that left so many pages, and whether the guest was held in them.
    fn after(rounds: &[(u64, u64, bool)]) -> f64 {
        let mut rate = DirtyRate::default();
        for &(ms, pages, held) in rounds {
            let lasted = Duration::from_millis(ms);
            rate.round_begins(held);
            rate.counted(lasted, pages as f64 / lasted.as_secs_f64());
        }
        rate.pages_per_s().round()
    }

    #[test]
    fn a_burst_in_a_short_round_is_no_rate() {
        assert_eq!(after(&[(5000, 5000, false)]), 1000.0);
        // 60 pages in 4 ms, as in each round that short.
        assert_eq!(after(&[(5000, 5000, false), (4, 60, false)]), 1560.0);
        assert_eq!(after(&[(5000, 5000, false), (50, 60, false), (50, 60, false)]), 1200.0);
        assert_eq!(after(&[(5000, 5000, false), (200, 60, false)]), 300.0);
        assert_eq!(after(&[(4, 60, false)]), 15_000.0, "nothing else is known");
    }

    #[test]
    fn one_that_is_held_shows_another_rate() {
        assert_eq!(after(&[(5000, 500_000, false), (10, 100, true)]), 10_000.0);
        assert_eq!(after(&[(5000, 500_000, false), (50, 500, true), (10, 20, true)]), 2000.0);
        assert_eq!(after(&[(5000, 500_000, true), (10, 20, true), (10, 40, true)]), 3000.0);
        assert_eq!(after(&[(5000, 500, true), (10, 1000, false)]), 100_000.0);
    }

    #[test]
    fn what_is_counted_again_replaces_what_was() {
        let mut rate = DirtyRate::default();
        rate.round_begins(false);
        assert_eq!(rate.pages_per_s(), 0.0);
        rate.counted(Duration::ZERO, 0.0);
        assert_eq!(rate.pages_per_s(), 0.0);
        rate.counted(Duration::from_millis(10), 500.0);
        rate.counted(Duration::from_millis(30), 300.0);
        assert_eq!(rate.pages_per_s(), 300.0);
    }
}
