//! Hold points: where a test stops a migration, so that a fault hits it at exactly one place. Off unless the environment variable
//! [`VARIABLE`] of the process names a directory; then whoever comes to a point makes the file `reached/POINT` there and waits for
//! as long as there is a file `hold/POINT`. A point is named by who comes to it and what it is about to do, `source.send-commit`.
//!
//! Nothing of a migration may depend on it: it is the tests' hook and no product's.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// The environment variable that names the directory.
pub const VARIABLE: &str = "GODWIT_HOLD";

/// How often it is looked whether a point is held still.
const INTERVAL: Duration = Duration::from_millis(2);

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// What a point costs where nobody holds any: one relaxed load.
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Whether points are held at all in this process.
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

/// Somebody (`who`: source, destination, host) is about to do something. Blocks the thread for as long as the point is held.
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
        tracing::warn!(point, %error, "nobody learns that this point is reached");
    }
    if held.exists() {
        tracing::info!(point, "held");
        while held.exists() {
            let interval = rustix::event::Timespec { tv_sec: 0, tv_nsec: INTERVAL.subsec_nanos().into() };
            // Nothing to wait for: only the time limit ends it.
            let _ = rustix::event::poll(&mut [], Some(&interval));
        }
        tracing::info!(point, "let go");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_told_and_held_until_its_file_is_gone() {
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
