//! How long images stay at this host after their disks have moved to another one.

use std::time::Duration;

use godwit_types::parse_scaled;
use serde::Deserialize;

/// Longest time that is not forever: ten years.
const MOST_SECONDS: u64 = 10 * 366 * 24 * 3600;

/// Time for which a source keeps the images of disks that have moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum KeepTime {
    /// They may be removed after this time; zero: at once.
    For(Duration),
    /// They stay until they are removed by request.
    Forever,
}

impl Default for KeepTime {
    fn default() -> Self {
        KeepTime::For(Duration::from_secs(24 * 3600))
    }
}

impl KeepTime {
    /// Returns the end of the time that begins at `from_unix_s`, in Unix time; `None`: never.
    #[must_use]
    pub(crate) fn until_unix_s(self, from_unix_s: u64) -> Option<u64> {
        match self {
            KeepTime::For(time) => Some(from_unix_s.saturating_add(time.as_secs())),
            KeepTime::Forever => None,
        }
    }
}

impl TryFrom<String> for KeepTime {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{text}\" is no time to keep disks: write 0, forever, or for example 12h or 1d"
            )
        };
        match text.as_str() {
            "forever" => return Ok(KeepTime::Forever),
            "0" => return Ok(KeepTime::For(Duration::ZERO)),
            _ => {}
        }
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, unit) = text.split_at(end);
        let unit_s = match unit {
            "s" => 1,
            "min" => 60,
            "h" => 3600,
            "d" => 24 * 3600,
            _ => return Err(wrong()),
        };
        let seconds = parse_scaled(number, unit_s).filter(|seconds| *seconds <= MOST_SECONDS);
        seconds.map(|seconds| KeepTime::For(Duration::from_secs(seconds))).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        let read = |text: &str| KeepTime::try_from(text.to_owned());
        let seconds = |count| Ok(KeepTime::For(Duration::from_secs(count)));
        assert_eq!(read("1d"), Ok(KeepTime::default()));
        assert_eq!(read("0"), seconds(0));
        assert_eq!(read("1.5h"), seconds(5400));
        assert_eq!((read("90s"), read("30min")), (seconds(90), seconds(1800)));
        assert_eq!(read("forever"), Ok(KeepTime::Forever));
        for wrong in ["", "1", "d", "-1d", "1 d", "1w", "never", "4000d", "99999999999999999999s"] {
            assert!(read(wrong).unwrap_err().contains("12h or 1d"), "{wrong}");
        }
    }

    #[test]
    fn the_end_of_the_time_does_not_overflow() {
        let hour = KeepTime::For(Duration::from_secs(3600));
        assert_eq!(hour.until_unix_s(10), Some(3610));
        assert_eq!(hour.until_unix_s(u64::MAX), Some(u64::MAX));
        assert_eq!(KeepTime::Forever.until_unix_s(10), None);
    }
}
