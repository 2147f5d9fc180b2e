//! The manager: its services and their wiring. Each service is defined in its own folder. This
//! module has the order in which records are loaded when this manager starts to lead, and the
//! summary of the cluster.

mod leading;

pub(crate) use leading::{HaShared, Leading};

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::FromRef;
use godwit_api::control::{AuditEntry, AuditOutcome, Cluster, Leader, Problem};
use godwit_pki::Identity;
use godwit_store::{Candidate, Store, StoreError};
use parking_lot::{Mutex, MutexGuard};

use crate::access::authorities::Authorities;
use crate::access::certificates::Certificates;
use crate::access::certificates::{REVOCATIONS, SavedRevocations};
use crate::access::known_tokens::KnownTokens;
use crate::access::rates::Rates;
use crate::access::record::{SavedToken, TOKENS};
use crate::access::refusals::Refusals;
use crate::access::requests::AccessRequests;
use crate::agents::AgentClients;
use crate::agents::fleet::Fleet;
use crate::agents::following::NewsFeed;
use crate::agents::record::{HOSTS, SavedHost};
use crate::alarms::http::AlarmRequests;
use crate::alarms::{AlarmSetup, Alarms};
use crate::baseline::CpuBaselines;
use crate::baseline::{BASELINE, SavedBaseline};
use crate::chronicle::Journal;
use crate::clock::now_unix_ms;
use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;
use crate::datastores::Datastores;
use crate::datastores::drains::DatastoreDrains;
use crate::datastores::drains::http::DatastoreDrainRequests;
use crate::datastores::record::{DATASTORES, SavedDatastore};
use crate::drains::Drains;
use crate::drains::http::DrainRequests;
use crate::ha::http::HaRequests;
use crate::ha::judges::Judges;
use crate::hosts::{HostMeans, HostRequests};
use crate::load::Loads;
use crate::load::http::LoadRequests;
use crate::moves::Moves;
use crate::moves::elsewhere::MovesElsewhere;
use crate::moves::limits::LimitsOfMoves;
use crate::moves::limits::{LIMITS, SavedLimits};
use crate::moves::requests::MoveRequests;
use crate::rules::Rules;
use crate::rules::{RULES, SavedRule};
use crate::storage::keeper::Keeper;
use crate::storage::planned::Planned;
use crate::storage::planning::Planning;
use crate::storage::term::Term;
use crate::storage::turns::Turns;
use crate::vms::bindings::{BINDINGS, SavedBinding};
use crate::vms::record::{SavedVm, VMS};
use crate::vms::{VmMeans, Vms};

/// Most hosts that the summary of the cluster names as away.
const MOST_NAMED: usize = 16;
/// Longest wait for the store to name the leader.
const LEADER_LIMIT: Duration = Duration::from_secs(2);

/// The manager, shared by everything that serves it.
pub(crate) struct Manager {
    pub(crate) state: Arc<State>,
    pub(crate) rates: Rates,
    pub(crate) authorities: Arc<Authorities>,
    /// Locks of requests with an idempotency key, and of operations on VMs.
    pub(crate) turns: Turns,
    /// Identity of this manager towards the others.
    candidate: Candidate,
    store: Arc<dyn Store>,
    leading: Term<Leading>,
    keeper: Arc<Term<Keeper>>,
    moves: Arc<Term<Moves>>,
    drains: Arc<Term<Drains>>,
    datastore_drains: Arc<Term<DatastoreDrains>>,
    alarms: Arc<Term<Alarms>>,
    judges: Arc<Term<Judges>>,
    /// Receivers of notices about alarms; set before this manager leads, or never.
    pub(crate) alarm_setup: Arc<OnceLock<AlarmSetup>>,
    pub(crate) ha: HaShared,
    pub(crate) elsewhere: Arc<MovesElsewhere>,
    pub(crate) fleet: Arc<Fleet>,
    news: Arc<NewsFeed>,
    pub(crate) tokens: Arc<KnownTokens>,
    refusals: Mutex<Refusals>,
    pub(crate) agents: Arc<AgentClients>,
    pub(crate) certificates: Certificates,
    pub(crate) rules: Rules,
    pub(crate) datastores: Datastores,
    pub(crate) baseline: CpuBaselines,
    pub(crate) limits: LimitsOfMoves,
    pub(crate) access: AccessRequests,
    pub(crate) loads: Arc<Loads>,
    pub(crate) requests: MoveRequests,
    pub(crate) host_requests: HostRequests,
    pub(crate) vms: Vms,
    pub(crate) journal: Journal,
}

