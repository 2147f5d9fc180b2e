//! A job's life: (state, event) → (state, actions). Nothing is moved twice, whenever a manager dies and another takes over.
//!
//! **The order that makes it so.** The manager chooses the migration's id, writes it to the store with the job ([`JobState::Starting`]), and
//! only then asks the source's agent to begin it. Actions are carried out in their order, those that [`Action::still_applies`], and none after
//! an [`Action::Save`] that did not succeed: another manager leads then. An agent that is asked twice to begin one id begins it once. So a manager that takes over, or did
//! not hear the answer, asks for the id ([`Action::Ask`]):
//!
//! | the source's agent | then |
//! |---|---|
//! | knows it | it is followed, or has ended |
//! | does not, and has the VM in the epoch that was noted | it was never begun: it is begun, with the same id |
//! | does not, and has the VM in a later epoch | it, or another, was tried and the agent was restarted: the attempt has failed |
//! | does not, and the target has the VM | it was moved |
//!
//! A VM's epoch grows with each hand-over that is tried, so the second row can't be a VM that has been there and came back.
//!
//! **Cancel** is a wish until it is known what the agent made of it: a job that was being begun is cancelled when its migration is known to
//! be cancelled, or known not to be. A request to begin may be on its way even then: where its migration shows up after all, it is
//! cancelled; where it came through, the job is done, and says so.

use godwit_types::Fault;
use serde::{Deserialize, Serialize};

use super::retry::{LOST_TRACK, MOVED_ELSEWHERE, RetryPolicy, Verdict};

/// One migration of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attempt {
    /// Its id, which the manager chose. No other attempt has it.
    pub migration: String,
    /// Where it goes.
    pub target: String,
    /// The VM's epoch at the source when this was decided.
    pub epoch: u64,
    /// Attempts that had failed before.
    pub failed_attempts: u32,
    /// It is to be cancelled.
    pub cancel: bool,
}

/// Where a job is. This is what the store has of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum JobState {
    /// In the queue, perhaps not before a time.
    Waiting { failed_attempts: u32, not_before_ms: Option<u64>, failure: Option<Fault> },
    /// Its migration's id is in the store. The source's agent may have begun it, or not.
    Starting(Attempt),
    /// The source's agent has begun it.
    Running(Attempt),
    /// The VM runs at the target.
    Done { migration: String, target: String, cancelled_too_late: bool },
    /// It was given up: a person is needed. `migration` is the last attempt's.
    Failed { migration: String, target: String, failed_attempts: u32, failure: Fault },
    /// Somebody cancelled it. `migration` is that of the attempt that was under way, which may be on its way to the agent even now.
    Cancelled { migration: Option<String>, target: Option<String> },
}

impl JobState {
    /// A job that was submitted just now.
    #[must_use]
    pub fn submitted() -> JobState {
        JobState::Waiting { failed_attempts: 0, not_before_ms: None, failure: None }
    }

    /// Whether nothing more is done for it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, JobState::Done { .. } | JobState::Failed { .. } | JobState::Cancelled { .. })
    }

    /// The migration whose news it takes.
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

/// How a migration ended, as its report says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The VM runs at the target.
    Completed,
    /// It runs on at the source.
    Failed(Fault),
    /// Somebody cancelled it; it runs on at the source.
    Cancelled,
    /// It is not known who may run it.
    InDoubt(Fault),
}

/// Where a VM is whose migration the source's agent does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// The source has it, in this epoch, and no migration has it there.
    AtSource {
        /// The epoch.
        epoch: u64,
    },
    AtTarget,
    /// Another host has it.
    Elsewhere {
        host: String,
    },
    /// It is in doubt who has it.
    InDoubt,
    /// Nobody who has been heard has it: hosts are away, or have not been heard yet.
    NotFound,
}

/// What is known of a migration when it is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    UnderWay,
    Ended(Ended),
    /// The source's agent does not know it.
    NotKnown(Whereabouts),
    /// The source's agent did not answer.
    NoAnswer,
}

/// What happens to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum JobEvent {
    /// The queue starts it: as this migration, to this target; the source has the VM in this epoch.
    Start {
        migration: String,
        target: String,
        epoch: u64,
    },
    /// The source's agent has begun the migration.
    Accepted {
        migration: String,
    },
    /// It did not begin it.
    Refused {
        migration: String,
        failure: Fault,
    },
    /// It was asked to begin it, and no answer came.
    Unanswered {
        migration: String,
    },
    Ended {
        migration: String,
        how: Ended,
    },
    /// It was asked what it knows of the migration; or tells by itself.
    Asked {
        migration: String,
        answer: Answer,
    },
    /// Somebody cancels the job.
    Cancel,
    /// A host that it can't do without is not known any more: nobody can say what becomes of it. The migration and the target are those of an
    /// attempt that would have come next.
    HostForgotten {
        host: String,
        migration: String,
        target: String,
    },
    /// A manager has begun with what the store has; or the source's agent is heard again after a silence, and may have been restarted.
    Resumed,
}

