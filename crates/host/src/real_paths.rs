//! Real paths of the files of VMs, with every link resolved. To know that no VM uses an image, all
//! images of all VMs are resolved, and the storage of one may hang. So each directory for VMs has a
//! thread that resolves what is below it. Where it does not answer in time, the last known paths
//! count, and nothing waits for it again until it answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use godwit_qemu::is_rbd;
use parking_lot::Mutex;
use rustix::io::Errno;

/// Longest time for which a directory is waited for.
const LIMIT: Duration = Duration::from_secs(2);
/// Most orders that wait for a thread. Beyond that its directory counts as silent.
const MOST_ORDERS: usize = 64;
/// Most paths that are remembered.
const MOST_KNOWN: usize = 16_384;

type Resolve = dyn Fn(&Path) -> io::Result<PathBuf> + Send + Sync;
type Reals = Vec<io::Result<PathBuf>>;

/// The threads, and the last known paths.
pub(crate) struct RealPaths {
    resolve: Arc<Resolve>,
    /// By directory for VMs. Everything else is below `/`.
    threads: Mutex<BTreeMap<PathBuf, Resolver>>,
    known: Mutex<BTreeMap<PathBuf, PathBuf>>,
}

/// The thread of a directory, which ends when this is dropped.
struct Resolver {
    orders: SyncSender<Order>,
    sent: u64,
    /// Number of the last order that was carried out.
    done: Arc<AtomicU64>,
    /// The last order that was not answered in time.
    silent: Option<u64>,
}

struct Order {
    paths: Vec<PathBuf>,
    answer: SyncSender<Reals>,
}

/// An order that was sent, and its answer.
struct Sent {
    dir: PathBuf,
    number: u64,
    paths: Vec<PathBuf>,
    answer: Receiver<Reals>,
}

/// Real paths; `None`: the storage of the path does not answer, or fails, and has not told it
/// before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolved(BTreeMap<PathBuf, Option<PathBuf>>);

impl Resolved {
    /// Returns the real path; the path itself if it is unknown or nothing is there.
    pub(crate) fn of(&self, path: &Path) -> PathBuf {
        self.0.get(path).cloned().flatten().unwrap_or_else(|| path.to_owned())
    }

    /// Whether the path may lead anywhere.
    pub(crate) fn is_unknown(&self, path: &Path) -> bool {
        self.0.get(path).is_some_and(Option::is_none)
    }
}

impl Default for RealPaths {
    fn default() -> RealPaths {
        RealPaths::by(Arc::new(Path::canonicalize))
    }
}

impl fmt::Debug for RealPaths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RealPaths").finish_non_exhaustive()
    }
}

impl Resolver {
    /// Starts a thread.
    fn start(resolve: Arc<Resolve>) -> io::Result<Resolver> {
        let (orders, ordered) = sync_channel::<Order>(MOST_ORDERS);
        let done = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&done);
        let resolves = move || {
            while let Ok(Order { paths, answer }) = ordered.recv() {
                let reals = paths.iter().map(|path| resolve(path)).collect();
                counted.fetch_add(1, Ordering::SeqCst);
                // Nobody may wait any more.
                let _ = answer.try_send(reals);
            }
        };
        std::thread::Builder::new().name("real-paths".to_owned()).spawn(resolves)?;
        Ok(Resolver { orders, sent: 0, done, silent: None })
    }

    fn is_silent(&self) -> bool {
        self.silent.is_some_and(|order| self.done.load(Ordering::SeqCst) < order)
    }
}

impl RealPaths {
    fn by(resolve: Arc<Resolve>) -> RealPaths {
        RealPaths { resolve, threads: Mutex::default(), known: Mutex::default() }
    }

    /// Resolves paths. Blocks for a short time, however many of the directories do not answer.
    pub(crate) fn resolve(&self, paths: BTreeSet<PathBuf>, vm_dirs: &[PathBuf]) -> Resolved {
        self.resolve_within(paths, vm_dirs, LIMIT)
    }

