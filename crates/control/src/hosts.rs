//! Hosts: adding, changing and forgetting them, and joining with a token.
//!
//! This module owns join tokens and their records; the record of a host's plan belongs to `agents`.
//! It calls the cluster, agents, access (to revoke a host's certificates), and moves and drains,
//! which can prevent that a host is forgotten.

pub(crate) mod adoption;
pub(crate) mod disks;
pub(crate) mod http;
pub(crate) mod in_use;
pub(crate) mod join;

use std::ops::Deref;
use std::sync::Arc;

use godwit_api::control::{
    AddHost, DrainState, JournalKind, ManagedHost, Problem, ProblemCode, UpdateHost,
};
use godwit_store::Candidate;

use crate::access::authorities::Authorities;
use crate::access::certificates::Certificates;
use crate::agents::AgentClients;
use crate::agents::fleet::Fleet;
use crate::agents::record::{HOSTS, SavedHost};
use crate::baseline::CpuBaselines;
use crate::cluster::inventory::HostPlan;
use crate::cluster::names::{check_labels, check_name};
use crate::cluster::state::State;
use crate::drains::Drains;
use crate::journal::entries::NewEntry;
use crate::moves::Moves;
use crate::problems::no_host;
use crate::storage::keeper::Keeper;
use crate::storage::planning::Planning;
use crate::storage::term::Term;
use in_use::check_unused;

/// Highest speed that can be set for a host's link: 1 Pb/s.
const MOST_LINK_BITS_PER_S: u64 = 1_000_000_000_000_000;
/// Highest limit of concurrent moves that can be set for a host.
const MOST_MOVES: u32 = 1000;

/// Service for requests about hosts and for joining hosts.
#[derive(Clone)]
pub(crate) struct HostRequests(Arc<HostMeans>);

/// Dependencies of [`HostRequests`].
pub(crate) struct HostMeans {
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<AgentClients>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) authorities: Arc<Authorities>,
    pub(crate) certificates: Certificates,
    pub(crate) baseline: CpuBaselines,
    pub(crate) keeper: Arc<Term<Keeper>>,
    pub(crate) moves: Arc<Term<Moves>>,
    pub(crate) drains: Arc<Term<Drains>>,
    pub(crate) planning: Planning,
    /// This manager, whose name no host may have.
    pub(crate) candidate: Candidate,
}

impl Deref for HostRequests {
    type Target = HostMeans;

    fn deref(&self) -> &HostMeans {
        &self.0
    }
}

impl HostRequests {
    pub(crate) fn new(means: HostMeans) -> HostRequests {
        HostRequests(Arc::new(means))
    }

    /// Returns one host.
    ///
    /// # Errors
    /// [`ProblemCode::NotFound`]: unknown host.
    pub(crate) fn host(&self, name: &str) -> Result<ManagedHost, Problem> {
        self.state.inventory().host(name).ok_or_else(|| no_host(name))
    }

    /// Adds a host.
    pub(crate) async fn add_host(&self, request: AddHost) -> Result<ManagedHost, Problem> {
        let AddHost { name, address, labels, link_bits_per_s, most_moves } = request;
        check_name(&name)?;
        let plan = HostPlan { address, labels, link_bits_per_s, most_moves, maintenance: false };
        check_plan(&plan)?;
        // Outside of `planning`, so that a slow agent delays no other change.
        let cpu = self.baseline.ask_new_host(&name, &plan.address).await?;
        let hosts = self.clone();
        self.planning
            .change(|keeper| async move {
                // If the host exists, `insert` refuses it.
                let is_new = hosts.state.inventory().host_plan(&name).is_none();
                if let Some(cpu) = cpu.filter(|_| is_new) {
                    hosts.baseline.check_new_host(&name, &cpu)?;
                }
                let writes = keeper.noting(added(&name, &plan))?;
                keeper.insert_with(writes, HOSTS, &name, &SavedHost::from(&plan)).await?;
                hosts.fleet.plan_host(&name, plan);
                hosts.host(&name)
            })
            .await
    }

