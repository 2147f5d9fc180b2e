//! Summary of many measurements in a few figures, and its form in tables. Pure.

use serde::Serialize;

/// Spread of several measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// Number of measurements.
    pub(crate) count: usize,
    pub(crate) min: f64,
    pub(crate) lower_quartile: f64,
    pub(crate) median: f64,
    pub(crate) upper_quartile: f64,
    /// The smallest value that at least 99 % of the values do not exceed: with fewer than 100
    /// values, the greatest.
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Computes the spread of these values. Returns `None` without values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let at = |quarter: usize| {
            // Interpolates linearly between the two neighbouring values, so that the median of an
            // even number is the mean of the middle two.
            let place = quarter * (sorted.len() - 1);
            let (low, rest) = (place / 4, place % 4);
            let high = (low + 1).min(sorted.len() - 1);
            let share = [0.0, 0.25, 0.5, 0.75][rest];
            sorted[low] + (sorted[high] - sorted[low]) * share
        };
        let count = sorted.len();
        let p99 = sorted[(count * 99).div_ceil(100) - 1];
        Some(Spread {
            count,
            min,
            lower_quartile: at(1),
            median: at(2),
            upper_quartile: at(3),
            p99,
            max,
        })
    }

    /// Returns the spread in another unit.
    pub(crate) fn times(self, factor: f64) -> Spread {
        Spread {
            count: self.count,
            min: self.min * factor,
            lower_quartile: self.lower_quartile * factor,
            median: self.median * factor,
            upper_quartile: self.upper_quartile * factor,
            p99: self.p99 * factor,
            max: self.max * factor,
        }
    }
}

/// Formats a spread for a table: the median, then the least and the most value.
pub(crate) fn cell(spread: Option<Spread>, decimals: usize) -> String {
    spread.map_or_else(dash, |Spread { median, min, max, .. }| {
        let to = if min < 0.0 { " to " } else { "-" };
        format!("{median:.decimals$} ({min:.decimals$}{to}{max:.decimals$})")
    })
}

/// Returns the text of a table for a figure that is missing.
pub(crate) fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles() {
        assert_eq!(Spread::of([]), None);
        let one = Spread::of([7.0]).unwrap();
        assert!(
            [one.min, one.lower_quartile, one.median, one.upper_quartile, one.max]
                .iter()
                .all(|v| *v == 7.0)
        );
        let five = Spread::of([5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!((five.count, five.min, five.lower_quartile, five.median), (5, 1.0, 2.0, 3.0));
        assert_eq!((five.upper_quartile, five.max), (4.0, 5.0));
        let four = Spread::of([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((four.lower_quartile, four.median, four.upper_quartile), (1.75, 2.5, 3.25));
    }

    #[test]
    fn a_cell_has_the_least_and_the_most_value() {
        assert_eq!(cell(None, 1), "-");
        assert_eq!(cell(Spread::of([3.0, 1.0, 2.0]), 0), "2 (1-3)");
        assert_eq!(cell(Spread::of([-3.0, -1.0, -2.0]), 1), "-2.0 (-3.0 to -1.0)");
        let gbit = Spread::of([9e9, 8e9]).map(|spread| spread.times(1e-9));
        assert_eq!(cell(gbit, 1), "8.5 (8.0-9.0)");
    }

    #[test]
    fn the_99th_percentile_is_a_value() {
        let p99 = |count: u32| Spread::of((1..=count).map(f64::from)).unwrap().p99;
        assert_eq!(
            [1, 2, 99, 100, 101, 200, 201].map(p99),
            [1.0, 2.0, 99.0, 99.0, 100.0, 198.0, 199.0]
        );
    }
}
