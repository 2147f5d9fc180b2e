//! Life of a job: (state, event) → (state, actions). No VM is moved twice, whenever a manager
//! dies and another takes over.
//!
//! **The order ensures that.** The manager chooses the migration's ID, writes it to the store with
//! the job ([`JobState::Starting`]), and only then asks the source's agent to begin it. Actions are
//! carried out in their order, as far as [`Action::still_applies`]. None follows an
//! [`Action::Save`] that failed: another manager leads then. An agent that is asked twice to begin
//! one ID begins it once. So a manager that takes over, or did not get the response, asks for the
//! ID ([`Action::Ask`]):
//!
//! - The source's agent knows the ID: the migration is followed, or has ended.
//! - It does not, and has the VM in the recorded epoch: the migration was never begun, and is begun
//!   with the same ID.
//! - It does not, and has the VM in a later epoch: this migration, or another, was attempted and
//!   the agent was restarted. The attempt has failed.
//! - It does not, and the target has the VM: the VM was moved.
//!
//! A VM's epoch grows with each attempted hand-over, so the second case cannot be a VM that was
//! there and came back.
//!
//! **Cancel** is a request until the agent's result is known. A job that was being begun is
//! cancelled when its migration is known to be cancelled, or known not to exist. A request to begin
//! may be on its way even then. If its migration appears after all, it is cancelled; if it
//! completed, the job is done and says so.

use godwit_types::Fault;
use serde::{Deserialize, Serialize};

use super::retry::{LOST_TRACK, MOVED_ELSEWHERE, RetryPolicy, Verdict};

/// One migration of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// Its ID, chosen by the manager. No other attempt has it.
    pub migration: String,
    /// The target host.
    pub target: String,
    /// Epoch of the VM at the source at the time of the decision.
    pub epoch: u64,
    /// Number of earlier failed attempts.
    pub failed_attempts: u32,
    /// Whether it is to be cancelled.
    pub cancel: bool,
}

/// State of a job, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum JobState {
    /// In the queue, possibly with an earliest start.
    Waiting { failed_attempts: u32, not_before_ms: Option<u64>, failure: Option<Fault> },
    /// The ID of its migration is in the store. The source's agent may have begun it, or not.
    Starting(Attempt),
    /// The source's agent has begun it.
    Running(Attempt),
    /// The VM runs at the target.
    Done { migration: String, target: String, cancelled_too_late: bool },
    /// The job was given up and needs an operator. `migration` is the last attempt's.
    Failed { migration: String, target: String, failed_attempts: u32, failure: Fault },
    /// The job was cancelled. `migration` is that of the attempt that ran, whose request may still
    /// be on its way to the agent.
    Cancelled { migration: Option<String>, target: Option<String> },
}

impl JobState {
    /// Returns the state of a job that was just submitted.
    #[must_use]
    pub fn submitted() -> JobState {
        JobState::Waiting { failed_attempts: 0, not_before_ms: None, failure: None }
    }

    /// Whether the job has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, JobState::Done { .. } | JobState::Failed { .. } | JobState::Cancelled { .. })
    }

    /// Returns the migration whose events apply to the job.
    #[must_use]
    pub fn migration(&self) -> Option<&str> {
        match self {
            JobState::Waiting { .. } => None,
            JobState::Starting(attempt) | JobState::Running(attempt) => Some(&attempt.migration),
            JobState::Done { migration, .. } | JobState::Failed { migration, .. } => {
                Some(migration)
            }
            JobState::Cancelled { migration, .. } => migration.as_deref(),
        }
    }
}

/// How a migration ended, from its report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The VM runs at the target.
    Completed,
    /// The VM runs on at the source.
    Failed(Fault),
    /// The migration was cancelled; the VM runs on at the source.
    Cancelled,
    /// It is unknown which host may run the VM.
    InDoubt(Fault),
}

/// Location of a VM whose migration the source's agent does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// The source has it, in this epoch and without a migration.
    AtSource {
        /// The epoch.
        epoch: u64,
    },
    AtTarget,
    /// Another host has it.
    Elsewhere {
        host: String,
    },
    /// It is in doubt which host has it.
    InDoubt,
    /// No host that has reported has it: some hosts are away, or have not reported yet.
    NotFound,
}

