//! Time stamps of the manager's records.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the current time, milliseconds since 1970.
#[must_use]
pub fn now_unix_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}
