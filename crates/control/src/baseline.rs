//! The cluster's CPU baseline, set by an operator (docs/cpu.md). `godwit_qemu` defines baselines;
//! preflight and placement enforce them.

pub(crate) mod http;
#[cfg(test)]
mod http_tests;
mod record;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::HostCpuInfo;
use godwit_api::control::{
    BaselineFit, BaselineHost, BaselineVm, COMPUTED_BASELINE, Check, CheckName, CpuBaselineChange,
    CpuBaselineInfo, JournalKind, Page, Problem, ProblemCode, SetCpuBaseline, Verdict,
};
use godwit_planner::baseline::{CpuSurvey, SurveyedHost, common_cpu};
use godwit_planner::words::{Names, some_features};
use godwit_qemu::{Baseline, CpuModel};
use tokio::time::timeout;

use crate::access::Caller;
use crate::agents::AgentClients;
use crate::clock::now_unix_ms;
use crate::cluster::inventory::{BaselinePlan, Cursor, Inventory};
use crate::cluster::names::check_name;
use crate::cluster::state::State;
use crate::journal::entries::NewEntry;
use crate::storage::keeper::Keeper;
use crate::storage::planning::Planning;

pub(crate) use record::{BASELINE, ID, SavedBaseline};

/// Longest name of a baseline with all of its features, bytes.
const MOST_MODEL_BYTES: usize = 2048;
/// Largest number of hosts in `without`, which may fall short.
const MOST_WITHOUT: usize = 256;
/// VMs that a change lists, and hosts that a refusal lists.
const NAMED_VMS: usize = 100;
const NAMED_HOSTS: usize = 16;
/// Longest time for an agent to report its CPU when its host is added.
const ASK_LIMIT: Duration = Duration::from_secs(3);

#[derive(Clone)]
pub(crate) struct CpuBaselines {
    state: Arc<State>,
    agents: Arc<AgentClients>,
    planning: Planning,
}

impl CpuBaselines {
    pub(crate) fn new(
        state: Arc<State>,
        agents: Arc<AgentClients>,
        planning: Planning,
    ) -> CpuBaselines {
        CpuBaselines { state, agents, planning }
    }

    /// Returns the baseline, and how each host compares with it.
    pub(crate) async fn show(&self) -> Result<CpuBaselineInfo, Problem> {
        let (seen, plan) = self.seen_cpus();
        apart(move || {
            let (common, no_common) = match seen.common(&[]) {
                Ok(common) => (Some(common_cpu(&common)), None),
                Err(error) => (None, Some(format!("{error} ({})", error.remedy()))),
            };
            let baseline = plan.as_ref().map(|plan| &plan.baseline);
            CpuBaselineInfo {
                hosts: seen.hosts(baseline),
                common,
                no_common,
                named: seen.choices(),
                must_restart_count: baseline
                    .map_or(0, |baseline| seen.restarts(baseline).len() as u64),
                baseline: plan.as_ref().map(BaselinePlan::info),
            }
        })
        .await
    }

    /// Returns running VMs whose CPU differs from the baseline, by name.
    pub(crate) async fn vms(&self, cursor: Cursor) -> Result<Page<BaselineVm>, Problem> {
        let (seen, plan) = self.seen_cpus();
        apart(move || {
            let all = plan.map(|plan| seen.restarts(&plan.baseline)).unwrap_or_default();
            let total = all.len() as u64;
            let behind =
                |vm: &BaselineVm| cursor.behind.as_ref().is_none_or(|behind| vm.vm > *behind);
            let mut items: Vec<_> = all.into_iter().filter(behind).take(cursor.limit + 1).collect();
            let has_more = items.len() > cursor.limit;
            items.truncate(cursor.limit);
            let next = items.last().filter(|_| has_more).map(|last| last.vm.clone());
            Page { items, total, next }
        })
        .await
    }

    /// Sets the baseline. With `plan_only`, only returns the effects. Running guests keep their
    /// CPU.
    ///
    /// # Errors
    /// [`ProblemCode::BaselineUnmet`]: a host in use falls short of it and is not in `without`.
    /// Nothing is changed.
    pub(crate) async fn set(
        &self,
        request: SetCpuBaseline,
        plan_only: bool,
        caller: &Caller,
    ) -> Result<CpuBaselineChange, Problem> {
        check_request(&request)?;
        let set_by = caller.name.clone();
        let baselines = self.clone();
        self.planning
            .change(move |keeper| async move {
                baselines.plan(&keeper, request, plan_only, set_by).await
            })
            .await
    }

