//! Limits of moves that operators change at run time. They are stored, and override the
//! configuration of each manager.

pub(crate) mod http;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use godwit_api::control::{JournalKind, MoveLimits, Problem, ProblemCode, UpdateLimits};
use godwit_store::records::{Record, Table};
use serde::{Deserialize, Serialize};

use crate::cluster::inventory::LimitsPlan;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::moves::Moves;
use crate::storage::planned::Planned;
use crate::storage::planning::Planning;
use crate::storage::term::Term;

pub(crate) const LIMITS: Table<SavedLimits> = Table::new();

/// ID of the only record.
const ID: &str = "moves";
/// Largest value of a limit.
const MOST: u32 = 1_000_000;
/// Most datastores with a limit of their own, and the longest of their paths in bytes.
const MOST_DATASTORES: usize = 1000;
const LONGEST_PATH: usize = 4096;

/// Limits as they are saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedLimits {
    out_of_host: Option<u32>,
    into_host: Option<u32>,
    per_datastore: Option<u32>,
    in_all: Option<u32>,
    datastores: BTreeMap<String, u32>,
}

impl Record for SavedLimits {
    const KIND: &'static str = "limits";
    const PREFIX: &'static str = "limits/";
    const VERSION: u32 = 1;
}

impl From<&LimitsPlan> for SavedLimits {
    fn from(plan: &LimitsPlan) -> SavedLimits {
        let LimitsPlan { out_of_host, into_host, per_datastore, in_all, datastores } = plan.clone();
        SavedLimits { out_of_host, into_host, per_datastore, in_all, datastores }
    }
}

impl From<SavedLimits> for LimitsPlan {
    fn from(saved: SavedLimits) -> LimitsPlan {
        let SavedLimits { out_of_host, into_host, per_datastore, in_all, datastores } = saved;
        LimitsPlan { out_of_host, into_host, per_datastore, in_all, datastores }
    }
}

impl Planned<State> for SavedLimits {
    fn known(state: &State) -> BTreeSet<String> {
        let is_set = *state.inventory().limits_plan() != LimitsPlan::default();
        is_set.then(|| ID.to_owned()).into_iter().collect()
    }

    fn set(state: &State, _id: &str, record: Option<SavedLimits>) {
        state.change(|inventory| inventory.plan_limits(record.map(Into::into)));
    }
}

/// Limits of moves, as operators set them.
#[derive(Clone, Debug)]
pub(crate) struct LimitsOfMoves {
    state: Arc<State>,
    moves: Arc<Term<Moves>>,
    planning: Planning,
}

impl LimitsOfMoves {
    pub(crate) fn new(
        state: Arc<State>,
        moves: Arc<Term<Moves>>,
        planning: Planning,
    ) -> LimitsOfMoves {
        LimitsOfMoves { state, moves, planning }
    }

    pub(crate) fn show(&self) -> MoveLimits {
        self.state.inventory().move_limits()
    }

    /// Changes limits. They apply from now on; running moves continue.
    pub(crate) async fn update(&self, request: UpdateLimits) -> Result<MoveLimits, Problem> {
        let limits = self.clone();
        self.planning
            .change(|keeper| async move {
                let before = limits.state.inventory().limits_plan().clone();
                let plan = changed(before, request)?;
                let text = "the limits of concurrent moves were changed";
                let entry =
                    NewEntry::info(JournalKind::SettingChanged, text).about_object("cluster");
                let writes = keeper.noting(entry)?;
                let writes = keeper.put(writes, LIMITS, ID, &SavedLimits::from(&plan)).await?;
                keeper.write(writes).await?;
                limits.state.change(|inventory| inventory.plan_limits(Some(plan)));
                if let Ok(moves) = limits.moves.get() {
                    moves.reschedule();
                }
                Ok(limits.show())
            })
            .await
    }
}