/// Result of a query for a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    UnderWay,
    Ended(Ended),
    /// The source's agent does not know it.
    NotKnown(Whereabouts),
    /// The source's agent did not respond.
    NoAnswer,
}

/// An event in the life of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum JobEvent {
    /// The queue starts it, with this migration and target; the source has the VM in this epoch.
    Start {
        migration: String,
        target: String,
        epoch: u64,
    },
    /// The source's agent has begun the migration.
    Accepted {
        migration: String,
    },
    /// The source's agent did not begin it.
    Refused {
        migration: String,
        failure: Fault,
    },
    /// The source's agent was asked to begin it, and did not respond.
    Unanswered {
        migration: String,
    },
    Ended {
        migration: String,
        how: Ended,
    },
    /// The agent was queried about the migration, or reported by itself.
    Reported {
        migration: String,
        answer: Answer,
    },
    /// The job is cancelled.
    Cancel,
    /// A host that the job needs has left the inventory: its outcome cannot be determined. The
    /// migration and the target are those of the attempt that would have come next.
    HostForgotten {
        host: String,
        migration: String,
        target: String,
    },
    /// A manager has started with the content of the store; or the source's agent is reachable
    /// again, and may have been restarted.
    Resumed,
}

impl JobEvent {
    /// Returns the migration that the event is about; `None` if it is about none that was begun.
    #[must_use]
    pub fn migration(&self) -> Option<&str> {
        match self {
            JobEvent::Start { migration, .. }
            | JobEvent::Accepted { migration }
            | JobEvent::Refused { migration, .. }
            | JobEvent::Unanswered { migration }
            | JobEvent::Ended { migration, .. }
            | JobEvent::Reported { migration, .. } => Some(migration),
            JobEvent::Cancel | JobEvent::HostForgotten { .. } | JobEvent::Resumed => None,
        }
    }
}

/// Actions for the manager, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Action {
    /// Writes the new state to the store. No later action is carried out before it is written, or
    /// if the write fails.
    Save,
    /// Ask the source's agent to begin the migration.
    Begin { migration: String, target: String },
    /// Queries the agent about the migration, as soon as it is reachable.
    Ask { migration: String },
    /// Asks the agent to cancel the migration.
    CancelMigration { migration: String },
}

impl Action {
    /// Whether the action still applies to the job's state when its turn comes. A migration that
    /// the job has left behind, or that is to be cancelled, is not begun.
    #[must_use]
    pub fn still_applies(&self, state: &JobState) -> bool {
        match self {
            Action::Begin { migration, .. } => {
                matches!(
                    state,
                    JobState::Starting(attempt)
                        if attempt.migration == *migration && !attempt.cancel
                )
            }
            _ => true,
        }
    }
}

/// Result of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The new state.
    pub state: JobState,
    /// Actions to carry out.
    pub actions: Vec<Action>,
}

impl Step {
    fn to(state: JobState) -> Step {
        Step { state, actions: vec![Action::Save] }
    }

    fn stay(state: JobState) -> Step {
        Step { state, actions: Vec::new() }
    }

    fn and(mut self, action: Action) -> Step {
        self.actions.push(action);
        self
    }
}

/// Applies an event to a job. An event that does not fit the state, or concerns another migration,
/// changes nothing.
#[must_use]
pub fn step(state: JobState, event: JobEvent, policy: &RetryPolicy, now_ms: u64) -> Step {
    let times = Times { policy, now_ms };
    match state {
        JobState::Waiting { .. } => waiting(state, event),
        JobState::Starting(attempt) => times.starting(attempt, event),
        JobState::Running(attempt) => times.running(attempt, event),
        JobState::Done { .. } | JobState::Failed { .. } | JobState::Cancelled { .. } => {
            over(state, &event)
        }
    }
}

fn waiting(state: JobState, event: JobEvent) -> Step {
    match (state, event) {
        (
            JobState::Waiting { failed_attempts, .. },
            JobEvent::Start { migration, target, epoch },
        ) => {
            let begin = Action::Begin { migration: migration.clone(), target: target.clone() };
            let attempt = Attempt { migration, target, epoch, failed_attempts, cancel: false };
            Step::to(JobState::Starting(attempt)).and(begin)
        }
        (_, JobEvent::Cancel) => Step::to(JobState::Cancelled { migration: None, target: None }),
        (
            JobState::Waiting { failed_attempts, .. },
            JobEvent::HostForgotten { host, migration, target },
        ) => Step::to(JobState::Failed {
            migration,
            target,
            failed_attempts,
            failure: forgotten(&host),
        }),
        (state, _) => Step::stay(state),
    }
}

