//! `godwit watch ADDRESS`: probes one guest in the foreground and reports each gap.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::namespace::in_namespace;
use crate::prober::{ECHO_PORT, Pace, Target};
use crate::record::Gaps;

/// What to watch, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchOptions {
    /// The guest.
    pub target: IpAddr,
    /// Its echo port, 7 as a rule.
    pub port: u16,
    /// Shortest gap that is reported.
    pub least_gap: Duration,
    /// How long to watch; `None`: until stopped.
    pub duration: Option<Duration>,
    /// Network namespace to watch from; `None`: the caller's own.
    pub namespace: Option<String>,
}

impl WatchOptions {
    /// Watches `target` from the caller's own namespace until stopped, and reports gaps of 10 ms
    /// and more.
    #[must_use]
    pub fn new(target: IpAddr) -> WatchOptions {
        WatchOptions {
            target,
            port: ECHO_PORT,
            least_gap: Duration::from_millis(10),
            duration: None,
            namespace: None,
        }
    }
}

/// What a watcher sees. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WatchEvent {
    /// The first answer came.
    Answering {
        /// Its time.
        at_ns: u64,
    },
    /// No answer for a second.
    Silent {
        /// Time of the last answer; zero if there was none.
        last_ns: u64,
    },
    Gap {
        /// Time of the answer before it.
        start_ns: u64,
        length_ns: u64,
    },
}

/// Watches until the time is over or `is_stopped` (called each millisecond) returns true. Passes
/// each event to `report`, and returns the figures of the whole time.
///
/// # Errors
/// The namespace cannot be entered, or the system gives no socket. A target that does not answer is
/// no error.
pub fn watch(
    options: &WatchOptions,
    is_stopped: &(dyn Fn() -> bool + Sync),
    report: &mut (dyn FnMut(WatchEvent) + Send),
) -> Result<Gaps> {
    // Only the socket must be of the namespace.
    let make = || Target::new(options.target, options.port);
    let target = match &options.namespace {
        Some(namespace) => in_namespace(namespace, make)??,
        None => make()?,
    };
    let pace = Pace::new()?;
    pace.run(true)?;
    let start_ns = clock::monotonic_ns();
    let end_ns = options.duration.map(|duration| start_ns.saturating_add(nanoseconds(duration)));
    let mut silence = Silence::new(nanoseconds(options.least_gap));
    let mut fds = [
        PollFd::new(&pace, PollFlags::IN),
        PollFd::from_borrowed_fd(target.socket().as_fd(), PollFlags::IN),
    ];
    loop {
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for answers"),
        }
        let answered = target.take_answers();
        let now_ns = clock::monotonic_ns();
        if let Some(event) = silence.observe(now_ns, answered) {
            report(event);
        }
        if is_stopped() || end_ns.is_some_and(|end_ns| now_ns >= end_ns) {
            return Ok(target.log().gaps(start_ns, now_ns, now_ns));
        }
        if pace.has_fired() {
            target.send_probe();
        }
    }
}

const SILENT_AFTER_NS: u64 = 1_000_000_000;

/// Turns answers into events.
struct Silence {
    least_gap_ns: u64,
    first_ns: Option<u64>,
    last_ns: Option<u64>,
    is_reported: bool,
}

impl Silence {
    fn new(least_gap_ns: u64) -> Silence {
        Silence { least_gap_ns, first_ns: None, last_ns: None, is_reported: false }
    }

    fn observe(&mut self, now_ns: u64, answered_ns: Option<u64>) -> Option<WatchEvent> {
        let first_ns = *self.first_ns.get_or_insert(now_ns);
        let Some(at_ns) = answered_ns else {
            let since_ns = self.last_ns.unwrap_or(first_ns);
            let is_silent = !self.is_reported && now_ns.saturating_sub(since_ns) >= SILENT_AFTER_NS;
            self.is_reported |= is_silent;
            return is_silent.then(|| WatchEvent::Silent { last_ns: self.last_ns.unwrap_or(0) });
        };
        self.is_reported = false;
        match self.last_ns.replace(at_ns) {
            None => Some(WatchEvent::Answering { at_ns }),
            Some(start_ns) => {
                let length_ns = at_ns.saturating_sub(start_ns);
                (length_ns >= self.least_gap_ns).then_some(WatchEvent::Gap { start_ns, length_ns })
            }
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn gaps_and_silence_are_reported_once() {
        let mut silence = Silence::new(10 * MS);
        assert_eq!(silence.observe(MS, None), None);
        assert_eq!(silence.observe(1001 * MS, None), Some(WatchEvent::Silent { last_ns: 0 }));
        assert_eq!(silence.observe(1002 * MS, None), None);
        assert_eq!(
            silence.observe(1003 * MS, Some(1003 * MS)),
            Some(WatchEvent::Answering { at_ns: 1003 * MS })
        );
        assert_eq!(silence.observe(1004 * MS, Some(1004 * MS)), None);
        let gap = WatchEvent::Gap { start_ns: 1004 * MS, length_ns: 16 * MS };
        assert_eq!(silence.observe(1020 * MS, Some(1020 * MS)), Some(gap));
        assert_eq!(
            silence.observe(2020 * MS, None),
            Some(WatchEvent::Silent { last_ns: 1020 * MS })
        );
    }

    #[test]
    fn a_watch_ends_when_stopped() {
        let options = WatchOptions { port: 9, ..WatchOptions::new("127.0.0.1".parse().unwrap()) };
        let gaps = watch(&options, &|| true, &mut |_| {}).unwrap();
        assert_eq!(gaps.received, 0);
    }
}
