//! Tests of the queue, by topic.

mod crashes;
mod fairness;
mod properties;
mod scenarios;

use godwit_api::control::MovePriority;

use super::*;

pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const GBIT: u64 = 1_000_000_000;
/// An arbitrary day.
pub(crate) const NOW: u64 = 1_800_000_000_000;
pub(crate) const MINUTE: u64 = 60_000;

pub(crate) fn host(name: &str) -> HostFacts {
    HostFacts {
        name: name.into(),
        link_bits_per_s: Some(10 * GBIT),
        memory_total_bytes: 1024 * GIB,
        memory_free_bytes: 512 * GIB,
        ..HostFacts::default()
    }
}

/// Returns a move of VM `vm` from host a to host b that takes a minute. Its job has the VM's name.
pub(crate) fn job(vm: &str) -> WaitingJob {
    WaitingJob {
        id: vm.into(),
        vm: vm.into(),
        source: "a".into(),
        targets: vec!["b".into()],
        priority: MovePriority::Normal,
        group: "drain a".into(),
        memory_bytes: 4 * GIB,
        estimate_ms: MINUTE,
        datastores: vec!["ceph".into()],
        reference_group: None,
        submitted_ms: NOW,
        failed_attempts: 0,
        not_before_ms: None,
        last_failure: None,
    }
}

/// Returns the migration of a job to `target`.
pub(crate) fn running(job: &WaitingJob, target: &str) -> RunningMove {
    RunningMove {
        migration: format!("m-{}", job.id),
        vm: job.vm.clone(),
        source: job.source.clone(),
        target: target.into(),
        group: Some(job.group.clone()),
        datastores: job.datastores.clone(),
        reference_group: job.reference_group.clone(),
    }
}

/// Input of a schedule, for tests to change.
pub(crate) struct Given {
    pub(crate) now_ms: u64,
    pub(crate) waiting: Vec<WaitingJob>,
    pub(crate) running: Vec<RunningMove>,
    pub(crate) hosts: Vec<HostFacts>,
    pub(crate) limits: Limits,
    pub(crate) served: Vec<Served>,
}

impl Given {
    pub(crate) fn new(waiting: Vec<WaitingJob>) -> Given {
        let hosts = ["a", "b", "c", "d"].map(host).into();
        let (running, served) = (Vec::new(), Vec::new());
        Given { now_ms: NOW, waiting, running, hosts, limits: Limits::default(), served }
    }

    pub(crate) fn host(&mut self, name: &str) -> &mut HostFacts {
        self.hosts.iter_mut().find(|host| host.name == name).unwrap()
    }

    pub(crate) fn schedule(&self) -> Schedule {
        let Given { now_ms, waiting, running, hosts, limits, served } = self;
        schedule(&Situation { now_ms: *now_ms, waiting, running, hosts, limits, served })
    }

    /// Turns the starting moves into running ones, and returns them.
    pub(crate) fn start(&mut self) -> Vec<Start> {
        let starts = self.schedule().starts;
        for start in &starts {
            let index = self.waiting.iter().position(|job| job.id == start.job).unwrap();
            let job = self.waiting.remove(index);
            self.host(&start.target).memory_promised_bytes += job.memory_bytes;
            self.served(&job.source, &job.group);
            self.running.push(running(&job, &start.target));
        }
        starts
    }

    pub(crate) fn served(&mut self, source: &str, group: &str) {
        self.served
            .retain(|served| (served.source.as_str(), served.group.as_str()) != (source, group));
        self.served.push(Served { source: source.into(), group: group.into(), at_ms: self.now_ms });
    }
}

/// Returns the jobs that start, in their order.
pub(crate) fn started(schedule: &Schedule) -> Vec<&str> {
    schedule.starts.iter().map(|start| start.job.as_str()).collect()
}

/// Returns what a job waits for.
pub(crate) fn wait_of<'a>(schedule: &'a Schedule, job: &str) -> &'a Wait {
    schedule.waits.iter().find(|wait| wait.job == job).unwrap()
}
