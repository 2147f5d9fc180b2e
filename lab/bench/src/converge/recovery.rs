//! How soon after the switchover a guest works at its former rate again. Pure.

use crate::converge::series::Seen;

/// Time over which its rate is measured: a guest that was paused makes up for up to a tenth of a
/// second with a burst, which is not its rate.
const WINDOW_MS: f64 = 1000.0;

/// Returns the time from `since_ms` until the first answer from which on the guest, for a second,
/// wrote at least `share` of its undisturbed rate. Returns `None` if it did not while it was
/// sampled.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
pub(crate) fn back_after_ms(
    guest: &[Seen],
    since_ms: f64,
    undisturbed_writes_per_s: f64,
    share: f64,
) -> Option<f64> {
    let answers: Vec<(f64, u64)> = (guest.iter())
        .filter(|seen| seen.ms >= since_ms)
        .filter_map(|seen| Some((seen.ms, seen.done?.writes)))
        .collect();
    answers.iter().enumerate().find_map(|(place, (from_ms, before))| {
        let (to_ms, writes) = answers[place..].iter().find(|(ms, _)| ms - from_ms >= WINDOW_MS)?;
        let writes_per_s = writes.saturating_sub(*before) as f64 / (to_ms - from_ms) * 1e3;
        (writes_per_s >= share * undisturbed_writes_per_s).then_some(from_ms - since_ms)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::converge::series::tests::guest;

    /// Computes the recovery of a guest that writes 10,000 pages per second undisturbed, sampled
    /// every 200 ms from 0 on.
    fn back(rates: &[f64], since_ms: f64) -> Option<f64> {
        back_after_ms(&guest(rates), since_ms, 10_000.0, 0.9)
    }

    #[test]
    fn one_that_lost_nothing_is_back_at_once() {
        assert_eq!(back(&[10.0; 10], 0.0), Some(0.0));
        // The first answer after the pause began.
        assert_eq!(back(&[10.0; 10], 300.0), Some(100.0));
    }

    #[test]
    fn back_is_where_a_whole_second_is_fast_enough() {
        let rates = [0.0, 2.0, 4.0, 6.0, 8.0, 9.5, 9.5, 9.5, 9.5, 9.5, 9.5];
        // From 800 ms on a second has 8 and four times 9.5: 9.2 on average.
        assert_eq!(back(&rates, 0.0), Some(800.0));
    }

    #[test]
    fn a_burst_is_not_back() {
        let rates = [0.0, 14.0, 5.0, 5.0, 5.0, 5.0, 5.0, 4.0, 10.0, 10.0, 10.0, 10.0, 10.0];
        assert_eq!(back(&rates, 0.0), Some(1600.0));
    }

    #[test]
    fn one_that_is_too_slow_or_was_not_asked_long_enough_is_not_back() {
        assert_eq!(back(&[8.9; 20], 0.0), None);
        assert_eq!(back(&[10.0; 4], 0.0), None);
        assert_eq!(back(&[], 0.0), None);
    }

    #[test]
    fn silence_counts_by_what_was_done_in_it() {
        let mut silent = guest(&[10.0, 10.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]);
        silent[3].done = None;
        silent[4].done = None;
        // A window from 400 ms on has 400 ms without a write.
        assert_eq!(back_after_ms(&silent, 400.0, 10_000.0, 0.9), Some(600.0));
    }
}
