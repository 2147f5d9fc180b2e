//! Rates and rate limits as people write them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Lowest limit that is accepted. At what it leaves for pages, a page takes 65 ms. Below it, the
/// streams of a host that share it come near the ten seconds of silence that a peer takes for their
/// end.
pub const LEAST_LIMIT: BitRate = BitRate(1_000_000);
/// Highest rate.
const MOST_BITS_PER_S: u64 = 10_000_000_000_000;

/// Error in a rate or a limit that a user typed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RateError {
    /// The text is not a rate.
    #[error("`{0}` is not a rate: write a number and a unit, such as 1gbit, 200mbit or 64kbit")]
    Rate(String),
    /// The text is neither a rate nor `none`.
    #[error(
        "`{0}` is not a limit: write a rate such as 2gbit or 500mbit, at least {LEAST_LIMIT}, or \
        none"
    )]
    Limit(String),
    /// The limit is zero, at which nothing would ever arrive.
    #[error(
        "a limit of zero would let nothing through: write none for no limit, or at least \
        {LEAST_LIMIT}"
    )]
    ZeroLimit,
    /// The limit is too low for a migration to survive.
    #[error(
        "a limit of {0} is too low: below {LEAST_LIMIT} peers take streams for dead; write at \
        least that, or none"
    )]
    LimitTooLow(BitRate),
}

/// Rate in bits per second, never zero. Its user defines what it counts: the lab's links count
/// Ethernet frames; limits count the bytes handed to TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BitRate(u64);

impl BitRate {
    /// Creates a rate of `bits_per_second`. Returns `None` for zero, at which nothing would ever
    /// arrive.
    #[must_use]
    pub fn new(bits_per_second: u64) -> Option<BitRate> {
        (bits_per_second > 0).then_some(BitRate(bits_per_second))
    }

    /// Returns the rate in bits per second.
    #[must_use]
    pub fn bits_per_second(self) -> u64 {
        self.0
    }

