//! Restarts of protected VMs whose host has failed (docs/ha-terms.md).
//!
//! **Never twice.** A VM starts on another host only if all of this holds:
//!
//! - The judge has ended the term of its host ([`Restarts::released`]).
//! - Every host answers that it does not run the VM, or its own term has ended, or its renewals
//!   rule the VM out ([`whereabouts`]). So a move that the manager has not heard of is found, and a
//!   VM in doubt waits for an operator.
//! - The start is recorded, with host and term, before it is requested. Without an answer it is
//!   requested there again, by the next leader too. Another host gets its turn only when that term
//!   has ended, when the answer to the first request was a refusal, or when the host has carried
//!   the start out and the VM has left it. It carries out each attempt once, however often and late
//!   it is requested.
//! - The agent accepts the request only while it holds that term.
//! - The manager has not confirmed to its host that its protection ends
//!   ([`Restarts::note_endings`]).
//! - The former host gives up its definition before it holds a term again
//!   ([`Restarts::take_releases`]). If it holds one first, the VM starts there and nowhere else.

mod endings;
mod following;
mod planning;
mod record;
mod releases;
mod round;
mod starting;
#[cfg(test)]
mod tests;
mod whereabouts;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use godwit_api::control::{HaShortfall, HaVmStatus, Problem};
use godwit_api::{ApiError, ClientError, ErrorCode, START_CARRIED_OUT, StartProtected, VmInfo};
use godwit_planner::failover::Shortfall;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::admission::Admission;
use super::terms::Terms;
use super::troubles::Troubles;
use crate::agents::AgentClients;
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::state::State;
use crate::cluster::text::beginning;
use crate::storage::keeper::Keeper;
use crate::storage::turns::Turns;
use record::{ENDINGS, EndingKey, PROTECTED, RELEASES, ReleaseKey, SavedRelease, SavedVm};

pub(crate) use planning::{promise, protected_from};

/// Interval at which records follow the hosts' reports, and waiting restarts are tried.
const INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which it is determined which VMs could not restart.
const PROBLEMS_INTERVAL: Duration = Duration::from_secs(10);
/// Time in which a host that is about to hold a term again should hold it.
const RETURN_LIMIT: Duration = Duration::from_secs(10);
/// Shortest interval between two such times.
const RETURN_INTERVAL: Duration = Duration::from_secs(60);
/// Most starts at the same time.
const MOST_STARTS: usize = 8;

/// Why a host has not started a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotStarted {
    /// It refused the request: nothing of it remains.
    Refused(String),
    /// There is no answer: it may start the VM now, or later in the same term.
    Unanswered(String),
    /// It has carried out this attempt before, and the VM has left it since. It starts nothing for
    /// this attempt any more.
    HasLeft(String),
}

/// Questions to the agents.
#[async_trait]
pub(crate) trait RestartAgents: Send + Sync {
    /// Returns what a host has of the VM with this name; an error is no answer.
    async fn vm(&self, host: &str, vm: &str) -> Result<Option<VmInfo>, String>;
    /// Starts a VM at a host.
    async fn start(&self, host: &str, request: &StartProtected) -> Result<VmInfo, NotStarted>;
}

/// The agents of the cluster.
pub(crate) struct ClusterAgents(pub(crate) Arc<AgentClients>);

#[async_trait]
impl RestartAgents for ClusterAgents {
    async fn vm(&self, host: &str, vm: &str) -> Result<Option<VmInfo>, String> {
        let client = self.0.client_of(host).map_err(|problem| problem.detail)?;
        match client.vm(vm).await {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(None),
            Err(error) => Err(beginning(&error.detail(), MOST_REASON_BYTES)),
        }
    }

