//! Expected times of planned moves: the queue decides in simulated time, and moves share links.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{DrainRequest, DrainVm, Expected, PlannedMove, UnderWay};
use crate::queue::{HostFacts, Limits, RunningMove, Situation, WaitReason, WaitingJob, schedule};
use crate::words::millis;

/// Remaining duration below which a move counts as ended.
const NEGLIGIBLE_MS: f64 = 0.5;

/// Fills in the expected times of a drain's moves, and sorts the moves by them.
pub(super) fn expect(request: &DrainRequest<'_>, moves: &mut [PlannedMove]) {
    let by_name: HashMap<&str, &DrainVm> =
        request.vms.iter().map(|vm| (vm.vm.name.as_str(), vm)).collect();
    let jobs = moves.iter().zip(0..).filter_map(|(planned, rank)| {
        let vm = by_name.get(planned.vm.as_str())?;
        Some(job(planned, vm, request.now_ms + rank))
    });
    let facts = request.hosts.iter().map(|host| &host.facts);
    fill(Clock::new(jobs.collect(), request.running, facts, request.limits, request.now_ms), moves);
}

/// Converts a planned move to a job of the queue.
pub(super) fn job(planned: &PlannedMove, vm: &DrainVm, submitted_ms: u64) -> WaitingJob {
    WaitingJob {
        id: planned.vm.clone(),
        vm: planned.vm.clone(),
        source: planned.source.clone(),
        targets: vec![planned.target.clone()],
        priority: crate::queue::Priority::Normal,
        group: "drain".into(),
        memory_bytes: vm.vm.memory_bytes,
        estimate_ms: vm.estimate_ms,
        datastores: vm.datastores.clone(),
        reference_group: vm.vm.reference_group.clone(),
        submitted_ms,
        failed_attempts: 0,
        not_before_ms: None,
        last_failure: None,
    }
}

pub(super) fn fill(clock: Clock<'_>, moves: &mut [PlannedMove]) {
    let (mut expected, mut waits_for) = clock.run();
    for planned in moves.iter_mut() {
        planned.expected = expected.remove(&planned.vm);
        planned.waits_for = waits_for.remove(&planned.vm);
    }
    let begin =
        |planned: &PlannedMove| planned.expected.map_or(u64::MAX, |expected| expected.starts_in_ms);
    moves.sort_by_cached_key(|planned| (begin(planned), planned.vm.clone()));
}

/// A move that runs.
struct Moving {
    running: RunningMove,
    memory_bytes: u64,
    /// Remaining duration, alone on the link.
    left_ms: f64,
    /// Bandwidth that it would use, bits per second.
    demand: f64,
    /// Start; `None` if it began before the plan.
    began_ms: Option<f64>,
}

/// The simulated cluster.
pub(super) struct Clock<'a> {
    epoch_ms: u64,
    /// Time since then.
    at_ms: f64,
    waiting: Vec<WaitingJob>,
    moving: Vec<Moving>,
    hosts: Vec<HostFacts>,
    limits: &'a Limits,
    expected: BTreeMap<String, Expected>,
}

