//! The arithmetic of leases.

use std::time::Duration;

use thiserror::Error;

/// Parts of a whole in [`Timing::drift_ppm`].
const MILLION: u128 = 1_000_000;
/// Renewals in the length of a lease.
const RENEWALS: u32 = 4;
/// Longest lease and grace.
const LONGEST: Duration = Duration::from_secs(3600);
/// Largest error of a clock.
const MOST_DRIFT_PPM: u32 = 500_000;

/// Durations of a cluster, equal at guards and judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timing {
    /// Time between two renewals, two heartbeats and two readings.
    pub interval: Duration,
    /// Time from the start of a confirmed renewal to the guard's deadline.
    pub lease: Duration,
    /// Longest time from the deadline until nothing of the term runs or writes.
    pub grace: Duration,
    /// Largest error of a clock, in millionths of a duration.
    pub drift_ppm: u32,
}

/// Why durations cannot be used together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadTiming {
    #[error("the interval and the grace must be longer than 0 s")]
    Zero,
    #[error("the lease must be at least 4 intervals long")]
    ShortLease,
    #[error("lease and grace must not be longer than an hour")]
    Long,
    #[error("the drift of a clock must not be more than 500000 ppm")]
    Drift,
}

impl Timing {
    /// Checks that the durations fit each other.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self) -> Result<(), BadTiming> {
        if self.interval.is_zero() || self.grace.is_zero() {
            return Err(BadTiming::Zero);
        }
        if self.lease > LONGEST || self.grace > LONGEST {
            return Err(BadTiming::Long);
        }
        if self.interval.checked_mul(RENEWALS).is_none_or(|least| self.lease < least) {
            return Err(BadTiming::ShortLease);
        }
        if self.drift_ppm > MOST_DRIFT_PPM {
            return Err(BadTiming::Drift);
        }
        Ok(())
    }

    /// Returns the silence after which nothing of a term runs, on the slowest clock of a host and
    /// the fastest one of a judge. Rounded up.
    #[must_use]
    pub fn silence(&self) -> Duration {
        let drift = u128::from(self.drift_ppm.min(MOST_DRIFT_PPM));
        let nanos = self.lease.saturating_add(self.grace).as_nanos();
        let stretched = nanos.saturating_mul(MILLION + drift).div_ceil(MILLION - drift);
        Duration::from_nanos(u64::try_from(stretched).unwrap_or(u64::MAX))
    }
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            interval: Duration::from_secs(1),
            lease: Duration::from_secs(8),
            grace: Duration::from_secs(6),
            drift_ppm: 1000,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_defaults_fit_and_are_those_of_the_document() {
        let timing = Timing::default();
        assert_eq!(timing.check(), Ok(()));
        let silence = timing.silence().as_secs_f64();
        assert!((14.02..14.1).contains(&silence), "{silence}");
        assert!(silence + 2.0 * timing.interval.as_secs_f64() < 17.0);
    }

    #[test]
    fn durations_that_do_not_fit_are_refused() {
        let fits = Timing::default();
        let second = Duration::from_secs(1);
        for (timing, bad) in [
            (Timing { interval: Duration::ZERO, ..fits }, BadTiming::Zero),
            (Timing { grace: Duration::ZERO, ..fits }, BadTiming::Zero),
            (Timing { lease: 3 * second, ..fits }, BadTiming::ShortLease),
            (Timing { interval: Duration::MAX, ..fits }, BadTiming::ShortLease),
            (Timing { lease: Duration::MAX, ..fits }, BadTiming::Long),
            (Timing { grace: Duration::MAX, ..fits }, BadTiming::Long),
            (Timing { drift_ppm: 500_001, ..fits }, BadTiming::Drift),
        ] {
            assert_eq!(timing.check(), Err(bad), "{timing:?}");
            assert!(timing.silence() > Duration::ZERO);
        }
    }

    proptest! {
        /// A host's clock that is slow and a judge's that is fast, in exact arithmetic.
        #[test]
        fn the_silence_outlasts_lease_and_grace_on_any_two_clocks(
            lease_ns in 1_u64..1_000_000_000_000,
            grace_ns in 1_u64..1_000_000_000_000,
            drift_ppm in 0_u32..=500_000,
        ) {
            let timing = Timing {
                interval: Duration::from_nanos(1),
                lease: Duration::from_nanos(lease_ns),
                grace: Duration::from_nanos(grace_ns),
                drift_ppm,
            };
            let drift = u128::from(drift_ppm);
            let silence = timing.silence().as_nanos();
            let need = u128::from(lease_ns) + u128::from(grace_ns);
            // silence / (1 + d) >= need / (1 - d), without division.
            prop_assert!(silence * (MILLION - drift) >= need * (MILLION + drift));
            prop_assert!((silence - 1) * (MILLION - drift) < need * (MILLION + drift));
        }
    }
}
