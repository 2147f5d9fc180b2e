//! Number and load of the host's processors.

use std::fs;

/// Number of online logical processors (hardware threads); 0 if the kernel does not report it.
pub(crate) fn logical_cores() -> u32 {
    fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .and_then(|text| count(&text))
        .unwrap_or(0)
}

/// Load average of the last minute from /proc/loadavg (proc(5)); 0 if it cannot be read.
pub(crate) fn average_1min() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// Counts the members of a list such as `0-3,8` (cpuset(7), list format).
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
    fn processor_lists_are_counted() {
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