    async fn plan(
        &self,
        keeper: &Keeper,
        request: SetCpuBaseline,
        plan_only: bool,
        set_by: String,
    ) -> Result<CpuBaselineChange, Problem> {
        let (seen, _) = self.seen_cpus();
        let planned = apart(move || {
            let plan = plan(&seen, request, set_by)?;
            let (change, unmet) = meaning(&seen, &plan);
            Ok::<_, Problem>((plan, change, unmet))
        });
        let (plan, change, unmet) = planned.await??;
        if plan_only {
            return Ok(CpuBaselineChange {
                refused: unmet.map(|problem| problem.detail),
                ..change
            });
        }
        unmet.map_or(Ok(()), Err)?;
        let entry = noted(format!("the CPU baseline was set to {}", plan.baseline.cpu_model));
        let writes = keeper.noting(entry.because(Some(format!("requested: {}", plan.asked))))?;
        let writes = keeper.put(writes, BASELINE, ID, &SavedBaseline::from(&plan)).await?;
        keeper.write(writes).await?;
        self.state.change(|inventory| inventory.plan_baseline(Some(plan)));
        Ok(CpuBaselineChange { set: true, ..change })
    }

    /// Removes the baseline. Running guests keep their CPU.
    pub(crate) async fn clear(&self) -> Result<(), Problem> {
        let baselines = self.clone();
        self.planning
            .change(|keeper| async move {
                if baselines.state.inventory().baseline().is_none() {
                    let (detail, remedy) = (
                        "the cluster has no CPU baseline",
                        "see `godwit control cpu-baseline show`",
                    );
                    return Err(Problem::new(ProblemCode::NotFound, detail, remedy));
                }
                let writes = keeper.noting(noted("the CPU baseline was removed"))?;
                keeper.remove_with(writes, BASELINE, ID).await?;
                baselines.state.change(|inventory| inventory.plan_baseline(None));
                Ok(())
            })
            .await
    }

    /// Asks the agent of a new host for the CPU of its guests; `None`: no response in time, or not
    /// reported.
    pub(crate) async fn ask_new_host(
        &self,
        name: &str,
        address: &str,
    ) -> Result<Option<HostCpuInfo>, Problem> {
        let client = self.agents.client(name, address)?;
        Ok(timeout(ASK_LIMIT, client.host())
            .await
            .ok()
            .and_then(Result::ok)
            .and_then(|info| info.cpu))
    }

    /// Refuses a new host whose CPU falls short of the baseline.
    pub(crate) fn check_new_host(&self, name: &str, cpu: &HostCpuInfo) -> Result<(), Problem> {
        let Some(baseline) = self.state.inventory().baseline().cloned() else { return Ok(()) };
        let lacks = cpu.lacks_of(&baseline);
        if lacks.is_empty() {
            return Ok(());
        }
        let evidence = falls_short(name, &baseline.cpu_model, &some_features(&lacks));
        let remedy = "set a lower baseline first (`godwit control cpu-baseline set`), or do not \
            add the host";
        let check = Check {
            name: CheckName::CpuBaseline,
            verdict: Verdict::Fail,
            evidence: evidence.clone(),
            remedy: remedy.to_owned(),
        };
        Err(Problem {
            checks: Box::new([check]),
            ..Problem::new(ProblemCode::BaselineUnmet, evidence, remedy)
        })
    }

    fn seen_cpus(&self) -> (CpuSurvey, Option<BaselinePlan>) {
        let inventory = self.state.inventory();
        (survey(&inventory), inventory.baseline_plan().cloned())
    }
}

/// Returns the entry of the journal about a change of the baseline.
fn noted(text: impl Into<String>) -> NewEntry {
    NewEntry::info(JournalKind::SettingChanged, text).about_object("cluster")
}

/// Copies the CPUs of all hosts and VMs, so that calculations over many of them hold no lock.
fn survey(inventory: &Inventory) -> CpuSurvey {
    let hosts = inventory.seen_hosts().map(|host| SurveyedHost {
        name: host.name.to_owned(),
        in_use: !host.plan.maintenance || inventory.vms_of(host.name).next().is_some(),
        info: inventory.host_info(host.name).cloned(),
    });
    CpuSurvey::new(hosts, inventory.all_vms().cloned())
}

/// Runs a calculation that is slow with many hosts on a thread of its own.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        let detail = format!("cannot compare the hosts' CPUs: {error}");
        Problem::new(ProblemCode::ManagerFailed, detail, "see the manager's log")
    })
}

fn falls_short(host: &str, cpu_model: &str, lacks: &str) -> String {
    format!("host {host} falls short of {cpu_model}: it lacks {lacks}")
}

fn wrong(detail: impl Into<String>, remedy: impl Into<String>) -> Problem {
    Problem::new(ProblemCode::InvalidRequest, detail, remedy)
}

