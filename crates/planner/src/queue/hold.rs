//! For whom is kept what becomes free.
//!
//! A job that needs much at once (the memory of a large VM, places on several datastores) would be passed for ever by those that need
//! little, since what is free goes to whoever fits. So the first job of a group at a source that has been passed over for
//! [`PATIENCE_MS`] is kept what becomes free: memory where memory is what it lacks, else all that it needs. Later jobs do not get it.
//!
//! What it waits for may never come (nobody leaves its target), so this is not for ever either: of four such spans by the clock it is kept
//! in three, and in the fourth all go on as if there were no such jobs. The clock is everybody's, so that those spans fall together.

use super::order::Ranked;
use super::reason::{TargetObstacle, WaitReason};
use super::situation::WaitingJob;

/// A job that has been passed over for this long is kept what becomes free.
const PATIENCE_MS: u64 = 10 * 60 * 1000;
/// Of so many spans of patience one is without.
const SPANS: u64 = 4;

/// What is kept for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// Memory at its target. Places are no use to it yet, and are left to others.
    Memory,
    /// All that it needs.
    All,
}

/// What is kept for this job, if anything is.
pub(super) fn kept(
    job: &WaitingJob,
    ranked: &Ranked,
    reason: &WaitReason,
    now_ms: u64,
) -> Option<Kept> {
    if !ranked.is_first || !is_of_capacity(reason) {
        return None;
    }
    let waited_ms = now_ms.saturating_sub(job.submitted_ms.max(job.not_before_ms.unwrap_or(0)));
    if waited_ms < PATIENCE_MS || !is_keeping(now_ms) {
        return None;
    }
    if is_of_memory(reason) {
        return Some(Kept::Memory);
    }
    // While others of its group leave the source it is passed over by these at most, and comes after them.
    (ranked.unserved_ms >= PATIENCE_MS).then_some(Kept::All)
}

/// Whether anything is kept for anybody at this time.
pub(super) fn is_keeping(now_ms: u64) -> bool {
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
