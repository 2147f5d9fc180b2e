//! Formats of figures and lists in the texts of reasons.

use std::fmt;

use godwit_qemu::CpuFeatures;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Most features named in a message; the rest are counted.
const NAMED_FEATURES: usize = 12;

/// Bytes in human-readable form: `512 MiB`, `1.5 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            GIB.. => (GIB, "GiB"),
            MIB.. => (MIB, "MiB"),
            KIB.. => (KIB, "KiB"),
            bytes => return write!(f, "{bytes} bytes"),
        };
        // Rounded down: free memory is never shown as more than it is.
        match (self.0 % unit) * 10 / unit {
            0 => write!(f, "{} {name}", self.0 / unit),
            tenth => write!(f, "{}.{tenth} {name}", self.0 / unit),
        }
    }
}

/// A duration in milliseconds, formatted in its two largest units: `40 s`, `4 min 30 s`,
/// `2 h 5 min`.
#[derive(Clone, Copy, Debug)]
pub struct Span(pub u64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded up: an event in the future is never shown as due in 0 s.
        let seconds = self.0.div_ceil(1000);
        let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
        let (first, second, more) = match seconds {
            0..60 => return write!(f, "{seconds} s"),
            60..3600 => (format!("{minutes} min"), seconds % 60, "s"),
            3600..86_400 => (format!("{hours} h"), minutes % 60, "min"),
            _ => (format!("{days} d"), hours % 24, "h"),
        };
        match second {
            0 => f.write_str(&first),
            second => write!(f, "{first} {second} {more}"),
        }
    }
}

/// Lists CPU features for a sentence: the first few, and the number of the others.
#[must_use]
pub fn some_features(features: &CpuFeatures) -> String {
    let named: Vec<&str> = features.iter().take(NAMED_FEATURES).map(String::as_str).collect();
    match features.len().saturating_sub(NAMED_FEATURES) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// A list of names for a sentence: `a`, `a and b`, `a, b and 3 more`. `count` is the whole number,
/// of which `names` may be the first.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a>(pub &'a [String], pub usize);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Names(names, count) = self;
        let more = count.saturating_sub(names.len());
        if more > 0 {
            return match names.is_empty() {
                true => write!(f, "{more}"),
                false => write!(f, "{} and {more} more", names.join(", ")),
            };
        }
        match names {
            [] => f.write_str("none"),
            [one] => f.write_str(one),
            [most @ .., last] => write!(f, "{} and {last}", most.join(", ")),
        }
    }
}

/// A number with its noun: `1 job`, `2 jobs`.
#[derive(Clone, Copy, Debug)]
pub struct Count(pub usize, pub &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count(count, what) = self;
        let plural = if *count == 1 { "" } else { "s" };
        write!(f, "{count} {what}{plural}")
    }
}

/// Converts a duration in milliseconds that may be infinite, negative or too large to the nearest
/// valid number.
#[must_use]
pub fn millis(ms: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(ms.max(0.0) / 1e3)
        .ok()
        .and_then(|span| u64::try_from(span.as_millis()).ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_rounded_conservatively() {
        assert_eq!(Bytes(512 * MIB).to_string(), "512 MiB");
        assert_eq!(Bytes(GIB + GIB / 2).to_string(), "1.5 GiB");
        assert_eq!(Bytes(2 * GIB - 1).to_string(), "1.9 GiB");
        assert_eq!(Bytes(7).to_string(), "7 bytes");
        assert_eq!(Span(1).to_string(), "1 s");
        assert_eq!(Span(270_000).to_string(), "4 min 30 s");
        assert_eq!(Span(7_500_000).to_string(), "2 h 5 min");
        assert_eq!(Span(172_800_000).to_string(), "2 d");
    }

    #[test]
    fn names_read_as_a_sentence() {
        let names = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(Names(&names(&["a"]), 1).to_string(), "a");
        assert_eq!(Names(&names(&["a", "b", "c"]), 3).to_string(), "a, b and c");
        assert_eq!(Names(&names(&["a", "b"]), 5).to_string(), "a, b and 3 more");
        assert_eq!(Count(1, "job").to_string(), "1 job");
        assert_eq!(Count(2, "job").to_string(), "2 jobs");
    }

    #[test]
    fn an_invalid_number_becomes_the_nearest_valid_one() {
        assert_eq!(millis(1500.0), 1500);
        assert_eq!(millis(f64::INFINITY), u64::MAX);
        assert_eq!(millis(-1.0), 0);
        assert_eq!(millis(f64::NAN), 0);
    }
}
