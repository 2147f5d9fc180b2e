//! Bytes sent over time, for a chart. A report holds few points, however long the migration. Pure.

use godwit_types::{BandwidthPoint, MOST_POINTS};

/// Initial minimum distance between two points: half the interval of progress reports.
const FIRST_SPACING_MS: f64 = 50.0;

/// Points of a migration in progress. When they become too many, every other one is dropped, and
/// further points come half as often.
#[derive(Clone, Debug, PartialEq)]
pub struct Bandwidth {
    points: Vec<BandwidthPoint>,
    spacing_ms: f64,
}

impl Default for Bandwidth {
    fn default() -> Self {
        Bandwidth { points: Vec::new(), spacing_ms: FIRST_SPACING_MS }
    }
}

impl Bandwidth {
    /// Adds a point. A point too soon after the last one is left out, as is one before anything was
    /// sent.
    pub fn add(&mut self, point: BandwidthPoint) {
        let last_ms = self.points.last().map_or(f64::NEG_INFINITY, |last| last.ms);
        if point.bytes == 0 || point.ms < last_ms + self.spacing_ms {
            return;
        }
        // One place is reserved for the final point.
        if self.points.len() + 1 >= MOST_POINTS {
            let mut kept = false;
            self.points.retain(|_| {
                kept = !kept;
                kept
            });
            self.spacing_ms *= 2.0;
        }
        self.points.push(point);
    }

    /// Returns all points and the final one: what had been sent at the end.
    #[must_use]
    pub fn end(&self, end: BandwidthPoint) -> Vec<BandwidthPoint> {
        let before =
            self.points.iter().filter(|point| point.ms < end.ms && point.bytes <= end.bytes);
        before.copied().chain((end.bytes > 0).then_some(end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: f64, bytes: u64) -> BandwidthPoint {
        BandwidthPoint { ms, bytes }
    }

    #[test]
    fn early_samples_are_dropped_but_not_the_last() {
        let mut bandwidth = Bandwidth::default();
        for point in [at(10.0, 0), at(20.0, 5), at(30.0, 6), at(90.0, 9)] {
            bandwidth.add(point);
        }
        assert_eq!(bandwidth.end(at(91.0, 10)), [at(20.0, 5), at(90.0, 9), at(91.0, 10)]);
        assert_eq!(Bandwidth::default().end(at(5.0, 0)), []);
    }

    proptest! {
        #[test]
        fn a_report_has_few_and_they_only_grow(
            steps in proptest::collection::vec((1.0f64..400.0, 0u64..1000), 0..2000)
        ) {
            let mut bandwidth = Bandwidth::default();
            let (mut ms, mut bytes) = (0.0, 0);
            for (wait, sent) in steps {
                (ms, bytes) = (ms + wait, bytes + sent);
                bandwidth.add(at(ms, bytes));
            }
            let points = bandwidth.end(at(ms + 1.0, bytes));
            prop_assert!(points.len() <= MOST_POINTS);
            prop_assert!(
                points.is_sorted_by(|one, next| one.ms < next.ms && one.bytes <= next.bytes)
            );
            // At most half of the points are dropped at once.
            prop_assert!(ms < 20_000.0 || points.len() > MOST_POINTS / 8);
        }
    }
}