    /// Returns how long `bytes` take on the wire, in nanoseconds, rounded up.
    #[must_use]
    pub fn serialisation_ns(self, bytes: u64) -> u64 {
        let ns = (u128::from(bytes) * 8 * 1_000_000_000).div_ceil(u128::from(self.0));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Returns how many whole bytes pass in `time`.
    #[must_use]
    pub fn bytes_in(self, time: Duration) -> u64 {
        let bytes = u128::from(self.0) * time.as_nanos() / 8 / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

const RATE_UNITS: [(&str, u64); 4] =
    [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];

impl FromStr for BitRate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<BitRate, RateError> {
        bits_of(text).and_then(BitRate::new).ok_or_else(|| RateError::Rate(text.to_owned()))
    }
}

impl TryFrom<String> for BitRate {
    type Error = RateError;

    fn try_from(text: String) -> Result<BitRate, RateError> {
        text.parse()
    }
}

impl From<BitRate> for String {
    fn from(rate: BitRate) -> String {
        rate.to_string()
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = RATE_UNITS
            .iter()
            .find(|(_, unit)| self.0.is_multiple_of(*unit))
            .copied()
            .unwrap_or(("bit", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

/// Parses the bits per second that a text names; zero is allowed.
fn bits_of(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let mut units = RATE_UNITS.iter();
    let (number, unit) = units.find_map(|(name, unit)| Some((lower.strip_suffix(name)?, *unit)))?;
    // 10 Tbit/s: a higher rate is a typing error, and the arithmetic stays far from its limits.
    parse_scaled(number, unit).filter(|bits| *bits <= MOST_BITS_PER_S)
}

/// Limit that an operator sets: a rate of at least [`LEAST_LIMIT`], or no limit. As text `2gbit`,
/// or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RateLimit(Option<BitRate>);

impl RateLimit {
    pub const NONE: RateLimit = RateLimit(None);

    /// Returns the rate, or `None` if there is no limit.
    #[must_use]
    pub fn rate(self) -> Option<BitRate> {
        self.0
    }
}

impl FromStr for RateLimit {
    type Err = RateError;

    fn from_str(text: &str) -> Result<RateLimit, RateError> {
        let trimmed = text.trim();
        if trimmed.eq_ignore_ascii_case("none") {
            return Ok(RateLimit::NONE);
        }
        let bits = if trimmed == "0" { Some(0) } else { bits_of(trimmed) };
        match bits.map(BitRate::new) {
            None => Err(RateError::Limit(text.to_owned())),
            Some(None) => Err(RateError::ZeroLimit),
            Some(Some(rate)) if rate < LEAST_LIMIT => Err(RateError::LimitTooLow(rate)),
            Some(rate) => Ok(RateLimit(rate)),
        }
    }
}

impl TryFrom<String> for RateLimit {
    type Error = RateError;

    fn try_from(text: String) -> Result<RateLimit, RateError> {
        text.parse()
    }
}

impl From<RateLimit> for String {
    fn from(limit: RateLimit) -> String {
        limit.to_string()
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(rate) => rate.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Multiplies `number` (digits, at most one point) by `unit`, exactly. Digits below one unit are
/// refused.
#[must_use]
pub fn parse_scaled(number: &str, unit: u64) -> Option<u64> {
    let number = number.trim();
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() && part.is_empty() || !digits(whole) || !digits(part) || part.len() > 9 {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let part_value: u64 = if part.is_empty() { 0 } else { part.parse().ok()? };
    let scale = 10_u64.checked_pow(u32::try_from(part.len()).ok()?)?;
    let part_units = part_value.checked_mul(unit)?;
    if !part_units.is_multiple_of(scale) {
        return None;
    }
    whole.checked_mul(unit)?.checked_add(part_units / scale)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rates_are_read_and_written() {
        for (text, bits) in [
            ("1gbit", 1_000_000_000),
            ("200mbit", 200_000_000),
            ("1.5gbit", 1_500_000_000),
            ("7bit", 7),
        ] {
            assert_eq!(text.parse::<BitRate>().unwrap().bits_per_second(), bits, "{text}");
        }
        assert_eq!("1.5Gbit".parse::<BitRate>().unwrap().to_string(), "1500mbit");
        for text in
            ["", "gbit", "1", "-1gbit", "0mbit", "1.gb", "1e9bit", "1.0000000001gbit", "99999gbit"]
        {
            assert_eq!(text.parse::<BitRate>(), Err(RateError::Rate(text.to_owned())));
        }
    }

    #[test]
    fn serialisation_time_of_a_full_frame() {
        let gigabit = "1gbit".parse::<BitRate>().unwrap();
        assert_eq!(gigabit.serialisation_ns(1514), 12_112);
        assert_eq!(gigabit.bytes_in(Duration::from_millis(10)), 1_250_000);
    }

    #[test]
    fn limits_are_read_and_written() {
        for (text, written) in
            [("2gbit", "2gbit"), (" None ", "none"), ("1mbit", "1mbit"), ("1500000bit", "1500kbit")]
        {
            assert_eq!(text.parse::<RateLimit>().unwrap().to_string(), written, "{text}");
        }
        assert_eq!("none".parse(), Ok(RateLimit::NONE));
        for text in ["0", "0mbit", "0.0gbit"] {
            assert_eq!(text.parse::<RateLimit>(), Err(RateError::ZeroLimit), "{text}");
        }
        let low = "999kbit".parse::<RateLimit>().unwrap_err();
        assert!(low.to_string().contains("999kbit") && low.to_string().contains("1mbit"), "{low}");
        for text in ["", "fast", "-1gbit", "1", "100", "99999gbit", "1gb"] {
            assert_eq!(text.parse::<RateLimit>(), Err(RateError::Limit(text.to_owned())));
        }
    }

    proptest! {
        #[test]
        fn written_rates_read_back(bits in 1_u64..=10_000_000_000_000) {
            let rate = BitRate::new(bits).unwrap();
            prop_assert_eq!(rate.to_string().parse::<BitRate>().unwrap(), rate);
        }

        #[test]
        fn time_and_bytes_agree(bits in 1_000_u64..100_000_000_000, bytes in 1_u64..10_000_000) {
            let rate = BitRate::new(bits).unwrap();
            let ns = rate.serialisation_ns(bytes);
            prop_assert!(rate.bytes_in(Duration::from_nanos(ns)) >= bytes);
            prop_assert!(rate.bytes_in(Duration::from_nanos(ns - 1)) <= bytes);
        }

        #[test]
        fn frames_one_by_one_take_as_long_as_all_at_once(
            bits in 1_000_u64..100_000_000_000,
            sizes in prop::collection::vec(60_u64..65_550, 1..50),
        ) {
            let rate = BitRate::new(bits).unwrap();
            let single: u64 = sizes.iter().map(|bytes| rate.serialisation_ns(*bytes)).sum();
            let together = rate.serialisation_ns(sizes.iter().sum());
            prop_assert!(single >= together && single - together <= sizes.len() as u64);
        }
    }
}
