//! A job: what was asked for, where it is, and what is told of it.

use std::sync::{Mutex, PoisonError};

use godwit_api::control::{CreateMove, Move, MovePriority, MoveState, Problem, ProblemCode, Waits};
use godwit_api::{MigrationRequest, QemuEngineOptions};
use godwit_store::records::{Record, Table};
use godwit_types::{EngineKind, Intent, PageInUse, Progress, Report};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use godwit_planner::queue::Priority;
use godwit_planner::queue::lifecycle::JobState;

pub(crate) const MOVES: Table<SavedMove> = Table::new();

/// A move that somebody wants.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) vm: String,
    /// The host that has it.
    pub(crate) from: String,
    pub(crate) asked_by: String,
    pub(crate) request: CreateMove,
    /// Why the target is the one that `request` names, where the manager chose it.
    pub(crate) to_reason: Option<String>,
    /// The drain that it is part of.
    pub(crate) drain: Option<String>,
}

/// One VM's move that somebody asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) vm: String,
    pub(super) from: String,
    pub(super) asked_by: String,
    pub(super) asked_unix_ms: u64,
    pub(super) request: CreateMove,
    to_reason: Option<String>,
    drain: Option<String>,
    pub(super) state: JobState,
    attempts: u32,
    started_unix_ms: Option<u64>,
    ended_unix_ms: Option<u64>,
    pub(super) waits: Option<Waits>,
    pub(super) progress: Option<Progress>,
    pub(super) report: Option<Report>,
}

/// A job as it is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedMove {
    vm: String,
    from: String,
    to: Option<String>,
    priority: MovePriority,
    engine: EngineKind,
    policy: Intent,
    page_in: PageInUse,
    asked_by: String,
    asked_unix_ms: u64,
    attempts: u32,
    started_unix_ms: Option<u64>,
    ended_unix_ms: Option<u64>,
    #[serde(default)]
    qemu: QemuEngineOptions,
    #[serde(default)]
    to_reason: Option<String>,
    #[serde(default)]
    drain: Option<String>,
    state: JobState,
}

/// What a manager knows of a move that another one carries out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OnWay {
    pub(crate) vm: String,
    /// It has begun, or is about to.
    pub(crate) runs: bool,
    /// Where its attempt goes that is under way.
    pub(crate) target: Option<String>,
}

impl SavedMove {
    /// None: it is over.
    pub(crate) fn on_way(self) -> Option<OnWay> {
        let runs = !matches!(self.state, JobState::Waiting { .. });
        let target = under_way_to(&self.state).cloned();
        (!self.state.is_over()).then_some(OnWay { vm: self.vm, runs, target })
    }
}

impl Record for SavedMove {
    const KIND: &'static str = "move";
    const PREFIX: &'static str = "moves/";
    const VERSION: u32 = 1;
}

impl Job {
    pub(super) fn new(id: String, wanted: Wanted, now_ms: u64) -> Job {
        let Wanted { vm, from, asked_by, request, to_reason, drain } = wanted;
        Job {
            id,
            vm,
            from,
            asked_by,
            asked_unix_ms: now_ms,
            request,
            to_reason,
            drain,
            state: JobState::submitted(),
            attempts: 0,
            started_unix_ms: None,
            ended_unix_ms: None,
            waits: None,
            progress: None,
            report: None,
        }
    }

    /// As the store has it.
    pub(super) fn of(id: &str, saved: SavedMove) -> Job {
        let SavedMove {
            vm,
            from,
            to,
            priority,
            engine,
            policy,
            page_in,
            asked_by,
            asked_unix_ms,
            ..
        } = saved;
        Job {
            id: id.to_owned(),
            vm,
            from,
            asked_by,
            asked_unix_ms,
            request: CreateMove {
                to,
                priority,
                engine,
                policy,
                page_in,
                qemu: saved.qemu,
                skip_preflight: false,
            },
            to_reason: saved.to_reason,
            drain: saved.drain,
            state: saved.state,
            attempts: saved.attempts,
            started_unix_ms: saved.started_unix_ms,
            ended_unix_ms: saved.ended_unix_ms,
            waits: None,
            progress: None,
            report: None,
        }
    }

    pub(super) fn saved(&self) -> SavedMove {
        let CreateMove { to, priority, engine, policy, page_in, qemu, .. } = self.request.clone();
        SavedMove {
            vm: self.vm.clone(),
            from: self.from.clone(),
            to,
            priority,
            engine,
            policy,
            page_in,
            qemu,
            asked_by: self.asked_by.clone(),
            asked_unix_ms: self.asked_unix_ms,
            attempts: self.attempts,
            started_unix_ms: self.started_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            to_reason: self.to_reason.clone(),
            drain: self.drain.clone(),
            state: self.state.clone(),
        }
    }

    /// It is in that state from now on.
    pub(super) fn enter(&mut self, state: JobState, now_ms: u64) {
        let starts =
            matches!(state, JobState::Starting(_)) && !matches!(self.state, JobState::Starting(_));
        if starts {
            self.attempts += 1;
            self.started_unix_ms = Some(now_ms);
            (self.waits, self.progress, self.report) = (None, None, None);
        }
        if state.is_over() && !self.state.is_over() {
            self.ended_unix_ms = Some(now_ms);
            self.waits = None;
        }
        self.state = state;
    }

    /// What the next attempt is called at the source's agent: no other attempt has that name.
    pub(super) fn next_migration(&self) -> String {
        format!("{}-{}", self.id, self.attempts + 1)
    }

