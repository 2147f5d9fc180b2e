//! Expected end of a running drain, from its plan and its progress.
//!
//! **The pace** is the speed of the moves relative to the plan. One average move at the planned
//! speed is included, so that the first unusual move does not dominate. **The position in the
//! plan** is the moment at which the plan expected as many bytes to be moved as have been: order
//! and detours do not matter. The rest of the plan takes as long as planned, divided by the pace.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PlannedMove;
use crate::words::{Span, millis};

/// Progress of a move.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the variants say what their fields are")]
pub enum Progress {
    /// The move has not begun. After a failure it does not begin before this time, in milliseconds
    /// since 1970.
    Waiting { not_before_ms: Option<u64> },
    /// The move runs since `started_ms`; `done` is the part that is complete, 0 to 1.
    Running { started_ms: u64, done: f64 },
    /// The VM was moved.
    Done { started_ms: u64, ended_ms: u64 },
    /// The move was given up, or cancelled.
    Dropped,
}

/// Expected times of one move, in milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveEta {
    pub vm: String,
    /// Actual or expected start; `None` if it could not begin when it was planned.
    pub starts_ms: Option<u64>,
    /// Actual or expected end.
    pub ends_ms: Option<u64>,
}

/// Expected end of a drain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Eta {
    /// Milliseconds since 1970; `None` if a move could not begin when it was planned.
    pub ends_ms: Option<u64>,
    /// Speed relative to the plan: 1 as planned, 0.5 half as fast.
    pub pace: f64,
    /// Number of completed moves.
    pub done: usize,
    /// Number of moves that were not dropped.
    pub of: usize,
    /// The moves that were not dropped, in the plan's order.
    pub moves: Vec<MoveEta>,
    /// Summary in one line.
    pub text: String,
}

/// Lowest and highest pace that is assumed.
const PACES: (f64, f64) = (0.02, 50.0);

/// Computes the expected end of a drain with these moves. `progress` is by VM; a VM without an
/// entry waits.
#[must_use]
pub fn eta(moves: &[PlannedMove], progress: &BTreeMap<String, Progress>, now_ms: u64) -> Eta {
    let of = |planned: &PlannedMove| {
        progress.get(&planned.vm).copied().unwrap_or(Progress::Waiting { not_before_ms: None })
    };
    let all = moves.iter().map(|planned| (planned, of(planned)));
    let kept: Vec<_> = all.filter(|(_, progress)| *progress != Progress::Dropped).collect();
    let pace = pace(&kept, now_ms);
    let plan_at_ms = where_the_plan_is(&kept);
    let moves: Vec<MoveEta> = kept
        .iter()
        .map(|(planned, progress)| one(planned, *progress, now_ms, pace, plan_at_ms))
        .collect();
    let ends_ms = moves.iter().map(|of| of.ends_ms).try_fold(0, |last, end| Some(last.max(end?)));
    let done =
        kept.iter().filter(|(_, progress)| matches!(progress, Progress::Done { .. })).count();
    let of = kept.len();
    let text = match ends_ms {
        _ if done == of => format!("{done} of {of} moved"),
        Some(ends_ms) => format!(
            "{done} of {of} moved, the rest in about {} (at {pace:.1} of the planned pace)",
            Span(ends_ms.saturating_sub(now_ms))
        ),
        None => format!("{done} of {of} moved; some of the rest cannot begin at present"),
    };
    Eta { ends_ms, pace, done, of, moves, text }
}

/// Returns the planned duration of a move.
fn planned_ms(planned: &PlannedMove) -> Option<f64> {
    let expected = planned.expected?;
    Some(expected.ends_in_ms.saturating_sub(expected.starts_in_ms) as f64)
}

/// Returns the completed part of a move.
fn share(progress: Progress) -> f64 {
    match progress {
        Progress::Done { .. } => 1.0,
        Progress::Running { done, .. } if done.is_finite() => done.clamp(0.0, 1.0),
        _ => 0.0,
    }
}

fn pace(kept: &[(&PlannedMove, Progress)], now_ms: u64) -> f64 {
    let (mut planned, mut took, mut all, mut count) = (0.0, 0.0, 0.0, 0.0);
    for (of, progress) in kept {
        let Some(whole_ms) = planned_ms(of) else { continue };
        (all, count) = (all + whole_ms, count + 1.0);
        let elapsed_ms = match *progress {
            Progress::Done { started_ms, ended_ms } => ended_ms.saturating_sub(started_ms),
            Progress::Running { started_ms, .. } => now_ms.saturating_sub(started_ms),
            Progress::Waiting { .. } | Progress::Dropped => continue,
        };
        (planned, took) = (planned + share(*progress) * whole_ms, took + elapsed_ms as f64);
    }
    if count == 0.0 {
        return 1.0;
    }
    let average = (all / count).max(1.0);
    ((planned + average) / (took + average)).clamp(PACES.0, PACES.1)
}

/// Returns the moment of the plan, in milliseconds since it was made, at which it expected as many
/// bytes to be moved as have been.
fn where_the_plan_is(kept: &[(&PlannedMove, Progress)]) -> f64 {
    let weight = |planned: &PlannedMove| planned.memory_bytes.max(1) as f64;
    let timed: Vec<_> = kept
        .iter()
        .filter_map(|(planned, progress)| {
            let expected = planned.expected?;
            let (start, end) = (expected.starts_in_ms as f64, expected.ends_in_ms as f64);
            Some((start, end, weight(planned), share(*progress)))
        })
        .collect();
    let moved: f64 = timed.iter().map(|(_, _, weight, share)| weight * share).sum();
    let expected_at = |at: f64| -> f64 {
        let of = |(start, end, weight, _): &(f64, f64, f64, f64)| {
            weight * ((at - start) / (end - start).max(1.0)).clamp(0.0, 1.0)
        };
        timed.iter().map(of).sum()
    };
    let (mut low, mut high) = (0.0, timed.iter().map(|(_, end, ..)| *end).fold(0.0, f64::max));
    // The function never falls, so bisection finds the moment, to a millisecond for any duration of
    // a plan.
    for _ in 0..48 {
        let middle = (low + high) / 2.0;
        if expected_at(middle) < moved { low = middle } else { high = middle }
    }
    high
}

fn one(
    planned: &PlannedMove,
    progress: Progress,
    now_ms: u64,
    pace: f64,
    plan_at_ms: f64,
) -> MoveEta {
    let vm = planned.vm.clone();
    let after = |planned_ms: f64| now_ms.saturating_add(millis(planned_ms / pace));
    let whole_ms = planned_ms(planned);
    match progress {
        Progress::Done { started_ms, ended_ms } => {
            MoveEta { vm, starts_ms: Some(started_ms), ends_ms: Some(ended_ms) }
        }
        Progress::Running { started_ms, .. } => {
            let ends_ms = whole_ms.map(|whole_ms| after((1.0 - share(progress)) * whole_ms));
            MoveEta { vm, starts_ms: Some(started_ms), ends_ms }
        }
        Progress::Waiting { not_before_ms } => {
            let starts = planned.expected.map(|expected| {
                after(expected.starts_in_ms as f64 - plan_at_ms).max(not_before_ms.unwrap_or(0))
            });
            let ends_ms = starts
                .zip(whole_ms)
                .map(|(starts, whole)| starts.saturating_add(millis(whole / pace)));
            MoveEta { vm, starts_ms: starts, ends_ms }
        }
        Progress::Dropped => MoveEta { vm, starts_ms: None, ends_ms: None },
    }
}
