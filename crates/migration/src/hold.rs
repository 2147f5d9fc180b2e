//! Hold points: places where a test stops a migration, so that a fault hits it at exactly one
//! place. They are off unless the environment variable [`VARIABLE`] of the process names a
//! directory. A thread that reaches a point then creates the file `reached/POINT` there and waits
//! while a file `hold/POINT` exists. A point is named by its component and the action that follows,
//! for example `source.send-commit`.
//!
//! No part of a migration may depend on it: it is a hook for tests, not a feature of the product.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Environment variable that names the directory.
pub const VARIABLE: &str = "GODWIT_HOLD";

/// Poll interval for the release of a point.
const INTERVAL: Duration = Duration::from_millis(2);

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// Cached state, so that a point costs one relaxed load if none is held.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Returns whether points can be held in this process.
#[must_use]
pub fn is_on() -> bool {
    match STATE.load(Ordering::Relaxed) {
        UNKNOWN => {
            let is_on = directory().is_some();
            STATE.store(if is_on { ON } else { OFF }, Ordering::Relaxed);
            is_on
        }
        state => state == ON,
    }
}

/// Marks a point: `who` (source, destination, host) is about to do `what`. Blocks the thread while
/// the point is held.
pub fn at(who: &str, what: &str) {
    if is_on()
        && let Some(directory) = directory()
    {
        wait(directory, &format!("{who}.{what}"));
    }
}

fn directory() -> Option<&'static Path> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from)).as_deref()
}

fn wait(directory: &Path, point: &str) {
    let held = directory.join("hold").join(point);
    if let Err(error) = std::fs::write(directory.join("reached").join(point), "") {
        tracing::warn!(point, %error, "cannot report that this point is reached");
    }
    if held.exists() {
        tracing::info!(point, "held");
        while held.exists() {
            let interval =
                rustix::event::Timespec { tv_sec: 0, tv_nsec: INTERVAL.subsec_nanos().into() };
            // No descriptor to wait for: only the time limit ends the call.
            let _ = rustix::event::poll(&mut [], Some(&interval));
        }
        tracing::info!(point, "let go");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_reported_and_held_until_its_file_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        for folder in ["hold", "reached"] {
            std::fs::create_dir(directory.path().join(folder)).unwrap();
        }
        let reached = directory.path().join("reached/source.finish");
        let held = directory.path().join("hold/source.finish");
        wait(directory.path(), "source.finish");
        assert!(reached.exists());
        std::fs::remove_file(&reached).unwrap();
        std::fs::write(&held, "").unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(directory.path(), "source.finish"));
            while !reached.exists() {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            std::fs::remove_file(&held).unwrap();
        });
        // Without the variable nothing is held, and nothing is written.
        at("source", "finish");
        assert!(!is_on());
    }
}
