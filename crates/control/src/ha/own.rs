//! VMs that agents restart among themselves (`protect_by_agents`), for display and alarms. The
//! hosts decide everything about them; this manager asks what they see, now and then, also while
//! its own HA is off.
//!
//! A host may show anything. What it shows leads to no request of this manager: a confirmation is
//! an operator's, at an agent that checks it itself.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use godwit_api::control::{AlarmKind, HaOwnVmStatus};
use godwit_api::{HaHost, HostInfo, OwnStanding, OwnVm};
use godwit_planner::alarms::HaFacts;
use godwit_qemu::{Uuid, VmName};
use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::troubles::{Source, Troubles};
use crate::agents::AgentClients;
use crate::cluster::inventory::Inventory;
use crate::cluster::names::is_unseen;
use crate::cluster::state::State;
use crate::cluster::text::beginning;

/// Interval at which hosts are asked. Agents close an idle connection earlier, so none is kept.
const ASK_INTERVAL: Duration = Duration::from_secs(10);
/// Time for a host's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(4);
/// Most hosts that are asked at once.
const MOST_AT_ONCE: usize = 16;
/// Missing answers after which a host's last one no longer counts.
const MOST_MISSED: u8 = 3;
/// Longest answer, bytes.
const MOST_ANSWER_BYTES: usize = 1 << 20;
/// Most VMs of a host, and of all.
const MOST_VMS_OF_HOST: usize = 64;
const MOST_VMS: usize = 256;
/// Most problems of a host, and of all.
const MOST_PROBLEMS_OF_HOST: usize = 8;
const MOST_PROBLEMS: usize = 64;
/// Longest text of a host, bytes.
const MOST_TEXT_BYTES: usize = 300;
/// Most hosts that a VM names.
const MOST_NAMED: usize = 16;

/// What a host showed last.
#[derive(Debug, Default)]
struct Report {
    vms: Vec<OwnVm>,
    problems: Vec<String>,
    /// Problems that the answer before had, too.
    lasting: Vec<String>,
    missed: u8,
}

impl Report {
    /// Takes an answer within bounds. VMs without a valid name are left out: users copy commands
    /// with the name.
    fn of(answer: HaHost) -> Report {
        let named = answer.own.into_iter().filter(|own| VmName::new(own.vm.as_str()).is_ok());
        let vms = named.take(MOST_VMS_OF_HOST).map(|own| OwnVm {
            host: own.host.map(|name| plain(&name)),
            problem: own.problem.map(|why| plain(&why)),
            ..own
        });
        let problems = answer.own_problems.iter().take(MOST_PROBLEMS_OF_HOST);
        Report {
            vms: vms.collect(),
            problems: problems.map(|why| plain(why)).collect(),
            ..Report::default()
        }
    }

    /// Returns this answer after the one before.
    fn after(mut self, before: Option<&Report>) -> Report {
        let had = |why: &&String| before.is_some_and(|before| before.problems.contains(why));
        self.lasting = self.problems.iter().filter(had).cloned().collect();
        self
    }

    /// Returns the report after an answer is missing.
    fn missed(self) -> Option<Report> {
        let missed = self.missed + 1;
        (missed < MOST_MISSED).then_some(Report { missed, ..self })
    }
}

/// Returns a text of a host as a short line.
fn plain(text: &str) -> String {
    beginning(&text.replace(is_unseen, " "), MOST_TEXT_BYTES)
}

/// What the hosts show, while this manager leads.
pub(crate) struct OwnVms {
    state: Arc<State>,
    agents: Arc<AgentClients>,
    troubles: Arc<Troubles>,
    reports: Mutex<BTreeMap<String, Report>>,
}

impl OwnVms {
    pub(crate) fn new(
        state: Arc<State>,
        agents: Arc<AgentClients>,
        troubles: Arc<Troubles>,
    ) -> OwnVms {
        OwnVms { state, agents, troubles, reports: Mutex::default() }
    }

    /// Asks all hosts that are up and may have such VMs, and reports what is wrong.
    pub(super) async fn ask_all(&self) {
        let hosts = hosts(&self.state.inventory());
        let asked: Vec<_> = hosts.into_iter().map(|host| self.ask(host)).collect();
        let answers: Vec<_> = stream::iter(asked).buffer_unordered(MOST_AT_ONCE).collect().await;
        let mut reports = self.reports.lock();
        let mut former = std::mem::take(&mut *reports);
        for (host, answer) in answers {
            let before = former.remove(&host);
            let report = match answer {
                Some(answer) => Some(answer.after(before.as_ref())),
                None => before.and_then(Report::missed),
            };
            reports.extend(report.map(|report| (host, report)));
        }
        self.troubles.set(Source::Own, troubles_of(&reports));
    }

    /// Asks one host; `None`: no answer.
    async fn ask(&self, host: String) -> (String, Option<Report>) {
        let Ok(client) = self.agents.client_of(&host) else { return (host, None) };
        let client = client.with_answers_of_at_most(MOST_ANSWER_BYTES);
        let answer = match timeout(ANSWER_LIMIT, client.ha()).await {
            Ok(Ok(answer)) => Some(Report::of(answer)),
            Ok(Err(error)) => {
                tracing::debug!(host, %error, "cannot ask for VMs of agents");
                None
            }
            Err(_) => None,
        };
        (host, answer)
    }

    /// Returns the VMs, with `names` of datastores by their identity, and the hosts' problems.
    pub(super) fn shown(
        &self,
        names: &BTreeMap<String, String>,
    ) -> (Vec<HaOwnVmStatus>, Vec<String>) {
        let reports = self.reports.lock();
        let mut vms = merged(&reports);
        for vm in &mut vms {
            if let Some(name) = names.get(&vm.datastore) {
                vm.datastore.clone_from(name);
            }
        }
        let problems = reports.iter().flat_map(|(host, report)| {
            report.problems.iter().map(move |why| format!("host {host}: {why}"))
        });
        (vms, problems.take(MOST_PROBLEMS).collect())
    }
}

