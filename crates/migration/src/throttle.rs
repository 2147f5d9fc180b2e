//! Decides how a guest's writers are slowed, and how far: pure arithmetic on measurements.
//!
//! There are two means. *Faults* hold each write to a page that must be sent again until there is
//! room for it (`godwit_ram`'s throttle). They are exact to the page and to the thread, and slow
//! nothing else; but each costs an answer. *A quota* on the CPU time of all vCPUs costs nothing,
//! and slows everything that the guest does. So faults are used if their answers can keep up, and
//! the quota otherwise: on links of 10 Gb/s and more.
//!
//! A change of means while the guest runs loses no written page. The same marks find written pages
//! all the time ([`godwit_ram::tracking`]), and a quota does not touch them. Memory that was held
//! by faults stays in that mode, without a limit, and each write is answered at once.

use std::time::Duration;

use godwit_ram::ThrottleFigures;
use godwit_types::ThrottleMeans;
use serde::{Deserialize, Serialize};

/// Means by which writers may be slowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MeansUse {
    /// Faults, as far as they can keep up, and the quota beyond. If one of the two is unavailable,
    /// the other.
    #[default]
    Auto,
    Faults,
    Quota,
}

/// Answers per second assumed of a handler with a core to itself, before any measurement: 20 µs
/// each. Measured were 7 to 10 µs with a plain process on two cores of a virtual machine (Linux
/// 6.18); a vCPU's write also passes through KVM twice.
const ANSWERS_PER_S: f64 = 50_000.0;
/// Number of answers after which the measured time per answer is used.
const ENOUGH_ANSWERS: u64 = 1000;
/// Writes per second of one vCPU that only waits for answers: 25 µs each, including the wake-ups
/// of handler and vCPU.
const VCPU_WRITES_PER_S: f64 = 40_000.0;
/// Maximum share of a core that answers, and of a vCPU that waits for answers.
const BUSY_SHARE: f64 = 0.5;
/// Fraction of the faults' capacity below which the quota is replaced by faults again: a guest
/// between alternating means would be slowed twice.
const RETURN_SHARE: f64 = 0.5;

/// Returns the means for a guest with `vcpus` that is to be limited to so many pages per second,
/// each of which costs an answer. Neighbours that an answer releases along (`ram`'s pacer) are not
/// counted, because those of a guest that writes at random become dirty in vain. `now`: the means
/// in use; `figures`: what faults have done so far.
#[must_use]
pub fn means_for(
    pages_per_s: f64,
    figures: ThrottleFigures,
    vcpus: usize,
    now: Option<ThrottleMeans>,
) -> ThrottleMeans {
    let answering = figures.answering.as_secs_f64();
    let measured = figures.faults >= ENOUGH_ANSWERS && answering > 0.0;
    let answers_per_s = if measured { figures.faults as f64 / answering } else { ANSWERS_PER_S };
    let follow = BUSY_SHARE * answers_per_s.min(VCPU_WRITES_PER_S * vcpus.max(1) as f64);
    let most = if now == Some(ThrottleMeans::Quota) { RETURN_SHARE * follow } else { follow };
    if pages_per_s > most { ThrottleMeans::Quota } else { ThrottleMeans::Faults }
}

/// Interval between two looks at what the guest dirties: the longest period of a quota, so that
/// each adjustment covers a whole one.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Lowest share of CPU time for vCPUs. With less, a guest is as good as stopped, and page-in serves
/// its clients better.
pub const LEAST_SHARE: f64 = 0.01;
/// Fraction of the limit that the loop aims at, so that the limit is kept.
const AIM: f64 = 0.9;
/// While the guest dirties more than this fraction of the limit, nothing is given back, because
/// measurements scatter.
const ENOUGH: f64 = 0.7;
/// Largest factor of a decrease: one sample may have seen a burst.
const MOST_TAKEN: f64 = 4.0;
/// Largest factor of an increase: what the guest could dirty may show only after its pages have
/// been sent.
const MOST_GIVEN: f64 = 1.1;

/// Control loop for the share of CPU time that keeps the guest below a limit. It is multiplicative,
/// because a guest dirties pages in proportion to its CPU time, or less than that if it writes to
/// the same pages again.
///
/// In the latter case each step down ends at the aim or above it, so no more is taken than
/// necessary. Each step up is the square root of the proportional one, and ends below the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuotaLoop {
    share: f64,
    least: f64,
}

impl Default for QuotaLoop {
    fn default() -> Self {
        QuotaLoop { share: 1.0, least: 1.0 }
    }
}

impl QuotaLoop {
    /// Starts with the full share.
    pub(crate) fn begin(&mut self) {
        self.share = 1.0;
    }

    /// Takes the pages per second that the guest has dirtied at the present share, which should not
    /// exceed `limit`. Returns the share from now on.
    pub fn adjust(&mut self, dirtied_pages_per_s: f64, limit: f64) -> f64 {
        let (dirtied, limit) = (dirtied_pages_per_s.max(0.0), limit.max(1.0));
        let factor = if dirtied > limit {
            (AIM * limit / dirtied).max(1.0 / MOST_TAKEN)
        } else if dirtied < ENOUGH * limit {
            (AIM * limit / dirtied.max(1e-3)).sqrt().min(MOST_GIVEN)
        } else {
            1.0
        };
        self.share = (self.share * factor).clamp(LEAST_SHARE, 1.0);
        self.least = self.least.min(self.share);
        self.share
    }

