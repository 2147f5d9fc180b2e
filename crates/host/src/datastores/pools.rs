//! Pools of Ceph of this host as datastores: identity, space and health.
//!
//! The identity is made of what the configuration says, so hosts agree on it without a request.
//! Ceph's own programs know the rest. They take long while the cluster does not answer, so each
//! entry of `[[ceph]]` has a query in the background, none other while that one runs, and the last
//! answer is reported. It knows no VMs; the agent asks it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::{CEPH_RBD, DatastoreInfo};
use godwit_qemu::{PoolSpace, Uuid, list_pool, pool_spaces};
use godwit_types::DatastoreHealth;
use parking_lot::Mutex;

use super::{Room, is_full};
use crate::ceph::{CephConfig, path_of};

/// Time for which the space is current: each query starts a program.
const FRESH: Duration = Duration::from_secs(60);
/// Interval of the queries while something is wrong.
const RETRY: Duration = Duration::from_secs(10);
/// Interval at which the images of pools are added up: `rbd` opens each of them.
const PROMISED_INTERVAL: Duration = Duration::from_secs(600);

/// What is known of the pools of each entry of `[[ceph]]`, by its position.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pools(Arc<Mutex<BTreeMap<usize, Known>>>);

/// What is known of the pools of a cluster.
#[derive(Debug)]
struct Known {
    /// Pools and namespaces, as the configuration names them.
    pools: BTreeMap<String, DatastoreInfo>,
    /// Begin of the last query.
    queried: Option<Instant>,
    added_up: Option<Instant>,
    is_querying: bool,
}

/// Space of each pool of a cluster, as far as the cluster knows it.
type Spaces = BTreeMap<String, Option<PoolSpace>>;

/// Why the space of a cluster's pools is unknown, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Silence {
    /// This host has no program to ask.
    Unasked(String),
    /// The cluster does not answer or refuses, or this host has no access.
    NoAnswer(String),
}

impl Pools {
    /// Returns what is known of the pools of these clusters. Starts queries in the background where
    /// they are due. `user`: that of Ceph's programs.
    pub(crate) fn infos(
        &self,
        clusters: &[CephConfig],
        user: (u32, u32),
    ) -> BTreeMap<PathBuf, DatastoreInfo> {
        let is_due = |last: Option<Instant>, every| last.is_none_or(|last| last.elapsed() >= every);
        let mut all = self.0.lock();
        for (index, cluster) in clusters.iter().enumerate() {
            let known = all.entry(index).or_insert_with(|| Known::of(cluster));
            let is_well = known.pools.values().all(|info| info.problem.is_none());
            let every = if is_well { FRESH } else { RETRY };
            if known.is_querying || !is_due(known.queried, every) {
                continue;
            }
            let adds_up = is_due(known.added_up, PROMISED_INTERVAL);
            (known.queried, known.is_querying) = (Some(Instant::now()), true);
            tokio::spawn(self.clone().query(index, cluster.clone(), user, adds_up));
        }
        let pools = all.values().flat_map(|known| &known.pools);
        pools.map(|(place, info)| (path_of(place), info.clone())).collect()
    }

    async fn query(self, index: usize, cluster: CephConfig, user: (u32, u32), adds_up: bool) {
        let access = cluster.access();
        let answer = match &access {
            Ok(access) => pool_spaces(access, user).await.map_err(|error| silence(&error)),
            Err(why) => Err(Silence::NoAnswer(format!(
                "this host has no access to its cluster: {why}; correct [[ceph]] in its \
                 configuration"
            ))),
        };
        let id = cluster.cluster().ok();
        self.change(index, |known| {
            for (place, info) in &mut known.pools {
                *info = described(info, (place.as_str(), id), &answer);
            }
        });
        if let (Ok(access), Ok(_), true) = (&access, &answer, adds_up) {
            self.change(index, |known| known.added_up = Some(Instant::now()));
            for place in &cluster.pools {
                match list_pool(access, place, user).await {
                    Ok(images) => {
                        let bytes = images.iter().map(|image| image.bytes);
                        let sum = bytes.fold(0, u64::saturating_add);
                        self.change(index, |known| {
                            if let Some(info) = known.pools.get_mut(place) {
                                info.promised_bytes = Some(sum);
                            }
                        });
                    }
                    Err(error) => {
                        tracing::debug!(pool = place, %error, "its images are not added up");
                        // The cluster may only refuse this pool.
                        if error.is_silent() {
                            break;
                        }
                    }
                }
            }
        }
        self.change(index, |known| known.is_querying = false);
    }