/// Asks the hosts again and again.
pub(crate) async fn run(own: Arc<OwnVms>) {
    let mut ticks = interval(ASK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        own.ask_all().await;
    }
}

/// Returns the hosts that are up and have a directory with an identity: others have no such VMs.
fn hosts(inventory: &Inventory) -> Vec<String> {
    let has_datastore = |host: &str| {
        let info = inventory.host_info(host);
        let has = |info: &Arc<HostInfo>| {
            info.datastores.iter().any(|(path, one)| path.is_absolute() && one.identity.is_some())
        };
        info.is_some_and(has)
    };
    let hosts = inventory.plans().map(|(host, _)| host);
    hosts.filter(|host| inventory.is_up(host) && has_datastore(host)).map(str::to_owned).collect()
}

/// Returns how much a standing says about its term: the word of its holder first, then an end that
/// the holder has written.
fn weight(standing: OwnStanding) -> u8 {
    match standing {
        OwnStanding::Held => 5,
        OwnStanding::Stopping => 4,
        OwnStanding::Stopped => 3,
        OwnStanding::Resting => 2,
        OwnStanding::Doubtful => 1,
        OwnStanding::Watched => 0,
    }
}

/// Returns each VM once, as the reports show it together: doubtful ones first, then by name.
fn merged(reports: &BTreeMap<String, Report>) -> Vec<HaOwnVmStatus> {
    let mut by_vm = BTreeMap::<(Uuid, Uuid), Vec<(&str, &OwnVm)>>::new();
    for (host, report) in reports {
        for own in &report.vms {
            by_vm.entry((own.datastore, own.uuid)).or_default().push((host.as_str(), own));
        }
    }
    let mut vms: Vec<HaOwnVmStatus> =
        by_vm.into_values().filter_map(|seen| shown_vm(&seen)).collect();
    vms.sort_by_key(|vm| {
        (vm.standing != OwnStanding::Doubtful, vm.vm.clone(), vm.datastore.clone(), vm.uuid)
    });
    vms.truncate(MOST_VMS);
    vms
}

/// Returns a VM as the hosts that list it show it together; `None`: there is no such host.
fn shown_vm(seen: &[(&str, &OwnVm)]) -> Option<HaOwnVmStatus> {
    let &(by, best) =
        seen.iter().max_by_key(|(host, own)| (own.term, weight(own.standing), Reverse(*host)))?;
    let is_holder = matches!(best.standing, OwnStanding::Held | OwnStanding::Stopping);
    let host = if is_holder { Some(by.to_owned()) } else { best.host.clone() };
    let others =
        seen.iter().map(|(other, _)| *other).filter(|other| host.as_deref() != Some(*other));
    let watched_by: BTreeSet<&str> = others.collect();
    let problem_of = |(host, own): &(&str, &OwnVm)| {
        let why = own.problem.as_ref()?;
        Some(format!("host {host}: {why}"))
    };
    let alone = || "no other reachable host watches it: it would not restart elsewhere".to_owned();
    let problem = problem_of(&(by, best)).or_else(|| seen.iter().find_map(problem_of));
    Some(HaOwnVmStatus {
        vm: best.vm.clone(),
        uuid: best.uuid,
        datastore: best.datastore.to_string(),
        term: best.term,
        standing: best.standing,
        problem: problem.or_else(|| (is_holder && watched_by.is_empty()).then(alone)),
        host,
        watched_by: watched_by.into_iter().take(MOST_NAMED).map(str::to_owned).collect(),
        confirm_at: (best.standing == OwnStanding::Doubtful).then(|| by.to_owned()),
    })
}

/// Returns what raises an alarm. Problems of hosts do so when two answers have them, and only in a
/// cluster with such VMs.
fn troubles_of(reports: &BTreeMap<String, Report>) -> Vec<HaFacts> {
    let vms = merged(reports);
    let lasting =
        reports.iter().filter(|(_, report)| !vms.is_empty() && !report.lasting.is_empty());
    let of_hosts = lasting.map(|(host, report)| HaFacts {
        kind: AlarmKind::HaTrouble,
        object: format!("host:{host}"),
        text: format!("VMs that agents protect: host {host}: {}", report.lasting.join("; ")),
        remedy: None,
    });
    vms.iter().filter_map(trouble_of).chain(of_hosts).collect()
}

fn trouble_of(shown: &HaOwnVmStatus) -> Option<HaFacts> {
    let HaOwnVmStatus { vm, term, host, confirm_at, problem, .. } = shown;
    let (kind, text, remedy) = match (confirm_at, problem) {
        (Some(at), _) => {
            let host = host.as_ref().map(|host| format!(" {host}")).unwrap_or_default();
            let text = format!(
                "the host{host} of VM {vm}, which agents protect, is silent, and nothing \
                 guarantees that the VM has ended"
            );
            let remedy = format!(
                "switch that host off, then confirm that it is off: godwit host ha confirm-off \
                 {at} {vm} --term {term}"
            );
            (AlarmKind::HaDoubtful, text, remedy)
        }
        (None, Some(why)) => {
            let text = format!("VM {vm}, which agents protect, has a problem: {why}");
            let remedy = format!(
                "remove the cause (docs/ha.md), or end the protection: godwit vm set {vm} --unset \
                 protect-by-agents"
            );
            (AlarmKind::HaUnprotected, text, remedy)
        }
        (None, None) => return None,
    };
    Some(HaFacts { kind, object: format!("vm:{vm}"), text, remedy: Some(remedy) })
}
