//! Time and CPU time of a piece of work of the calling thread.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Cost of a piece of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

impl Cost {
    /// Measures work. Returns its cost and its result.
    pub(crate) fn of<T>(work: impl FnOnce() -> T) -> (Cost, T) {
        let (wall, cpu) = (Instant::now(), thread_cpu());
        let result = work();
        (Cost { cpu: thread_cpu().saturating_sub(cpu), wall: wall.elapsed() }, result)
    }

    pub(crate) fn add(&mut self, more: Cost) {
        (self.wall, self.cpu) = (self.wall + more.wall, self.cpu + more.cpu);
    }

    /// Returns this cost without a part of it.
    pub(crate) fn without(self, part: Cost) -> Cost {
        Cost { wall: self.wall.saturating_sub(part.wall), cpu: self.cpu.saturating_sub(part.cpu) }
    }
}

/// Returns the CPU time that the thread has taken.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = Duration::from_secs(time.tv_sec.unsigned_abs());
    seconds + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}
