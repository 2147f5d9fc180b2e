//! Benchmarks of the manager with simulated agents: a real `godwit control run`, its real API, and
//! a simulated QEMU.

pub(crate) mod drain;
pub(crate) mod liar;
mod managed;
pub(crate) mod mixed;
pub(crate) mod scale;

use std::time::Duration;

use serde::Serialize;

/// Response times, milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Answers {
    pub(crate) what: String,
    pub(crate) count: usize,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// Size of the last answer.
    pub(crate) bytes: usize,
}

impl Answers {
    /// Summarises response times. Returns `None` without any.
    pub(crate) fn of(what: &str, times: &[Duration], bytes: usize) -> Option<Answers> {
        let mut ms: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1000.0).collect();
        ms.sort_by(f64::total_cmp);
        // The nearest rank: this many of a hundred took no longer.
        let rank = |percent: usize| (ms.len() * percent).div_ceil(100).saturating_sub(1);
        Some(Answers {
            what: what.to_owned(),
            count: ms.len(),
            p50_ms: *ms.get(rank(50))?,
            p99_ms: *ms.get(rank(99))?,
            max_ms: *ms.last()?,
            bytes,
        })
    }
}

/// A promise and whether it is kept.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Promise {
    what: String,
    at_most: f64,
    found: f64,
    unit: &'static str,
}

impl Promise {
    pub(crate) fn new(
        what: impl Into<String>,
        at_most: f64,
        found: f64,
        unit: &'static str,
    ) -> Promise {
        Promise { what: what.into(), at_most, found, unit }
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.found <= self.at_most
    }

    pub(crate) fn print(&self) {
        let Promise { what, at_most, found, unit } = self;
        let verdict = if self.is_kept() { "pass" } else { "FAIL" };
        println!("  {verdict}  {what} at most {at_most} {unit}: {found:.3} {unit}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_answers_that_were_measured() {
        let times: Vec<Duration> = (1..=200).rev().map(Duration::from_millis).collect();
        let answers = Answers::of("x", &times, 1).unwrap();
        assert!((answers.p50_ms - 100.0).abs() < 1e-9 && (answers.p99_ms - 198.0).abs() < 1e-9);
        assert!((answers.max_ms - 200.0).abs() < 1e-9 && Answers::of("x", &[], 0).is_none());
    }
}
