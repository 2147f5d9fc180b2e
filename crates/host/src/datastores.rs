//! How much room there is where VMs have their disks. A file system of another machine may not answer for as long as that is away, so it is asked by a
//! thread of its own, and what it said last is told.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::DatastoreInfo;
use rustix::fs::statvfs;

/// How long what was said holds.
const FRESH: Duration = Duration::from_secs(10);

/// What was said last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Datastores(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    told: BTreeMap<PathBuf, DatastoreInfo>,
    asked: Option<Instant>,
    /// They are being asked now.
    is_asking: bool,
}

impl Datastores {
    /// What is known of these directories; those that are not there, or have not been asked yet, are left out. They are asked anew in the
    /// background where that is due.
    pub(crate) fn told(&self, directories: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, DatastoreInfo> {
        let mut known = self.known();
        let told = known.told.iter().filter(|(path, _)| directories.contains(*path));
        let told = told.map(|(path, info)| (path.clone(), *info)).collect();
        let is_due = known.asked.is_none_or(|asked| asked.elapsed() >= FRESH);
        if is_due && !known.is_asking {
            let all = self.clone();
            let asks = move || {
                let told = ask(directories);
                let mut known = all.known();
                (known.told, known.is_asking) = (told, false);
            };
            known.asked = Some(Instant::now());
            known.is_asking =
                std::thread::Builder::new().name("datastores".into()).spawn(asks).is_ok();
        }
        told
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ask(directories: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, DatastoreInfo> {
    directories.into_iter().filter_map(|path| Some((path.clone(), room(&path)?))).collect()
}

/// The room below a directory, as its users have it (statvfs(3)).
fn room(directory: &Path) -> Option<DatastoreInfo> {
    let found = statvfs(directory).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Some(DatastoreInfo { total_bytes: bytes(found.f_blocks), free_bytes: bytes(found.f_bavail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_told_once_it_was_asked() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = BTreeSet::from([dir.path().to_owned(), dir.path().join("missing")]);
        let datastores = Datastores::default();
        assert!(datastores.told(wanted.clone()).is_empty());
        let told = loop {
            let told = datastores.told(wanted.clone());
            if !told.is_empty() {
                break told;
            }
            std::thread::yield_now();
        };
        assert_eq!(told.keys().collect::<Vec<_>>(), [dir.path()]);
        let room = told[dir.path()];
        assert!(room.total_bytes > 0 && room.free_bytes <= room.total_bytes);
        // Of others nothing is told.
        assert!(datastores.told(BTreeSet::new()).is_empty());
    }
}