/// A job that has ended follows its migration only if that had not ended with it.
fn over(state: JobState, event: &JobEvent) -> Step {
    let own = state.migration().map(ToOwned::to_owned);
    let of_own = |migration: &String| own.as_ref() == Some(migration);
    let cancelled = matches!(state, JobState::Cancelled { .. });
    match event {
        JobEvent::Accepted { migration }
        | JobEvent::Reported { migration, answer: Answer::UnderWay }
            if cancelled && of_own(migration) =>
        {
            Step::stay(state).and(Action::CancelMigration { migration: migration.clone() })
        }
        JobEvent::Ended { migration, how: Ended::Completed }
        | JobEvent::Reported { migration, answer: Answer::Ended(Ended::Completed) }
            if of_own(migration) =>
        {
            came_through(state)
        }
        _ => Step::stay(state),
    }
}

/// The VM was moved although the job had been given up: a doubt was resolved, or a cancel came too
/// late.
fn came_through(state: JobState) -> Step {
    match state {
        JobState::Failed { migration, target, .. } => {
            Step::to(JobState::Done { migration, target, cancelled_too_late: false })
        }
        JobState::Cancelled { migration: Some(migration), target: Some(target) } => {
            Step::to(JobState::Done { migration, target, cancelled_too_late: true })
        }
        state => Step::stay(state),
    }
}

/// Parameters that decide on a retry.
struct Times<'a> {
    policy: &'a RetryPolicy,
    now_ms: u64,
}