    fn change(&self, index: usize, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.0.lock().get_mut(&index) {
            change(known);
        }
    }
}

impl Known {
    /// Returns what the configuration of a cluster says.
    fn of(cluster: &CephConfig) -> Known {
        let id = cluster.cluster().ok();
        let pools = cluster.pools.iter().map(|place| {
            let identity = id.map(|id| identity_of(id, place));
            let kind = Some(CEPH_RBD.to_owned());
            (place.clone(), DatastoreInfo { identity, kind, ..DatastoreInfo::default() })
        });
        Known { pools: pools.collect(), queried: None, added_up: None, is_querying: false }
    }
}

/// Returns the identity of a pool or a namespace of one: hosts know its cluster and its name alone.
fn identity_of(cluster: Uuid, place: &str) -> String {
    let hash = blake3::hash(format!("godwit ceph pool {cluster} {place}").as_bytes());
    let first = hash.as_bytes().first_chunk().copied().unwrap_or_default();
    Uuid::from_u128(u128::from_be_bytes(first)).to_string()
}

fn silence(error: &io::Error) -> Silence {
    match error.kind() {
        io::ErrorKind::NotFound => Silence::Unasked(format!(
            "its space is unknown: cannot start ceph: {error}; install ceph-common on this host"
        )),
        _ => Silence::NoAnswer(format!(
            "its cluster does not answer: {error}; check it with `ceph status`"
        )),
    }
}

