//! Time stamps of the manager's records, and the clock of the judges.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Clock of the judges: [`since_boot`] but in tests.
pub(crate) type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Returns the current time, milliseconds since 1970.
#[must_use]
pub fn now_unix_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the time since the machine's boot. It also counts suspended time.
pub(crate) fn since_boot() -> Duration {
    read(ClockId::Boottime)
}

/// Returns how long the machine has been suspended since its boot.
pub(crate) fn suspended() -> Duration {
    let running = read(ClockId::Monotonic);
    since_boot().saturating_sub(running)
}

fn read(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or_default())
}
