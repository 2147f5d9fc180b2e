//! Looks at the directories for VMs, each in a thread of its own and one at a time. Storage that
//! does not answer delays no arrival beyond a limit, and holds one thread.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// The directories that were looked at: those of the configuration.
static DIRECTORIES: Mutex<BTreeMap<PathBuf, Arc<Directory>>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Directory {
    turn: Arc<Semaphore>,
    /// Begin of the look that runs.
    begun: Mutex<Option<Instant>>,
}

impl Default for Directory {
    fn default() -> Directory {
        Directory { turn: Arc::new(Semaphore::new(1)), begun: Mutex::default() }
    }
}

/// A look that runs; dropped when it ends.
struct Running {
    directory: Arc<Directory>,
    _turn: OwnedSemaphorePermit,
}

impl Running {
    fn begin(directory: Arc<Directory>, turn: OwnedSemaphorePermit) -> Running {
        *directory.begun.lock() = Some(Instant::now());
        Running { directory, _turn: turn }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.directory.begun.lock() = None;
    }
}

/// Looks at a directory when its turn comes. `None`: that takes longer than `limit`, or another
/// look does.
pub(super) async fn look_at<T: Send + 'static>(
    dir: &Path,
    limit: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let directory = Arc::clone(DIRECTORIES.lock().entry(dir.to_owned()).or_default());
    let begun = *directory.begun.lock();
    let found = match begun.is_some_and(|begun| begun.elapsed() >= limit) {
        true => None,
        false => tokio::time::timeout(limit, in_turn(directory, look)).await.ok().flatten(),
    };
    if found.is_none() {
        tracing::warn!(dir = %dir.display(), "storage does not answer: no references to it");
    }
    found
}

/// Looks at a directory in a thread, which goes on if nobody waits any more.
async fn in_turn<T: Send + 'static>(
    directory: Arc<Directory>,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let turn = Arc::clone(&directory.turn).acquire_owned().await.ok()?;
    let running = Running::begin(directory, turn);
    let (answer, found) = oneshot::channel();
    let looks = move || {
        let seen = look();
        drop(running);
        // Nobody may wait any more.
        let _ = answer.send(seen);
    };
    std::thread::Builder::new().name("look-alike".to_owned()).spawn(looks).ok()?;
    found.await.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// Far more than a look takes.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_directory_that_hangs_delays_itself_alone_and_has_one_thread() {
        let (hung, well) = (Path::new("/test/hung"), Path::new("/test/well"));
        let (answers, waits) = sync_channel::<()>(0);
        let hangs = move || waits.recv().is_ok();
        let limit = Duration::from_millis(20);
        assert_eq!(look_at(hung, limit, hangs).await, None);
        for _ in 0..3 {
            // Its thread is still there: no other begins.
            assert_eq!(look_at::<u8>(hung, limit, || panic!("looked at")).await, None);
            assert_eq!(look_at(well, LONG, || 7).await, Some(7));
        }
        answers.send(()).unwrap();
        assert_eq!(look_at(hung, LONG, || 8).await, Some(8));
    }
}
