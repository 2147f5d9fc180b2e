//! Decision on each round right before a stop of the guest: it is sent and another one follows, it
//! is the last one, or the stop is put off. Pure: no clock and no I/O.
//!
//! What is left at the stop is sent while the guest is paused. These rounds have the link to
//! themselves, but the guest writes memory meanwhile, so they may take only a moment. The first of
//! them may take longer than that alone: the rounds before it shared the link with the memory, and
//! the guest wrote much during each of them. Then the memory sends another round, the disks go on
//! with theirs, and the next attempt begins with less.

use std::time::Duration;

/// Longest time for the rounds right before a stop.
const SETTLING: Duration = Duration::from_millis(250);
/// Bytes that are little enough on any link.
const LITTLE_BYTES: u64 = 1 << 20;
/// Part of the pause that the rest of the disks may take without a put-off.
const LITTLE_TIME: Duration = Duration::from_millis(10);
/// Most stops of a transfer that are put off because too much is left.
const MOST_PUT_OFFS: u32 = 2;

/// Rounds right before a stop, for all attempts of a transfer.
#[derive(Clone, Debug, Default)]
pub(super) struct BeforeStop {
    /// Bytes of the round before, in this attempt.
    before: Option<u64>,
    /// Bytes that were left when a stop was put off last.
    before_put_off: Option<u64>,
    put_offs: u32,
}

/// What is done with a listed round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Send it, and list another one.
    Round,
    /// Send it; then the guest may be stopped.
    Stop,
    /// Do not stop the guest for now: too much is left, and there is less each time.
    PutOff,
}

impl BeforeStop {
    /// Begins an attempt.
    pub(super) fn begins(&mut self) {
        self.before = None;
    }

    /// Decides on a round of so many bytes that is listed. `elapsed`: time since the attempt began.
    /// `bytes_per_s`: measured rate of the streams.
    pub(super) fn before_round(
        &mut self,
        bytes: u64,
        elapsed: Duration,
        bytes_per_s: Option<f64>,
    ) -> Then {
        let before = self.before.replace(bytes);
        if bytes <= LITTLE_BYTES || !is_less(bytes, before) {
            return Then::Stop;
        }
        if elapsed < SETTLING {
            return Then::Round;
        }
        let may_put_off = self.put_offs < MOST_PUT_OFFS && is_less(bytes, self.before_put_off);
        if !may_put_off || expected_rest(bytes, before) <= little(bytes_per_s) {
            return Then::Stop;
        }
        self.put_offs += 1;
        self.before_put_off = Some(bytes);
        Then::PutOff
    }
}

/// Returns whether rounds become smaller. What does not become less would become more.
fn is_less(bytes: u64, before: Option<u64>) -> bool {
    before.is_none_or(|before| bytes / 7 < before / 8)
}

/// Returns what is left after a round, in bytes: each leaves the same part of what it sends. After
/// the first one that part is unknown, and at most all is assumed.
fn expected_rest(bytes: u64, before: Option<u64>) -> f64 {
    let bytes = bytes as f64;
    before.map_or(bytes, |before| bytes * bytes / before as f64)
}

