//! Requests to agents for a move, and the meaning of their answers for it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use godwit_api::{ClientError, ErrorCode, MigrationRequest, MigrationStatus, VmState};
use godwit_planner::queue::lifecycle::{Action, Answer, Ended, JobEvent, Whereabouts};
use godwit_types::{Fault, Outcome, Report};
use tokio::time::sleep;

use super::job::Job;
use crate::agents::AgentClients;
use crate::cluster::bounds::MOST_REASON_BYTES;
use crate::cluster::inventory::Inventory;
use crate::cluster::state::State;
use crate::cluster::text::beginning;
use crate::problems::no_vm;

/// Pause before a silent agent is queried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Outcome of an action at an agent, for a job.
#[derive(Clone, Debug)]
pub(crate) struct AgentAnswer {
    /// The event for the job's lifecycle.
    pub(crate) event: JobEvent,
    /// Report of the migration, if it has ended.
    pub(crate) report: Option<Box<Report>>,
}

impl From<JobEvent> for AgentAnswer {
    fn from(event: JobEvent) -> AgentAnswer {
        AgentAnswer { event, report: None }
    }
}

/// Executor of the actions of moves.
#[async_trait]
pub(crate) trait Agents: Send + Sync + 'static {
    /// Carries out an action for a job and returns the resulting event, if any.
    async fn carry_out(&self, job: &Job, action: Action) -> Option<AgentAnswer>;

    /// Returns the migrations that a host's agent remembers. Empty: it does not answer.
    async fn migrations(&self, host: &str) -> Vec<MigrationStatus>;
}

/// Agents of the hosts that this manager follows.
pub(crate) struct FollowedAgents {
    pub(crate) agents: Arc<AgentClients>,
    pub(crate) state: Arc<State>,
}

#[async_trait]
impl Agents for FollowedAgents {
    async fn carry_out(&self, job: &Job, action: Action) -> Option<AgentAnswer> {
        match action {
            Action::Save => None,
            Action::Begin { migration, target } => {
                Some(self.begin(job, migration, &target).await.into())
            }
            Action::Ask { migration } => Some(self.ask(job, migration).await),
            Action::CancelMigration { migration } => {
                let client = self.agents.client_of(&job.from).ok()?;
                let Err(error) = client.cancel_migration(&migration).await else { return None };
                tracing::warn!(job = job.id, migration, %error, "cannot cancel a migration");
                // The migration may be over or unknown, which no later event would report. If it
                // still runs, it is cancelled again then.
                sleep(PAUSE).await;
                Some(self.ask(job, migration).await)
            }
        }
    }
    async fn migrations(&self, host: &str) -> Vec<MigrationStatus> {
        let Ok(client) = self.agents.client_of(host) else { return Vec::new() };
        let answer = client.migrations().await;
        answer
            .inspect_err(|error| tracing::warn!(host, %error, "cannot list a host's migrations"))
            .unwrap_or_default()
    }
}

impl FollowedAgents {
    async fn begin(&self, job: &Job, migration: String, target: &str) -> JobEvent {
        let client = match self.agents.client_of(&job.from) {
            Ok(client) => client,
            Err(problem) => {
                return JobEvent::Refused { migration, failure: Fault::from(&problem) };
            }
        };
        self.agents.name_peers(&job.from).await;
        self.agents.name_peers(target).await;
        let request = self.keeping_used(job, job.migration_request(&migration, target)).await;
        match client.migrate(&job.vm, &request).await {
            Ok(_) => JobEvent::Accepted { migration },
            Err(ClientError::Refused(error)) => {
                JobEvent::Refused { migration, failure: bounded(Fault::from(error)) }
            }
            Err(error) => {
                let message = "cannot determine whether a migration has begun";
                tracing::warn!(job = job.id, migration, %error, "{message}");
                JobEvent::Unanswered { migration }
            }
        }
    }

    /// Returns a request that keeps the images at the source in place of deleting them, if a VM of
    /// another host uses one or may use it: the move may have waited since it was checked, and a
    /// drain checks nothing.
    async fn keeping_used(&self, job: &Job, mut request: MigrationRequest) -> MigrationRequest {
        if !request.disks.as_ref().is_some_and(|disks| disks.delete_source) {
            return request;
        }
        let info = self.state.inventory().vm_info(&job.vm).cloned();
        let why = match info {
            Some(info) => self.agents.check_disks_elsewhere(&info).await.err(),
            None => Some(no_vm(&job.vm)),
        };
        if let Some(problem) = why {
            tracing::warn!(job = job.id, %problem, "the images of a VM's disks stay at the source");
            if let Some(disks) = &mut request.disks {
                (disks.delete_source, disks.keep_source) = (false, true);
            }
        }
        request
    }

    async fn ask(&self, job: &Job, migration: String) -> AgentAnswer {
        let mut report = None;
        let answer = match self.agents.client_of(&job.from) {
            Ok(client) => match client.migration(&migration).await {
                Ok(status) => {
                    report = status.report.map(Box::new);
                    report
                        .as_deref()
                        .map_or(Answer::UnderWay, |report| Answer::Ended(ended(report)))
                }
                Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
                    Answer::NotKnown(whereabouts(&self.state.inventory(), job))
                }
                Err(_) => Answer::NoAnswer,
            },
            Err(_) => Answer::NoAnswer,
        };
        if matches!(answer, Answer::NoAnswer | Answer::NotKnown(Whereabouts::NotFound)) {
            sleep(PAUSE).await;
        }
        AgentAnswer { event: JobEvent::Reported { migration, answer }, report }
    }
}

/// Returns the outcome that a report states.
pub(super) fn ended(report: &Report) -> Ended {
    let failure = || {
        let unknown = || Fault::new("internal", "the report gives no reason", "");
        bounded(report.error.clone().unwrap_or_else(unknown))
    };
    match report.outcome {
        Outcome::Completed => Ended::Completed,
        Outcome::Cancelled => Ended::Cancelled,
        Outcome::Failed => Ended::Failed(failure()),
        Outcome::InDoubt => Ended::InDoubt(failure()),
    }
}

/// Limits the texts of a failure, which come from a host.
fn bounded(Fault { code, message, remedy }: Fault) -> Fault {
    let [code, message, remedy] =
        [code, message, remedy].map(|text| beginning(&text, MOST_REASON_BYTES));
    Fault { code, message, remedy }
}

/// Returns where a VM is, according to the reachable hosts.
fn whereabouts(inventory: &Inventory, job: &Job) -> Whereabouts {
    let Some(vm) = inventory.vm(&job.vm).filter(|vm| vm.summary.is_current) else {
        return Whereabouts::NotFound;
    };
    let host = vm.summary.host;
    if vm.summary.in_doubt {
        Whereabouts::InDoubt
    } else if host == job.from {
        // During a migration the agent would know that migration.
        match vm.info.state {
            VmState::MigratingOut | VmState::MigratingIn => Whereabouts::NotFound,
            _ => Whereabouts::AtSource { epoch: vm.info.epoch },
        }
    } else if job.target() == Some(&host) {
        Whereabouts::AtTarget
    } else {
        Whereabouts::Elsewhere { host }
    }
}
