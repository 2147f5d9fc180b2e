//! Clock of the lab, and punctual scheduling of the two processes that must keep time.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};
use thread_priority::unix::{
    RealtimeThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy, thread_native_id,
};
use thread_priority::{ThreadPriority, ThreadPriorityValue};

/// Returns `CLOCK_MONOTONIC` in nanoseconds; it is the same in all namespaces of a machine.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Converts nanoseconds to the kernel's form.
pub(crate) fn timespec(ns: u64) -> Timespec {
    let tv_sec = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: (ns % 1_000_000_000).cast_signed() }
}

/// Converts a duration to the kernel's form.
pub(crate) fn duration_timespec(duration: Duration) -> Timespec {
    timespec(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Processes that must keep time. The more exact one comes last and takes precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeKeeper {
    /// The emulator: a link does not become slower when hosts are busy.
    Emulator = 1,
    /// The prober: it must not measure its own delays.
    Prober = 2,
}

/// Makes this thread wake up as punctually as the kernel permits: without timer slack (50 µs by
/// default), and with the lowest real-time priorities, ahead of ordinary threads, which wake up
/// milliseconds late on a busy machine. Without the right to do so, takes the best ordinary
/// priority available.
pub(crate) fn be_punctual(who: TimeKeeper) {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let is_real_time = ThreadPriorityValue::try_from(who as u8).is_ok_and(|priority| {
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);
        set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Crossplatform(priority), policy)
            .is_ok()
    });
    if !is_real_time {
        let _ = rustix::process::setpriority_process(None, -20);
    }
}
