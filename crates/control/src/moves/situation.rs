//! Input of the queue: the jobs, and the hosts from the inventory.

use std::collections::BTreeMap;

use godwit_api::VmState;
use godwit_api::control::Waits;
use godwit_planner::queue::lifecycle::JobState;
use godwit_planner::queue::{HostFacts, RunningMove, WaitReason, WaitingJob};

use super::job::Job;
use super::jobs::Jobs;
use crate::cluster::inventory::Inventory;
use crate::cluster::planner_input::{
    begun_at_agents, datastores, estimate_ms, host_facts, reference_group,
};

/// Input of the queue.
pub(crate) struct QueueInput {
    pub(crate) waiting: Vec<WaitingJob>,
    /// Jobs whose VM cannot leave in its present state, with what they wait for. They take no place
    /// in the queue.
    pub(crate) unable: Vec<(String, Waits)>,
    pub(crate) running: Vec<RunningMove>,
    pub(crate) hosts: Vec<HostFacts>,
}

pub(super) fn queue_input(jobs: &Jobs, inventory: &Inventory) -> QueueInput {
    let (mut waits, mut cannot) = (Vec::new(), Vec::new());
    for job in jobs.open().filter(|job| matches!(job.state, JobState::Waiting { .. })) {
        match unable(job, inventory) {
            Some(why) => cannot.push((job.id.clone(), why)),
            None => waits.extend(waiting(job, inventory)),
        }
    }
    let is_own = |migration: &str| jobs.is_own(migration);
    let running = jobs.open().filter_map(|job| running(job, inventory));
    let running: Vec<_> = running.chain(begun_at_agents(is_own, inventory)).collect();
    let mut arriving = BTreeMap::<&str, Vec<&str>>::new();
    for one in &running {
        arriving.entry(&one.target).or_default().push(&one.vm);
    }
    let of = |name: &str| arriving.get(name).map_or(&[][..], Vec::as_slice);
    let hosts =
        inventory.plans().filter_map(|(name, _)| host_facts(name, of(name), inventory)).collect();
    QueueInput { waiting: waits, unable: cannot, running, hosts }
}

fn waiting(job: &Job, inventory: &Inventory) -> Option<WaitingJob> {
    let JobState::Waiting { failed_attempts, not_before_ms, failure } = &job.state else {
        return None;
    };
    let memory_bytes = inventory.vm_info(&job.vm).map_or(0, |info| info.memory_bytes);
    Some(WaitingJob {
        id: job.id.clone(),
        vm: job.vm.clone(),
        source: job.from.clone(),
        targets: job.request.to.iter().cloned().collect(),
        priority: job.request.priority,
        group: job.group().to_owned(),
        memory_bytes,
        estimate_ms: estimate_ms(memory_bytes, &job.from, inventory),
        datastores: datastores(&job.vm, inventory),
        reference_group: inventory.vm_info(&job.vm).and_then(|info| reference_group(info)),
        submitted_ms: job.asked_unix_ms,
        failed_attempts: *failed_attempts,
        not_before_ms: *not_before_ms,
        last_failure: failure.as_ref().map(|failure| failure.code.clone()),
    })
}

/// Returns what keeps a job's VM from leaving its host now. `None`: nothing about the VM itself.
fn unable(job: &Job, inventory: &Inventory) -> Option<Waits> {
    if epoch(inventory, &job.vm, &job.from).is_some() {
        return None;
    }
    let (code, text) = match inventory.vm_info(&job.vm) {
        // Its host may not have been reached yet; the queue reports that case.
        None if !inventory.is_up(&job.from) => return None,
        None => (
            "vm-gone",
            format!("no host reports VM {}; cancel the move if the VM is gone for good", job.vm),
        ),
        Some(info) if info.host != job.from => (
            "vm-elsewhere",
            format!(
                "VM {} is now on host {}, not on {}; cancel the move",
                job.vm, info.host, job.from
            ),
        ),
        Some(info) => (
            "vm-not-running",
            format!("VM {} is {}: it cannot move in this state", job.vm, info.state),
        ),
    };
    Some(Waits { code: code.to_owned(), text })
}

fn running(job: &Job, inventory: &Inventory) -> Option<RunningMove> {
    let (JobState::Starting(attempt) | JobState::Running(attempt)) = &job.state else {
        return None;
    };
    Some(RunningMove {
        migration: attempt.migration.clone(),
        vm: job.vm.clone(),
        source: job.from.clone(),
        target: attempt.target.clone(),
        group: Some(job.group().to_owned()),
        datastores: datastores(&job.vm, inventory),
        reference_group: inventory.vm_info(&job.vm).and_then(|info| reference_group(info)),
    })
}

/// Returns the epoch in which a host runs a VM that can move. `None`: the host does not have the
/// VM, or the VM does not run.
pub(crate) fn epoch(inventory: &Inventory, vm: &str, host: &str) -> Option<u64> {
    let found = inventory.vm_info(vm)?;
    let can_move = matches!(found.state, VmState::Running | VmState::Paused);
    (found.host == host && can_move).then_some(found.epoch)
}

/// Returns a stable code for what a job waits for.
pub(crate) fn code(reason: &WaitReason) -> String {
    let value = serde_json::to_value(reason).unwrap_or_default();
    let kind = |value: &serde_json::Value| value.get("kind")?.as_str().map(str::to_owned);
    // An obstacle at a target has its own code, such as `target-away`.
    let of_target = value.get("obstacle").and_then(kind).map(|of| format!("target-{of}"));
    of_target
        .or_else(|| kind(&value))
        .or(value.as_str().map(str::to_owned))
        .unwrap_or("waits".to_owned())
}
