//! A token bucket: arithmetic alone. It receives the time and a number of bytes, and returns
//! whether they may be sent or how long to wait.

use std::time::Duration;

use godwit_types::BitRate;

/// A piece takes this fraction of a second at the limit: 2 ms.
const PIECES_A_SECOND: u64 = 500;
/// Smallest piece. Below a few pages the extra calls cost more than the smoothness is worth.
pub(super) const LEAST_PIECE_BYTES: u64 = 16 << 10;
/// Largest piece. A larger one would let one migration keep another waiting.
pub(super) const MOST_PIECE_BYTES: u64 = 256 << 10;
/// The burst after a pause takes this fraction of a second at the limit: 5 ms. It makes up for a
/// thread that wakes up late.
const BURSTS_A_SECOND: u64 = 200;
/// This fraction of a limit is reserved for control traffic: 2 %.
const RESERVE_PART: u64 = 50;
/// Smallest reserve, in bits per second, unless it exceeds half of the limit.
const LEAST_RESERVE_BITS_PER_S: u64 = 1_000_000;

/// Levels are kept in bytes times this factor, so that rounding loses nothing.
const SCALE: i128 = 1_000_000_000;

/// Returns what a limit leaves for pages, in bytes per second. Control traffic is not paced and has
/// a reserved part.
pub(super) fn data_bytes_per_s(limit: BitRate) -> u64 {
    let bits = limit.bits_per_second();
    let reserve = (bits / RESERVE_PART).max(LEAST_RESERVE_BITS_PER_S).min(bits / 2);
    ((bits - reserve) / 8).max(1)
}

/// Returns the size of a piece at a rate.
pub(super) fn piece_bytes(bytes_per_s: u64) -> u64 {
    (bytes_per_s / PIECES_A_SECOND).clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
}

#[derive(Clone, Debug)]
pub(super) struct Bucket {
    bytes_per_s: u64,
    /// Scaled level; negative after a piece that exceeded the burst.
    level: i128,
    at: Duration,
}

impl Bucket {
    /// Creates a full bucket.
    pub(super) fn new(now: Duration, bytes_per_s: u64) -> Self {
        let mut bucket = Bucket { bytes_per_s, level: 0, at: now };
        bucket.level = bucket.burst();
        bucket
    }

    /// Returns the largest burst, in bytes.
    pub(super) fn burst_bytes(&self) -> u64 {
        (self.bytes_per_s / BURSTS_A_SECOND).max(2 * piece_bytes(self.bytes_per_s))
    }

    fn burst(&self) -> i128 {
        i128::from(self.burst_bytes()) * SCALE
    }

    fn refill(&mut self, now: Duration) {
        let since = now.saturating_sub(self.at);
        let gained = i128::from(self.bytes_per_s)
            .saturating_mul(i128::try_from(since.as_nanos()).unwrap_or(i128::MAX));
        self.level = self.level.saturating_add(gained).min(self.burst());
        self.at = self.at.max(now);
    }

    /// Sets another rate from `now` on.
    pub(super) fn set_rate(&mut self, now: Duration, bytes_per_s: u64) {
        self.refill(now);
        self.bytes_per_s = bytes_per_s;
        self.level = self.level.min(self.burst());
    }

    /// Counts bytes that were sent without a request. Later requests wait for them.
    pub(super) fn charge(&mut self, now: Duration, bytes: u64) {
        self.refill(now);
        self.level -= i128::from(bytes) * SCALE;
    }

