//! A manager: what every one has, and while it leads, what only that one has ([`Leading`]). What is asked of the one that leads is written to
//! the store first, then known, then done.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::FromRef;
use godwit_api::Client;
use godwit_api::control::{
    AddHost, AuditEntry, AuditOutcome, Cluster, CreateMove, CreateToken, CreatedToken, DrainState, Leader,
    ManagedHost, Move, Problem, ProblemCode, UpdateHost,
};
use godwit_pki::Identity;
use godwit_store::{Candidate, Store, StoreError};

use crate::access::authorities::Doors;
use crate::access::certificates::Certificates;
use crate::access::certificates::{REVOCATIONS, SavedRevocations};
use crate::access::known_tokens::KnownTokens;
use crate::access::rates::Rates;
use crate::access::record::{SavedToken, TOKENS};
use crate::access::refusals::Refusals;
use crate::access::{Caller, Secret, TokenRecord};
use crate::agents::fleet::Fleet;
use crate::agents::following::Told;
use crate::agents::{Hosts, no_host};
use crate::baseline::CpuBaselines;
use crate::baseline::{BASELINE, SavedBaseline};
use crate::clock::now_unix_ms;
use crate::cluster::inventory::{HostPlan, Inventory};
use crate::cluster::names::{check_labels, check_name};
use crate::cluster::state::State;
use crate::hosts::in_use::check_unused;
use crate::hosts::record::{HOSTS, SavedHost};
use crate::leadership::leading::Leading;
use crate::moves::elsewhere::MovesElsewhere;
use crate::moves::limits::LimitsOfMoves;
use crate::moves::limits::{LIMITS, SavedLimits};
use crate::moves::requests::check_qemu;
use crate::moves::{Moves, Wanted};
use crate::rules::Rules;
use crate::rules::{RULES, SavedRule};
use crate::storage::keeper::Keeper;
use crate::storage::planned::Planned;
use crate::storage::planning::{Planning, whole};
use crate::storage::term::Term;
use crate::vms::BeingMade;
use crate::vms::bindings::{BINDINGS, SavedBinding};
use crate::vms::record::{SavedVm, VMS};

/// Milliseconds of a day.
const DAY_MS: u64 = 24 * 3600 * 1000;
/// How long the store may take to say who leads.
const LEADER_LIMIT: Duration = Duration::from_secs(2);
/// The most that a host's link is taken for.
const MOST_LINK_BITS_PER_S: u64 = 1_000_000_000_000_000;
/// The most moves at a time that a host may be set to.
const MOST_MOVES: u32 = 1000;
/// The manager. Shared by everything that serves it.
pub(crate) struct Manager {
    pub(crate) state: Arc<State>,
    pub(crate) rates: Rates,
    /// How others than holders of tokens come in.
    pub(crate) doors: Arc<Doors>,
    /// This manager, to the others.
    candidate: Candidate,
    store: Arc<dyn Store>,
    leading: Term<Leading>,
    keeper: Arc<Term<Keeper>>,
    moves: Arc<Term<Moves>>,
    pub(crate) planning: Planning,
    pub(crate) elsewhere: Arc<MovesElsewhere>,
    pub(crate) fleet: Arc<Fleet>,
    told: Arc<Told>,
    pub(crate) tokens: Arc<KnownTokens>,
    refusals: Mutex<Refusals>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) being_made: BeingMade,
    pub(crate) certificates: Certificates,
    pub(crate) rules: Rules,
    pub(crate) baseline: CpuBaselines,
    pub(crate) limits: LimitsOfMoves,
}