impl Manager {
    /// Creates a manager that does not lead and has no state yet.
    pub(crate) fn new(
        candidate: Candidate,
        store: Arc<dyn Store>,
        state: Arc<State>,
        identity: Option<Identity>,
    ) -> Arc<Manager> {
        let loads = Loads::new(Arc::clone(&state));
        let news = Arc::new(NewsFeed::with_loads(Arc::clone(&loads) as _));
        let agents = Arc::new(AgentClients::new(Arc::clone(&state), identity));
        let fleet = Fleet::new(Arc::clone(&state), Arc::clone(&agents), Arc::clone(&news));
        let (keeper, moves) = (Arc::<Term<Keeper>>::default(), Arc::<Term<Moves>>::default());
        let (turns, ha, drains): (Turns, HaShared, Arc<Term<Drains>>) = Default::default();
        let datastore_drains = Arc::<Term<DatastoreDrains>>::default();
        let (tokens, authorities) = (Arc::<KnownTokens>::default(), Arc::<Authorities>::default());
        let planning = Planning::new(Arc::clone(&state), Arc::clone(&keeper));
        let certificates = Certificates::new(
            Arc::clone(&agents),
            Arc::clone(&fleet),
            Arc::clone(&authorities),
            Arc::clone(&keeper),
            planning.clone(),
        );
        let baseline = CpuBaselines::new(Arc::clone(&state), Arc::clone(&agents), planning.clone());
        let requests =
            MoveRequests::new(Arc::clone(&state), Arc::clone(&agents), Arc::clone(&moves));
        let vms = Vms::new(VmMeans {
            state: Arc::clone(&state),
            agents: Arc::clone(&agents),
            turns: turns.clone(),
            tokens: Arc::clone(&tokens),
            keeper: Arc::clone(&keeper),
            planning: planning.clone(),
            requests: requests.clone(),
            admission: ha.admission.clone(),
        });
        let host_requests = HostRequests::new(HostMeans {
            state: Arc::clone(&state),
            agents: Arc::clone(&agents),
            fleet: Arc::clone(&fleet),
            authorities: Arc::clone(&authorities),
            certificates: certificates.clone(),
            baseline: baseline.clone(),
            keeper: Arc::clone(&keeper),
            moves: Arc::clone(&moves),
            drains: Arc::clone(&drains),
            planning: planning.clone(),
            candidate: candidate.clone(),
        });
        Arc::new(Manager {
            rates: Rates::default(),
            access: AccessRequests::new(Arc::clone(&tokens), Arc::clone(&keeper), planning.clone()),
            authorities,
            turns,
            candidate,
            store,
            leading: Term::default(),
            ha,
            elsewhere: Arc::new(MovesElsewhere::new(Arc::clone(&state))),
            fleet,
            news,
            tokens,
            refusals: Mutex::default(),
            certificates,
            rules: Rules::new(Arc::clone(&state), planning.clone()),
            datastores: Datastores::new(
                Arc::clone(&state),
                planning.clone(),
                Arc::clone(&datastore_drains),
            ),
            baseline,
            loads,
            requests,
            host_requests,
            vms,
            journal: Journal::new(Arc::clone(&keeper)),
            limits: LimitsOfMoves::new(Arc::clone(&state), Arc::clone(&moves), planning),
            agents,
            keeper,
            moves,
            drains,
            datastore_drains,
            alarms: Arc::default(),
            judges: Arc::default(),
            alarm_setup: Arc::default(),
            state,
        })
    }

    /// Creates a manager that leads already.
    #[cfg(test)]
    pub(crate) async fn open(
        keeper: Keeper,
        state: Arc<State>,
        identity: Option<Identity>,
    ) -> Result<Arc<Manager>, Problem> {
        let manager =
            Manager::new(keeper.candidate().clone(), Arc::clone(keeper.store()), state, identity);
        manager.lead(keeper).await?;
        Ok(manager)
    }