    /// Changes a host's plan.
    pub(crate) async fn update_host(
        &self,
        name: &str,
        request: UpdateHost,
    ) -> Result<ManagedHost, Problem> {
        let name = name.to_owned();
        let hosts = self.clone();
        self.planning
            .change(move |keeper| async move {
                let before = hosts.state.inventory().host_plan(&name).cloned();
                let before = before.ok_or_else(|| no_host(&name))?;
                if request.maintenance == Some(false) {
                    check_not_emptied(&name, &*hosts.drains.get()?)?;
                }
                let was_in_maintenance = before.maintenance;
                let plan = HostPlan {
                    address: request.address.unwrap_or(before.address),
                    labels: request.labels.unwrap_or(before.labels),
                    link_bits_per_s: request.link_bits_per_s.unwrap_or(before.link_bits_per_s),
                    most_moves: request.most_moves.unwrap_or(before.most_moves),
                    maintenance: request.maintenance.unwrap_or(before.maintenance),
                };
                check_plan(&plan)?;
                hosts.agents.client(&name, &plan.address)?;
                let entry = (plan.maintenance != was_in_maintenance)
                    .then(|| maintenance_changed(&name, plan.maintenance));
                let writes = entry.map(|entry| keeper.noting(entry)).transpose()?;
                let saved = SavedHost::from(&plan);
                keeper.replace_with(writes.unwrap_or_default(), HOSTS, &name, &saved).await?;
                hosts.fleet.plan_host(&name, plan);
                hosts.host(&name)
            })
            .await
    }

    /// Forgets a host and revokes its certificates. A host in use is forgotten only with `force`:
    /// its moves then end as failed, and its drain ends.
    pub(crate) async fn forget_host(&self, name: &str, force: bool) -> Result<(), Problem> {
        let name = name.to_owned();
        let hosts = self.clone();
        self.planning
            .change(move |keeper| async move {
                hosts.host(&name)?;
                if !force {
                    check_unused(
                        &name,
                        &*hosts.drains.get()?,
                        &*hosts.moves.get()?,
                        &hosts.state.inventory(),
                    )?;
                }
                // A forgotten host's certificate must not be valid any more.
                hosts.certificates.revoke_host(&keeper, &name).await?;
                let text = format!("host {name} was removed from the cluster");
                let entry = NewEntry::info(JournalKind::HostRemoved, text).about("host", &name);
                keeper.remove_with(keeper.noting(entry)?, HOSTS, &name).await?;
                hosts.fleet.leave_host(&name);
                if let Ok(moves) = hosts.moves.get() {
                    moves.reschedule();
                }
                Ok(())
            })
            .await
    }
}

/// Returns the entry of the journal about a new host.
fn added(name: &str, plan: &HostPlan) -> NewEntry {
    let text = format!("host {name} joined the cluster at {}", plan.address);
    NewEntry::info(JournalKind::HostAdded, text).about("host", name)
}

fn maintenance_changed(name: &str, maintenance: bool) -> NewEntry {
    let change = if maintenance { "entered" } else { "left" };
    let text = format!("host {name} {change} maintenance mode");
    NewEntry::info(JournalKind::HostMaintenance, text).about("host", name)
}

/// Checks that a host is not being drained: until the drain ends, it must stay in maintenance.
fn check_not_emptied(host: &str, drains: &Drains) -> Result<(), Problem> {
    let Some((id, _)) = drains.of_host(host).filter(|(_, state)| *state == DrainState::Running)
    else {
        return Ok(());
    };
    let detail = format!("host {host} is being drained by drain {id}");
    let remedy = format!("wait for its end, or cancel it with `godwit host drain {host} --cancel`");
    Err(Problem::new(ProblemCode::WrongState, detail, remedy))
}

fn check_plan(plan: &HostPlan) -> Result<(), Problem> {
    let wrong =
        |detail: &str, remedy: &str| Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
    if plan.link_bits_per_s == Some(0) {
        return wrong(
            "invalid link speed: 0 bits per second",
            "give the link's speed, or leave it out",
        );
    }
    if plan.link_bits_per_s.is_some_and(|bits| bits > MOST_LINK_BITS_PER_S) {
        return wrong(
            "invalid link speed: more than 1 Pb/s",
            "give bits per second, 1 Pb/s at most",
        );
    }
    if plan.most_moves == Some(0) {
        return wrong(
            "invalid limit of concurrent moves: 0",
            "give 1 to 1000, or set maintenance instead",
        );
    }
    if plan.most_moves.is_some_and(|moves| moves > MOST_MOVES) {
        return wrong(
            "invalid limit of concurrent moves: more than 1000",
            "give 1 to 1000, or leave it out to derive it from the link",
        );
    }
    check_labels(&plan.labels)
}