    /// Returns the present share; 1 is all that the vCPUs could take.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Returns the lowest share so far.
    #[must_use]
    pub fn least(&self) -> f64 {
        self.least
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn figures(faults: u64, each_us: u64) -> ThrottleFigures {
        ThrottleFigures {
            faults,
            answering: Duration::from_micros(each_us * faults),
            ..ThrottleFigures::default()
        }
    }

    #[test]
    fn faults_where_they_can_follow() {
        let means =
            |pages_per_s, vcpus| means_for(pages_per_s, ThrottleFigures::default(), vcpus, None);
        // 0.3 of what 1 Gb/s carries, of 2.5 Gb/s, 10 and 100.
        assert_eq!(means(9_000.0, 1), ThrottleMeans::Faults);
        assert_eq!(means(22_900.0, 2), ThrottleMeans::Faults);
        assert_eq!(means(22_900.0, 1), ThrottleMeans::Quota, "one vCPU would do little but wait");
        assert_eq!(means(91_000.0, 16), ThrottleMeans::Quota);
        assert_eq!(means(910_000.0, 128), ThrottleMeans::Quota);
    }

    #[test]
    fn the_cost_of_answers_is_measured() {
        assert_eq!(means_for(40_000.0, figures(5000, 5), 8, None), ThrottleMeans::Faults);
        assert_eq!(means_for(40_000.0, figures(5000, 25), 8, None), ThrottleMeans::Quota);
        assert_eq!(means_for(20_000.0, figures(5000, 100), 8, None), ThrottleMeans::Quota);
        assert_eq!(
            means_for(20_000.0, figures(5, 100), 8, None),
            ThrottleMeans::Faults,
            "five say nothing"
        );
    }

    #[test]
    fn a_quota_is_not_left_for_a_little_less() {
        let means =
            |pages_per_s, now| means_for(pages_per_s, ThrottleFigures::default(), 4, Some(now));
        assert_eq!(means(26_000.0, ThrottleMeans::Faults), ThrottleMeans::Quota);
        assert_eq!(means(20_000.0, ThrottleMeans::Quota), ThrottleMeans::Quota);
        assert_eq!(means(20_000.0, ThrottleMeans::Faults), ThrottleMeans::Faults);
        assert_eq!(means(12_000.0, ThrottleMeans::Quota), ThrottleMeans::Faults);
    }

    #[test]
    fn a_guest_that_writes_little_keeps_its_cpus() {
        let mut control = QuotaLoop::default();
        for dirtied in [0.0, 500.0, 1000.0, 990.0, 700.0] {
            assert_eq!(control.adjust(dirtied, 1000.0), 1.0);
        }
        assert_eq!(control.least(), 1.0);
    }

    /// Pages that a guest dirties at a share: proportional at first, and fewer when it writes to
    /// the same pages again.
    #[derive(Clone, Copy, Debug)]
    struct Guest {
        demand: f64,
        set_pages: f64,
        /// Share from which on it has nothing more to do.
        needs: f64,
    }

    impl Guest {
        fn dirties(&self, share: f64) -> f64 {
            let wants = self.demand * share.min(self.needs);
            let in_a_look = wants * LOOK_INTERVAL.as_secs_f64();
            self.set_pages * (1.0 - (-in_a_look / self.set_pages).exp())
                / LOOK_INTERVAL.as_secs_f64()
        }
    }

    fn guests() -> impl Strategy<Value = Guest> {
        (100.0..5e6f64, 10.0..1e6f64, 0.02..1.0f64).prop_map(|(demand, set_pages, needs)| Guest {
            demand,
            set_pages,
            needs,
        })
    }

    proptest! {
        #[test]
        fn it_ends_below_the_limit_and_not_far_below(guest in guests(), limit in 10.0..1e6f64) {
            let mut control = QuotaLoop::default();
            for _ in 0..200 {
                let share = control.adjust(guest.dirties(control.share()), limit);
                prop_assert!((LEAST_SHARE..=1.0).contains(&share));
            }
            let dirties = guest.dirties(control.share());
            prop_assert!(
                dirties <= limit || control.share() == LEAST_SHARE,
                "{dirties} of {limit}, {control:?}"
            );
            prop_assert!(
                dirties >= ENOUGH * limit || control.share() == 1.0,
                "{dirties} of {limit}, {control:?}"
            );
            // It stays there.
            let share = control.share();
            prop_assert_eq!(control.adjust(dirties, limit), share);
        }

        #[test]
        fn it_recovers_when_the_guest_calms_down_or_the_link_gets_faster(
            guest in guests(),
            limit in 10.0..1e4f64,
        ) {
            let mut control = QuotaLoop::default();
            for _ in 0..200 {
                control.adjust(guest.dirties(control.share()), limit);
            }
            for _ in 0..60 {
                control.adjust(guest.dirties(control.share()), 1e9);
            }
            prop_assert_eq!(control.share(), 1.0);
        }

        #[test]
        fn the_share_stays_within_its_limits(
            seen in prop::collection::vec((0.0..1e9f64, 0.0..1e9f64), 1..200),
        ) {
            let mut control = QuotaLoop::default();
            for (dirtied, limit) in seen {
                let before = control.share();
                let share = control.adjust(dirtied, limit);
                prop_assert!((LEAST_SHARE..=1.0).contains(&share) && control.least() <= share);
                prop_assert!(
                    share >= before / MOST_TAKEN * 0.999 && share <= before * MOST_GIVEN * 1.001
                );
                prop_assert!(
                    dirtied <= limit.max(1.0) || share <= before,
                    "it never gives where too much is written"
                );
            }
        }
    }
}
