//! How many processors the host has, and how busy they are.

use std::fs;

/// Processors that run, each thread of a core counted; 0 where the kernel does not say.
pub(crate) fn logical_cores() -> u32 {
    fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .and_then(|text| count(&text))
        .unwrap_or(0)
}

/// The load average of the last minute, /proc/loadavg (proc(5)); 0 where the kernel does not say.
pub(crate) fn average_1min() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// Counts a list like `0-3,8` (cpuset(7), list format).
fn count(list: &str) -> Option<u32> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    });
    ranges.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!(count("0-1\n"), Some(2));
        assert_eq!(count("0,2-5,9\n"), Some(6));
        assert_eq!(count("5-2"), None);
        assert_eq!(count(""), None);
    }

    #[test]
    fn this_machine_has_processors() {
        assert!(logical_cores() > 0);
        assert!(average_1min() >= 0.0);
    }
}
