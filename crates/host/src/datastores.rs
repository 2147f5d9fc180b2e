//! Datastores of this host: what its directories with disks are, and how they are. Its pools of
//! Ceph are in [`pools`], its thin pools of LVM in [`thin_pools`].
//!
//! It owns what is known of each directory: space, kind, identity ([`marker`]), promised bytes
//! ([`images`]) and speed ([`speed`]). A remote file system may not answer while its server is
//! down, so each directory has a thread of its own for a query, none other while that one waits,
//! and the last answer is reported. It knows no VMs; the agent asks it.

mod images;
mod kind;
mod marker;
mod pools;
mod speed;
mod thin_pools;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::DatastoreInfo;
use godwit_qemu::Uuid;
use godwit_types::{DatastoreHealth, DatastoreSpeed};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Mode, OFlags, StatVfsMountFlags, fstat, statvfs};

pub(crate) use marker::give_free_name;
pub(crate) use pools::Pools;
pub(crate) use thin_pools::ThinPools;

/// Time for which the space is current.
const FRESH: Duration = Duration::from_secs(10);
/// Shortest interval between two measurements of a directory's speed.
const MEASURE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which the images in a directory are added up.
const PROMISED_INTERVAL: Duration = Duration::from_secs(60);
/// Time of a query after which its directory counts as not answering.
const SILENT: Duration = Duration::from_secs(30);
/// Most queries at once.
const MOST_QUERIES: usize = 32;
/// Latency of a write from which a datastore counts as slow: guests notice it.
const SLOW_US: u64 = 100_000;
/// Free space without which nothing is measured: a measurement takes some.
const MEASURABLE_BYTES: u64 = 256 << 20;
/// Part of a file system that copies leave to its VMs, and the most that they leave.
const RESERVED_PART: u64 = 50;
const MOST_RESERVED_BYTES: u64 = 1 << 30;

/// Space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) total_bytes: u64,
    /// Bytes that unprivileged users can still use.
    pub(crate) free_bytes: u64,
}

/// Last answers of the file systems.
#[derive(Clone, Debug, Default)]
pub(crate) struct Datastores(Arc<Mutex<BTreeMap<PathBuf, Known>>>);

/// What is known of a directory.
#[derive(Clone, Debug, Default)]
struct Known {
    /// The last answer; none: it does not exist, or was not asked yet.
    info: Option<DatastoreInfo>,
    /// Device and inode of the directory.
    place: (u64, u64),
    /// Begin of the last query.
    queried: Option<Instant>,
    is_querying: bool,
    measured: Option<Instant>,
    added_up: Option<Instant>,
}

/// What a query finds out beside the space.
#[derive(Clone, Copy, Debug)]
struct Query {
    /// The directory is one for VMs: the agent may write there.
    is_own: bool,
    measures: bool,
    adds_up: bool,
}

impl Datastores {
    /// Returns what is known of these directories; omits those that do not exist or have not been
    /// queried yet. Starts queries in the background where they are due. The agent's marker and
    /// measurements are in `own` alone.
    pub(crate) fn infos(
        &self,
        directories: &BTreeSet<PathBuf>,
        own: &[PathBuf],
    ) -> BTreeMap<PathBuf, DatastoreInfo> {
        let mut all = self.known();
        all.retain(|path, known| known.is_querying || directories.contains(path));
        let mut queries = all.values().filter(|known| known.is_querying).count();
        let measured: BTreeSet<u64> = all.values().filter_map(Known::measured_device).collect();
        for path in directories {
            let known = all.entry(path.clone()).or_default();
            let is_due = known.queried.is_none_or(|queried| queried.elapsed() >= FRESH);
            if is_due && !known.is_querying && queries < MOST_QUERIES {
                known.queried = Some(Instant::now());
                // Directories of one file system are measured once.
                let may_measure = is_own(path, own) && !measured.contains(&known.place.0);
                known.is_querying = self.begin(path, (is_own(path, own), may_measure), known);
                queries += usize::from(known.is_querying);
            }
        }
        shown(&all, directories.iter())
    }