impl JobEvent {
    /// The migration that it is about; none: it is about none that was begun.
    #[must_use]
    pub fn migration(&self) -> Option<&str> {
        match self {
            JobEvent::Start { migration, .. }
            | JobEvent::Accepted { migration }
            | JobEvent::Refused { migration, .. }
            | JobEvent::Unanswered { migration }
            | JobEvent::Ended { migration, .. }
            | JobEvent::Asked { migration, .. } => Some(migration),
            JobEvent::Cancel | JobEvent::HostForgotten { .. } | JobEvent::Resumed => None,
        }
    }
}

/// What the manager is to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Action {
    /// Write the new state to the store. Nothing after it is done before it is written, or if it can't be.
    Save,
    /// Ask the source's agent to begin the migration.
    Begin { migration: String, target: String },
    /// Ask it what it knows of the migration, as soon as it is heard.
    Ask { migration: String },
    /// Ask it to cancel the migration.
    CancelMigration { migration: String },
}

impl Action {
    /// Whether it is still to be done when its turn comes, as the job is then: nothing is begun that the job has left behind, or that is
    /// to be cancelled.
    #[must_use]
    pub fn still_applies(&self, state: &JobState) -> bool {
        match self {
            Action::Begin { migration, .. } => {
                matches!(state, JobState::Starting(attempt) if attempt.migration == *migration && !attempt.cancel)
            }
            _ => true,
        }
    }
}

/// What an event makes of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it is now.
    pub state: JobState,
    /// What is to be done.
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

/// What an event makes of a job. An event that does not belong to its state, or is news of another migration than its own, changes nothing.
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

/// A job that is over hears of its migration only if that was not over with it.
fn over(state: JobState, event: &JobEvent) -> Step {
    let own = state.migration().map(ToOwned::to_owned);
    let of_own = |migration: &String| own.as_ref() == Some(migration);
    let cancelled = matches!(state, JobState::Cancelled { .. });
    match event {
        JobEvent::Accepted { migration }
        | JobEvent::Asked { migration, answer: Answer::UnderWay }
            if cancelled && of_own(migration) =>
        {
            Step::stay(state).and(Action::CancelMigration { migration: migration.clone() })
        }
        JobEvent::Ended { migration, how: Ended::Completed }
        | JobEvent::Asked { migration, answer: Answer::Ended(Ended::Completed) }
            if of_own(migration) =>
        {
            came_through(state)
        }
        _ => Step::stay(state),
    }
}

/// The VM was moved though the job had been given up: a doubt was settled, or a cancel came too late.
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

/// What decides on another try.
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
            JobEvent::Asked { migration, answer } if migration == attempt.migration => match answer
            {
                Answer::UnderWay => begun(attempt),
                Answer::Ended(how) => self.ended(attempt, how),
                Answer::NotKnown(Whereabouts::AtSource { epoch }) if epoch == attempt.epoch => {
                    never_begun(attempt)
                }
                Answer::NotKnown(whereabouts) => {
                    self.located(attempt, whereabouts, JobState::Starting)
                }
                Answer::NoAnswer => Step::stay(JobState::Starting(attempt)).and(ask),
            },
            // The request to begin may be on its way: what became of it comes first.
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
            JobEvent::Asked { migration: of, answer } if of == migration => match answer {
                // It was saved that it is to be cancelled, and perhaps nobody asked for it.
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
            // Whoever cancelled it at the agent meant it.
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

    /// The source's agent does not know the migration any more; where the VM is says what became of it.
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
                    "the source's agent has forgotten migration {migration}, and has the VM"
                );
                self.failed(attempt, of(LOST_TRACK, message, ""))
            }
            Whereabouts::Elsewhere { host } => {
                let message = format!("the VM is on host {host} now");
                let remedy = "submit another job if it is to leave that host";
                Step::to(gave_up(attempt, of(MOVED_ELSEWHERE, message, remedy)))
            }
            Whereabouts::InDoubt => {
                let message = "it is not known which of the two hosts may run the VM".to_owned();
                let remedy = "see `godwit vm show`; `godwit migration resolve` settles it";
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
        message: format!("host {host} was taken out of the inventory"),
        remedy: "add the host again with `godwit control host add`, and see where the VM is"
            .to_owned(),
    }
}

fn gave_up(attempt: Attempt, failure: Fault) -> JobState {
    let Attempt { migration, target, failed_attempts, .. } = attempt;
    JobState::Failed { migration, target, failed_attempts: failed_attempts + 1, failure }
}