impl<'a> Clock<'a> {
    /// Creates the simulation with only those hosts that moves touch.
    pub(super) fn new<'h>(
        waiting: Vec<WaitingJob>,
        running: &[UnderWay],
        hosts: impl Iterator<Item = &'h HostFacts>,
        limits: &'a Limits,
        now_ms: u64,
    ) -> Self {
        let mut touched: HashSet<&str> = HashSet::new();
        for job in &waiting {
            touched.insert(&job.source);
            touched.extend(job.targets.iter().map(String::as_str));
        }
        for UnderWay { running, .. } in running {
            touched.extend([running.source.as_str(), running.target.as_str()]);
        }
        let hosts = hosts.filter(|host| touched.contains(host.name.as_str())).cloned().collect();
        let moving = running.iter().map(|under_way| Moving {
            running: under_way.running.clone(),
            memory_bytes: under_way.memory_bytes,
            left_ms: under_way.remaining_ms as f64,
            // The part of its memory that it has moved is unknown: assume that it fills its link.
            demand: f64::INFINITY,
            began_ms: None,
        });
        let moving = moving.collect();
        Clock {
            epoch_ms: now_ms,
            at_ms: 0.0,
            waiting,
            moving,
            hosts,
            limits,
            expected: BTreeMap::new(),
        }
    }

    fn host(&mut self, name: &str) -> Option<&mut HostFacts> {
        self.hosts.iter_mut().find(|host| host.name == name)
    }

    /// Returns the expected times of each job, or what it waits for when nothing moves any more.
    fn run(mut self) -> (BTreeMap<String, Expected>, BTreeMap<String, WaitReason>) {
        loop {
            let waits = self.begin();
            if self.moving.is_empty() {
                return (self.expected, waits);
            }
            self.advance();
        }
    }

    /// Starts the moves that the queue would start; returns what the others wait for.
    fn begin(&mut self) -> BTreeMap<String, WaitReason> {
        if self.waiting.is_empty() {
            return BTreeMap::new();
        }
        let running: Vec<RunningMove> =
            self.moving.iter().map(|moving| moving.running.clone()).collect();
        let now_ms = self.epoch_ms.saturating_add(millis(self.at_ms));
        let (waiting, hosts, limits) = (&self.waiting, &self.hosts, self.limits);
        let decided =
            schedule(&Situation { now_ms, waiting, running: &running, hosts, limits, served: &[] });
        for start in decided.starts {
            let Some(index) = self.waiting.iter().position(|job| job.id == start.job) else {
                continue;
            };
            let job = self.waiting.swap_remove(index);
            if let Some(target) = self.host(&start.target) {
                target.memory_promised_bytes =
                    target.memory_promised_bytes.saturating_add(job.memory_bytes);
            }
            self.moving.push(Moving {
                memory_bytes: job.memory_bytes,
                left_ms: job.estimate_ms as f64,
                demand: job.memory_bytes as f64 * 8.0 / (job.estimate_ms.max(1) as f64 / 1e3),
                began_ms: Some(self.at_ms),
                running: RunningMove {
                    migration: job.id,
                    vm: job.vm,
                    source: job.source,
                    target: start.target,
                    group: Some(job.group),
                    datastores: job.datastores,
                    reference_group: job.reference_group,
                },
            });
        }
        decided.waits.into_iter().map(|wait| (wait.job, wait.reason)).collect()
    }

    /// Advances to the moment at which the next move ends.
    fn advance(&mut self) {
        let speeds = self.speeds();
        let until_end =
            self.moving.iter().zip(&speeds).map(|(moving, speed)| moving.left_ms / speed);
        let step_ms = until_end.fold(f64::INFINITY, f64::min).max(0.0);
        self.at_ms += step_ms;
        for (moving, speed) in self.moving.iter_mut().zip(&speeds) {
            moving.left_ms -= step_ms * speed;
        }
        let (ended, moving) = std::mem::take(&mut self.moving)
            .into_iter()
            .partition(|moving: &Moving| moving.left_ms <= NEGLIGIBLE_MS);
        self.moving = moving;
        for ended in ended {
            self.end(ended);
        }
    }

    fn end(&mut self, ended: Moving) {
        let Moving { running, memory_bytes, began_ms, .. } = ended;
        if let Some(target) = self.host(&running.target) {
            target.memory_promised_bytes =
                target.memory_promised_bytes.saturating_sub(memory_bytes);
            target.memory_free_bytes = target.memory_free_bytes.saturating_sub(memory_bytes);
            target.reference_groups.extend(running.reference_group);
        }
        if let Some(began_ms) = began_ms {
            let ends_in_ms = millis(self.at_ms);
            self.expected
                .insert(running.vm, Expected { starts_in_ms: millis(began_ms), ends_in_ms });
        }
    }

    /// Returns the speed of each move, as a share of its speed alone, from the fuller of its two
    /// links. A link whose moves would use more than it carries gives each the same part of its
    /// demand.
    fn speeds(&self) -> Vec<f64> {
        let links: HashMap<&str, Option<u64>> =
            self.hosts.iter().map(|host| (host.name.as_str(), host.link_bits_per_s)).collect();
        let part = |host: &str, demand: f64| match links.get(host).copied().flatten() {
            Some(link) => (demand / link.max(1) as f64).min(1.0),
            // The speed is unknown: assume that each move fills the link.
            None => 1.0,
        };
        let (mut out, mut into): (HashMap<&str, f64>, HashMap<&str, f64>) =
            (HashMap::new(), HashMap::new());
        for Moving { running, demand, .. } in &self.moving {
            *out.entry(&running.source).or_default() += part(&running.source, *demand);
            *into.entry(&running.target).or_default() += part(&running.target, *demand);
        }
        let of = |asked: &HashMap<&str, f64>, host: &str| {
            1.0 / asked.get(host).copied().unwrap_or(1.0).max(1.0)
        };
        self.moving
            .iter()
            .map(|Moving { running, .. }| of(&out, &running.source).min(of(&into, &running.target)))
            .collect()
    }
}
