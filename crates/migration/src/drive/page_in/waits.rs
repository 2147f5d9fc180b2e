//! Statistics of waits for missing pages.

use std::time::Duration;

use godwit_wire::{FIRST_WAIT_CLASS_NS, PagedIn, WAIT_CLASSES};

use crate::report::nanos;

/// Number of waits that are kept individually, for the percentiles. Later ones replace earlier ones
/// in such a way that all times of the page-in are represented.
const KEPT: usize = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct Waits {
    kept_ns: Vec<u64>,
    most_ns: u64,
    count: u64,
    classes: [u64; WAIT_CLASSES],
}

impl Waits {
    pub(super) fn add(&mut self, wait: Duration) {
        let wait_ns = nanos(wait);
        self.most_ns = self.most_ns.max(wait_ns);
        self.classes[class_of(wait_ns)] += 1;
        if self.kept_ns.len() < KEPT {
            self.kept_ns.push(wait_ns);
        } else {
            // A step that is coprime to the size reaches every place in time.
            let place = (self.count % KEPT as u64).wrapping_mul(40_503) % KEPT as u64;
            self.kept_ns[usize::try_from(place).unwrap_or(0)] = wait_ns;
        }
        self.count += 1;
    }

    /// Returns the statistics, for so many missing pages and so many cuts.
    pub(super) fn figures(&self, pages: u64, cuts: u64) -> PagedIn {
        let mut sorted = self.kept_ns.clone();
        sorted.sort_unstable();
        let percentile = |percent: usize| {
            let place = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
            sorted.get(place).copied().unwrap_or(0)
        };
        PagedIn {
            pages,
            demanded: self.count,
            cuts,
            median_ns: percentile(50),
            p90_ns: percentile(90),
            p99_ns: percentile(99),
            most_ns: self.most_ns,
            waits: self.classes,
        }
    }
}

fn class_of(wait_ns: u64) -> usize {
    let bits = (wait_ns / FIRST_WAIT_CLASS_NS).checked_ilog2().map_or(0, |log| log as usize + 1);
    bits.min(WAIT_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_double() {
        let bounds = [
            (0, 0),
            (16_383, 0),
            (16_384, 1),
            (32_767, 1),
            (32_768, 2),
            (u64::MAX, WAIT_CLASSES - 1),
        ];
        for (wait_ns, class) in bounds {
            assert_eq!(class_of(wait_ns), class, "{wait_ns}");
        }
    }

    #[test]
    fn percentiles_are_of_what_was_waited() {
        let mut waits = Waits::default();
        assert_eq!(waits.figures(7, 1), PagedIn { pages: 7, cuts: 1, ..PagedIn::default() });
        for ms in (1..=100).rev() {
            waits.add(Duration::from_millis(ms));
        }
        let figures = waits.figures(200, 0);
        let in_ms = |ns: u64| ns / 1_000_000;
        assert_eq!(figures.demanded, 100);
        assert_eq!(
            [figures.median_ns, figures.p90_ns, figures.p99_ns, figures.most_ns].map(in_ms),
            [50, 90, 99, 100]
        );
        assert_eq!(figures.waits.iter().sum::<u64>(), 100);
    }

    #[test]
    fn samples_beyond_the_kept_ones_still_count() {
        let mut waits = Waits::default();
        for number in 0..2 * KEPT as u64 {
            waits.add(Duration::from_nanos(number));
        }
        let figures = waits.figures(0, 0);
        assert_eq!((waits.kept_ns.len(), figures.demanded), (KEPT, 2 * KEPT as u64));
        assert!(
            figures.median_ns >= KEPT as u64,
            "the later half took the place of the earlier one"
        );
    }
}