    fn resolve_within(
        &self,
        paths: BTreeSet<PathBuf>,
        vm_dirs: &[PathBuf],
        limit: Duration,
    ) -> Resolved {
        let (mut found, mut below) = (BTreeMap::new(), BTreeMap::<&Path, Vec<PathBuf>>::new());
        for path in paths {
            if is_rbd(&path) {
                found.insert(path.clone(), Some(path));
            } else {
                below.entry(dir_of(&path, vm_dirs)).or_default().push(path);
            }
        }
        let (mut sent, mut silent) = (Vec::new(), Vec::new());
        for (dir, paths) in below {
            match self.send(dir, &paths) {
                Some((number, answer)) => {
                    sent.push(Sent { dir: dir.to_owned(), number, paths, answer });
                }
                None => silent.extend(paths),
            }
        }
        let deadline = Instant::now().checked_add(limit);
        for Sent { dir, number, paths, answer } in sent {
            let left = deadline.map_or(limit, |end| end.saturating_duration_since(Instant::now()));
            if let Ok(reals) = answer.recv_timeout(left) {
                found.extend(self.note(paths, reals));
            } else {
                self.note_silence(&dir, number);
                silent.extend(paths);
            }
        }
        let known = self.known.lock();
        found.extend(silent.into_iter().map(|path| {
            let last = known.get(&path).cloned();
            (path, last)
        }));
        Resolved(found)
    }

    /// Forgets the last known paths, as if the agent had just started.
    #[cfg(test)]
    pub(crate) fn forget(&self) {
        self.known.lock().clear();
    }

    /// Sends an order to the thread of a directory; `None`: it does not answer.
    fn send(&self, dir: &Path, paths: &[PathBuf]) -> Option<(u64, Receiver<Reals>)> {
        let mut threads = self.threads.lock();
        if !threads.contains_key(dir) {
            let started = Resolver::start(Arc::clone(&self.resolve)).ok()?;
            threads.insert(dir.to_owned(), started);
        }
        let thread = threads.get_mut(dir).filter(|thread| !thread.is_silent())?;
        let (answer, answered) = sync_channel(1);
        thread.orders.try_send(Order { paths: paths.to_vec(), answer }).ok()?;
        thread.sent += 1;
        Some((thread.sent, answered))
    }

    /// Notes what a directory has answered. Where nothing is, the path itself counts. What fails
    /// may lead anywhere: the last known path counts, as where there is no answer.
    fn note(&self, paths: Vec<PathBuf>, reals: Reals) -> Vec<(PathBuf, Option<PathBuf>)> {
        let mut known = self.known.lock();
        let noted = paths.into_iter().zip(reals).map(|(path, real)| {
            let real = match real {
                Ok(real) => {
                    if known.len() >= MOST_KNOWN {
                        known.clear();
                    }
                    known.insert(path.clone(), real.clone());
                    Some(real)
                }
                Err(error) if is_nowhere(&error) => {
                    known.remove(&path);
                    Some(path.clone())
                }
                Err(_) => known.get(&path).cloned(),
            };
            (path, real)
        });
        noted.collect()
    }

    fn note_silence(&self, dir: &Path, order: u64) {
        tracing::warn!(dir = %dir.display(), "storage does not answer: its last known files count");
        if let Some(thread) = self.threads.lock().get_mut(dir) {
            thread.silent = thread.silent.max(Some(order));
        }
    }
}

/// Whether an error says that a path leads nowhere.
fn is_nowhere(error: &io::Error) -> bool {
    let errors = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::NAMETOOLONG];
    Errno::from_io_error(error).is_some_and(|error| errors.contains(&error))
}

/// Returns the directory for VMs that a path is below, or `/`.
pub(crate) fn dir_of<'a>(path: &Path, vm_dirs: &'a [PathBuf]) -> &'a Path {
    let below = vm_dirs.iter().filter(|dir| path.starts_with(dir));
    below.max_by_key(|dir| dir.as_os_str().len()).map_or(Path::new("/"), PathBuf::as_path)
}

#[cfg(test)]
mod tests {
    use parking_lot::Condvar;
    use proptest::prelude::*;

    use super::*;

    /// Far more than a directory takes that answers.
    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(5);
    const DIRS: usize = 3;

    /// File systems, each of which can hang. What is below `/fs/N` is really below `/real/N/V`,
    /// with a number V that changes.
    #[derive(Default)]
    struct FileSystems {
        all: Mutex<[(bool, u32); DIRS]>,
        freed: Condvar,
    }

    impl FileSystems {
        fn look(&self, path: &Path) -> io::Result<PathBuf> {
            let parts: Vec<_> = path.iter().map(|part| part.to_str().unwrap()).collect();
            let number: usize = parts[2].parse().unwrap();
            let mut all = self.all.lock();
            while all[number].0 {
                self.freed.wait(&mut all);
            }
            match parts[3] {
                "absent" => Err(Errno::NOENT.into()),
                "loop" => Err(Errno::LOOP.into()),
                "fails" => Err(Errno::IO.into()),
                name => Ok(real(number, all[number].1, name)),
            }
        }