impl Manager {
    /// One that does not lead, and knows nothing yet.
    pub(crate) fn new(
        candidate: Candidate,
        store: Arc<dyn Store>,
        state: Arc<State>,
        identity: Option<Identity>,
    ) -> Arc<Manager> {
        let told = Arc::<Told>::default();
        let hosts = Arc::new(Hosts::new(Arc::clone(&state), identity));
        let fleet = Arc::new(Fleet::new(Arc::clone(&state), Arc::clone(&hosts), Arc::clone(&told)));
        let (keeper, moves) = (Arc::<Term<Keeper>>::default(), Arc::<Term<Moves>>::default());
        let planning = Planning::new(Arc::clone(&state), Arc::clone(&keeper));
        let doors = Arc::<Doors>::default();
        let certificates = Certificates::new(
            Arc::clone(&hosts),
            Arc::clone(&fleet),
            Arc::clone(&doors),
            Arc::clone(&keeper),
            planning.clone(),
        );
        Arc::new(Manager {
            rates: Rates::default(),
            doors,
            candidate,
            store,
            leading: Term::default(),
            elsewhere: Arc::new(MovesElsewhere::new(Arc::clone(&state))),
            fleet,
            told,
            tokens: Arc::default(),
            refusals: Mutex::default(),
            being_made: BeingMade::default(),
            certificates,
            rules: Rules::new(Arc::clone(&state), planning.clone()),
            baseline: CpuBaselines::new(Arc::clone(&state), Arc::clone(&hosts), planning.clone()),
            limits: LimitsOfMoves::new(Arc::clone(&state), Arc::clone(&moves), planning.clone()),
            hosts,
            keeper,
            moves,
            planning,
            state,
        })
    }

    /// One that leads already.
    #[cfg(test)]
    pub(crate) async fn open(
        keeper: Keeper,
        state: Arc<State>,
        identity: Option<Identity>,
    ) -> Result<Arc<Manager>, Problem> {
        let manager = Manager::new(keeper.candidate().clone(), Arc::clone(keeper.store()), state, identity);
        manager.lead(keeper).await?;
        Ok(manager)
    }

    /// Leads from now on: reads what is kept anew, and takes up what is under way.
    pub(crate) async fn lead(&self, keeper: Keeper) -> Result<(), Problem> {
        let keeper = Arc::new(keeper);
        let (hosts, vms) = (keeper.read_all(HOSTS).await?, keeper.read_all(VMS).await?);
        SavedToken::set_all(&*self.tokens, keeper.read_all(TOKENS).await?);
        // What is planned of the cluster holds before a host is heard.
        SavedBaseline::set_all(&*self.state, keeper.read_all(BASELINE).await?);
        SavedRule::set_all(&*self.state, keeper.read_all(RULES).await?);
        SavedLimits::set_all(&*self.state, keeper.read_all(LIMITS).await?);
        // Before any host is followed.
        SavedRevocations::set_all(&self.certificates, keeper.read_all(REVOCATIONS).await?);
        SavedVm::set_all(&*self.state, vms);
        // Whose names are whose is known before a host is heard.
        SavedBinding::set_all(&*self.state, keeper.read_all(BINDINGS).await?);
        SavedHost::set_all(&*self.fleet, hosts);
        self.state.change(Inventory::release_forgotten);
        let (state, hosts) = (Arc::clone(&self.state), Arc::clone(&self.hosts));
        let leading = Leading::begin(keeper, state, hosts, &self.told).await?;
        self.elsewhere.clear();
        self.moves.begin(Arc::clone(&leading.moves));
        self.keeper.begin(Arc::clone(&leading.keeper));
        self.leading.begin(Arc::new(leading));
        Ok(())
    }

    /// Leads no more.
    pub(crate) fn step_down(&self) {
        let Some(leading) = self.leading.end() else { return };
        self.keeper.end();
        self.moves.end();
        // Whoever leads next goes on with them, and the store tells of it.
        let vms: Vec<_> = leading.moves.all().values().map(|one| one.vm.clone()).collect();
        self.state.change(|inventory| {
            vms.iter().flat_map(|vm| inventory.plan_move(vm, None, None)).collect::<Vec<_>>()
        });
    }

    /// What only the manager has that leads.
    ///
    /// # Errors
    /// [`ProblemCode::NoLeader`]: it is another one, or none.
    pub(crate) fn leading(&self) -> Result<Arc<Leading>, Problem> {
        self.leading.get()
    }

    /// Whether it leads.
    pub(crate) fn leads(&self) -> bool {
        self.leading.is_on()
    }

    /// Waits until it does.
    pub(crate) async fn begins_to_lead(&self) {
        self.leading.begins().await;
    }

    /// This manager, to the others.
    pub(crate) fn candidate(&self) -> &Candidate {
        &self.candidate
    }

    /// How agents and other managers are reached.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Who leads, by the store's word.
    pub(crate) async fn leader(&self) -> Result<Option<Candidate>, StoreError> {
        Ok(self.store.leader().await?.map(|leader| leader.candidate))
    }

    /// Notes who did what; of what can't be written, the manager's own log has it.
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

