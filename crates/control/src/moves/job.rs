//! Jobs: the request for a move, its state, and its public form.

use std::time::Duration;

use parking_lot::Mutex;

use godwit_api::control::{CreateMove, Move, MoveState, Problem, ProblemCode, Waits};
use godwit_api::{MigrationRequest, MigrationStatus};
use godwit_types::{Progress, Report};
use rustix::rand::{GetRandomFlags, getrandom};

use super::record::SavedMove;
use godwit_planner::queue::lifecycle::JobState;

/// User of a migration that was requested at an agent.
pub(super) const AGENT: &str = "agent";

/// Request for a move.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) vm: String,
    /// Host that has the VM.
    pub(crate) from: String,
    pub(crate) asked_by: String,
    pub(crate) request: CreateMove,
    /// Reason for the target in `request`, if the manager chose it.
    pub(crate) to_reason: Option<String>,
    /// Drain that the move is part of.
    pub(crate) drain: Option<String>,
}

/// Requested move of one VM.
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

    /// Restores a job from the store.
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
                disks: saved.disks,
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

    /// Creates the job of a migration that an agent was asked for, and that ended in this state.
    pub(super) fn reported(
        id: String,
        status: MigrationStatus,
        state: JobState,
        now_ms: u64,
    ) -> Job {
        let MigrationStatus { vm, from, to, engine, started_unix_ms, progress, report, .. } =
            status;
        // The times are the host's.
        let started_ms = started_unix_ms.min(now_ms);
        let took = report.as_ref().map_or(0.0, |report| report.migration_time_ms);
        let took = Duration::try_from_secs_f64(took / 1000.0).unwrap_or_default();
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(0);
        Job {
            id,
            vm,
            from,
            asked_by: AGENT.to_owned(),
            asked_unix_ms: started_ms,
            request: CreateMove { to: Some(to), engine, ..CreateMove::default() },
            to_reason: None,
            drain: None,
            state,
            attempts: 1,
            started_unix_ms: Some(started_ms),
            ended_unix_ms: Some(started_ms.saturating_add(took_ms).min(now_ms)),
            waits: None,
            progress: Some(progress),
            report,
        }
    }

    pub(super) fn saved(&self) -> SavedMove {
        let CreateMove { to, priority, engine, policy, page_in, qemu, disks, .. } =
            self.request.clone();
        SavedMove {
            vm: self.vm.clone(),
            from: self.from.clone(),
            to,
            priority,
            engine,
            policy,
            page_in,
            qemu,
            disks,
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

    /// Enters a state.
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

    /// Returns the name of the next attempt at the source's agent. The name is unique among
    /// attempts.
    pub(super) fn next_migration(&self) -> String {
        format!("{}-{}", self.id, self.attempts + 1)
    }

    /// Returns the group for fair shares: all moves of a drain have one share.
    pub(super) fn group(&self) -> &str {
        self.drain.as_ref().unwrap_or(&self.asked_by)
    }

    /// Returns the request for the agent of the source.
    pub(super) fn migration_request(&self, migration: &str, target: &str) -> MigrationRequest {
        MigrationRequest {
            id: Some(migration.to_owned()),
            engine: self.request.engine,
            policy: self.request.policy,
            page_in: self.request.page_in,
            qemu: self.request.qemu.clone(),
            disks: self.request.disks.clone(),
            ..MigrationRequest::to(target)
        }
    }

    /// Returns the target of the attempt in progress.
    pub(super) fn target(&self) -> Option<&String> {
        under_way_to(&self.state)
    }

    /// Returns the target, as requested or as chosen.
    fn to(&self) -> Option<String> {
        match &self.state {
            JobState::Starting(attempt) | JobState::Running(attempt) => {
                Some(attempt.target.clone())
            }
            JobState::Done { target, .. } | JobState::Failed { target, .. } => Some(target.clone()),
            JobState::Waiting { .. } | JobState::Cancelled { .. } => self.request.to.clone(),
        }
    }

    /// Returns the public form of the job.
    pub(super) fn to_move(&self) -> Move {
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
            // A move that ended before its first attempt has no migration.
            migration: self.state.migration().filter(|_| self.attempts > 0).map(str::to_owned),
            progress: self.progress.clone(),
            failure: failure.cloned(),
            report: None,
        }
    }
}

/// Returns the target of the attempt in progress.
pub(super) fn under_way_to(state: &JobState) -> Option<&String> {
    match state {
        JobState::Starting(attempt) | JobState::Running(attempt) => Some(&attempt.target),
        _ => None,
    }
}

/// Returns the ID of the job whose attempt has this name.
pub(crate) fn job_of(migration: &str) -> Option<&str> {
    Some(migration.rsplit_once('-')?.0)
}

/// Time of the last ID, and the number of earlier IDs in the same millisecond.
static LAST_ID: Mutex<(u64, u16)> = Mutex::new((0, 0));

/// Creates a unique ID that sorts by the time of the request. It consists of the millisecond, a
/// number within it, and 16 random bits, because another manager may create an ID in the same
/// millisecond. `kind` is the prefix for the kind of object.
pub(crate) fn fresh_id(kind: char, now_ms: u64) -> Result<String, Problem> {
    let mut random = [0; 2];
    getrandom(&mut random, GetRandomFlags::empty()).map_err(|error| {
        Problem::new(ProblemCode::ManagerFailed, format!("cannot get random bytes: {error}"), "")
    })?;
    let (ms, number) = {
        let mut last = LAST_ID.lock();
        *last = moment_behind(*last, now_ms);
        *last
    };
    let (seconds, ms) = (ms / 1000, ms % 1000);
    Ok(format!("{kind}{seconds:x}{ms:03x}-{number:04x}{:04x}", u16::from_le_bytes(random)))
}

/// Returns the number of the present moment. It exceeds the last one even if the clock was set
/// back.
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
    fn ids_sort_by_their_creation() {
        let now_ms = 1_795_444_970_253;
        let drawn: Vec<String> = (0..1000)
            .map(|n| fresh_id('d', if n % 3 == 0 { now_ms + n / 100 } else { now_ms }).unwrap())
            .collect();
        assert!(drawn.is_sorted_by(|one, next| one < next), "{drawn:?}");
        // They sort after IDs that an earlier version created in the same second.
        assert!(drawn[0].as_str() > "d6b0450ea-ffffffff");
    }

    #[test]
    fn a_full_millisecond_continues_in_the_next() {
        assert_eq!(moment_behind((5, 3), 9), (9, 0));
        assert_eq!(moment_behind((5, 3), 5), (5, 4));
        assert_eq!(moment_behind((5, 3), 2), (5, 4));
        assert_eq!(moment_behind((5, u16::MAX), 5), (6, 0));
    }
}
