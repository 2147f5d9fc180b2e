//! Decision after each round: another one, the pause, a limit on the guest's writes, or the end.
//! Pure: no clock and no I/O.
//!
//! The last round is sent while the guest is paused, so what is left must be sent within a budget.
//! What is left after a round is what the guest wrote during it. As long as that shrinks from round
//! to round, rounds go on. If it does not, the guest writes as fast as the streams carry: its
//! writes are limited to half of their rate, and to half of that whenever a limit was not enough.
//! Such limits are needed more than once because a bit of the bitmap covers 64 KiB: small writes
//! far apart cost more than their bytes.

use std::time::Duration;

use crate::failure::{Failure, FailureCode};

use super::streams::RoundSent;

/// A rest of at least this part of the one before is no progress.
const SAME_REST: f64 = 0.7;
/// Rounds without progress in a row, before the guest's writes are limited.
const ROUNDS_WITHOUT_PROGRESS: u32 = 2;
/// Rounds in all, after which one without progress is enough: some guests write in bursts.
const MOST_FREE_ROUNDS: u32 = 30;
/// A rest that does not shrink may take so many budgets.
const MOST_BUDGETS: f64 = 3.0;
/// Lowest limit of the guest's writes.
const LEAST_LIMIT: u64 = 1 << 20;
/// Rounds without progress under a limit, before the transfer is given up.
const MOST_LIMITED_ROUNDS: u32 = 8;
/// A round of fewer bytes says more about the round trip and the flush than about the rate.
const LEAST_MEASURED_BYTES: u64 = 4 << 20;
/// Weight of the last round in the measured rate.
const LATEST: f64 = 0.5;

/// Convergence of the rounds of a transfer.
#[derive(Clone, Debug)]
pub struct Convergence {
    budget: Duration,
    /// Bytes that the streams carry per second, those that are zero left out.
    bytes_per_s: Option<f64>,
    /// Whether the rate is that of a round that was long enough.
    is_measured: bool,
    /// Rest after the round before.
    rest_bytes: Option<u64>,
    rounds: u32,
    /// Rounds without progress in a row.
    unchanged: u32,
    limit: Option<u64>,
    /// Rounds without progress under a limit.
    limited_rounds: u32,
}

/// What follows a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another round.
    Round,
    /// The rest can be sent while the guest is paused.
    Ready,
    /// Limit the guest's writes to this rate, then another round.
    Limit { bytes_per_s: u64 },
    /// The rest does not become small enough.
    GiveUp(Failure),
}

impl Convergence {
    /// Creates the state before the first round. `budget`: time that the last round may take.
    #[must_use]
    pub fn new(budget: Duration) -> Self {
        Convergence {
            budget,
            bytes_per_s: None,
            is_measured: false,
            rest_bytes: None,
            rounds: 0,
            unchanged: 0,
            limit: None,
            limited_rounds: 0,
        }
    }

    /// Returns the measured rate of the streams, bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// Decides what follows a round. `rest_bytes`: what the guest wrote during the round, as far as
    /// is to be sent.
    pub fn after_round(&mut self, rest_bytes: u64, round: &RoundSent) -> Next {
        self.measure(round);
        let before = self.rest_bytes.replace(rest_bytes);
        let is_unchanged =
            before.is_some_and(|before| rest_bytes as f64 >= SAME_REST * before as f64);
        self.rounds = self.rounds.saturating_add(1);
        self.unchanged = if is_unchanged { self.unchanged + 1 } else { 0 };
        let budgets = self.budgets(rest_bytes);
        if budgets <= 1.0 || (is_unchanged && budgets <= MOST_BUDGETS) {
            return Next::Ready;
        }
        let may_go_on = self.unchanged < ROUNDS_WITHOUT_PROGRESS && self.rounds < MOST_FREE_ROUNDS;
        match self.limit {
            _ if !is_unchanged => Next::Round,
            None if may_go_on => Next::Round,
            None => self.limit_to(self.bytes_per_s.unwrap_or(0.0) / 2.0),
            Some(limit) => {
                self.limited_rounds += 1;
                if self.limited_rounds >= MOST_LIMITED_ROUNDS {
                    return Next::GiveUp(self.not_converging(rest_bytes, limit));
                }
                self.limit_to(limit as f64 / 2.0)
            }
        }
    }

