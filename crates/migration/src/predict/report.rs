//! The prediction in reports: within a migration's report, and in a dry run's. Times are in
//! milliseconds, sizes in bytes.

use std::time::Duration;

use godwit_types::{DirtySample, GuestFigures, Means, Predicted};

use super::{Conditions, Prediction};
use crate::report::millis;

/// Silence that clients of the guest see in addition to the vCPUs' pause: the last answer came some
/// time before it, and the network has to learn the guest's new location. This is an assumption and
/// a lower bound: with TCG the lab's client saw tens of ms (docs/operations.md).
const BEYOND_THE_PAUSE: Duration = Duration::from_millis(5);
/// Pages that a guest accesses one after the other before it answers, if it lacks them: 0.6 to 1.2
/// s in the lab at a round trip of 10 ms, median 0.7 s of eight.
const PAGES_TO_AN_ANSWER: u32 = 70;

impl Prediction {
    /// Converts the prediction to its form in reports.
    #[must_use]
    pub fn to_report(&self) -> Predicted {
        Predicted {
            migration_time_ms: millis(self.migration),
            wire_bytes: super::whole(self.wire_bytes),
            rounds: self.rounds,
            switchover_ms: millis(self.switchover),
            means: self.means,
            throttled_to_pages_per_s: self.throttled_to_pages_per_s,
        }
    }

    /// Returns the longest silence that clients of the guest will see, as far as it is predictable.
    #[must_use]
    pub fn blackout(&self) -> Duration {
        let fetches = if self.means == Means::PageIn { PAGES_TO_AN_ANSWER } else { 0 };
        self.switchover.saturating_add(BEYOND_THE_PAUSE).saturating_add(fetches * self.round_trip)
    }

    /// Explains the choice of means, in one line for people.
    #[must_use]
    pub fn why(&self, conditions: &Conditions) -> String {
        let writes = conditions.curve.pages_per_s();
        let carries = 1.0 / conditions.hot.time_s.max(1e-12);
        let both = format!("the guest writes {writes:.0} pages/s, the lanes carry {carries:.0}");
        match (self.means, self.throttled_to_pages_per_s) {
            (Means::Plain, _) => format!("{both}: rounds get shorter by themselves"),
            (Means::Throttle, Some(limit)) if writes > limit => {
                let share = 100.0 * limit / writes;
                format!(
                    "{both}: its writers will be throttled to {limit:.0} pages/s, {share:.0} % of \
                    that"
                )
            }
            (Means::Throttle, limit) => {
                format!(
                    "{both}: its writers will be throttled to {:.0} pages/s",
                    limit.unwrap_or_default()
                )
            }
            (Means::PageIn, _) => {
                format!(
                    "{both}: it will run at the destination while the rest of its memory follows"
                )
            }
            (Means::None, Some(limit)) => {
                format!(
                    "{both}: even throttled to {limit:.0} pages/s, it would need a longer pause \
                    than the policy allows"
                )
            }
            (Means::None, None) if conditions.policy.may_throttle => {
                format!("{both}: it would need a longer pause than the policy allows")
            }
            (Means::None, None) => format!("{both}, and it cannot be throttled here"),
        }
    }
}

impl Conditions {
    /// Returns the sampled figures of the guest, on these lanes.
    #[must_use]
    pub fn guest_figures(&self) -> GuestFigures {
        let Conditions { curve, data_pages, data, hot, .. } = self;
        GuestFigures {
            data_pages: *data_pages,
            sent_as: data.sent_as,
            wire_bytes_per_page: data.wire_bytes,
            written_wire_bytes_per_page: hot.wire_bytes,
            dirty_pages_per_s: curve.pages_per_s(),
            working_set_pages: super::whole(curve.working_set_pages()),
            samples: curve
                .samples()
                .map(|(at, pages)| DirtySample { ms: millis(at), pages })
                .collect(),
        }
    }
}
