//! Units that people type: link rates, round-trip times and loss, with their arithmetic. A link's
//! rate is in bits of Ethernet frames per second, as the kernel's own shapers count it: TCP over
//! IPv4 with timestamps carries 1448 of each 1514 bytes, 95.6 % of it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub use godwit_types::BitRate;
use godwit_types::parse_scaled;
use serde::{Deserialize, Serialize};

/// Error in a time, a loss or an address family that a user typed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The text is not a time.
    #[error(
        "`{0}` is no round-trip time: write a number and a unit, such as 10ms, 500us or 1s, at \
         most 10s"
    )]
    Time(String),
    /// The text is not a loss.
    #[error("`{0}` is no packet loss: write a percentage from 0% to below 100%, such as 0.1%")]
    Loss(String),
    /// The text is not an address family.
    #[error("`{0}` is no address family: write ipv4, ipv6 or both")]
    Family(String),
}

/// A round-trip time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rtt(Duration);

impl Rtt {
    /// Returns the round-trip time.
    #[must_use]
    pub fn duration(self) -> Duration {
        self.0
    }

    /// Returns the delay of one direction.
    #[must_use]
    pub fn one_way(self) -> Duration {
        self.0 / 2
    }
}

impl From<Duration> for Rtt {
    fn from(duration: Duration) -> Rtt {
        Rtt(duration)
    }
}

const TIME_UNITS: [(&str, u64); 4] =
    [("ms", 1_000_000), ("us", 1_000), ("ns", 1), ("s", 1_000_000_000)];

impl FromStr for Rtt {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Rtt, UnitError> {
        let wrong = || UnitError::Time(text.to_owned());
        let lower = text.trim().to_ascii_lowercase();
        if lower == "0" {
            return Ok(Rtt::default());
        }
        let (number, unit) = TIME_UNITS
            .iter()
            .find_map(|(name, unit)| Some((lower.strip_suffix(name)?, *unit)))
            .ok_or_else(wrong)?;
        let ns = parse_scaled(number, unit).ok_or_else(wrong)?;
        if ns > 10_000_000_000 {
            return Err(wrong());
        }
        Ok(Rtt(Duration::from_nanos(ns)))
    }
}

impl TryFrom<String> for Rtt {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Rtt, UnitError> {
        text.parse()
    }
}

impl From<Rtt> for String {
    fn from(rtt: Rtt) -> String {
        rtt.to_string()
    }
}

impl fmt::Display for Rtt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.as_nanos();
        match ns {
            0 => f.write_str("0ms"),
            ns if ns.is_multiple_of(1_000_000) => write!(f, "{}ms", ns / 1_000_000),
            ns if ns.is_multiple_of(1_000) => write!(f, "{}us", ns / 1_000),
            ns => write!(f, "{ns}ns"),
        }
    }
}

/// Share of packets that a link loses, each independently, in parts per million.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Loss {
    parts_per_million: u32,
}

impl Loss {
    /// Returns whether nothing is lost.
    #[must_use]
    pub fn is_none(self) -> bool {
        self.parts_per_million == 0
    }

    /// Returns the parts per million.
    #[must_use]
    pub fn parts_per_million(self) -> u32 {
        self.parts_per_million
    }
}

impl FromStr for Loss {
    type Err = UnitError;

    /// Parses `0.1%` or the plain fraction `0.001`.
    fn from_str(text: &str) -> Result<Loss, UnitError> {
        let wrong = || UnitError::Loss(text.to_owned());
        let trimmed = text.trim();
        let (number, unit) = match trimmed.strip_suffix('%') {
            Some(number) => (number, 10_000),
            None => (trimmed, 1_000_000),
        };
        let parts = parse_scaled(number, unit).ok_or_else(wrong)?;
        match u32::try_from(parts) {
            Ok(parts_per_million) if parts_per_million < 1_000_000 => {
                Ok(Loss { parts_per_million })
            }
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Loss {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Loss, UnitError> {
        text.parse()
    }
}

impl From<Loss> for String {
    fn from(loss: Loss) -> String {
        loss.to_string()
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.parts_per_million / 10_000, self.parts_per_million % 10_000);
        if rest == 0 {
            return write!(f, "{whole}%");
        }
        let digits = format!("{rest:04}");
        write!(f, "{whole}.{}%", digits.trim_end_matches('0'))
    }
}

/// Address families on the migration networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Only IPv4.
    Ipv4,
    /// Only IPv6.
    Ipv6,
    /// One address of each family.
    #[default]
    Both,
}

impl FromStr for Family {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Family, UnitError> {
        match text.trim().to_ascii_lowercase().as_str() {
            "ipv4" => Ok(Family::Ipv4),
            "ipv6" => Ok(Family::Ipv6),
            "both" => Ok(Family::Both),
            _ => Err(UnitError::Family(text.to_owned())),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::Ipv4 => "ipv4",
            Family::Ipv6 => "ipv6",
            Family::Both => "both",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_are_read_and_written() {
        assert_eq!("10ms".parse::<Rtt>().unwrap().one_way(), Duration::from_millis(5));
        assert_eq!("0.5ms".parse::<Rtt>().unwrap().to_string(), "500us");
        assert_eq!("0".parse::<Rtt>().unwrap().to_string(), "0ms");
        assert_eq!("1s".parse::<Rtt>().unwrap().to_string(), "1000ms");
        for text in ["10", "ms", "11s", "-1ms"] {
            assert!(text.parse::<Rtt>().is_err(), "{text}");
        }
    }

    #[test]
    fn loss_is_read_and_written() {
        assert_eq!("0.1%".parse::<Loss>().unwrap().parts_per_million(), 1000);
        assert_eq!("0.001".parse::<Loss>().unwrap().to_string(), "0.1%");
        assert_eq!("2%".parse::<Loss>().unwrap().to_string(), "2%");
        assert!("0".parse::<Loss>().unwrap().is_none());
        for text in ["100%", "1", "%", "x", "-1%"] {
            assert!(text.parse::<Loss>().is_err(), "{text}");
        }
    }

    #[test]
    fn families_are_read_and_written() {
        for family in [Family::Ipv4, Family::Ipv6, Family::Both] {
            assert_eq!(family.to_string().parse(), Ok(family));
        }
        assert!("ipv5".parse::<Family>().is_err());
    }

    proptest! {
        #[test]
        fn written_losses_read_back(parts_per_million in 0_u32..1_000_000) {
            let loss = Loss { parts_per_million };
            prop_assert_eq!(loss.to_string().parse::<Loss>().unwrap(), loss);
        }
    }
}