    /// Returns what is known of these directories, without a query.
    pub(crate) fn last(&self, directories: &[PathBuf]) -> BTreeMap<PathBuf, DatastoreInfo> {
        shown(&self.known(), directories.iter())
    }

    /// Begins a query; returns whether it runs.
    fn begin(&self, path: &Path, (is_own, may_measure): (bool, bool), known: &mut Known) -> bool {
        let is_due = |last: Option<Instant>, every| last.is_none_or(|last| last.elapsed() >= every);
        let query = Query {
            is_own,
            measures: may_measure && is_due(known.measured, MEASURE_INTERVAL),
            adds_up: is_own && is_due(known.added_up, PROMISED_INTERVAL),
        };
        if query.measures {
            known.measured = Some(Instant::now());
        }
        if query.adds_up {
            known.added_up = Some(Instant::now());
        }
        let (all, path, before) = (self.clone(), path.to_owned(), known.info.clone());
        let asks = move || {
            let found = ask(&path, query, before.as_ref(), &|info, place| {
                if let Some(known) = all.known().get_mut(&path) {
                    (known.info, known.place) = (Some(info), place);
                }
            });
            if let Some(known) = all.known().get_mut(&path) {
                known.is_querying = false;
                if !found {
                    known.info = None;
                }
            }
        };
        std::thread::Builder::new().name("datastore".into()).spawn(asks).is_ok()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Known>> {
        self.0.lock()
    }
}

impl Known {
    /// Returns the device of a directory that was measured a short time ago.
    fn measured_device(&self) -> Option<u64> {
        let last = self.measured.filter(|_| self.place.0 != 0)?;
        (last.elapsed() < MEASURE_INTERVAL).then_some(self.place.0)
    }

    /// Returns the last answer, or that there is none any more.
    fn shown(&self) -> Option<DatastoreInfo> {
        let mut info = self.info.clone()?;
        let silent = self.queried.filter(|queried| self.is_querying && queried.elapsed() >= SILENT);
        if let Some(since) = silent {
            info.health = Some(DatastoreHealth::NoAnswer);
            let problem = format!(
                "it has not answered for {} s: check its server, its mount and the network",
                since.elapsed().as_secs()
            );
            info.problem = Some(problem);
        }
        Some(info)
    }
}

fn shown<'a>(
    all: &BTreeMap<PathBuf, Known>,
    directories: impl Iterator<Item = &'a PathBuf>,
) -> BTreeMap<PathBuf, DatastoreInfo> {
    let shown = directories.filter_map(|path| {
        let known = all.get(path)?;
        Some((path.clone(), known.shown()?, known.place))
    });
    with_speeds_of_devices(without_copies(shown))
}

/// Returns whether the agent may write to a directory: it is one for VMs. The lab has `/` there.
fn is_own(path: &Path, own: &[PathBuf]) -> bool {
    path.parent().is_some() && own.iter().any(|dir| dir == path)
}

/// Removes the identity of a directory that is a copy of another: a marker that was copied with the
/// images would make two datastores one.
fn without_copies(
    all: impl Iterator<Item = (PathBuf, DatastoreInfo, (u64, u64))>,
) -> BTreeMap<PathBuf, (DatastoreInfo, u64)> {
    let mut places = BTreeMap::<String, (PathBuf, (u64, u64))>::new();
    let mut infos = BTreeMap::new();
    for (path, mut info, place) in all {
        if let Some(identity) = info.identity.clone() {
            let first = places.entry(identity).or_insert_with(|| (path.clone(), place));
            if first.1 != place {
                info.identity = None;
                info.problem = Some(format!(
                    "its marker {} is a copy of the one in {}: remove the copy",
                    marker::NAME,
                    first.0.display()
                ));
            }
        }
        infos.insert(path, (info, place.0));
    }
    infos
}

