//! Clock that a test moves on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Clock that stands still until it is moved on. Its copies show the same time.
#[derive(Clone, Debug, Default)]
pub struct HeldClock {
    /// Nanoseconds.
    now_ns: Arc<AtomicU64>,
}

impl HeldClock {
    /// Returns the time since the clock began.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.load(Ordering::SeqCst))
    }

    /// Moves the clock on.
    pub fn advance(&self, by: Duration) {
        let by_ns = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.now_ns.fetch_add(by_ns, Ordering::SeqCst);
    }
}