    /// Updates the rate. A short round counts only until a longer one was measured.
    fn measure(&mut self, round: &RoundSent) {
        let free_bytes = round.zero_bytes.saturating_add(round.referenced_bytes);
        let bytes = round.bytes.saturating_sub(free_bytes);
        let seconds = round.took.as_secs_f64();
        let is_long = bytes >= LEAST_MEASURED_BYTES;
        if bytes == 0 || seconds <= 0.0 || (self.is_measured && !is_long) {
            return;
        }
        let seen = bytes as f64 / seconds;
        self.bytes_per_s = Some(match self.bytes_per_s {
            Some(before) if self.is_measured => before + (seen - before) * LATEST,
            _ => seen,
        });
        self.is_measured |= is_long;
    }

    /// Returns how many budgets it takes to send so many bytes.
    fn budgets(&self, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        let budget_bytes = self.bytes_per_s.unwrap_or(0.0) * self.budget.as_secs_f64();
        if budget_bytes > 0.0 { bytes as f64 / budget_bytes } else { f64::INFINITY }
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    fn limit_to(&mut self, bytes_per_s: f64) -> Next {
        let bytes_per_s = (bytes_per_s as u64).max(LEAST_LIMIT);
        // At the lowest limit the rounds are still counted.
        if self.limit == Some(bytes_per_s) {
            return Next::Round;
        }
        self.limit = Some(bytes_per_s);
        Next::Limit { bytes_per_s }
    }

    fn not_converging(&self, rest_bytes: u64, limit: u64) -> Failure {
        let rate = self.bytes_per_s.unwrap_or(0.0) / MIB;
        let detail = format!(
            "the guest writes its disks faster than they are copied: {:.0} MiB are left after each \
            round at {rate:.0} MiB/s, although its writes were limited to {:.0} MiB/s",
            rest_bytes as f64 / MIB,
            limit as f64 / MIB,
        );
        Failure::new(FailureCode::DisksNotConverging, detail)
    }
}

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BUDGET: Duration = Duration::from_millis(100);

    /// Returns a round of so many MiB at 100 MiB/s.
    fn round(mib: u64) -> RoundSent {
        let took = Duration::from_millis(10 * mib);
        RoundSent { bytes: mib << 20, took, ..RoundSent::default() }
    }

    #[test]
    fn a_quiet_guest_is_ready_after_the_first_round() {
        assert_eq!(Convergence::new(BUDGET).after_round(0, &round(1000)), Next::Ready);
        assert_eq!(Convergence::new(BUDGET).after_round(0, &RoundSent::default()), Next::Ready);
        assert_eq!(Convergence::new(BUDGET).after_round(10 << 20, &round(1000)), Next::Ready);
        assert_eq!(Convergence::new(BUDGET).after_round(11 << 20, &round(1000)), Next::Round);
        // Nothing is known about the rate.
        let nothing = RoundSent::default();
        assert_eq!(Convergence::new(BUDGET).after_round(512, &nothing), Next::Round);
    }

    #[test]
    fn a_rest_that_shrinks_takes_rounds_and_no_limit() {
        let mut convergence = Convergence::new(BUDGET);
        let mut rest = 1000;
        while rest > 10 {
            let next = rest * 6 / 10;
            let expected = if next <= 10 { Next::Ready } else { Next::Round };
            assert_eq!(convergence.after_round(next << 20, &round(rest)), expected);
            rest = next;
        }
    }