/// Gives each directory the latest measurement of its file system.
fn with_speeds_of_devices(
    infos: BTreeMap<PathBuf, (DatastoreInfo, u64)>,
) -> BTreeMap<PathBuf, DatastoreInfo> {
    let mut latest = BTreeMap::<u64, DatastoreSpeed>::new();
    for (info, device) in infos.values() {
        let Some(speed) = info.speed else { continue };
        let known = latest.entry(*device).or_insert(speed);
        if speed.measured_unix_ms > known.measured_unix_ms {
            *known = speed;
        }
    }
    let shown = infos.into_iter().map(|(path, (mut info, device))| {
        if let (Some(_), Some(speed)) = (info.speed, latest.get(&device)) {
            info.speed = Some(*speed);
            let is_well = info.health.is_some_and(DatastoreHealth::takes_disks);
            info.health = if is_well { Some(by_speed(speed)) } else { info.health };
        }
        (path, info)
    });
    shown.collect()
}

/// Asks a file system, and reports what is found as soon as it is. Returns whether the directory
/// exists.
fn ask(
    path: &Path,
    query: Query,
    before: Option<&DatastoreInfo>,
    found: &dyn Fn(DatastoreInfo, (u64, u64)),
) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::open(path, flags, Mode::empty()) else { return false };
    let (Ok(space), Ok(stat)) = (statvfs(path), fstat(&dir)) else { return false };
    let room = room_in(&space);
    let mut info = DatastoreInfo {
        total_bytes: room.total_bytes,
        free_bytes: room.free_bytes,
        kind: Some(kind::kind_of(&dir, stat.st_dev)),
        promised_bytes: before.and_then(|before| before.promised_bytes),
        speed: before.and_then(|before| before.speed),
        ..DatastoreInfo::default()
    };
    let mut is_readonly = space.f_flag.contains(StatVfsMountFlags::RDONLY);
    if query.is_own {
        match marker::identity(&dir, is_readonly) {
            Ok(identity) => info.identity = identity.map(|identity| identity.to_string()),
            Err(marker::MarkerError::NotWritable(error)) => {
                is_readonly = true;
                info.problem = Some(format!("the agent cannot write to it: {error}"));
            }
            Err(error @ marker::MarkerError::Damaged(_)) => info.problem = Some(error.to_string()),
        }
    }
    let place = (stat.st_dev, stat.st_ino);
    info.health = Some(health(room, is_readonly, info.speed.as_ref()));
    found(info.clone(), place);
    if query.adds_up {
        info.promised_bytes = images::promised_bytes(path);
    }
    let is_well = !is_readonly && !is_full(room) && room.free_bytes >= MEASURABLE_BYTES;
    match query.measures && is_well {
        true => info.speed = measured(&dir, path).or(info.speed),
        false if !is_well => info.speed = None,
        false => {}
    }
    info.health = Some(health(room, is_readonly, info.speed.as_ref()));
    found(info, place);
    true
}

fn measured(dir: &OwnedFd, path: &Path) -> Option<DatastoreSpeed> {
    match speed::measure(dir) {
        Ok(speed) => Some(speed),
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "cannot measure a datastore");
            None
        }
    }
}

fn health(room: Room, is_readonly: bool, speed: Option<&DatastoreSpeed>) -> DatastoreHealth {
    match speed {
        _ if is_readonly => DatastoreHealth::ReadOnly,
        _ if is_full(room) => DatastoreHealth::Full,
        Some(speed) => by_speed(speed),
        None => DatastoreHealth::Ok,
    }
}

fn by_speed(speed: &DatastoreSpeed) -> DatastoreHealth {
    if speed.write_us >= SLOW_US { DatastoreHealth::Slow } else { DatastoreHealth::Ok }
}

/// Opens a directory if it is this datastore now. Since the last query its file system may have
/// gone, and what is below its mount appears.
pub(crate) fn open_datastore(directory: &Path, identity: Uuid) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(directory, flags, Mode::empty())?;
    match marker::identity(&dir, true).map_err(io::Error::other)? {
        Some(found) if found == identity => Ok(dir),
        _ => Err(io::Error::other("its directory has another marker or none: is it mounted?")),
    }
}

/// Returns what copies leave to VMs of a file system of so many bytes.
pub(crate) fn reserve_of(bytes: u64) -> u64 {
    (bytes / RESERVED_PART).min(MOST_RESERVED_BYTES)
}

fn is_full(room: Room) -> bool {
    room.free_bytes <= reserve_of(room.total_bytes)
}

/// Returns the space below a directory that unprivileged users can use (statvfs(3)).
pub(crate) fn room(directory: &Path) -> Option<Room> {
    Some(room_in(&statvfs(directory).ok()?))
}