    async fn start(&self, host: &str, request: &StartProtected) -> Result<VmInfo, NotStarted> {
        // Nothing has been sent.
        let refused = |problem: Problem| NotStarted::Refused(problem.detail);
        let client = self.0.client_of(host).map_err(refused)?;
        client.ha_start(request).await.map_err(|error| {
            let why = beginning(&error.detail(), MOST_REASON_BYTES);
            match error {
                ClientError::Refused(error) if has_left(&error) => NotStarted::HasLeft(why),
                ClientError::Refused(_) => NotStarted::Refused(why),
                _ => NotStarted::Unanswered(why),
            }
        })
    }
}

fn has_left(refusal: &ApiError) -> bool {
    refusal.code == ErrorCode::WrongState && refusal.message.contains(START_CARRIED_OUT)
}

/// What restarts need.
pub(crate) struct Means {
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) state: Arc<State>,
    pub(crate) agents: Arc<dyn RestartAgents>,
    pub(crate) turns: Turns,
    pub(crate) terms: Arc<Terms>,
    pub(crate) troubles: Arc<Troubles>,
    pub(crate) admission: Admission,
}

/// Protected VMs and their restarts, for the API.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RestartsStatus {
    /// In the order of their restart.
    pub(crate) vms: Vec<HaVmStatus>,
    pub(crate) shortfall: Option<HaShortfall>,
}

/// The restarts of one leadership.
pub(crate) struct Restarts {
    means: Means,
    known: Mutex<Known>,
    /// Held from the decision about a record until it is saved.
    saving: tokio::sync::Mutex<()>,
    news: Notify,
}

#[derive(Default)]
struct Known {
    vms: BTreeMap<String, SavedVm>,
    releases: BTreeMap<ReleaseKey, SavedRelease>,
    /// VMs whose protection is about to end: they start nowhere else.
    endings: BTreeSet<EndingKey>,
    tries: BTreeMap<String, Tries>,
    /// Hosts that are about to hold a term again, and since when.
    returning: BTreeMap<String, Instant>,
    /// Why VMs could not restart elsewhere, by name.
    problems: BTreeMap<String, String>,
    shortfall: Option<Shortfall>,
}

/// What has happened with a restart under this leader.
#[derive(Debug, Default)]
struct Tries {
    /// Whether it is in progress.
    is_busy: bool,
    /// Host on which it is being started.
    target: Option<String>,
    not_before: Option<Instant>,
    failures: u32,
    /// What it waits for.
    why: Option<String>,
    /// Hosts that refused it, and why; all get another turn when none is left.
    refused: BTreeMap<String, String>,
}