    /// Notes how many more requests were refused, where it is time.
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
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page of what people did, the newest first.
    pub(crate) async fn audit_page(
        &self,
        behind: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<AuditEntry>, Option<String>), Problem> {
        self.leading()?.keeper.audit_page(behind, limit).await
    }

    /// Changes what is planned, by whoever leads: one change after the other, and each to its end, also where who asked has gone. So what the
    /// store has and what is known never differ.
    pub(crate) async fn planning<T: Send + 'static, F>(
        self: &Arc<Self>,
        change: impl FnOnce(Arc<Manager>, Arc<Leading>) -> F + Send + 'static,
    ) -> Result<T, Problem>
    where
        F: Future<Output = Result<T, Problem>> + Send,
    {
        let manager = Arc::clone(self);
        whole(async move {
            let _turn = manager.state.planning().await;
            let leading = manager.leading()?;
            change(Arc::clone(&manager), leading).await
        })
        .await
    }

    /// A client of the agent of a host that is known.
    pub(crate) fn client_of(&self, host: &str) -> Result<Client, Problem> {
        self.hosts.client_of(host)
    }

    pub(crate) fn host(&self, name: &str) -> Result<ManagedHost, Problem> {
        self.state.inventory().host(name).ok_or_else(|| no_host(name))
    }

    pub(crate) async fn add_host(self: &Arc<Self>, request: AddHost) -> Result<ManagedHost, Problem> {
        let AddHost { name, address, labels, link_bits_per_s, most_moves } = request;
        check_name(&name)?;
        let plan = HostPlan { address, labels, link_bits_per_s, most_moves, maintenance: false };
        check_plan(&plan)?;
        // What asks an agent keeps nobody waiting who plans.
        let cpu = self.baseline.ask_new_host(&name, &plan.address).await?;
        self.planning(|manager, leading| async move {
            // One that is there already is refused as such.
            let is_new = manager.state.inventory().host_plan(&name).is_none();
            if let Some(cpu) = cpu.filter(|_| is_new) {
                manager.baseline.check_new_host(&name, &cpu)?;
            }
            leading.keeper.insert(HOSTS, &name, &SavedHost::from(&plan)).await?;
            manager.fleet.plan_host(&name, plan);
            manager.host(&name)
        })
        .await
    }

    pub(crate) async fn update_host(
        self: &Arc<Self>,
        name: &str,
        request: UpdateHost,
    ) -> Result<ManagedHost, Problem> {
        let name = name.to_owned();
        self.planning(move |manager, leading| async move {
            let before = manager.state.inventory().host_plan(&name).cloned();
            let before = before.ok_or_else(|| no_host(&name))?;
            if request.maintenance == Some(false) {
                check_not_emptied(&name, &leading)?;
            }
            let plan = HostPlan {
                address: request.address.unwrap_or(before.address),
                labels: request.labels.unwrap_or(before.labels),
                link_bits_per_s: request.link_bits_per_s.unwrap_or(before.link_bits_per_s),
                most_moves: request.most_moves.unwrap_or(before.most_moves),
                maintenance: request.maintenance.unwrap_or(before.maintenance),
            };
            check_plan(&plan)?;
            manager.hosts.client(&name, &plan.address)?;
            leading.keeper.replace(HOSTS, &name, &SavedHost::from(&plan)).await?;
            manager.fleet.plan_host(&name, plan);
            manager.host(&name)
        })
        .await
    }

    /// Knows a host no more, and revokes its certificates. One that is in use only with `force`: its moves end as failed
    /// then, and its drain ends.
    pub(crate) async fn forget_host(self: &Arc<Self>, name: &str, force: bool) -> Result<(), Problem> {
        let name = name.to_owned();
        self.planning(move |manager, leading| async move {
            manager.host(&name)?;
            if !force {
                check_unused(&name, &leading, &manager.state.inventory())?;
            }
            // A host that is gone for good shows its certificate to nobody any more.
            manager.certificates.revoke_host(&leading.keeper, &name).await?;
            leading.keeper.remove(HOSTS, &name).await?;
            manager.fleet.leave_host(&name);
            leading.moves.look();
            Ok(())
        })
        .await
    }

    /// Asks for a VM's move.
    pub(crate) async fn create_move(
        &self,
        vm: &str,
        mut request: CreateMove,
        caller: &Caller,
    ) -> Result<Move, Problem> {
        check_qemu(&request.qemu)?;
        let to_reason = self.choose_target(vm, &mut request)?;
        let from = self.check_move(vm, &request)?;
        let (vm, asked_by) = (vm.to_owned(), caller.name.clone());
        let wanted = Wanted { vm, from, asked_by, request, to_reason, ..Wanted::default() };
        self.leading()?.moves.submit(wanted).await
    }

    pub(crate) async fn create_token(
        self: &Arc<Self>,
        request: CreateToken,
        caller: &Caller,
    ) -> Result<CreatedToken, Problem> {
        check_name(&request.name)?;
        if matches!(request.name.as_str(), "root" | "nobody") {
            let detail =
                format!("no token can be called {}: the audit log means somebody else", request.name);
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "take another name"));
        }
        let failed = |error: std::io::Error| {
            Problem::new(ProblemCode::ManagerFailed, format!("no secret can be drawn: {error}"), "")
        };
        let secret = Secret::draw().map_err(failed)?;
        let now = now_unix_ms();
        let good = now..now + u64::from(request.days) * DAY_MS;
        let record = TokenRecord::new(&secret, &request.name, request.role, &caller.name, good);
        self.planning(|manager, leading| async move {
            leading.keeper.insert(TOKENS, secret.id(), &SavedToken::from(&record)).await?;
            let info = record.info.clone();
            manager.tokens.know(record);
            Ok(CreatedToken { info, token: secret.reveal() })
        })
        .await
    }

    pub(crate) async fn revoke_token(self: &Arc<Self>, id: &str) -> Result<(), Problem> {
        let id = id.to_owned();
        self.planning(|manager, leading| async move {
            if !manager.tokens.infos().iter().any(|token| token.id == id) {
                let detail = format!("no token {id}");
                return Err(Problem::new(ProblemCode::NotFound, detail, "see `godwit control token list`"));
            }
            leading.keeper.remove(TOKENS, &id).await?;
            manager.tokens.forget(&id);
            Ok(())
        })
        .await
    }

    pub(crate) async fn cluster(&self) -> Cluster {
        let leading = self.leading().ok();
        let leader = match &leading {
            Some(leading) => Some(leading.keeper.candidate().clone()),
            None => {
                tokio::time::timeout(LEADER_LIMIT, self.leader()).await.ok().and_then(Result::ok).flatten()
            }
        };
        let leader =
            leader.map(|Candidate { name, address }| Leader { name, address, is_self: leading.is_some() });
        let (moves_running, moves_waiting) = match &leading {
            Some(leading) => leading.moves.counts(),
            None => self.elsewhere.counts(),
        };
        let inventory = self.state.inventory();
        let ((hosts, hosts_up), (vms, vms_running)) = (inventory.host_counts(), inventory.vm_counts());
        Cluster {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leader,
            hosts,
            hosts_up,
            vms,
            vms_running,
            name_conflicts: inventory.conflict_count(),
            hosts_faulty: inventory.faulty_hosts(),
            moves_running,
            moves_waiting,
            limits: inventory.move_limits(),
        }
    }
}

