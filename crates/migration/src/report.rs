//! Figures of the engine in the form of reports.

use std::time::Duration;

use godwit_types::{FetchTimes, PageInReport, WaitClass};
use godwit_wire::{FIRST_WAIT_CLASS_NS, PagedIn, WAIT_CLASSES};

/// Creates the report of a page-in from the destination's measurements and the total duration.
pub(crate) fn page_in_report(figures: &PagedIn, duration_ms: f64) -> PageInReport {
    let ms = |ns: u64| millis(Duration::from_nanos(ns));
    let below = |class: usize| (class + 1 < WAIT_CLASSES).then(|| ms(FIRST_WAIT_CLASS_NS << class));
    let classes = figures.waits.iter().enumerate().filter(|(_, waits)| **waits > 0);
    PageInReport {
        pages: figures.pages,
        demanded_pages: figures.demanded,
        cuts: figures.cuts,
        duration_ms,
        fetch_ms: FetchTimes {
            median: ms(figures.median_ns),
            p90: ms(figures.p90_ns),
            p99: ms(figures.p99_ns),
            max: ms(figures.most_ns),
        },
        waits: classes.map(|(class, &waits)| WaitClass { below_ms: below(class), waits }).collect(),
    }
}

/// Converts a duration to milliseconds, with the fraction.
#[must_use]
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Converts a duration to whole nanoseconds, capped at the maximum if it exceeds 584 years.
#[must_use]
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
