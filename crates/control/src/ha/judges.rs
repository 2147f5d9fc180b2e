//! The judges of all hosts while this manager leads, and the settings of the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use godwit_api::control::{
    FencingTest, HaHostStatus, HaSettings, HaStatus, JournalKind, Problem, ProblemCode,
};
use godwit_ha::{Phase, Term, Timing};
use godwit_qemu::Uuid;
use parking_lot::{Mutex, RwLock};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::record::{HA, HA_HOSTS, OF_CLUSTER, SavedHa, SavedJudge};
use super::renewals;
use super::seat::{Judged, Judging, Means};
use super::status::{host_status, troubles_of};
use super::troubles::Source;
use super::watch;
use crate::journal::entries::NewEntry;
use crate::problems::no_host;
use crate::storage::planning::whole;

/// Largest number of hosts that may fail at once.
const MOST_FAILURES: u32 = 8;
/// Most VMs that a refusal names.
const MOST_NAMED: usize = 8;

/// The judges of one leadership.
pub(crate) struct Judges {
    judging: Arc<Judging>,
    /// `None`: HA was never enabled.
    settings: RwLock<Option<SavedHa>>,
    hosts: RwLock<BTreeMap<String, Arc<Judged>>>,
    /// Renewals and watch of each host; they end on drop.
    tasks: Mutex<BTreeMap<String, JoinSet<()>>>,
    /// Held during a change of the settings, and while hosts are added and removed.
    changing: tokio::sync::Mutex<()>,
}

impl Judges {
    /// Loads the judges from the store. They count from now on.
    pub(crate) async fn begin(means: Means, timing: Timing) -> Result<Arc<Judges>, Problem> {
        let settings = means.keeper.read_all(HA).await?;
        let settings = settings.into_iter().find(|(id, _)| id == OF_CLUSTER).map(|(_, it)| it);
        let saved = means.keeper.read_all(HA_HOSTS).await?;
        means.admission.set(settings.map(|saved| saved.settings()).unwrap_or_default());
        // What this manager knew under an earlier leadership may be wrong now.
        means.terms.clear();
        let judging = Arc::new(Judging::new(means, timing));
        let mut hosts = BTreeMap::new();
        if let Some(SavedHa { cluster, .. }) = settings {
            for (host, saved) in saved {
                let judged = Judged::new(&host, cluster, saved, &judging);
                hosts.insert(host, Arc::new(judged));
            }
        }
        Ok(Arc::new(Judges {
            judging,
            settings: RwLock::new(settings),
            hosts: RwLock::new(hosts),
            tasks: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }))
    }

    /// Returns the restarts to which the judges hand over.
    #[cfg(test)]
    pub(super) fn restarts(&self) -> Arc<super::restarts::Restarts> {
        Arc::clone(&self.judging.means.restarts)
    }

    fn settings(&self) -> HaSettings {
        (*self.settings.read()).map(|saved| saved.settings()).unwrap_or_default()
    }

    /// Returns what is known of VMs that agents restart.
    #[cfg(test)]
    pub(super) fn own(&self) -> Arc<super::own::OwnVms> {
        Arc::clone(&self.judging.means.own)
    }

    /// Returns the settings, hosts, protected VMs and VMs of agents. While HA is off there are no
    /// hosts: the last states of their terms say nothing.
    pub(crate) fn status(&self) -> HaStatus {
        let (settings, restarts) = (self.settings(), self.judging.means.restarts.status());
        let names: BTreeMap<String, String> = {
            let inventory = self.judging.means.state.inventory();
            inventory.all_datastores().into_iter().map(|one| (one.id, one.name)).collect()
        };
        let (own, own_problems) = self.judging.means.own.shown(&names);
        let (hosts, shortfall) = match settings.enabled {
            true => (self.host_statuses(&names), restarts.shortfall),
            false => (Vec::new(), None),
        };
        HaStatus { settings, hosts, vms: restarts.vms, own, own_problems, shortfall }
    }

    fn host_statuses(&self, names: &BTreeMap<String, String>) -> Vec<HaHostStatus> {
        let now = self.judging.now();
        let hosts = self.hosts.read();
        let shown = hosts.values().map(|judged| {
            let host = &judged.host;
            let devices = &self.judging.means.devices;
            let mut status = host_status(host, &judged.shown(), now, devices.has(host), names);
            let fault = || devices.fault(host).map(|fault| fault.to_string());
            status.problem = status.problem.or_else(fault);
            status
        });
        shown.collect()
    }

    /// Sets all settings.
    ///
    /// # Errors
    /// They are invalid, a protected VM exists and HA would be disabled, or they cannot be saved.
    pub(crate) async fn set(self: &Arc<Self>, settings: HaSettings) -> Result<HaStatus, Problem> {
        if !(1..=MOST_FAILURES).contains(&settings.failures) {
            let detail = format!("invalid number of failures: {}", settings.failures);
            let remedy = format!("give a number from 1 to {MOST_FAILURES}");
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
        }
        let judges = Arc::clone(self);
        whole(async move { judges.change_settings(settings).await }).await
    }