/// Returns a pool after an answer of its cluster. `before`: what was known of it, which stays while
/// there is no answer.
fn described(
    before: &DatastoreInfo,
    (place, cluster): (&str, Option<Uuid>),
    answer: &Result<Spaces, Silence>,
) -> DatastoreInfo {
    let pool = place.split_once('/').map_or(place, |(pool, _)| pool);
    // Settings of the datastore do not end when a file cannot be read for a while.
    let identity = cluster.map(|cluster| identity_of(cluster, place));
    let identity = identity.or_else(|| before.identity.clone());
    let (room, health, problem) = match answer.as_ref().map(|spaces| spaces.get(pool)) {
        Ok(Some(Some(space))) => {
            let total_bytes = space.used_bytes.saturating_add(space.free_bytes);
            let room = Room { total_bytes, free_bytes: space.free_bytes };
            let health = if is_full(room) { DatastoreHealth::Full } else { DatastoreHealth::Ok };
            (Some(room), Some(health), None)
        }
        Ok(Some(None)) => {
            let why = "its cluster does not know its space: check its managers with `ceph status`";
            (None, None, Some(why.to_owned()))
        }
        Ok(None) => {
            let why = format!("its cluster has no pool {pool}: see `ceph osd pool ls`");
            (None, Some(DatastoreHealth::NoAnswer), Some(why))
        }
        Err(Silence::Unasked(why)) => (None, None, Some(why.clone())),
        Err(Silence::NoAnswer(why)) => {
            let last = Room { total_bytes: before.total_bytes, free_bytes: before.free_bytes };
            (Some(last), Some(DatastoreHealth::NoAnswer), Some(why.clone()))
        }
    };
    DatastoreInfo {
        total_bytes: room.map_or(0, |room| room.total_bytes),
        free_bytes: room.map_or(0, |room| room.free_bytes),
        identity,
        health,
        problem,
        ..before.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const FSID: Uuid = Uuid::from_u128(7);

    fn cluster(key: &Path) -> CephConfig {
        CephConfig {
            pools: vec!["vms".into(), "vms/shop".into()],
            monitors: vec!["127.0.0.1".into()],
            conf: None,
            fsid: Some(FSID),
            user: "godwit".into(),
            key: key.to_owned(),
        }
    }

    fn space(used_bytes: u64, free_bytes: u64) -> Option<PoolSpace> {
        Some(PoolSpace { used_bytes, free_bytes })
    }

    #[test]
    fn the_identity_is_that_of_cluster_and_name() {
        let known = |number| {
            let fsid = Some(Uuid::from_u128(number));
            Known::of(&CephConfig { fsid, ..cluster(Path::new("/no/key")) }).pools
        };
        let (one, again, other) = (known(7), known(7), known(8));
        assert_eq!(one, again);
        let mut all: Vec<_> =
            one.values().chain(other.values()).map(|info| &info.identity).collect();
        assert!(all.iter().all(|identity| identity.is_some()), "{all:?}");
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4);
        // It is one that a manager accepts.
        assert!(one["vms"].identity.as_ref().unwrap().parse::<Uuid>().is_ok());
        assert_eq!(one["vms"].kind.as_deref(), Some(CEPH_RBD));
    }

    #[test]
    fn a_pool_has_the_space_that_its_cluster_answers() {
        let before = DatastoreInfo { promised_bytes: Some(9), ..DatastoreInfo::default() };
        let after = |before: &DatastoreInfo, place: &str, spaces: &[(&str, Option<PoolSpace>)]| {
            let spaces = spaces.iter().map(|(pool, space)| ((*pool).to_owned(), *space));
            described(before, (place, Some(FSID)), &Ok(spaces.collect()))
        };
        let gib = 1 << 30;
        for place in ["vms", "vms/shop"] {
            let found = after(&before, place, &[("vms", space(300 * gib, 100 * gib))]);
            assert_eq!((found.total_bytes, found.free_bytes), (400 * gib, 100 * gib));
            assert_eq!((found.health, &found.problem), (Some(DatastoreHealth::Ok), &None));
            assert_eq!(found.promised_bytes, Some(9));
        }
        let full = after(&before, "vms", &[("vms", space(300 * gib, 0))]);
        assert_eq!(full.health, Some(DatastoreHealth::Full));
        let most = after(&before, "vms", &[("vms", space(u64::MAX, u64::MAX))]);
        assert_eq!(most.total_bytes, u64::MAX);
        // An unknown space is 0, and a pool that is gone takes no disks.
        let unknown = after(&full, "vms", &[("vms", None)]);
        assert_eq!((unknown.total_bytes, unknown.health), (0, None));
        assert!(unknown.problem.unwrap().contains("does not know its space"));
        let gone = after(&full, "vms", &[("other", space(1, 1))]);
        assert_eq!((gone.total_bytes, gone.health), (0, Some(DatastoreHealth::NoAnswer)));
        assert!(gone.problem.unwrap().contains("no pool vms"));
    }

    #[test]
    fn a_silent_cluster_keeps_its_figures_and_a_host_without_ceph_has_none() {
        let known = DatastoreInfo { total_bytes: 9, free_bytes: 4, ..DatastoreInfo::default() };
        let after = |kind| {
            let error = io::Error::new(kind, "why");
            described(&known, ("vms", Some(FSID)), &Err(silence(&error)))
        };
        let silent = after(io::ErrorKind::TimedOut);
        assert_eq!((silent.total_bytes, silent.free_bytes), (9, 4));
        assert_eq!(silent.health, Some(DatastoreHealth::NoAnswer));
        assert!(silent.problem.unwrap().contains("why; check it with `ceph status`"));
        let unasked = after(io::ErrorKind::NotFound);
        assert_eq!((unasked.total_bytes, unasked.health), (0, None));
        assert!(unasked.problem.as_deref().unwrap().contains("install ceph-common"));
        assert!(unasked.identity.is_some());
        let unread = described(&unasked, ("vms", None), &Err(Silence::NoAnswer("why".into())));
        assert_eq!(unread.identity, unasked.identity);
    }

    #[tokio::test]
    async fn a_pool_is_reported_at_once_and_says_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let clusters = [cluster(&folder.path().join("key"))];
        let pools = Pools::default();
        let first = pools.infos(&clusters, (0, 0));
        let paths: Vec<_> = first.keys().map(PathBuf::as_path).collect();
        assert_eq!(paths, [Path::new("rbd:vms"), Path::new("rbd:vms/shop")]);
        assert!(first.values().all(|info| info.identity.is_some() && info.problem.is_none()));
        let found = loop {
            let infos = pools.infos(&clusters, (0, 0));
            let found = infos[Path::new("rbd:vms")].clone();
            if found.problem.is_some() {
                break found;
            }
            tokio::task::yield_now().await;
        };
        let problem = found.problem.unwrap();
        assert!(problem.contains("no access") && problem.contains("[[ceph]]"), "{problem}");
        assert_eq!(found.health, Some(DatastoreHealth::NoAnswer));
        assert_eq!(found.identity, first[Path::new("rbd:vms")].identity);
    }
}
