//! Thin pools of LVM of this host as datastores: identity, space and health.
//!
//! LVM's program knows all of it. It waits while another program changes the volume group, so each
//! pool has a query in the background, none other while that one runs, and the last answer is
//! reported. It knows no VMs; the agent asks it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::DatastoreInfo;
use godwit_qemu::{ThinPool, Uuid};
use godwit_types::DatastoreHealth;
use parking_lot::Mutex;

use super::{Room, is_full};
use crate::thin_pools::{Lvm, LvmError, PoolState, Seen};

/// Kind of a thin pool.
const KIND: &str = "lvm-thin-pool";
/// Time for which the space is current: each query starts a program.
const FRESH: Duration = Duration::from_secs(60);
/// Interval of the queries while something is wrong.
const RETRY: Duration = Duration::from_secs(10);
/// Hundredths of a per cent of the metadata from which a pool needs more of it: once it is full,
/// the pool takes no writes.
const MUCH_METADATA: u64 = 8_000;

/// What is known of each thin pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct ThinPools(Arc<Mutex<BTreeMap<ThinPool, Known>>>);

/// What is known of a thin pool.
#[derive(Debug)]
struct Known {
    info: DatastoreInfo,
    /// Begin of the last query.
    queried: Option<Instant>,
    is_querying: bool,
}

impl ThinPools {
    /// Returns what is known of these pools. Starts queries in the background where they are due.
    pub(crate) fn infos(&self, pools: &[ThinPool], lvm: &Lvm) -> BTreeMap<PathBuf, DatastoreInfo> {
        let mut all = self.0.lock();
        for pool in pools {
            let kind = Some(KIND.to_owned());
            let known = all.entry(pool.clone()).or_insert_with(|| Known {
                info: DatastoreInfo { kind, ..DatastoreInfo::default() },
                queried: None,
                is_querying: false,
            });
            let every = if known.info.problem.is_none() { FRESH } else { RETRY };
            let is_due = known.queried.is_none_or(|last| last.elapsed() >= every);
            if known.is_querying || !is_due {
                continue;
            }
            (known.queried, known.is_querying) = (Some(Instant::now()), true);
            tokio::spawn(self.clone().query(pool.clone(), lvm.clone()));
        }
        all.iter().map(|(pool, known)| (pool.place(), known.info.clone())).collect()
    }

    async fn query(self, pool: ThinPool, lvm: Lvm) {
        let answer = lvm.look(&pool).await;
        if let Some(known) = self.0.lock().get_mut(&pool) {
            known.info = described(&known.info, &pool, &answer);
            known.is_querying = false;
        }
    }
}

/// Returns the identity of a pool: LVM gives it and its group UUIDs.
fn identity_of(state: &PoolState) -> String {
    let text = format!("godwit lvm thin pool {} {}", state.group_uuid, state.uuid);
    let first = blake3::hash(text.as_bytes()).as_bytes().first_chunk().copied();
    Uuid::from_u128(u128::from_be_bytes(first.unwrap_or_default())).to_string()
}

/// Returns a pool after an answer of LVM. `before`: what was known of it, of which the figures stay
/// while there is no answer.
fn described(
    before: &DatastoreInfo,
    pool: &ThinPool,
    answer: &Result<Seen, LvmError>,
) -> DatastoreInfo {
    let silent = |health, problem: String| DatastoreInfo {
        health,
        problem: Some(problem),
        ..before.clone()
    };
    let no_answer = Some(DatastoreHealth::NoAnswer);
    let seen = match answer {
        Ok(seen) => seen,
        Err(LvmError::CannotStart(error)) if error.kind() == io::ErrorKind::NotFound => {
            let why = format!("its space is unknown: cannot start lvm: {error}; install lvm2");
            return silent(None, why);
        }
        Err(error) => return silent(no_answer, format!("{error}; {}", error.remedy())),
    };
    let Some(state) = &seen.pool else {
        let why = format!("there is no thin pool {pool}: see `lvs {}`", pool.group());
        return silent(no_answer, why);
    };
    let Some(used_bytes) = state.used_bytes else {
        let why = format!("it is not active: run `lvchange --activate y {pool}`");
        return silent(no_answer, why);
    };
    let free_bytes = state.total_bytes.saturating_sub(used_bytes);
    let room = Room { total_bytes: state.total_bytes, free_bytes };
    let promised = seen.volumes.iter().filter(|volume| volume.is_in_pool).map(|one| one.bytes);
    DatastoreInfo {
        total_bytes: room.total_bytes,
        free_bytes: room.free_bytes,
        identity: Some(identity_of(state)),
        promised_bytes: Some(promised.fold(0, u64::saturating_add)),
        health: Some(match state.takes_writes {
            _ if is_full(room) => DatastoreHealth::Full,
            true => DatastoreHealth::Ok,
            false => DatastoreHealth::ReadOnly,
        }),
        problem: problem_of(pool, state),
        ..before.clone()
    }
}