    #[test]
    fn a_rest_that_stays_is_sent_if_the_pause_bears_it() {
        let mut convergence = Convergence::new(BUDGET);
        assert_eq!(convergence.after_round(25 << 20, &round(1000)), Next::Round);
        assert_eq!(convergence.after_round(25 << 20, &round(25)), Next::Ready);
    }

    #[test]
    fn a_guest_that_writes_too_much_is_limited_more_and_more() {
        let mut convergence = Convergence::new(BUDGET);
        assert_eq!(convergence.after_round(500 << 20, &round(1000)), Next::Round);
        assert_eq!(convergence.after_round(500 << 20, &round(500)), Next::Round);
        let limit = |mib: u64| Next::Limit { bytes_per_s: mib << 20 };
        assert_eq!(convergence.after_round(500 << 20, &round(500)), limit(50));
        assert_eq!(convergence.after_round(500 << 20, &round(500)), limit(25));
        // Enough.
        for rest in [300, 150, 80, 40, 20] {
            assert_eq!(convergence.after_round(rest << 20, &round(rest)), Next::Round);
        }
        assert_eq!(convergence.after_round(9 << 20, &round(20)), Next::Ready);
    }

    #[test]
    fn a_guest_that_no_limit_helps_is_given_up() {
        let mut convergence = Convergence::new(BUDGET);
        let mut limits = Vec::new();
        let given_up = (0..100).find_map(|_| {
            match convergence.after_round(500 << 20, &round(500)) {
                Next::Limit { bytes_per_s } => limits.push(bytes_per_s >> 20),
                Next::GiveUp(failure) => return Some(failure),
                Next::Round => {}
                Next::Ready => panic!("ready"),
            }
            None
        });
        assert_eq!(limits, [50, 25, 12, 6, 3, 1, 1]);
        let given_up = given_up.unwrap();
        assert_eq!(given_up.code, FailureCode::DisksNotConverging);
        assert!(given_up.detail.contains("500 MiB are left"), "{given_up}");
    }

    #[test]
    fn small_rounds_do_not_spoil_the_rate() {
        let mut convergence = Convergence::new(BUDGET);
        let small =
            RoundSent { bytes: 65536, took: Duration::from_millis(40), ..RoundSent::default() };
        convergence.after_round(20 << 20, &small);
        assert!(convergence.bytes_per_s().unwrap() < 2.0 * MIB);
        convergence.after_round(20 << 20, &round(50));
        convergence.after_round(20 << 20, &small);
        assert!((convergence.bytes_per_s().unwrap() - 100.0 * MIB).abs() < MIB);
        // Zeros are no measure of the rate either.
        let zeros = RoundSent { zero_bytes: 1000 << 20, ..round(1000) };
        convergence.after_round(20 << 20, &zeros);
        assert!((convergence.bytes_per_s().unwrap() - 100.0 * MIB).abs() < MIB);
    }

    proptest! {
        /// However the guest writes, the rounds end.
        #[test]
        fn rounds_end(shares in prop::collection::vec(0.0..3.0f64, 400)) {
            let mut convergence = Convergence::new(BUDGET);
            let (mut rest, mut unchanged) = (4_u64 << 30, 0);
            for share in shares {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // below 2^40
                let next = ((rest as f64 * share) as u64).min(1 << 40);
                unchanged += u32::from(next as f64 >= SAME_REST * rest as f64);
                let sent = RoundSent {
                    bytes: rest,
                    took: Duration::from_secs_f64(rest as f64 / (100.0 * MIB)),
                    ..RoundSent::default()
                };
                match convergence.after_round(next, &sent) {
                    Next::Ready | Next::GiveUp(_) => return Ok(()),
                    Next::Limit { bytes_per_s } => prop_assert!(bytes_per_s >= LEAST_LIMIT),
                    Next::Round => {}
                }
                rest = next.max(1);
            }
            prop_assert!(unchanged < 40, "{unchanged} rounds without progress");
        }
    }
}
