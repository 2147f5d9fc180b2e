//! Journal entries about moves, and about migrations that an agent was asked for.

use godwit_api::control::JournalKind;
use godwit_planner::queue::lifecycle::JobState;
use godwit_types::Report;

use super::job::{AGENT, Job};
use crate::journal::entries::NewEntry;

/// Returns the entry of a request for a move. `None`: it is part of a drain, whose entry it is.
pub(super) fn requested(job: &Job) -> Option<NewEntry> {
    let shown = job.to_move();
    if shown.drain.is_some() {
        return None;
    }
    let Job { vm, from, .. } = job;
    let text = match &shown.to {
        Some(to) => format!("a move of VM {vm} from {from} to {to} was requested"),
        None => format!("a move of VM {vm} from {from} was requested"),
    };
    let entry = NewEntry::info(JournalKind::MoveRequested, text);
    Some(of_job(entry, job).because(shown.to_reason).by(&job.asked_by))
}

/// Returns the entry of the end of a move. `None`: it is not over.
pub(super) fn ended(job: &Job) -> Option<NewEntry> {
    let Job { vm, from, .. } = job;
    let (entry, why) = match &job.state {
        JobState::Done { target, .. } => {
            let figures = job.report.as_ref().map(figures).unwrap_or_default();
            let text = format!("VM {vm} moved from {from} to {target}{figures}");
            let why = job.to_move().drain.map(|drain| format!("drain {drain} of host {from}"));
            (NewEntry::info(JournalKind::MoveDone, text), why)
        }
        JobState::Failed { target, failure, .. } => {
            let text = format!("the move of VM {vm} from {from} to {target} failed");
            (NewEntry::error(JournalKind::MoveFailed, text), Some(failure.message.clone()))
        }
        JobState::Cancelled { .. } => {
            let text = format!("the move of VM {vm} from {from} was cancelled");
            (NewEntry::info(JournalKind::MoveCancelled, text), None)
        }
        JobState::Waiting { .. } | JobState::Starting(_) | JobState::Running(_) => return None,
    };
    let entry = of_job(entry, job).because(why);
    Some(if job.asked_by == AGENT { entry } else { entry.by(&job.asked_by) })
}

/// Returns the entry of the end of a migration that an agent was asked for. `None`: it is not over.
pub(super) fn reported(job: &Job) -> Option<NewEntry> {
    Some(ended(job)?.reported_by(&job.from))
}

fn of_job(entry: NewEntry, job: &Job) -> NewEntry {
    let shown = job.to_move();
    // First, because entries about one object are limited.
    let entry = entry.about("move", &job.id).about("vm", &job.vm).about("host", &job.from);
    let entry = match &shown.to {
        Some(to) => entry.about("host", to),
        None => entry,
    };
    match &shown.drain {
        Some(drain) => entry.about("drain", drain),
        None => entry,
    }
}

fn figures(report: &Report) -> String {
    let seconds = report.migration_time_ms / 1000.0;
    let pause = report.switchover_ms.map(|ms| format!("paused for {ms:.0} ms, "));
    let sent = report.wire_bytes >> 20;
    format!(" in {seconds:.1} s: {}{sent} MiB sent", pause.unwrap_or_default())
}