    /// Who shares with whom: a drain's moves are one share.
    pub(super) fn group(&self) -> &str {
        self.drain.as_ref().unwrap_or(&self.asked_by)
    }

    pub(super) fn priority(&self) -> Priority {
        match self.request.priority {
            MovePriority::Low => Priority::Low,
            MovePriority::Normal => Priority::Normal,
            MovePriority::High => Priority::High,
            MovePriority::Urgent => Priority::Urgent,
        }
    }

    /// What its source's agent is asked.
    pub(super) fn migration_request(&self, migration: &str, target: &str) -> MigrationRequest {
        MigrationRequest {
            id: Some(migration.to_owned()),
            engine: self.request.engine,
            policy: self.request.policy,
            page_in: self.request.page_in,
            qemu: self.request.qemu.clone(),
            ..MigrationRequest::to(target)
        }
    }

    /// Where its attempt goes that is under way.
    pub(super) fn target(&self) -> Option<&String> {
        under_way_to(&self.state)
    }

    /// Where it goes: as was asked for, or as was chosen.
    fn to(&self) -> Option<String> {
        match &self.state {
            JobState::Starting(attempt) | JobState::Running(attempt) => {
                Some(attempt.target.clone())
            }
            JobState::Done { target, .. } | JobState::Failed { target, .. } => Some(target.clone()),
            JobState::Waiting { .. } | JobState::Cancelled { .. } => self.request.to.clone(),
        }
    }

    /// What everybody is told of it.
    pub(super) fn told(&self) -> Move {
        let (state, failure) = match &self.state {
            JobState::Waiting { failure, .. } => (MoveState::Waiting, failure.as_ref()),
            JobState::Starting(_) => (MoveState::Starting, None),
            JobState::Running(_) => (MoveState::Running, None),
            JobState::Done { .. } => (MoveState::Done, None),
            JobState::Failed { failure, .. } => (MoveState::Failed, Some(failure)),
            JobState::Cancelled { .. } => (MoveState::Cancelled, None),
        };
        Move {
            id: self.id.clone(),
            vm: self.vm.clone(),
            from: self.from.clone(),
            to: self.to(),
            to_reason: self.to_reason.clone(),
            state,
            waits: self.waits.clone(),
            priority: self.request.priority,
            drain: self.drain.clone(),
            asked_by: self.asked_by.clone(),
            asked_unix_ms: self.asked_unix_ms,
            started_unix_ms: self.started_unix_ms,
            ended_unix_ms: self.ended_unix_ms,
            attempts: self.attempts,
            // Of one that ended before it began there is none.
            migration: self.state.migration().filter(|_| self.attempts > 0).map(str::to_owned),
            progress: self.progress.clone(),
            failure: failure.cloned(),
            report: None,
        }
    }
}

fn under_way_to(state: &JobState) -> Option<&String> {
    match state {
        JobState::Starting(attempt) | JobState::Running(attempt) => Some(&attempt.target),
        _ => None,
    }
}

/// The job whose attempt has this name, if it is a job's.
pub(crate) fn job_of(migration: &str) -> Option<&str> {
    Some(migration.rsplit_once('-')?.0)
}

/// The moment of the last id, and how many had the same before it.
static LAST_ID: Mutex<(u64, u16)> = Mutex::new((0, 0));

/// In the order in which they were asked for, and no two alike: the millisecond, which number it is of that, and 16 random bits, since
/// another manager may draw one in the same millisecond. `kind` tells what it names.
pub(crate) fn fresh_id(kind: char, now_ms: u64) -> Result<String, Problem> {
    let mut random = [0; 2];
    getrandom(&mut random, GetRandomFlags::empty()).map_err(|error| {
        Problem::new(ProblemCode::ManagerFailed, format!("no random bytes can be had: {error}"), "")
    })?;
    let (ms, number) = {
        let mut last = LAST_ID.lock().unwrap_or_else(PoisonError::into_inner);
        *last = moment_behind(*last, now_ms);
        *last
    };
    let (seconds, ms) = (ms / 1000, ms % 1000);
    Ok(format!("{kind}{seconds:x}{ms:03x}-{number:04x}{:04x}", u16::from_le_bytes(random)))
}

/// The present moment's number, behind the last one also where the clock was set back.
fn moment_behind(last: (u64, u16), now_ms: u64) -> (u64, u16) {
    match last.1.checked_add(1) {
        _ if now_ms > last.0 => (now_ms, 0),
        Some(number) => (last.0, number),
        None => (last.0 + 1, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_the_order_in_which_they_were_drawn() {
        let now_ms = 1_795_444_970_253;
        let drawn: Vec<String> = (0..1000)
            .map(|n| fresh_id('d', if n % 3 == 0 { now_ms + n / 100 } else { now_ms }).unwrap())
            .collect();
        assert!(drawn.is_sorted_by(|one, next| one < next), "{drawn:?}");
        // Behind those of the same second that an earlier version drew.
        assert!(drawn[0].as_str() > "d6b0450ea-ffffffff");
    }

    #[test]
    fn a_millisecond_that_is_full_borrows_of_the_next() {
        assert_eq!(moment_behind((5, 3), 9), (9, 0));
        assert_eq!(moment_behind((5, 3), 5), (5, 4));
        assert_eq!(moment_behind((5, 3), 2), (5, 4));
        assert_eq!(moment_behind((5, u16::MAX), 5), (6, 0));
    }
}
