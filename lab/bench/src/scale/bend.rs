//! Where a curve bends: how a figure grows from one size to the next. Pure.

use serde::Serialize;

/// Exponent above which a figure grows faster than the size, beyond the error of measurement.
const BENDS_ABOVE: f64 = 1.15;

/// Growth of a figure between two neighbouring sizes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Growth {
    pub(crate) size_ratio: f64,
    pub(crate) ratio: f64,
    /// 1: the figure grows as the size; 0: it does not grow; 2: with the square.
    pub(crate) exponent: f64,
}

impl Growth {
    /// Computes the growth between two points (size, figure). Returns `None` if one is not positive
    /// or the sizes are equal.
    fn between(from: (f64, f64), to: (f64, f64)) -> Option<Growth> {
        let (size_ratio, ratio) = (to.0 / from.0, to.1 / from.1);
        let is_positive = [from.0, from.1, to.0, to.1].iter().all(|value| *value > 0.0);
        let exponent = ratio.ln() / size_ratio.ln();
        (is_positive && exponent.is_finite()).then_some(Growth { size_ratio, ratio, exponent })
    }

    /// Returns whether the curve bends upwards here.
    pub(crate) fn bends(&self) -> bool {
        self.exponent > BENDS_ABOVE
    }
}

/// Returns the growth from each point (size, figure) to the next; `None` where there is no figure.
pub(crate) fn growths(points: &[(f64, Option<f64>)]) -> Vec<Option<Growth>> {
    let growth = |pair: &[(f64, Option<f64>)]| {
        let [(from, before), (to, after)] = pair else { return None };
        Growth::between((*from, (*before)?), (*to, (*after)?))
    };
    points.windows(2).map(growth).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_bends_where_it_grows_faster_than_the_size() {
        let points = [(1.0, Some(3.0)), (2.0, Some(6.0)), (4.0, Some(24.0)), (8.0, Some(24.0))];
        let growths: Vec<Growth> = growths(&points).into_iter().flatten().collect();
        let exponents: Vec<f64> = growths.iter().map(|growth| growth.exponent).collect();
        for (found, expected) in exponents.iter().zip([1.0, 2.0, 0.0]) {
            assert!((found - expected).abs() < 1e-9, "{exponents:?}");
        }
        let bends: Vec<bool> = growths.iter().map(Growth::bends).collect();
        assert_eq!((bends, growths[1].ratio), (vec![false, true, false], 4.0));
    }

    #[test]
    fn there_is_no_growth_without_two_figures() {
        assert_eq!(growths(&[]), []);
        assert_eq!(growths(&[(1.0, Some(1.0))]), []);
        let missing = [(1.0, None), (2.0, Some(1.0)), (2.0, Some(2.0)), (4.0, Some(0.0))];
        assert_eq!(growths(&missing), [None, None, None]);
    }
}
