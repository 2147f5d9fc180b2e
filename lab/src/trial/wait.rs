//! Waiting, with a deadline, for conditions that produce no event.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_prober::clock;
use rustix::event::poll;

/// Time limit for an action that takes a second or two on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Poll interval.
const PACE: Duration = Duration::from_millis(20);

/// Polls until `look` returns a value, and returns it. An error of `look` counts as "not yet" and
/// is reported past the deadline.
///
/// # Errors
/// The deadline is past.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let found = look();
        let is_over = Instant::now() >= deadline;
        match found {
            Ok(Some(found)) => return Ok(found),
            Ok(None) if is_over => bail!("not within {limit:?}: {what}"),
            Err(error) if is_over => {
                return Err(error.context(format!("not within {limit:?}: {what}")));
            }
            Ok(None) | Err(_) => {}
        }
        // No descriptor to wait for: only the time limit ends the call.
        let _ = poll(&mut [], Some(&clock::duration_timespec(PACE)));
    }
}
