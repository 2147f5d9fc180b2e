//! By what a guest's writers are slowed, and how far: pure arithmetic on what was measured.
//!
//! Two means. *Faults* hold each write to a page that is to be sent again until there is room for it (`godwit_ram`'s throttle): exact to
//! the page and to the thread, and nothing else is slowed; but each costs an answer. *A quota* on the CPU time of all vCPUs
//! costs nothing, and slows whatever the guest does. So faults where their answers can follow, the quota where they can't: links of 10
//! Gb/s and more.
//!
//! A change of means while the guest runs loses no page that is written: what is written is found by the same marks all the time
//! ([`godwit_ram::tracking`]), which a quota does not touch; and memory that faults were held in stays as it is, without a limit, each
//! write answered at once.

use std::time::Duration;

use godwit_ram::ThrottleFigures;
use serde::{Deserialize, Serialize};

/// By what writers are slowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub enum ThrottleMeans {
    /// Each write to a page that would have to be sent again waits for an answer.
    #[default]
    Faults,
    /// The vCPUs get less CPU time.
    Quota,
}

/// By what writers may be slowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MeansUse {
    /// Faults, as far as they can follow; the quota beyond, and where one of the two can't be had the other.
    #[default]
    Auto,
    /// Faults alone.
    Faults,
    /// The quota alone.
    Quota,
}

/// Answers a second that a handler with a core to itself is taken to give before it has shown: 20 µs each. Measured 7 to 10 µs with a
/// plain process on two cores of a virtual machine (Linux 6.18); a vCPU's write comes by way of KVM, and goes on by it.
const ANSWERS_PER_S: f64 = 50_000.0;
/// So many answers say how long one takes.
const ENOUGH_ANSWERS: u64 = 1000;
/// Writes a second of one vCPU that does nothing but wait for answers: 25 µs each, with the wake-ups of handler and vCPU.
const VCPU_WRITES_PER_S: f64 = 40_000.0;
/// Of a core that answers, and of a vCPU that waits for answers, no more than this.
const BUSY_SHARE: f64 = 0.5;
/// The quota is left for faults again when so much less is needed than they can answer: what changes to and fro is slowed twice.
const RETURN_SHARE: f64 = 0.5;

/// The means for a guest with `vcpus` that is to be held to so many pages a second, of which each costs an answer: neighbours that an
/// answer releases along (`ram`'s pacer) are not counted on, as those of a guest that writes at random go dirty for nothing. `now`: the one in use;
/// `figures`: what faults have done so far.
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

/// Between two looks at what the guest dirties: the longest period of a quota, so that each look sees a whole one.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The least that vCPUs get, as a share of what they could take: a guest at less is as good as stopped, and its clients would rather have
/// that over (page-in).
pub const LEAST_SHARE: f64 = 0.01;
/// What is aimed at, of the limit: it is to be kept to.
const AIM: f64 = 0.9;
/// As long as it dirties more than this of the limit, nothing is given back: measurements scatter.
const ENOUGH: f64 = 0.7;
/// The most that is taken at a time: one look may have seen a burst,
const MOST_TAKEN: f64 = 4.0;
/// and the most that is given back: what the guest could dirty may only show when its pages have been sent.
const MOST_GIVEN: f64 = 1.1;