impl Restarts {
    /// Loads protected VMs, restarts that are not over, and releases.
    pub(crate) async fn begin(means: Means) -> Result<Arc<Restarts>, Problem> {
        let vms = means.keeper.read_all(PROTECTED).await?;
        let releases = means.keeper.read_all(RELEASES).await?;
        let releases = releases
            .into_iter()
            .filter_map(|(id, release)| Some((ReleaseKey::of_id(&id)?, release)));
        let endings = means.keeper.read_all(ENDINGS).await?;
        let endings = endings.iter().filter_map(|(id, _)| EndingKey::of_id(id)).collect();
        let restarting = vms.iter().filter(|(_, vm)| vm.restart.is_some());
        means.admission.set_restarting(restarting.map(|(name, _)| name.clone()).collect());
        let known = Known {
            vms: vms.into_iter().collect(),
            releases: releases.collect(),
            endings,
            ..Known::default()
        };
        Ok(Arc::new(Restarts {
            means,
            known: Mutex::new(known),
            saving: tokio::sync::Mutex::default(),
            news: Notify::new(),
        }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    /// Returns the names of the protected VMs.
    pub(crate) fn protected(&self) -> Vec<String> {
        self.known().vms.keys().cloned().collect()
    }

    /// Returns whether a protected VM should run on a host, or is being started there.
    pub(crate) fn may_run_at(&self, host: &str) -> bool {
        let known = self.known();
        let starts_at = |vm: &SavedVm| {
            let attempt = vm.restart.as_ref().and_then(|restart| restart.attempt.as_ref());
            attempt.is_some_and(|attempt| attempt.host == host)
        };
        known.vms.values().any(|vm| (vm.runs && vm.host == host) || starts_at(vm))
    }

    /// Returns the protected VMs in the order of their restart, and whether they fit elsewhere.
    pub(crate) fn status(&self) -> RestartsStatus {
        let known = self.known();
        let mut vms: Vec<&SavedVm> = known.vms.values().collect();
        vms.sort_by_key(|vm| {
            let memory = planning::memory_bytes(&vm.spec);
            (vm.spec.protect, std::cmp::Reverse(memory), vm.spec.name.as_str())
        });
        let status = |vm: &SavedVm| HaVmStatus {
            vm: vm.spec.name.clone(),
            host: vm.host.clone(),
            priority: vm.spec.protect.unwrap_or_default(),
            problem: known.problem_of(vm),
            restart: vm.restart.as_ref().map(|_| known.restart_in_words(vm)),
        };
        RestartsStatus {
            vms: vms.into_iter().map(status).collect(),
            shortfall: known.shortfall.as_ref().map(shown),
        }
    }
}

fn shown(found: &Shortfall) -> HaShortfall {
    let Shortfall { hosts, vms, memory_bytes } = found.clone();
    HaShortfall { hosts, vms, memory_bytes }
}

impl Known {
    /// Returns whether the protection of a VM is about to end on a host.
    fn is_ending(&self, host: &str, vm: &SavedVm) -> bool {
        let marked = vm.spec.uuid.map(|uuid| EndingKey::new(host, uuid));
        marked.is_some_and(|key| self.endings.contains(&key))
    }

    fn problem_of(&self, vm: &SavedVm) -> Option<String> {
        if self.is_ending(&vm.host, vm) {
            return Some("its protection is about to end".to_owned());
        }
        self.problems.get(&vm.spec.name).cloned()
    }

    fn restart_in_words(&self, vm: &SavedVm) -> String {
        let tries = self.tries.get(&vm.spec.name);
        let attempt = vm.restart.as_ref().and_then(|restart| restart.attempt.as_ref());
        let target = attempt
            .map(|attempt| attempt.host.as_str())
            .or_else(|| tries.and_then(|tries| tries.target.as_deref()));
        let why = tries.and_then(|tries| tries.why.as_deref());
        match (target, why) {
            (Some(host), None) => format!("starts on host {host}"),
            (Some(host), Some(why)) => format!("starts on host {host}: {why}"),
            (None, Some(why)) => format!("waits: {why}"),
            (None, None) => "waits for its turn".to_owned(),
        }
    }

    /// Returns whether a host holds a term again, or is about to: its VMs may be started there.
    fn is_returning(&self, host: &str, terms: &Terms) -> bool {
        let since = self.returning.get(host);
        terms.open(host).is_some() || since.is_some_and(|since| since.elapsed() < RETURN_LIMIT)
    }

    fn releases_of_hosts(&self) -> BTreeSet<ReleaseKey> {
        self.releases.keys().cloned().collect()
    }
}

/// Keeps records current and restarts VMs while this manager leads.
pub(crate) async fn run(restarts: Arc<Restarts>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut starts = tokio::task::JoinSet::new();
    let mut checks = tokio::task::JoinSet::new();
    let mut problems_due = Instant::now();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = restarts.news.notified() => {}
        }
        while starts.try_join_next().is_some() {}
        if let Err(problem) = restarts.follow().await {
            tracing::warn!(%problem, "cannot save protected VMs; retrying");
        }
        while checks.try_join_next().is_some() {}
        if checks.is_empty() && Instant::now() >= problems_due {
            let restarts = Arc::clone(&restarts);
            checks.spawn_blocking(move || restarts.find_problems());
            problems_due = Instant::now() + PROBLEMS_INTERVAL;
        }
        restarts.report_troubles();
        for step in restarts.due(MOST_STARTS.saturating_sub(starts.len())) {
            starts.spawn(starting::restart(Arc::clone(&restarts), step));
        }
    }
}
