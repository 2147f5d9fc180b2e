//! The clock that all processes of a machine share, and punctuality for those that must keep time.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};
use thread_priority::unix::{
    RealtimeThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};
use thread_priority::{ThreadPriority, ThreadPriorityValue};

/// Returns `CLOCK_MONOTONIC` in nanoseconds: the same in all namespaces of a machine.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Converts nanoseconds to the kernel's form.
#[must_use]
pub fn timespec(ns: u64) -> Timespec {
    let tv_sec = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: (ns % 1_000_000_000).cast_signed() }
}

/// Converts a duration to the kernel's form.
#[must_use]
pub fn duration_timespec(duration: Duration) -> Timespec {
    timespec(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Real-time priority of a prober: the gaps that it sees must not be its own lateness. What shapes
/// links beside it takes a lower one.
pub const PROBER_PRIORITY: u8 = 2;

/// Wakes this thread as near to its time as the kernel can: no timer slack (50 µs by default), and
/// first in line for the CPU by a low real-time `priority`, since on a busy machine ordinary ones
/// come milliseconds late. Takes the best ordinary priority, or keeps the present one, where a
/// real-time priority is not allowed.
pub fn be_punctual(priority: u8) {
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
    let is_real_time = ThreadPriorityValue::try_from(priority).is_ok_and(|priority| {
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);
        set_thread_priority_and_policy(
            thread_native_id(),
            ThreadPriority::Crossplatform(priority),
            policy,
        )
        .is_ok()
    });
    if !is_real_time {
        let _ = rustix::process::setpriority_process(None, -20);
    }
}