        fn free(&self, number: usize) {
            let mut all = self.all.lock();
            all[number] = (false, all[number].1 + 1);
            self.freed.notify_all();
        }
    }

    fn dirs() -> Vec<PathBuf> {
        (0..DIRS).map(|number| format!("/fs/{number}").into()).collect()
    }

    fn path(number: usize, name: &str) -> PathBuf {
        format!("/fs/{number}/{name}").into()
    }

    fn real(number: usize, version: u32, name: &str) -> PathBuf {
        format!("/real/{number}/{version}/{name}").into()
    }

    fn over(all: &Arc<FileSystems>) -> RealPaths {
        let all = Arc::clone(all);
        RealPaths::by(Arc::new(move |path: &Path| all.look(path)))
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Hang(usize),
        Free(usize),
        Look,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..DIRS).prop_map(Step::Hang),
            (0..DIRS).prop_map(Step::Free),
            Just(Step::Look),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Directories that hang and answer again in any order: those that answer are resolved,
        /// without a wait for the others, of which the last known paths count.
        #[test]
        fn a_directory_that_hangs_delays_no_other(steps in prop::collection::vec(step(), 1..16)) {
            let all = Arc::<FileSystems>::default();
            let (paths, dirs) = (over(&all), dirs());
            let one = |number: usize, limit| {
                let wanted = BTreeSet::from([path(number, "web")]);
                paths.resolve_within(wanted, &dirs, limit)
            };
            let mut known: [Option<PathBuf>; DIRS] = Default::default();
            for step in steps {
                match step {
                    Step::Hang(number) if !all.all.lock()[number].0 => {
                        all.all.lock()[number].0 = true;
                        let (found, web) = (one(number, SHORT), path(number, "web"));
                        prop_assert_eq!(found.is_unknown(&web), known[number].is_none());
                    }
                    Step::Free(number) if all.all.lock()[number].0 => {
                        all.free(number);
                        let new = real(number, all.all.lock()[number].1, "web");
                        // Its thread ends the order that nobody waits for.
                        while one(number, LONG).of(&path(number, "web")) != new {
                            std::thread::yield_now();
                        }
                        known[number] = Some(new);
                    }
                    Step::Hang(_) | Step::Free(_) => {}
                    Step::Look => {
                        let wanted = (0..DIRS).map(|number| path(number, "web")).collect();
                        let found = paths.resolve_within(wanted, &dirs, LONG);
                        for (number, last) in known.iter_mut().enumerate() {
                            let (hangs, version) = all.all.lock()[number];
                            if !hangs {
                                *last = Some(real(number, version, "web"));
                            }
                            let web = path(number, "web");
                            prop_assert_eq!(found.is_unknown(&web), last.is_none());
                            prop_assert_eq!(found.of(&web), last.clone().unwrap_or(web));
                        }
                    }
                }
            }
            (0..DIRS).for_each(|number| all.free(number));
        }
    }

    #[test]
    fn what_is_absent_is_itself_what_fails_is_unknown_and_no_pool_is_asked() {
        let all = Arc::<FileSystems>::default();
        let paths = over(&all);
        let (absent, pooled) = (path(1, "absent"), PathBuf::from("rbd:vms/web"));
        let (circle, failed) = (path(1, "loop"), path(1, "fails"));
        let wanted =
            BTreeSet::from([absent.clone(), pooled.clone(), circle.clone(), failed.clone()]);
        let found = paths.resolve_within(wanted, &dirs(), LONG);
        assert_eq!((found.of(&absent), found.of(&pooled)), (absent.clone(), pooled.clone()));
        assert!(!found.is_unknown(&absent) && !found.is_unknown(&pooled));
        // It may be a link to anything.
        assert!(!found.is_unknown(&circle) && found.is_unknown(&failed));
        assert_eq!(found.of(Path::new("/other")), Path::new("/other"));
    }

    #[test]
    fn a_path_belongs_to_the_nearest_directory() {
        let dirs = ["/srv", "/srv/fast", "/srv/fa"].map(PathBuf::from);
        for (path, dir) in [
            ("/srv/fast/web.raw", "/srv/fast"),
            ("/srv/fastest/web.raw", "/srv"),
            ("/srv/fa/web.raw", "/srv/fa"),
            ("/home/web.raw", "/"),
        ] {
            assert_eq!(dir_of(Path::new(path), &dirs), Path::new(dir));
        }
    }
}