/// Returns what is wrong with a pool that answers, and the remedy.
fn problem_of(pool: &ThinPool, state: &PoolState) -> Option<String> {
    if !state.takes_writes {
        return Some(format!(
            "it takes no writes, since it has failed or is out of space: see `lvs {pool}` and the \
             kernel log"
        ));
    }
    if !state.zeroes {
        return Some(format!(
            "it takes no disks that arrive, since its new blocks are not made zero: run `lvchange \
             --zero y {pool}`"
        ));
    }
    let used = state.metadata_used.filter(|used| *used > MUCH_METADATA)?;
    Some(format!(
        "{} % of its metadata are used: make them larger with `lvextend --poolmetadatasize +256m \
         {pool}`",
        used / 100
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::thin_pools::ThinVolume;

    const GIB: u64 = 1 << 30;

    fn thin0() -> ThinPool {
        ThinPool::of(Path::new("lvm:vg0/thin0")).unwrap()
    }

    fn state() -> PoolState {
        PoolState {
            group_uuid: "G".into(),
            uuid: "P".into(),
            total_bytes: 400 * GIB,
            used_bytes: Some(100 * GIB),
            metadata_used: Some(8_000),
            zeroes: true,
            takes_writes: true,
        }
    }

    fn after(before: &DatastoreInfo, state: Option<PoolState>) -> DatastoreInfo {
        let volume = |bytes, is_in_pool| ThinVolume {
            name: "web".into(),
            uuid: "W".into(),
            bytes,
            is_in_pool,
            tags: Vec::new(),
        };
        let volumes = vec![volume(300 * GIB, true), volume(300 * GIB, true), volume(GIB, false)];
        described(before, &thin0(), &Ok(Seen { pool: state, volumes }))
    }

    #[test]
    fn a_pool_has_the_space_and_the_identity_that_lvm_answers() {
        let known = after(&DatastoreInfo::default(), Some(state()));
        assert_eq!((known.total_bytes, known.free_bytes), (400 * GIB, 300 * GIB));
        assert_eq!((known.health, &known.problem), (Some(DatastoreHealth::Ok), &None));
        assert_eq!(known.promised_bytes, Some(600 * GIB));
        // It is one that a manager accepts, and another pool has another.
        let identity = known.identity.clone().unwrap();
        assert!(identity.parse::<Uuid>().is_ok());
        for other in [
            PoolState { uuid: "Q".into(), ..state() },
            PoolState { group_uuid: "H".into(), ..state() },
        ] {
            assert_ne!(after(&known, Some(other)).identity.as_ref(), Some(&identity));
        }
        let full = after(&known, Some(PoolState { used_bytes: Some(400 * GIB), ..state() }));
        assert_eq!((full.free_bytes, full.health), (0, Some(DatastoreHealth::Full)));
    }

    #[test]
    fn what_is_wrong_with_a_pool_is_said() {
        let before = after(&DatastoreInfo::default(), Some(state()));
        let problem = |state| after(&before, state).problem.unwrap();
        let much = PoolState { metadata_used: Some(8_001), ..state() };
        assert!(problem(Some(much)).starts_with("80 % of its metadata"));
        let dirty = PoolState { zeroes: false, ..state() };
        assert!(problem(Some(dirty)).contains("--zero y vg0/thin0"));
        let stuck = after(&before, Some(PoolState { takes_writes: false, ..state() }));
        assert!(stuck.problem.unwrap().contains("takes no writes"));
        assert_eq!(stuck.health, Some(DatastoreHealth::ReadOnly));
        // What does not answer keeps its figures.
        let idle = after(&before, Some(PoolState { used_bytes: None, ..state() }));
        let gone = after(&before, None);
        let late = Err(LvmError::Late { limit: Duration::from_secs(1) });
        let late = described(&before, &thin0(), &late);
        for (silent, word) in [(idle, "not active"), (gone, "no thin pool"), (late, "did not end")]
        {
            assert!(silent.problem.as_ref().unwrap().contains(word), "{silent:?}");
            assert_eq!(silent.health, Some(DatastoreHealth::NoAnswer));
            assert_eq!((silent.free_bytes, &silent.identity), (300 * GIB, &before.identity));
        }
    }

    #[tokio::test]
    async fn a_pool_is_reported_at_once_and_says_that_lvm_is_missing() {
        let (pools, lvm) = (ThinPools::default(), Lvm::new(Path::new("/nonexistent/lvm")));
        let look = || pools.infos(&[thin0()], &lvm)[Path::new("lvm:vg0/thin0")].clone();
        let first = look();
        assert_eq!((first.kind.as_deref(), first.total_bytes), (Some(KIND), 0));
        let found = loop {
            let found = look();
            if found.problem.is_some() {
                break found;
            }
            tokio::task::yield_now().await;
        };
        assert!(found.problem.unwrap().contains("install lvm2"));
        assert_eq!(found.health, None);
    }
}