/// A host that is emptied takes no VMs until that is over.
fn check_not_emptied(host: &str, leading: &Leading) -> Result<(), Problem> {
    let Some((id, _)) = leading.drains.of_host(host).filter(|(_, state)| *state == DrainState::Running)
    else {
        return Ok(());
    };
    let detail = format!("host {host} is being emptied by drain {id}");
    let mend = format!("wait for its end, or call it off with `godwit host drain {host} --cancel`");
    Err(Problem::new(ProblemCode::WrongState, detail, mend))
}

fn check_plan(plan: &HostPlan) -> Result<(), Problem> {
    let wrong = |detail: &str, mend: &str| Err(Problem::new(ProblemCode::InvalidRequest, detail, mend));
    if plan.link_bits_per_s == Some(0) {
        return wrong("a link of 0 bits a second carries nothing", "leave it out, or say what it carries");
    }
    if plan.link_bits_per_s.is_some_and(|bits| bits > MOST_LINK_BITS_PER_S) {
        return wrong("no link carries that much", "give bits a second, 1 Pb/s at most");
    }
    if plan.most_moves == Some(0) {
        return wrong("a host of which no VM may go or come can't be managed", "set maintenance instead");
    }
    if plan.most_moves.is_some_and(|moves| moves > MOST_MOVES) {
        return wrong("too many moves at a time", "1000 at most; leave it out to go by the link");
    }
    check_labels(&plan.labels)
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
