//! State that only the leading manager has: it writes to the store and carries out moves.

use std::sync::{Arc, OnceLock};

use godwit_api::control::Problem;
use godwit_ha::Timing;
use tokio::task::JoinSet;

use crate::access::certificates;
use crate::agents::AgentClients;
use crate::agents::following::NewsFeed;
use crate::agents::peers;
use crate::alarms::{self, AlarmSetup, Alarms};
use crate::chronicle::Chronicle;
use crate::clock::since_boot;
use crate::cluster::state::State;
use crate::datastores;
use crate::datastores::drains::DatastoreDrains;
use crate::drains::{Drains, Means};
use crate::ha::admission::Admission;
use crate::ha::fencing::{self, Devices};
use crate::ha::judges::{self, Judges};
use crate::ha::own::{self, OwnVms};
use crate::ha::restarts::{self, ClusterAgents, Restarts};
use crate::ha::seat;
use crate::ha::terms::Terms;
use crate::ha::troubles::Troubles;
use crate::idempotency::kept::Repeats;
use crate::moves::{FollowedAgents, Moves};
use crate::storage::keeper::Keeper;
use crate::storage::turns::Turns;
use crate::vms::bindings;

/// What the high availability shares with the rest of the manager.
#[derive(Clone, Default)]
pub(crate) struct HaShared {
    pub(crate) terms: Arc<Terms>,
    pub(crate) troubles: Arc<Troubles>,
    pub(crate) admission: Admission,
    /// Fencing devices; set before this manager leads, or never.
    pub(crate) fencing: Arc<OnceLock<Arc<Devices>>>,
}

/// Work of one leadership. It ends on drop; migrations in progress continue at their hosts.
pub(crate) struct Leading {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) moves: Arc<Moves>,
    pub(crate) drains: Arc<Drains>,
    pub(crate) datastore_drains: Arc<DatastoreDrains>,
    pub(crate) alarms: Arc<Alarms>,
    pub(crate) judges: Arc<Judges>,
    pub(crate) repeats: Repeats,
    /// Tasks that end on drop.
    _tasks: JoinSet<()>,
}

impl Leading {
    /// Loads the moves from the store. Hosts, VMs and settings are known already.
    pub(crate) async fn begin(
        keeper: Arc<Keeper>,
        state: Arc<State>,
        agents: Arc<AgentClients>,
        feed: &NewsFeed,
        turns: Turns,
        setup: Arc<OnceLock<AlarmSetup>>,
        ha: HaShared,
    ) -> Result<Leading, Problem> {
        // Listens before it reads, so that a migration that ends in between is either reported or
        // known to the agent when asked.
        let migrations = feed.listen();
        let mut tasks = JoinSet::new();
        tasks.spawn(peers::name_all(Arc::downgrade(&agents)));
        tasks.spawn(certificates::spread_all(Arc::downgrade(&agents), Arc::clone(&keeper)));
        let troubles = Arc::clone(&ha.troubles);
        let judges = begin_ha(ha, (&keeper, &state, &agents), turns.clone(), &mut tasks).await?;
        let chronicle = Chronicle::begin(Arc::clone(&keeper), Arc::clone(&state), turns).await?;
        tasks.spawn(chronicle.run());
        tasks.spawn(bindings::keep_bindings(Arc::clone(&keeper), Arc::clone(&state)));
        let of_datastores = datastores::drains::Means {
            keeper: Arc::clone(&keeper),
            state: Arc::clone(&state),
            agents: Arc::clone(&agents),
        };
        let agents = Arc::new(FollowedAgents { agents, state: Arc::clone(&state) });
        let moves = Arc::new(
            Moves::begin(Arc::clone(&keeper), Arc::clone(&state), agents, migrations).await?,
        );
        let of_alarms = alarms::Means {
            keeper: Arc::clone(&keeper),
            state: Arc::clone(&state),
            moves: Arc::clone(&moves),
            troubles,
            setup,
        };
        let means = Means { keeper: Arc::clone(&keeper), state, moves: Arc::clone(&moves) };
        let drains = Arc::new(Drains::begin(means).await?);
        let datastore_drains = Arc::new(DatastoreDrains::begin(of_datastores).await?);
        let alarms = Arc::new(Alarms::begin(of_alarms).await?);
        tasks.spawn(alarms::watch(Arc::clone(&alarms)));
        Ok(Leading {
            keeper,
            moves,
            drains,
            datastore_drains,
            alarms,
            judges,
            repeats: Repeats::default(),
            _tasks: tasks,
        })
    }
}

/// Loads the restarts and the judges, which decide before any restart continues.
async fn begin_ha(
    ha: HaShared,
    (keeper, state, agents): (&Arc<Keeper>, &Arc<State>, &Arc<AgentClients>),
    turns: Turns,
    tasks: &mut JoinSet<()>,
) -> Result<Arc<Judges>, Problem> {
    let HaShared { terms, troubles, admission, fencing } = ha;
    let devices = fencing.get().cloned().unwrap_or_default();
    let of_restarts = restarts::Means {
        keeper: Arc::clone(keeper),
        state: Arc::clone(state),
        agents: Arc::new(ClusterAgents(Arc::clone(agents))),
        turns,
        terms: Arc::clone(&terms),
        troubles: Arc::clone(&troubles),
        admission: admission.clone(),
    };
    let restarts = Restarts::begin(of_restarts).await?;
    let own = OwnVms::new(Arc::clone(state), Arc::clone(agents), Arc::clone(&troubles));
    let own = Arc::new(own);
    let of_judges = seat::Means {
        keeper: Arc::clone(keeper),
        state: Arc::clone(state),
        agents: Arc::clone(agents),
        devices: Arc::clone(&devices),
        restarts: Arc::clone(&restarts),
        own: Arc::clone(&own),
        terms,
        troubles,
        admission,
        clock: Arc::new(since_boot),
    };
    let judges = Judges::begin(of_judges, Timing::default()).await?;
    tasks.spawn(fencing::watch(devices, Arc::clone(state)));
    tasks.spawn(judges::run(Arc::clone(&judges)));
    tasks.spawn(restarts::run(restarts));
    tasks.spawn(own::run(own));
    Ok(judges)
}