fn check_request(request: &SetCpuBaseline) -> Result<(), Problem> {
    let SetCpuBaseline { model, without } = request;
    let may_stand = |letter: char| letter.is_ascii_alphanumeric() || "=,+-._".contains(letter);
    if model.is_empty() || model.len() > MOST_MODEL_BYTES || !model.chars().all(may_stand) {
        let remedy = "use `computed`, a level of the psABI, or a model in the form of QEMU's -cpu";
        return Err(wrong("not a valid CPU model", remedy));
    }
    let settings = CpuModel::parse(model).settings;
    // Other settings change what is checked (`enforce`), or do not take part in the comparison of
    // hosts.
    let other = settings.keys().find(|name| !matches!(name.as_str(), "vendor" | "min-level"));
    if let Some(setting) = other {
        let detail = format!("\"{setting}\" is not a feature of a baseline");
        return Err(wrong(detail, "use only features, as +avx2 or -avx2, and a versioned model"));
    }
    if without.len() > MOST_WITHOUT {
        return Err(wrong(
            format!("too many hosts that may fall short: {}", without.len()),
            format!("{MOST_WITHOUT} at most"),
        ));
    }
    without.iter().try_for_each(|host| check_name(host))
}

/// Converts a request into a baseline plan.
fn plan(
    seen: &CpuSurvey,
    request: SetCpuBaseline,
    set_by: String,
) -> Result<BaselinePlan, Problem> {
    let SetCpuBaseline { model, mut without } = request;
    without.sort_unstable();
    without.dedup();
    if let Some(host) = without.iter().find(|host| !seen.has_host(host)) {
        return Err(crate::problems::no_host(host));
    }
    let baseline = if model == COMPUTED_BASELINE {
        let common = seen.common(&without);
        common
            .map_err(|error| {
                Problem::new(ProblemCode::WrongState, error.to_string(), error.remedy())
            })?
            .baseline
    } else {
        seen.named(&model).ok_or_else(|| unknown_name(seen, &model))?
    };
    Ok(BaselinePlan { baseline, asked: model, without, set_unix_ms: now_unix_ms(), set_by })
}

fn unknown_name(seen: &CpuSurvey, model: &str) -> Problem {
    let names = seen.known_names();
    if names.is_empty() {
        let detail =
            format!("cannot look up {model}: no host has reported the CPU of its guests yet");
        return Problem::new(ProblemCode::WrongState, detail, "wait until an agent is connected");
    }
    let detail = format!("no host knows the features of CPU model {model}");
    wrong(detail, format!("use `computed`, or one of {names}"))
}

/// Returns the effects of a baseline, and the reason to refuse it; `None`: it is acceptable.
fn meaning(seen: &CpuSurvey, plan: &BaselinePlan) -> (CpuBaselineChange, Option<Problem>) {
    let hosts = seen.hosts(Some(&plan.baseline));
    let with = |fit: BaselineFit| move |host: &&BaselineHost| host.fit == Some(fit);
    let falls_short: Vec<BaselineHost> =
        hosts.iter().filter(with(BaselineFit::FallsShort)).cloned().collect();
    let unknown = hosts.iter().filter(with(BaselineFit::Unknown)).map(|host| host.host.clone());
    let in_use =
        |host: &&BaselineHost| seen.is_in_use(&host.host) && !plan.without.contains(&host.host);
    let unmet = unmet(&plan.baseline, &falls_short.iter().filter(in_use).collect::<Vec<_>>());
    let mut must_restart = seen.restarts(&plan.baseline);
    let must_restart_count = must_restart.len() as u64;
    must_restart.truncate(NAMED_VMS);
    let change = CpuBaselineChange {
        set: false,
        baseline: plan.info(),
        refused: None,
        unknown: unknown.collect(),
        falls_short,
        must_restart_count,
        must_restart,
    };
    (change, unmet)
}

/// Returns the refusal of a baseline of which these hosts fall short; `None`: there are none.
fn unmet(baseline: &Baseline, hosts: &[&BaselineHost]) -> Option<Problem> {
    let first = hosts.first()?;
    let names: Vec<String> = hosts.iter().take(NAMED_HOSTS).map(|host| host.host.clone()).collect();
    let evidence = |host: &BaselineHost| {
        falls_short(&host.host, &baseline.cpu_model, &some_features(&host.lacks))
    };
    let others = match hosts.len() {
        1 => String::new(),
        count => format!(" (and {} more hosts)", count - 1),
    };
    let remedy = format!(
        "set a lower baseline (`computed` is what all hosts have), or exclude {}: --without {}",
        Names(&names, hosts.len()),
        first.host
    );
    let check = |host: &&BaselineHost| Check {
        name: CheckName::CpuBaseline,
        verdict: Verdict::Fail,
        evidence: evidence(host),
        remedy: "set a lower baseline, or exclude the host with --without".to_owned(),
    };
    let checks = hosts.iter().take(NAMED_HOSTS).map(check).collect();
    let detail = format!("{}{others}", evidence(first));
    Some(Problem { checks, ..Problem::new(ProblemCode::BaselineUnmet, detail, remedy) })
}