/// The closed loop: what share of CPU time keeps the guest below a limit. Multiplicative, as what a guest dirties goes by the time that it
/// gets, or by less than that where it writes to the same pages again.
///
/// Where it does, each step down ends at the aim or above it, so that no more is taken than it needs; each step up is the root of what
/// proportion would give, and ends below the limit.
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
    /// The vCPUs have all again.
    pub(crate) fn begin(&mut self) {
        self.share = 1.0;
    }

    /// The guest has dirtied so many pages a second at the share so far, and should not dirty more than `limit`: the share from now on.
    pub fn look(&mut self, dirtied_pages_per_s: f64, limit: f64) -> f64 {
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

    /// The share now, 1 being all that the vCPUs could take.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share
    }

    /// The lowest so far.
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
        let means = |pages_per_s, vcpus| means_for(pages_per_s, ThrottleFigures::default(), vcpus, None);
        // What 1 Gb/s carries 0.3 of, 2.5 Gb/s, 10 and 100.
        assert_eq!(means(9_000.0, 1), ThrottleMeans::Faults);
        assert_eq!(means(22_900.0, 2), ThrottleMeans::Faults);
        assert_eq!(means(22_900.0, 1), ThrottleMeans::Quota, "one vCPU would do little but wait");
        assert_eq!(means(91_000.0, 16), ThrottleMeans::Quota);
        assert_eq!(means(910_000.0, 128), ThrottleMeans::Quota);
    }

    #[test]
    fn what_answers_take_is_measured() {
        assert_eq!(means_for(40_000.0, figures(5000, 5), 8, None), ThrottleMeans::Faults);
        assert_eq!(means_for(40_000.0, figures(5000, 25), 8, None), ThrottleMeans::Quota);
        assert_eq!(means_for(20_000.0, figures(5000, 100), 8, None), ThrottleMeans::Quota);
        assert_eq!(means_for(20_000.0, figures(5, 100), 8, None), ThrottleMeans::Faults, "five say nothing");
    }

    #[test]
    fn a_quota_is_not_left_for_a_little_less() {
        let means = |pages_per_s, now| means_for(pages_per_s, ThrottleFigures::default(), 4, Some(now));
        assert_eq!(means(26_000.0, ThrottleMeans::Faults), ThrottleMeans::Quota);
        assert_eq!(means(20_000.0, ThrottleMeans::Quota), ThrottleMeans::Quota);
        assert_eq!(means(20_000.0, ThrottleMeans::Faults), ThrottleMeans::Faults);
        assert_eq!(means(12_000.0, ThrottleMeans::Quota), ThrottleMeans::Faults);
    }

    #[test]
    fn a_guest_that_writes_little_keeps_its_cpus() {
        let mut control = QuotaLoop::default();
        for dirtied in [0.0, 500.0, 1000.0, 990.0, 700.0] {
            assert_eq!(control.look(dirtied, 1000.0), 1.0);
        }
        assert_eq!(control.least(), 1.0);
    }

    /// What a guest dirties at a share: in proportion at first, and less where it comes to the same pages again.
    #[derive(Clone, Copy, Debug)]
    struct Guest {
        demand: f64,
        set_pages: f64,
        /// From this share on it has nothing more to do.
        needs: f64,
    }

    impl Guest {
        fn dirties(&self, share: f64) -> f64 {
            let wants = self.demand * share.min(self.needs);
            let in_a_look = wants * LOOK_INTERVAL.as_secs_f64();
            self.set_pages * (1.0 - (-in_a_look / self.set_pages).exp()) / LOOK_INTERVAL.as_secs_f64()
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
                let share = control.look(guest.dirties(control.share()), limit);
                prop_assert!((LEAST_SHARE..=1.0).contains(&share));
            }
            let dirties = guest.dirties(control.share());
            prop_assert!(dirties <= limit || control.share() == LEAST_SHARE, "{dirties} of {limit}, {control:?}");
            prop_assert!(dirties >= ENOUGH * limit || control.share() == 1.0, "{dirties} of {limit}, {control:?}");
            // It stays there.
            let share = control.share();
            prop_assert_eq!(control.look(dirties, limit), share);
        }

        #[test]
        fn it_recovers_when_the_guest_calms_down_or_the_link_gets_faster(guest in guests(), limit in 10.0..1e4f64) {
            let mut control = QuotaLoop::default();
            for _ in 0..200 {
                control.look(guest.dirties(control.share()), limit);
            }
            for _ in 0..60 {
                control.look(guest.dirties(control.share()), 1e9);
            }
            prop_assert_eq!(control.share(), 1.0);
        }

        #[test]
        fn whatever_is_seen_it_keeps_its_bounds(seen in prop::collection::vec((0.0..1e9f64, 0.0..1e9f64), 1..200)) {
            let mut control = QuotaLoop::default();
            for (dirtied, limit) in seen {
                let before = control.share();
                let share = control.look(dirtied, limit);
                prop_assert!((LEAST_SHARE..=1.0).contains(&share) && control.least() <= share);
                prop_assert!(share >= before / MOST_TAKEN * 0.999 && share <= before * MOST_GIVEN * 1.001);
                prop_assert!(dirtied <= limit.max(1.0) || share <= before, "it never gives where too much is written");
            }
        }
    }
}