/// Returns how many bytes are little on a link of this rate.
fn little(bytes_per_s: Option<f64>) -> f64 {
    (bytes_per_s.unwrap_or(0.0) * LITTLE_TIME.as_secs_f64()).max(LITTLE_BYTES as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    /// Rate of a link of 1 Gb/s.
    const GIGABIT: Option<f64> = Some(117e6);

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn rounds_go_on_until_little_is_left() {
        let mut rounds = BeforeStop::default();
        rounds.begins();
        assert_eq!(rounds.before_round(12 * MIB, millis(110), GIGABIT), Then::Round);
        assert_eq!(rounds.before_round(6 * MIB, millis(170), GIGABIT), Then::Round);
        assert_eq!(rounds.before_round(3 * MIB, millis(200), GIGABIT), Then::Round);
        assert_eq!(rounds.before_round(MIB, millis(210), GIGABIT), Then::Stop);
        // Nothing was left.
        assert_eq!(BeforeStop::default().before_round(0, millis(400), None), Then::Stop);
    }

    /// Begins an attempt, and lists two rounds of so many MiB. Returns the decision on the second.
    fn attempt(rounds: &mut BeforeStop, [first, second]: [u64; 2], elapsed_ms: u64) -> Then {
        rounds.begins();
        assert_eq!(rounds.before_round(first * MIB, millis(10), GIGABIT), Then::Round);
        rounds.before_round(second * MIB, millis(elapsed_ms), GIGABIT)
    }

    #[test]
    fn a_first_round_that_takes_long_puts_the_stop_off_twice_at_most() {
        let mut rounds = BeforeStop::default();
        assert_eq!(attempt(&mut rounds, [31, 21], 300), Then::PutOff);
        // The next attempt is compared with its own rounds.
        assert_eq!(attempt(&mut rounds, [26, 14], 250), Then::PutOff);
        assert_eq!(attempt(&mut rounds, [14, 9], 260), Then::Stop);
    }

    #[test]
    fn rounds_that_do_not_become_smaller_do_not_put_the_stop_off() {
        assert_eq!(attempt(&mut BeforeStop::default(), [12, 11], 260), Then::Stop);
        // Nor does an attempt that has as much left as the one before.
        let mut rounds = BeforeStop::default();
        assert_eq!(attempt(&mut rounds, [31, 21], 289), Then::PutOff);
        assert_eq!(attempt(&mut rounds, [31, 21], 289), Then::Stop);
    }

    #[test]
    fn what_is_little_depends_on_the_rate() {
        let after = |bytes_per_s| {
            let mut rounds = BeforeStop::default();
            rounds.begins();
            assert_eq!(rounds.before_round(8 * MIB, millis(200), bytes_per_s), Then::Round);
            rounds.before_round(4 * MIB, millis(260), bytes_per_s)
        };
        // 2 MiB will be left.
        assert_eq!(after(Some(1e9)), Then::Stop);
        assert_eq!(after(GIGABIT), Then::PutOff);
        assert_eq!(after(Some(0.0)), Then::PutOff);
        assert_eq!(after(None), Then::PutOff);
        let mut rounds = BeforeStop::default();
        assert_eq!(rounds.before_round(MIB, millis(900), Some(1e6)), Then::Stop);
    }

    proptest! {
        #[test]
        fn attempts_end_and_few_are_put_off(
            rounds in prop::collection::vec((any::<u64>(), 0..600_u64), 1..200),
            bytes_per_s in prop::option::of(0.0..1e11_f64),
        ) {
            let (mut before_stop, mut put_offs, mut in_a_row) = (BeforeStop::default(), 0, 0);
            before_stop.begins();
            for (bytes, elapsed_ms) in rounds {
                let then = before_stop.before_round(bytes, millis(elapsed_ms), bytes_per_s);
                match then {
                    Then::Round => in_a_row += 1,
                    Then::PutOff => put_offs += 1,
                    Then::Stop => {}
                }
                let is_late = millis(elapsed_ms) >= SETTLING;
                let never = if is_late { Then::Round } else { Then::PutOff };
                prop_assert_ne!(then, never);
                prop_assert!(then == Then::Stop || bytes > LITTLE_BYTES);
                if then != Then::Round {
                    before_stop.begins();
                    in_a_row = 0;
                }
                // Each is at most about seven eighths of the one before.
                prop_assert!(in_a_row < 260);
            }
            prop_assert!(put_offs <= MOST_PUT_OFFS);
        }

        /// A guest that writes less than the link carries is stopped with little left, or after
        /// all put-offs.
        #[test]
        fn little_is_left_or_all_put_offs_are_used(
            first_mib in 1..64_u64,
            share in 0.1..0.7_f64,
        ) {
            let (mut before_stop, mut put_offs) = (BeforeStop::default(), 0);
            let (mut bytes, rate) = ((first_mib * MIB) as f64, 117e6);
            loop {
                before_stop.begins();
                let mut elapsed = 0.0;
                let then = loop {
                    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                    let listed = bytes as u64; // at most 2^26
                    let time = Duration::from_secs_f64(elapsed);
                    let then = before_stop.before_round(listed, time, Some(rate));
                    if then == Then::PutOff {
                        break then;
                    }
                    // It is sent, and the guest writes meanwhile.
                    elapsed += bytes / rate;
                    bytes *= share;
                    if then == Then::Stop {
                        break then;
                    }
                };
                if then == Then::Stop {
                    break;
                }
                put_offs += 1;
            }
            let is_little = bytes <= 1.1 * little(Some(rate));
            prop_assert!(is_little || put_offs == MOST_PUT_OFFS, "{bytes} left");
        }
    }
}