/// Applies a change to the limits and checks the result.
fn changed(before: LimitsPlan, request: UpdateLimits) -> Result<LimitsPlan, Problem> {
    let wrong = |detail: String, remedy: &str| {
        Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy))
    };
    let UpdateLimits { out_of_host, into_host, per_datastore, in_all, datastores } = request;
    let numbers = [out_of_host, into_host, per_datastore, in_all].into_iter().flatten();
    if let Some(most) =
        numbers.chain(datastores.values().copied()).flatten().find(|most| *most > MOST)
    {
        return wrong(
            format!("{most} is not a valid limit of moves"),
            "set at most 1,000,000, or null for no limit",
        );
    }
    let is_path = |path: &&String| Path::new(path).is_absolute() && path.len() <= LONGEST_PATH;
    if let Some(path) = datastores.keys().find(|path| !is_path(path)) {
        let remedy = "name a datastore by its path: `godwit control datastores`";
        return wrong(format!("\"{path}\" is not a datastore path"), remedy);
    }
    let mut plan = LimitsPlan {
        out_of_host: out_of_host.unwrap_or(before.out_of_host),
        into_host: into_host.unwrap_or(before.into_host),
        per_datastore: per_datastore.unwrap_or(before.per_datastore),
        in_all: in_all.unwrap_or(before.in_all),
        datastores: before.datastores,
    };
    for (path, most) in datastores {
        match most {
            Some(most) => drop(plan.datastores.insert(path, most)),
            None => drop(plan.datastores.remove(&path)),
        }
    }
    if plan.datastores.len() > MOST_DATASTORES {
        return wrong("too many datastores have their own limit".to_owned(), "set at most 1000");
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::http::Method;
    use godwit_api::control::{Change, Cluster, MoveLimits, ProblemCode};
    use godwit_store::{MemoryStore, Store};
    use serde_json::json;

    use crate::http::tests::Managed;
    use crate::journal::events::Next;
    use crate::rig;

    const LIMITS: &str = "/api/v1/limits";

    #[tokio::test(flavor = "multi_thread")]
    async fn limits_are_set_published_reset_and_outlive_the_manager() {
        let managed = Managed::begin().await;
        let mut news = managed.manager.state.events().listen(None);
        let change =
            json!({ "in_all": 3, "out_of_host": 2, "datastores": { "/srv": 1, "/mnt": 4 } });
        let set: MoveLimits = managed.root(Method::PATCH, LIMITS, Some(change)).await.read();
        assert_eq!(
            (set.in_all, set.out_of_host, set.into_host, set.per_datastore),
            (Some(3), Some(2), None, 128)
        );
        let Some(Next::Events(events)) = news.next().await else { panic!("no event") };
        let limits = Change::Limits(Box::new(set.clone()));
        assert!(events.iter().any(|event| event.change == limits), "{events:?}");
        // An absent field keeps its value; null removes it.
        let change = json!({ "out_of_host": null, "datastores": { "/mnt": null } });
        let set: MoveLimits = managed.root(Method::PATCH, LIMITS, Some(change)).await.read();
        assert_eq!((set.in_all, set.out_of_host, set.datastores.len()), (Some(3), None, 1));
        let cluster: Cluster = managed.root(Method::GET, "/api/v1/cluster", None).await.read();
        assert_eq!(cluster.limits, set);
        for wrong in [
            json!({ "in_all": 1_000_001 }),
            json!({ "in_all": -1 }),
            json!({ "datastores": { "srv": 1 } }),
            json!({ "total": 1 }),
        ] {
            let refused = managed.root(Method::PATCH, LIMITS, Some(wrong)).await;
            assert_eq!(refused.problem(), ProblemCode::InvalidRequest);
        }
        let store = Arc::clone(&managed.store);
        drop(managed);
        let managed = Managed::with(store).await;
        let shown: MoveLimits = managed.root(Method::GET, LIMITS, None).await.read();
        assert_eq!(shown, set);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_follower_knows_the_limits() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let leader = rig::leader(Arc::clone(&store)).await;
        let (follower, _standby) = rig::follower(&store);
        let change = serde_json::from_value(json!({ "in_all": 5 })).unwrap();
        leader.limits.update(change).await.unwrap();
        rig::until(&follower, |inventory| inventory.limits().in_all == Some(5)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_host_without_its_own_limit_uses_its_link_speed_again() {
        let managed = Managed::begin().await;
        let host = json!({
            "name": "a", "address": "http://127.0.0.1:1",
            "link_bits_per_s": 1_000_000_000, "most_moves": 7
        });
        assert_eq!(managed.root(Method::POST, "/api/v1/hosts", Some(host)).await.status, 201);
        let shown: MoveLimits = managed.root(Method::GET, LIMITS, None).await.read();
        assert_eq!(shown.hosts["a"].out, Some(7));
        let change = json!({ "most_moves": null });
        let changed = managed.root(Method::PATCH, "/api/v1/hosts/a", Some(change)).await;
        assert_eq!(changed.body["link_bits_per_s"], 1_000_000_000, "{}", changed.body);
        let shown: MoveLimits = managed.root(Method::GET, LIMITS, None).await.read();
        assert!(shown.hosts.is_empty());
        assert_eq!(managed.manager.state.inventory().host_limits("a"), (4, 4));
    }
}
