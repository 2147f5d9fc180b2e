//! Displayed time to completion: it may pause, but never grows.

/// Shortest time, in milliseconds, after which an estimate is meaningful.
const SETTLING_MS: f64 = 500.0;

/// Returns the next figure to show. `shown` is the last one (`None` at first), `estimate` the
/// newest estimate of the engine. A lower estimate is shown immediately; with a higher one, the
/// figure pauses until time catches up.
#[must_use]
pub(super) fn next_eta_ms(
    shown: Option<f64>,
    estimate: Option<f64>,
    elapsed_ms: f64,
) -> Option<f64> {
    let estimate = estimate.filter(|estimate| estimate.is_finite() && *estimate >= 0.0);
    match (shown, estimate) {
        (Some(shown), Some(estimate)) => Some(shown.min(estimate)),
        (Some(shown), None) => Some(shown),
        (None, Some(estimate)) if elapsed_ms >= SETTLING_MS => Some(estimate),
        (None, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_grows() {
        let mut shown = None;
        let estimates = [
            Some(9e3),
            Some(5e3),
            Some(7e3),
            None,
            Some(4e3),
            Some(f64::INFINITY),
            Some(f64::NAN),
            Some(-1.0),
            Some(0.0),
        ];
        let mut last = f64::INFINITY;
        for (step, estimate) in (0_u32..).zip(estimates) {
            shown = next_eta_ms(shown, estimate, 600.0 + f64::from(step));
            let now = shown.unwrap();
            assert!(now <= last, "{now} after {last}");
            last = now;
        }
        assert!(last.abs() < 1e-9);
    }

    #[test]
    fn the_first_guesses_are_not_shown() {
        assert_eq!(next_eta_ms(None, Some(3.0), 100.0), None);
        assert_eq!(next_eta_ms(None, None, 1000.0), None);
        assert_eq!(next_eta_ms(None, Some(3.0), 1000.0), Some(3.0));
    }
}
