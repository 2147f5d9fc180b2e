//! One run of the queue: which jobs start, and what each of the others waits for.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::capacity::Capacity;
use super::hold;
use super::order::{Ranked, order};
use super::reason::WaitReason;
use super::situation::{RunningMove, Situation, WaitingJob};

/// A job that starts now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub job: String,
    pub vm: String,
    /// The host that the VM leaves.
    pub source: String,
    /// The chosen target.
    pub target: String,
}

/// A job that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    pub job: String,
    pub vm: String,
    /// Its place among the jobs that would start if there were capacity, from 1; `None` if another
    /// reason prevents it.
    pub position: Option<usize>,
    /// What it waits for.
    pub reason: WaitReason,
    /// The reason in one line, for people.
    pub text: String,
}

/// Result for all waiting jobs: each is in one of the two lists, once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Jobs that start now, in this order.
    pub starts: Vec<Start>,
    /// Jobs that wait: first those with a position, in its order; then the others, the oldest
    /// first.
    pub waits: Vec<Wait>,
}

/// Decides which jobs start now, and what each of the others waits for. The result does not depend
/// on the order of the given jobs and hosts.
#[must_use]
pub fn schedule(situation: &Situation<'_>) -> Schedule {
    let mut capacity = Capacity::new(situation);
    let (ready, mut barred) = ready_and_barred(situation, &mut capacity);
    let mut schedule = Schedule::default();
    for ranked in order(situation, &ready) {
        let job = &situation.waiting[ranked.job];
        match capacity.seat(job) {
            Ok(seat) => {
                capacity.take(job, &seat);
                let target = capacity.target_of(&seat).to_owned();
                let (id, vm, source) = (job.id.clone(), job.vm.clone(), job.source.clone());
                schedule.starts.push(Start { job: id, vm, source, target });
            }
            Err(reason) => {
                keep_for(&mut capacity, job, &ranked, &reason, situation.now_ms);
                schedule.waits.push(wait(job, Some(schedule.waits.len() + 1), reason));
            }
        }
    }
    let waiting = situation.waiting;
    barred.sort_by_key(|(index, _)| (waiting[*index].submitted_ms, &waiting[*index].id));
    schedule
        .waits
        .extend(barred.into_iter().map(|(index, reason)| wait(&waiting[index], None, reason)));
    schedule
}

fn keep_for<'a>(
    capacity: &mut Capacity<'a>,
    job: &'a WaitingJob,
    ranked: &Ranked,
    reason: &WaitReason,
    now_ms: u64,
) {
    if let Some(kept) = hold::kept(job, ranked, reason, now_ms) {
        capacity.keep(job, kept);
    }
}

fn wait(job: &WaitingJob, position: Option<usize>, reason: WaitReason) -> Wait {
    let text = reason.to_string();
    Wait { job: job.id.clone(), vm: job.vm.clone(), position, reason, text }
}

/// Separates jobs that would start if there were capacity from the others with their reasons.
fn ready_and_barred<'a>(
    situation: &Situation<'a>,
    capacity: &mut Capacity<'a>,
) -> (Vec<usize>, Vec<(usize, WaitReason)>) {
    let moving: HashMap<&str, &RunningMove> =
        situation.running.iter().map(|running| (running.vm.as_str(), running)).collect();
    let mut first_of_vm: HashMap<&str, usize> = HashMap::new();
    for (index, job) in situation.waiting.iter().enumerate() {
        let first = first_of_vm.entry(&job.vm).or_insert(index);
        let before = &situation.waiting[*first];
        if (job.submitted_ms, &job.id) < (before.submitted_ms, &before.id) {
            *first = index;
        }
    }
    let (mut ready, mut barred) = (Vec::new(), Vec::new());
    for (index, job) in situation.waiting.iter().enumerate() {
        let first = first_of_vm.get(job.vm.as_str()).copied().filter(|first| *first != index);
        let first = first.map(|first| &situation.waiting[first]);
        let obstacle = of_vm(moving.get(job.vm.as_str()).copied(), first)
            .or_else(|| of_time(job, situation.now_ms))
            .or_else(|| capacity.source_obstacle(job))
            .or_else(|| capacity.no_standing_target(job));
        match obstacle {
            Some(reason) => barred.push((index, reason)),
            None => ready.push(index),
        }
    }
    (ready, barred)
}

fn of_vm(moving: Option<&RunningMove>, first: Option<&WaitingJob>) -> Option<WaitReason> {
    if let Some(RunningMove { migration, source, target, .. }) = moving {
        let (migration, source, target) = (migration.clone(), source.clone(), target.clone());
        return Some(WaitReason::VmBusy { migration, source, target });
    }
    first.map(|first| WaitReason::EarlierJob { job: first.id.clone() })
}

fn of_time(job: &WaitingJob, now_ms: u64) -> Option<WaitReason> {
    let at_ms = job.not_before_ms.filter(|at_ms| *at_ms > now_ms)?;
    let (failed_attempts, failure) = (job.failed_attempts, job.last_failure.clone());
    Some(WaitReason::RetryAt { at_ms, in_ms: at_ms - now_ms, failed_attempts, failure })
}
