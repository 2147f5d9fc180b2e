//! Waiting for what gives no event, with a deadline.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use godwit_prober::clock;
use rustix::event::poll;

/// How long anything may take that takes a second or two on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The pace of looking.
const PACE: Duration = Duration::from_millis(20);

/// Looks over and over until there is something, and gives it. An error of `look` counts as "not yet" and is told
/// past the deadline.
///
/// # Errors
/// The deadline is past.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        let found = look();
        let is_over = Instant::now() >= deadline;
        match found {
            Ok(Some(found)) => return Ok(found),
            Ok(None) if is_over => bail!("not within {limit:?}: {what}"),
            Err(error) if is_over => return Err(error.context(format!("not within {limit:?}: {what}"))),
            Ok(None) | Err(_) => {}
        }
        // Nothing to wait for: only the time limit ends it.
        let _ = poll(&mut [], Some(&clock::duration_timespec(PACE)));
    }
}