impl Times<'_> {
    fn starting(&self, attempt: Attempt, event: JobEvent) -> Step {
        let ask = Action::Ask { migration: attempt.migration.clone() };
        match event {
            JobEvent::Accepted { migration } if migration == attempt.migration => begun(attempt),
            JobEvent::Refused { migration, failure } if migration == attempt.migration => {
                self.failed(attempt, failure)
            }
            JobEvent::Unanswered { migration } if migration == attempt.migration => {
                Step::stay(JobState::Starting(attempt)).and(ask)
            }
            JobEvent::Ended { migration, how } if migration == attempt.migration => {
                self.ended(attempt, how)
            }
            JobEvent::Reported { migration, answer } if migration == attempt.migration => {
                match answer {
                    Answer::UnderWay => begun(attempt),
                    Answer::Ended(how) => self.ended(attempt, how),
                    Answer::NotKnown(Whereabouts::AtSource { epoch }) if epoch == attempt.epoch => {
                        never_begun(attempt)
                    }
                    Answer::NotKnown(whereabouts) => {
                        self.located(attempt, whereabouts, JobState::Starting)
                    }
                    Answer::NoAnswer => Step::stay(JobState::Starting(attempt)).and(ask),
                }
            }
            // The request to begin may be on its way: its result comes first.
            JobEvent::Cancel if !attempt.cancel => {
                Step::to(JobState::Starting(Attempt { cancel: true, ..attempt })).and(ask)
            }
            JobEvent::Resumed => Step::stay(JobState::Starting(attempt)).and(ask),
            JobEvent::HostForgotten { host, .. } => Step::to(gave_up(attempt, forgotten(&host))),
            _ => Step::stay(JobState::Starting(attempt)),
        }
    }

    fn running(&self, attempt: Attempt, event: JobEvent) -> Step {
        let migration = attempt.migration.clone();
        let cancel = Action::CancelMigration { migration: migration.clone() };
        let ask = Action::Ask { migration: migration.clone() };
        match event {
            JobEvent::Ended { migration: of, how } if of == migration => self.ended(attempt, how),
            JobEvent::Reported { migration: of, answer } if of == migration => match answer {
                // The cancel was saved, but perhaps never sent.
                Answer::UnderWay if attempt.cancel => {
                    Step::stay(JobState::Running(attempt)).and(cancel)
                }
                Answer::UnderWay => Step::stay(JobState::Running(attempt)),
                Answer::Ended(how) => self.ended(attempt, how),
                Answer::NotKnown(whereabouts) => {
                    self.located(attempt, whereabouts, JobState::Running)
                }
                Answer::NoAnswer => Step::stay(JobState::Running(attempt)).and(ask),
            },
            JobEvent::Cancel if !attempt.cancel => {
                Step::to(JobState::Running(Attempt { cancel: true, ..attempt })).and(cancel)
            }
            JobEvent::Resumed => Step::stay(JobState::Running(attempt)).and(ask),
            JobEvent::HostForgotten { host, .. } => Step::to(gave_up(attempt, forgotten(&host))),
            _ => Step::stay(JobState::Running(attempt)),
        }
    }

    fn ended(&self, attempt: Attempt, how: Ended) -> Step {
        match how {
            Ended::Completed => Step::to(done(attempt)),
            // A cancel at the agent was intended.
            Ended::Cancelled => Step::to(cancelled(attempt)),
            Ended::Failed(failure) => self.failed(attempt, failure),
            Ended::InDoubt(failure) => Step::to(gave_up(attempt, failure)),
        }
    }

    fn failed(&self, attempt: Attempt, failure: Fault) -> Step {
        if attempt.cancel {
            return Step::to(cancelled(attempt));
        }
        let failed_attempts = attempt.failed_attempts + 1;
        Step::to(match self.policy.after(&failure.code, failed_attempts, self.now_ms) {
            Verdict::Again { at_ms, .. } => JobState::Waiting {
                failed_attempts,
                not_before_ms: Some(at_ms),
                failure: Some(failure),
            },
            Verdict::GiveUp { .. } => gave_up(attempt, failure),
        })
    }

    /// The source's agent no longer knows the migration; the location of the VM shows the result.
    fn located(
        &self,
        attempt: Attempt,
        whereabouts: Whereabouts,
        stay: fn(Attempt) -> JobState,
    ) -> Step {
        let of = |code: &str, message: String, remedy: &str| Fault {
            code: code.to_owned(),
            message,
            remedy: remedy.to_owned(),
        };
        let migration = &attempt.migration;
        match whereabouts {
            Whereabouts::AtTarget => Step::to(done(attempt)),
            Whereabouts::AtSource { .. } => {
                let message = format!(
                    "the source's agent no longer knows migration {migration}, and has the VM"
                );
                self.failed(attempt, of(LOST_TRACK, message, ""))
            }
            Whereabouts::Elsewhere { host } => {
                let message = format!("the VM is on host {host} now");
                let remedy = "submit another job to move it off that host";
                Step::to(gave_up(attempt, of(MOVED_ELSEWHERE, message, remedy)))
            }
            Whereabouts::InDoubt => {
                let message = "it is unknown which of the two hosts may run the VM".to_owned();
                let remedy = "see `godwit vm show`; resolve it with `godwit migration resolve`";
                Step::to(gave_up(attempt, of("in-doubt", message, remedy)))
            }
            Whereabouts::NotFound => {
                let ask = Action::Ask { migration: migration.clone() };
                Step::stay(stay(attempt)).and(ask)
            }
        }
    }
}

fn begun(attempt: Attempt) -> Step {
    let (migration, cancel) = (attempt.migration.clone(), attempt.cancel);
    let step = Step::to(JobState::Running(attempt));
    if cancel { step.and(Action::CancelMigration { migration }) } else { step }
}

fn never_begun(attempt: Attempt) -> Step {
    if attempt.cancel {
        return Step::to(cancelled(attempt));
    }
    let begin =
        Action::Begin { migration: attempt.migration.clone(), target: attempt.target.clone() };
    Step::stay(JobState::Starting(attempt)).and(begin)
}

fn done(attempt: Attempt) -> JobState {
    let Attempt { migration, target, cancel, .. } = attempt;
    JobState::Done { migration, target, cancelled_too_late: cancel }
}

fn cancelled(attempt: Attempt) -> JobState {
    JobState::Cancelled { migration: Some(attempt.migration), target: Some(attempt.target) }
}

fn forgotten(host: &str) -> Fault {
    Fault {
        code: "host-forgotten".to_owned(),
        message: format!("host {host} was removed from the inventory"),
        remedy: "add the host again with `godwit control host add`, and check where the VM is"
            .to_owned(),
    }
}

fn gave_up(attempt: Attempt, failure: Fault) -> JobState {
    let Attempt { migration, target, failed_attempts, .. } = attempt;
    JobState::Failed { migration, target, failed_attempts: failed_attempts + 1, failure }
}