    /// Starts to lead: loads all records and resumes work in progress.
    pub(crate) async fn lead(&self, keeper: Keeper) -> Result<(), Problem> {
        let keeper = Arc::new(keeper);
        keeper.publish_to(Arc::clone(self.state.events()));
        let (hosts, vms) = (keeper.read_all(HOSTS).await?, keeper.read_all(VMS).await?);
        SavedToken::set_all(&*self.tokens, keeper.read_all(TOKENS).await?);
        // Settings of the cluster apply before the first report of a host.
        SavedBaseline::set_all(&*self.state, keeper.read_all(BASELINE).await?);
        SavedRule::set_all(&*self.state, keeper.read_all(RULES).await?);
        SavedLimits::set_all(&*self.state, keeper.read_all(LIMITS).await?);
        SavedDatastore::set_all(&*self.state, keeper.read_all(DATASTORES).await?);
        // Revocations are known before any host is followed.
        SavedRevocations::set_all(&self.certificates, keeper.read_all(REVOCATIONS).await?);
        SavedVm::set_all(&*self.state, vms);
        // The owners of names are known before the first report of a host.
        SavedBinding::set_all(&*self.state, keeper.read_all(BINDINGS).await?);
        SavedHost::set_all(&*self.fleet, hosts);
        self.state.change(Inventory::release_forgotten);
        let (state, agents) = (Arc::clone(&self.state), Arc::clone(&self.agents));
        let setup = Arc::clone(&self.alarm_setup);
        let (news, turns) = (&self.news, self.turns.clone());
        let ha = self.ha.clone();
        let leading = Leading::begin(keeper, state, agents, news, turns, setup, ha).await?;
        self.elsewhere.clear();
        self.moves.begin(Arc::clone(&leading.moves));
        self.drains.begin(Arc::clone(&leading.drains));
        self.datastore_drains.begin(Arc::clone(&leading.datastore_drains));
        self.alarms.begin(Arc::clone(&leading.alarms));
        self.judges.begin(Arc::clone(&leading.judges));
        self.keeper.begin(Arc::clone(&leading.keeper));
        self.leading.begin(Arc::new(leading));
        Ok(())
    }

    /// Ends the leadership.
    pub(crate) fn step_down(&self) {
        let Some(leading) = self.leading.end() else { return };
        self.ha.terms.clear();
        self.ha.troubles.clear();
        self.keeper.end();
        self.drains.end();
        self.datastore_drains.end();
        self.alarms.end();
        self.judges.end();
        self.moves.end();
        // The next leader continues these moves, and the store reports on them.
        let vms: Vec<_> = leading.moves.all().open().map(|one| one.vm.clone()).collect();
        self.state.change(|inventory| {
            vms.iter().flat_map(|vm| inventory.plan_move(vm, None, None)).collect::<Vec<_>>()
        });
    }

    /// Returns the state that only the leader has.
    ///
    /// # Errors
    /// [`NoLeader`](godwit_api::control::ProblemCode::NoLeader): another manager leads, or none.
    pub(crate) fn leading(&self) -> Result<Arc<Leading>, Problem> {
        self.leading.get()
    }

    /// Returns whether this manager leads.
    pub(crate) fn leads(&self) -> bool {
        self.leading.is_on()
    }

    /// Waits until this manager leads.
    pub(crate) async fn begins_to_lead(&self) {
        self.leading.begins().await;
    }

    /// Returns this manager's identity towards the others.
    pub(crate) fn candidate(&self) -> &Candidate {
        &self.candidate
    }

    /// Returns the leader according to the store.
    pub(crate) async fn leader(&self) -> Result<Option<Candidate>, StoreError> {
        Ok(self.store.leader().await?.map(|leader| leader.candidate))
    }

    /// Writes an audit entry. The manager's own log has every entry, even if the store is not
    /// writable.
    pub(crate) fn audit(&self, entry: AuditEntry) {
        let level_is_info = entry.outcome == AuditOutcome::Done;
        let AuditEntry { who, what, status, reason, .. } = &entry;
        if level_is_info {
            tracing::info!(who, what, status, "asked");
        } else {
            tracing::warn!(who, what, status, reason, "refused");
        }
        let due = if level_is_info { vec![entry] } else { self.refusals().note(entry) };
        self.write_audit(due);
    }

    /// Writes summaries of further refused requests that are due.
    pub(crate) fn audit_refusals(&self) {
        let due = self.refusals().over(now_unix_ms());
        self.write_audit(due);
    }

