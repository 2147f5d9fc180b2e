//! Free space of the directories with VMs' disks. A remote file system may not answer while its
//! server is down, so a separate thread queries it, and the last answer is reported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::DatastoreInfo;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::statvfs;

/// Time for which an answer is current.
const FRESH: Duration = Duration::from_secs(10);

/// Last answers of the file systems.
#[derive(Clone, Debug, Default)]
pub(crate) struct Datastores(Arc<Mutex<LastAnswers>>);

#[derive(Debug, Default)]
struct LastAnswers {
    infos: BTreeMap<PathBuf, DatastoreInfo>,
    queried: Option<Instant>,
    /// A query is running.
    is_querying: bool,
}

impl Datastores {
    /// Returns what is known of these directories; omits those that do not exist or have not been
    /// queried yet. Starts a new query in the background when one is due.
    pub(crate) fn infos(&self, directories: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, DatastoreInfo> {
        let mut known = self.known();
        let infos = known.infos.iter().filter(|(path, _)| directories.contains(*path));
        let infos = infos.map(|(path, info)| (path.clone(), *info)).collect();
        let is_due = known.queried.is_none_or(|queried| queried.elapsed() >= FRESH);
        if is_due && !known.is_querying {
            let all = self.clone();
            let asks = move || {
                let infos = ask(directories);
                let mut known = all.known();
                (known.infos, known.is_querying) = (infos, false);
            };
            known.queried = Some(Instant::now());
            known.is_querying =
                std::thread::Builder::new().name("datastores".into()).spawn(asks).is_ok();
        }
        infos
    }

    fn known(&self) -> MutexGuard<'_, LastAnswers> {
        self.0.lock()
    }
}

fn ask(directories: BTreeSet<PathBuf>) -> BTreeMap<PathBuf, DatastoreInfo> {
    directories.into_iter().filter_map(|path| Some((path.clone(), room(&path)?))).collect()
}

/// Returns the space below a directory that unprivileged users can use (statvfs(3)).
pub(crate) fn room(directory: &Path) -> Option<DatastoreInfo> {
    let found = statvfs(directory).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Some(DatastoreInfo { total_bytes: bytes(found.f_blocks), free_bytes: bytes(found.f_bavail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_directory_is_reported_once_it_was_queried() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = BTreeSet::from([dir.path().to_owned(), dir.path().join("missing")]);
        let datastores = Datastores::default();
        assert!(datastores.infos(wanted.clone()).is_empty());
        let infos = loop {
            let infos = datastores.infos(wanted.clone());
            if !infos.is_empty() {
                break infos;
            }
            std::thread::yield_now();
        };
        assert_eq!(infos.keys().collect::<Vec<_>>(), [dir.path()]);
        let room = infos[dir.path()];
        assert!(room.total_bytes > 0 && room.free_bytes <= room.total_bytes);
        // Other directories are not reported.
        assert!(datastores.infos(BTreeSet::new()).is_empty());
    }
}
