//! The clock of the lab, and punctuality for the two processes that must keep time.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};
use thread_priority::unix::{
    RealtimeThreadSchedulePolicy, ThreadSchedulePolicy, set_thread_priority_and_policy, thread_native_id,
};
use thread_priority::{ThreadPriority, ThreadPriorityValue};

/// `CLOCK_MONOTONIC` in nanoseconds: the same in all namespaces of a machine.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Nanoseconds as the kernel wants them.
pub(crate) fn timespec(ns: u64) -> Timespec {
    let tv_sec = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: (ns % 1_000_000_000).cast_signed() }
}

/// A duration as the kernel wants it.
pub(crate) fn duration_timespec(duration: Duration) -> Timespec {
    timespec(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Who keeps time, the more exact one last: it goes before the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeKeeper {
    /// A link does not slow down as hosts are busy.
    Emulator = 1,
    /// What it sees must not be its own lateness.
    Prober = 2,
}

/// Wakes this thread as near to its time as the kernel can: no timer slack (50 µs by default), and first in
/// line for the CPU by the lowest real-time priorities; on a busy machine the ordinary ones come milliseconds
/// late. Where that is not allowed, the best ordinary priority is taken, or what there is.
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
