//! Figures and lists as the texts of reasons have them.

use std::fmt;

use godwit_qemu::CpuFeatures;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The features named in a message; the rest are counted.
const NAMED_FEATURES: usize = 12;

/// Bytes as people write them: `512 MiB`, `1.5 GiB`.
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
        // Rounded down: what is free is never told as more than it is.
        match (self.0 % unit) * 10 / unit {
            0 => write!(f, "{} {name}", self.0 / unit),
            tenth => write!(f, "{}.{tenth} {name}", self.0 / unit),
        }
    }
}

/// A length of time, given in milliseconds, in its two largest units: `40 s`, `4 min 30 s`, `2 h 5 min`.
#[derive(Clone, Copy, Debug)]
pub struct Span(pub u64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded up: nothing is told to be due in 0 s that is not due yet.
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

/// CPU features as a sentence has them: the first few, and how many more there are.
#[must_use]
pub fn some_features(features: &CpuFeatures) -> String {
    let named: Vec<&str> = features.iter().take(NAMED_FEATURES).map(String::as_str).collect();
    match features.len().saturating_sub(NAMED_FEATURES) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// Names as a sentence has them: `a`, `a and b`, `a, b and 3 more`. `count` is how many there are, of which `names` may be the first.
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

/// `1 job`, `2 jobs`.
#[derive(Clone, Copy, Debug)]
pub struct Count(pub usize, pub &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count(count, what) = self;
        let plural = if *count == 1 { "" } else { "s" };
        write!(f, "{count} {what}{plural}")
    }
}

/// Milliseconds of a number that may be none (infinite, negative, too large): the nearest that is one.
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
    fn figures_are_short_and_never_flatter() {
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
    fn a_number_that_is_no_time_is_the_nearest() {
        assert_eq!(millis(1500.0), 1500);
        assert_eq!(millis(f64::INFINITY), u64::MAX);
        assert_eq!(millis(-1.0), 0);
        assert_eq!(millis(f64::NAN), 0);
    }
}
