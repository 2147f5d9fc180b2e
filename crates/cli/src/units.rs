//! Times and sizes in the form that people read and write.

use std::time::Duration;

use godwit_types::parse_scaled;

/// Parses `20ms`, `1.5s`, `500us`, `2min`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("\"{text}\" is no time: write a number and a unit, such as 20ms, 1.5s or 2min");
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits_end);
    let unit_ns = match unit {
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(wrong()),
    };
    parse_scaled(number, unit_ns).map(Duration::from_nanos).ok_or_else(wrong)
}

/// Formats `1.2 GiB`, `512 MiB`, `17 B`.
pub(crate) fn bytes(bytes: f64) -> String {
    const UNITS: [(&str, f64); 4] = [
        ("TiB", 1_099_511_627_776.0),
        ("GiB", 1_073_741_824.0),
        ("MiB", 1_048_576.0),
        ("KiB", 1024.0),
    ];
    match UNITS.iter().find(|(_, size)| bytes >= *size) {
        Some((unit, size)) if bytes / size < 9.95 => format!("{:.1} {unit}", bytes / size),
        Some((unit, size)) => format!("{:.0} {unit}", bytes / size),
        None => format!("{bytes:.0} B"),
    }
}

/// Formats a number of bytes.
#[expect(clippy::cast_precision_loss, reason = "for people: three digits are shown")]
pub(crate) fn byte_count(count: u64) -> String {
    bytes(count as f64)
}

/// Formats `12.3 ms`, `4.56 s`, `2 min 05 s`, `3 h 10 min`, `2 d 4 h`, rounded to the smallest unit
/// shown.
pub(crate) fn millis(ms: f64) -> String {
    const SECOND_MS: f64 = 1e3;
    const MINUTE_MS: f64 = 60.0 * SECOND_MS;
    const HOUR_MS: f64 = 60.0 * MINUTE_MS;
    const DAY_MS: f64 = 24.0 * HOUR_MS;
    let whole = |unit_ms: f64, large_ms: f64| {
        let in_small = large_ms / unit_ms;
        let count = (ms / unit_ms).round();
        ((count / in_small).floor(), count % in_small)
    };
    if ms < 999.95 {
        return format!("{ms:.1} ms");
    }
    if ms < MINUTE_MS - 5.0 {
        return format!("{:.2} s", ms / SECOND_MS);
    }
    let (minutes, seconds) = whole(SECOND_MS, MINUTE_MS);
    if minutes < 60.0 {
        return format!("{minutes:.0} min {seconds:02.0} s");
    }
    let (hours, minutes) = whole(MINUTE_MS, HOUR_MS);
    if hours < 24.0 {
        return format!("{hours:.0} h {minutes:02.0} min");
    }
    let (days, hours) = whole(HOUR_MS, DAY_MS);
    format!("{days:.0} d {hours:.0} h")
}

/// Formats a time, UTC, to the second.
pub(crate) fn utc(unix_ms: u64) -> String {
    let seconds = i64::try_from(unix_ms / 1000).unwrap_or(i64::MAX);
    time::OffsetDateTime::from_unix_timestamp(seconds).map_or_else(
        |_| "-".to_owned(),
        |at| format!("{} {:02}:{:02}:{:02}", at.date(), at.hour(), at.minute(), at.second()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(parse_duration("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2min"), Ok(Duration::from_secs(120)));
        for text in ["20", "ms", "-1s", "1e3s", "1..2s", "20 ms", "9999999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn figures_have_few_digits() {
        assert_eq!(byte_count(17), "17 B");
        assert_eq!(byte_count(1536 << 10), "1.5 MiB");
        assert_eq!(byte_count(512 << 20), "512 MiB");
        assert_eq!(millis(8.04), "8.0 ms");
        assert_eq!(millis(4560.0), "4.56 s");
        assert_eq!(millis(125_000.0), "2 min 05 s");
        assert_eq!(millis(11_400_000.0), "3 h 10 min");
        assert_eq!(millis(187_500_000.0), "2 d 4 h");
        assert_eq!(millis(999.96), "1.00 s");
        assert_eq!(millis(59_996.0), "1 min 00 s");
        assert_eq!(millis(81_920.0), "1 min 22 s");
        assert_eq!(millis(119_600.0), "2 min 00 s");
        assert_eq!(millis(3_599_700.0), "1 h 00 min");
        assert_eq!(millis(86_399_000.0), "1 d 0 h");
    }
}