    /// Takes the bytes, or returns how long it takes until they are available. More than a burst is
    /// granted when the bucket is full, and later requests wait for it.
    pub(super) fn take(&mut self, now: Duration, bytes: u64) -> Result<(), Duration> {
        self.refill(now);
        let wanted = i128::from(bytes) * SCALE;
        let missing = wanted.min(self.burst()) - self.level;
        if missing <= 0 {
            self.level -= wanted;
            return Ok(());
        }
        let rate = i128::from(self.bytes_per_s.max(1));
        let wait_ns = (missing + rate - 1) / rate;
        Err(Duration::from_nanos(u64::try_from(wait_ns).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_traffic_has_its_part() {
        let left = |text: &str| data_bytes_per_s(text.parse().unwrap()) * 8;
        assert_eq!(left("10gbit"), 9_800_000_000);
        assert_eq!(left("10mbit"), 9_000_000, "at least 1 Mbit/s is kept");
        assert_eq!(left("1mbit"), 500_000, "but no more than half");
    }

    #[test]
    fn more_than_a_burst_waits_for_a_full_bucket_and_is_paid_for() {
        let mut bucket = Bucket::new(Duration::ZERO, 1_000_000);
        let burst = bucket.burst_bytes();
        assert_eq!(bucket.take(Duration::ZERO, 3 * burst), Ok(()));
        let wait = bucket.take(Duration::ZERO, burst).unwrap_err();
        assert_eq!(wait, Duration::from_micros(3 * burst));
        assert_eq!(bucket.take(wait, burst), Ok(()));
    }

    #[test]
    fn unrequested_bytes_are_charged_later() {
        let mut bucket = Bucket::new(Duration::ZERO, 1_000_000);
        let burst = bucket.burst_bytes();
        bucket.charge(Duration::ZERO, 2 * burst);
        assert_eq!(bucket.take(Duration::ZERO, burst), Err(Duration::from_micros(2 * burst)));
    }

    /// Generates a sender that sends continuously and wakes up a little late: (rate, pieces,
    /// lateness of each wake-up).
    fn senders() -> impl Strategy<Value = (u64, Vec<(u64, u64)>)> {
        let rate = 62_500_u64..2_000_000_000;
        rate.prop_flat_map(|rate| {
            let piece = (1_u64..=piece_bytes(rate), 0_u64..1_000_000);
            (Just(rate), prop::collection::vec(piece, 1..400))
        })
    }

    proptest! {
        #[test]
        fn no_window_gets_more_than_the_rate_and_a_burst((rate, pieces) in senders()) {
            let mut bucket = Bucket::new(Duration::ZERO, rate);
            let mut now = Duration::ZERO;
            let mut sent = Vec::new();
            for (piece, late_ns) in pieces {
                while let Err(wait) = bucket.take(now, piece) {
                    now += wait + Duration::from_nanos(late_ns);
                }
                sent.push((now, piece));
            }
            let burst = u128::from(bucket.burst_bytes());
            for (first, (from, _)) in sent.iter().enumerate() {
                let mut bytes = 0;
                for (until, piece) in &sent[first..] {
                    bytes += u128::from(*piece);
                    let allowed =
                        u128::from(rate) * (*until - *from).as_nanos() / 1_000_000_000 + burst;
                    prop_assert!(
                        bytes <= allowed,
                        "{bytes} of {allowed} from {from:?} to {until:?}"
                    );
                }
            }
        }

        #[test]
        fn a_constant_sender_gets_the_rate(
            rate in 62_500_u64..2_000_000_000,
            late_ns in 0_u64..1_000_000,
        ) {
            let mut bucket = Bucket::new(Duration::ZERO, rate);
            let (mut now, mut bytes) = (Duration::ZERO, 0_u64);
            let piece = piece_bytes(rate);
            while now < Duration::from_secs(5) {
                match bucket.take(now, piece) {
                    Ok(()) => bytes += piece,
                    Err(wait) => now += wait + Duration::from_nanos(late_ns),
                }
            }
            let fair = rate as f64 * now.as_secs_f64();
            prop_assert!(bytes as f64 >= 0.97 * fair, "{bytes} of {fair}");
        }

        #[test]
        fn a_wait_is_neither_too_short_nor_too_long(
            rate in 1_u64..2_000_000_000,
            bytes in 1_u64..1 << 20,
        ) {
            let mut bucket = Bucket::new(Duration::ZERO, rate);
            let now = Duration::from_secs(1);
            let _ = bucket.take(now, bucket.burst_bytes());
            if let Err(wait) = bucket.take(now, bytes) {
                let early = now + wait.saturating_sub(Duration::from_nanos(1));
                prop_assert!(bucket.clone().take(early, bytes).is_err());
                prop_assert_eq!(bucket.take(now + wait, bytes), Ok(()));
            }
        }

        #[test]
        fn a_new_rate_grants_no_extra_bytes(
            rates in prop::collection::vec(62_500_u64..1_000_000_000, 2..20),
        ) {
            let mut bucket = Bucket::new(Duration::ZERO, rates[0]);
            let now = Duration::from_secs(1);
            let _ = bucket.take(now, bucket.burst_bytes());
            for rate in rates {
                bucket.set_rate(now, rate);
                prop_assert!(bucket.take(now, 1).is_err());
            }
        }
    }
}