    async fn change_settings(&self, settings: HaSettings) -> Result<HaStatus, Problem> {
        let _turn = self.changing.lock().await;
        let before = *self.settings.read();
        if self.settings() == settings && before.is_some() {
            return Ok(self.status());
        }
        if self.settings().enabled && !settings.enabled {
            self.check_unprotected()?;
        }
        let cluster = before.map_or_else(Uuid::new_v4, |saved| saved.cluster);
        let saved = SavedHa::new(cluster, settings);
        let mode = if settings.enabled { "enabled" } else { "disabled" };
        let text = format!("the settings of the high availability were changed: it is {mode}");
        let Means { keeper, admission, .. } = &self.judging.means;
        let beside = keeper.noting(NewEntry::info(JournalKind::SettingChanged, text))?;
        keeper.write(keeper.put(beside, HA, OF_CLUSTER, &saved).await?).await?;
        *self.settings.write() = Some(saved);
        admission.set(settings);
        Ok(self.status())
    }

    /// Refuses to disable HA while VMs rely on it.
    fn check_unprotected(&self) -> Result<(), Problem> {
        let mut names = self.judging.means.restarts.protected();
        if names.is_empty() {
            return Ok(());
        }
        let count = names.len();
        names.truncate(MOST_NAMED);
        let more = if count > names.len() { ", …" } else { "" };
        let detail = format!(
            "cannot disable the high availability: it protects {count} VMs ({}{more})",
            names.join(", ")
        );
        let remedy = "end their protection first: `godwit vm set NAME --unset protect`";
        Err(Problem::new(ProblemCode::Conflict, detail, remedy))
    }

    /// Takes an operator's confirmation that a host has no power.
    ///
    /// # Errors
    /// The host has no judge, its term is not in doubt, or its end cannot be saved.
    pub(crate) async fn confirm_off(
        self: &Arc<Self>,
        host: &str,
        term: u64,
    ) -> Result<HaStatus, Problem> {
        let judged = self.hosts.read().get(host).cloned().ok_or_else(|| no_host(host))?;
        let judges = Arc::clone(self);
        whole(async move {
            judged.confirmed_off(&judges.judging, Term(term)).await?;
            Ok(judges.status())
        })
        .await
    }

    /// Asks every fencing device for the state of its host's power.
    pub(crate) async fn test_fencing(&self) -> FencingTest {
        self.judging.means.devices.test().await
    }

    /// Begins and ends the tasks of hosts, as the settings and the list of hosts require.
    async fn follow_hosts(&self) {
        let _turn = self.changing.lock().await;
        let settings = *self.settings.read();
        let Some(SavedHa { cluster, .. }) = settings.filter(|saved| saved.settings().enabled)
        else {
            self.tasks.lock().clear();
            return;
        };
        let planned: BTreeSet<String> = {
            let inventory = self.judging.means.state.inventory();
            inventory.plans().map(|(name, _)| name.to_owned()).collect()
        };
        let known: Vec<Arc<Judged>> = self.hosts.read().values().cloned().collect();
        for judged in known.iter().filter(|judged| !planned.contains(&judged.host)) {
            // A removed host may still hold its term.
            self.forget(judged).await;
        }
        for host in planned {
            let known = self.hosts.read().get(&host).cloned();
            if known.is_none() {
                let saved = SavedJudge::new(Uuid::new_v4());
                let judged = Judged::new(&host, cluster, saved, &self.judging);
                self.hosts.write().insert(host, Arc::new(judged));
            }
        }
        let all: Vec<Arc<Judged>> = self.hosts.read().values().cloned().collect();
        for judged in all {
            if !self.tasks.lock().contains_key(&judged.host) {
                judged.wake(&self.judging).await;
                self.watch(judged);
            }
        }
    }

    fn watch(&self, judged: Arc<Judged>) {
        let host = judged.host.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(renewals::run(Arc::clone(&self.judging), Arc::clone(&judged)));
        tasks.spawn(watch::run(Arc::clone(&self.judging), judged));
        self.tasks.lock().insert(host, tasks);
    }

    /// Ends the judge of a removed host, if its term is over.
    async fn forget(&self, judged: &Judged) {
        let host = &judged.host;
        // No term can be opened meanwhile.
        let seat = judged.seat.lock().await;
        if seat.judge().phase() != Phase::Over {
            return;
        }
        let keeper = &self.judging.means.keeper;
        if keeper.has(HA_HOSTS, host)
            && let Err(problem) = keeper.remove(HA_HOSTS, host).await
        {
            tracing::warn!(host, %problem, "cannot remove the judge of a removed host");
            return;
        }
        self.tasks.lock().remove(host);
        self.hosts.write().remove(host);
        self.judging.means.terms.forget(host);
    }

    fn report_troubles(&self) {
        let hosts: Vec<Arc<Judged>> = self.hosts.read().values().cloned().collect();
        let shown = hosts.iter().flat_map(|judged| troubles_of(&judged.host, &judged.shown()));
        let troubles = if self.settings().enabled { shown.collect() } else { Vec::new() };
        let Means { devices, troubles: of_all, .. } = &self.judging.means;
        of_all.set(Source::Judges, troubles);
        of_all.set(Source::Fencing, devices.troubles());
    }
}

/// Keeps a judge for each host.
pub(crate) async fn run(judges: Arc<Judges>) {
    let mut ticks = interval(judges.judging.timing.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        judges.follow_hosts().await;
        judges.report_troubles();
    }
}