fn room_in(found: &rustix::fs::StatVfs) -> Room {
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Room { total_bytes: bytes(found.f_blocks), free_bytes: bytes(found.f_bavail) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = ask() {
                return found;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_existing_directory_is_reported_once_it_was_queried() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = BTreeSet::from([dir.path().to_owned(), dir.path().join("missing")]);
        let datastores = Datastores::default();
        assert!(datastores.infos(&wanted, &[]).is_empty());
        let infos = until(|| {
            let infos = datastores.infos(&wanted, &[]);
            (!infos.is_empty()).then_some(infos)
        });
        assert_eq!(infos.keys().collect::<Vec<_>>(), [dir.path()]);
        let found = &infos[dir.path()];
        assert!(found.total_bytes > 0 && found.free_bytes <= found.total_bytes);
        // The agent writes to directories for VMs alone.
        assert!(found.identity.is_none() && found.speed.is_none());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // Other directories are not reported.
        assert!(datastores.infos(&BTreeSet::new(), &[]).is_empty());
    }

    #[test]
    fn a_directory_for_vms_gets_an_identity_and_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = BTreeSet::from([dir.path().to_owned()]);
        std::fs::write(dir.path().join("a.raw"), vec![1; 1 << 20]).unwrap();
        let ask = |datastores: &Datastores| {
            until(|| {
                let infos = datastores.infos(&wanted, &[dir.path().to_owned()]);
                infos.get(dir.path()).filter(|info| info.speed.is_some()).cloned()
            })
        };
        let info = ask(&Datastores::default());
        assert_eq!(info.promised_bytes, Some(1 << 20));
        assert!(info.identity.is_some() && info.problem.is_none(), "{info:?}");
        assert!(info.speed.unwrap().write_bytes_per_s > 0);
        // The next agent finds the same.
        assert_eq!(ask(&Datastores::default()).identity, info.identity);
        let names = std::fs::read_dir(dir.path()).unwrap().flatten();
        let mut names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names, [marker::NAME, "a.raw"]);
    }

    #[test]
    fn a_copied_marker_makes_no_second_datastore() {
        let info = || DatastoreInfo { identity: Some("one".into()), ..DatastoreInfo::default() };
        let all = [("/a", (1, 1)), ("/again", (1, 1)), ("/copy", (1, 2))];
        let all = all.map(|(path, place)| (PathBuf::from(path), info(), place));
        let infos = with_speeds_of_devices(without_copies(all.into_iter()));
        let identities: Vec<_> = infos.values().map(|info| info.identity.is_some()).collect();
        assert_eq!(identities, [true, true, false]);
        assert!(infos[Path::new("/copy")].problem.as_ref().unwrap().contains("remove the copy"));
    }

    #[test]
    fn a_directory_that_does_not_answer_keeps_its_figures() {
        let known = Known {
            info: Some(DatastoreInfo { total_bytes: 7, ..DatastoreInfo::default() }),
            queried: Instant::now().checked_sub(SILENT),
            is_querying: true,
            ..Known::default()
        };
        let shown = known.shown().unwrap();
        assert_eq!((shown.total_bytes, shown.health), (7, Some(DatastoreHealth::NoAnswer)));
        assert!(Known { is_querying: false, ..known }.shown().unwrap().health.is_none());
    }

    #[test]
    fn health_names_the_worst() {
        let room = |free_bytes| Room { total_bytes: 100 << 30, free_bytes };
        let speed = |write_us| DatastoreSpeed { write_us, ..DatastoreSpeed::default() };
        let of = |free, is_readonly, us| health(room(free), is_readonly, Some(&speed(us)));
        assert_eq!(of(50 << 30, false, 900), DatastoreHealth::Ok);
        assert_eq!(of(50 << 30, false, SLOW_US), DatastoreHealth::Slow);
        assert_eq!(of(1 << 30, false, SLOW_US), DatastoreHealth::Full);
        assert_eq!(of(1 << 30, true, 900), DatastoreHealth::ReadOnly);
        assert!(!is_own(Path::new("/"), &["/".into()]));
    }
}
