//! One run of the queue: which jobs start, and what each of the others waits for.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::capacity::Capacity;
use super::order::{Ranked, order};
use super::reason::WaitReason;
use super::reservation;
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
    let (starts, refused, mut barred) = decide(situation, false);
    let positioned = refused.into_iter().zip(1..);
    let mut waits: Vec<Wait> = positioned
        .map(|((job, reason), position)| wait(&situation.waiting[job], Some(position), reason))
        .collect();
    let waiting = situation.waiting;
    barred.sort_by_key(|(index, _)| (waiting[*index].submitted_ms, &waiting[*index].id));
    waits.extend(barred.into_iter().map(|(index, reason)| wait(&waiting[index], None, reason)));
    Schedule { starts, waits }
}

/// Decides which jobs start now, as [`schedule`] does, without the reasons of the others. Stops at
/// the job behind which no source has a free place.
#[must_use]
pub fn starts(situation: &Situation<'_>) -> Vec<Start> {
    decide(situation, true).0
}

/// Indexes of waiting jobs, with what they wait for.
type Refused = Vec<(usize, WaitReason)>;

/// Returns the jobs that start, those without a place, in order, and those that are barred.
fn decide(situation: &Situation<'_>, only_starts: bool) -> (Vec<Start>, Refused, Refused) {
    let mut capacity = Capacity::new(situation);
    let (ready, barred) = ready_and_barred(situation, &mut capacity);
    let (mut starts, mut refused) = (Vec::new(), Vec::new());
    let sources: HashSet<&str> =
        ready.iter().map(|index| situation.waiting[*index].source.as_str()).collect();
    let mut has_room = capacity.has_room(&sources);
    for ranked in order(situation, &ready) {
        if only_starts && !has_room {
            break;
        }
        let job = &situation.waiting[ranked.job];
        match capacity.seat(job) {
            Ok(seat) => {
                capacity.start(job, &seat);
                let target = capacity.target_of(&seat).to_owned();
                let (id, vm, source) = (job.id.clone(), job.vm.clone(), job.source.clone());
                starts.push(Start { job: id, vm, source, target });
                has_room = capacity.has_room(&sources);
            }
            Err(reason) => {
                reserve(&mut capacity, job, &ranked, &reason, situation.now_ms);
                refused.push((ranked.job, reason));
            }
        }
    }
    (starts, refused, barred)
}

fn reserve<'a>(
    capacity: &mut Capacity<'a>,
    job: &'a WaitingJob,
    ranked: &Ranked,
    reason: &WaitReason,
    now_ms: u64,
) {
    if let Some(reservation) = reservation::of(job, ranked, reason, now_ms) {
        capacity.reserve(job, reservation);
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