    fn write_audit(&self, entries: Vec<AuditEntry>) {
        if let Ok(leading) = self.leading() {
            entries.into_iter().for_each(|entry| leading.keeper.audit(entry));
        }
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock()
    }

    pub(crate) async fn cluster(&self) -> Cluster {
        let leading = self.leading().ok();
        let leader = match &leading {
            Some(leading) => Some(leading.keeper.candidate().clone()),
            None => tokio::time::timeout(LEADER_LIMIT, self.leader())
                .await
                .ok()
                .and_then(Result::ok)
                .flatten(),
        };
        let leader = leader.map(|Candidate { name, address }| Leader {
            name,
            address,
            is_self: leading.is_some(),
        });
        let (moves_running, moves_waiting) = match &leading {
            Some(leading) => leading.moves.counts(),
            None => self.elsewhere.counts(),
        };
        let inventory = self.state.inventory();
        let ((hosts, hosts_up), vms) = (inventory.host_counts(), inventory.vm_counts());
        Cluster {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leader,
            hosts,
            hosts_up,
            hosts_away: inventory.away_hosts(MOST_NAMED),
            vms: vms.all,
            vms_running: vms.running,
            vms_unknown: vms.unknown,
            name_conflicts: inventory.conflict_count(),
            hosts_faulty: inventory.faulty_hosts(),
            moves_running,
            moves_waiting,
            limits: inventory.move_limits(),
        }
    }
}

impl FromRef<Arc<Manager>> for Certificates {
    fn from_ref(manager: &Arc<Manager>) -> Certificates {
        manager.certificates.clone()
    }
}

impl FromRef<Arc<Manager>> for Rules {
    fn from_ref(manager: &Arc<Manager>) -> Rules {
        manager.rules.clone()
    }
}

impl FromRef<Arc<Manager>> for Datastores {
    fn from_ref(manager: &Arc<Manager>) -> Datastores {
        manager.datastores.clone()
    }
}

impl FromRef<Arc<Manager>> for CpuBaselines {
    fn from_ref(manager: &Arc<Manager>) -> CpuBaselines {
        manager.baseline.clone()
    }
}

impl FromRef<Arc<Manager>> for LimitsOfMoves {
    fn from_ref(manager: &Arc<Manager>) -> LimitsOfMoves {
        manager.limits.clone()
    }
}

impl FromRef<Arc<Manager>> for AccessRequests {
    fn from_ref(manager: &Arc<Manager>) -> AccessRequests {
        manager.access.clone()
    }
}

impl FromRef<Arc<Manager>> for MoveRequests {
    fn from_ref(manager: &Arc<Manager>) -> MoveRequests {
        manager.requests.clone()
    }
}

impl FromRef<Arc<Manager>> for HostRequests {
    fn from_ref(manager: &Arc<Manager>) -> HostRequests {
        manager.host_requests.clone()
    }
}

impl FromRef<Arc<Manager>> for Journal {
    fn from_ref(manager: &Arc<Manager>) -> Journal {
        manager.journal.clone()
    }
}

impl FromRef<Arc<Manager>> for Vms {
    fn from_ref(manager: &Arc<Manager>) -> Vms {
        manager.vms.clone()
    }
}

impl FromRef<Arc<Manager>> for DatastoreDrainRequests {
    fn from_ref(manager: &Arc<Manager>) -> DatastoreDrainRequests {
        DatastoreDrainRequests(Arc::clone(&manager.datastore_drains))
    }
}

impl FromRef<Arc<Manager>> for LoadRequests {
    fn from_ref(manager: &Arc<Manager>) -> LoadRequests {
        LoadRequests(Arc::clone(&manager.loads))
    }
}

impl FromRef<Arc<Manager>> for AlarmRequests {
    fn from_ref(manager: &Arc<Manager>) -> AlarmRequests {
        AlarmRequests(Arc::clone(&manager.alarms))
    }
}

impl FromRef<Arc<Manager>> for HaRequests {
    fn from_ref(manager: &Arc<Manager>) -> HaRequests {
        HaRequests(Arc::clone(&manager.judges))
    }
}

impl FromRef<Arc<Manager>> for DrainRequests {
    fn from_ref(manager: &Arc<Manager>) -> DrainRequests {
        DrainRequests(Arc::clone(&manager.drains))
    }
}
