//! Reservation of freed capacity for jobs that have waited long.
//!
//! A job that needs much at once (the memory of a large VM, places on several datastores) could be
//! passed forever by jobs that need little, since free capacity goes to whichever job fits. So
//! capacity is reserved for the first job of a group at a source that has been passed over for
//! [`PATIENCE_MS`]: memory if it lacks memory, otherwise everything that it needs. Later jobs do
//! not get it.
//!
//! What the job waits for may never come (no VM leaves its target), so the reservation is not
//! permanent. Of four such spans by the clock it holds in three. In the fourth all jobs proceed as
//! if there were no such jobs. The spans are by the clock, so that they coincide for all jobs.

use super::order::Ranked;
use super::reason::{TargetObstacle, WaitReason};
use super::situation::WaitingJob;

/// Time after which capacity is reserved for a job that has been passed over.
const PATIENCE_MS: u64 = 10 * 60 * 1000;
/// Number of spans of which one is without reservations.
const SPANS: u64 = 4;

/// What is reserved for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reservation {
    /// Memory at its target. Places are of no use to it yet, and are left to others.
    Memory,
    /// Everything that it needs.
    All,
}

/// Returns what is reserved for this job.
pub(super) fn of(
    job: &WaitingJob,
    ranked: &Ranked,
    reason: &WaitReason,
    now_ms: u64,
) -> Option<Reservation> {
    if !ranked.is_first || !is_of_capacity(reason) {
        return None;
    }
    let waited_ms = now_ms.saturating_sub(job.submitted_ms.max(job.not_before_ms.unwrap_or(0)));
    if waited_ms < PATIENCE_MS || !are_in_force(now_ms) {
        return None;
    }
    if is_of_memory(reason) {
        return Some(Reservation::Memory);
    }
    // While others of its group leave the source, it is passed over at most by these, and comes
    // after them.
    (ranked.unserved_ms >= PATIENCE_MS).then_some(Reservation::All)
}

/// Whether reservations hold at this time.
pub(super) fn are_in_force(now_ms: u64) -> bool {
    !(now_ms / PATIENCE_MS).is_multiple_of(SPANS)
}

fn is_of_capacity(reason: &WaitReason) -> bool {
    match reason {
        WaitReason::TotalLimit { .. }
        | WaitReason::SourceLimit { .. }
        | WaitReason::DatastoreLimit { .. }
        | WaitReason::Turn { .. } => true,
        WaitReason::Target { obstacle } | WaitReason::Targets { best: obstacle, .. } => matches!(
            obstacle,
            TargetObstacle::Limit { .. }
                | TargetObstacle::Memory { .. }
                | TargetObstacle::Turn { .. }
        ),
        _ => false,
    }
}

fn is_of_memory(reason: &WaitReason) -> bool {
    let of_memory = |obstacle: &TargetObstacle| matches!(obstacle, TargetObstacle::Memory { .. });
    match reason {
        WaitReason::Target { obstacle } => of_memory(obstacle),
        WaitReason::Targets { best, .. } => of_memory(best),
        _ => false,
    }
}
