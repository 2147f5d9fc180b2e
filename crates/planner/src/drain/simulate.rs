//! Expected times of planned moves: the queue decides in simulated time, and moves share links.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use godwit_api::control::MovePriority;

use super::{DrainRequest, DrainVm, Expected, PlannedMove, UnderWay};
use crate::queue::{
    HostFacts, Limits, RunningMove, Situation, WaitReason, WaitingJob, schedule, stands_at, starts,
};
use crate::words::millis;

/// Remaining duration below which a move counts as ended.
const NEGLIGIBLE_MS: f64 = 0.5;

/// Fills in the expected times of a drain's moves, and sorts the moves by them.
pub(super) fn expect(request: &DrainRequest<'_>, moves: &mut [PlannedMove]) {
    fill(clock(request, moves), moves);
}

/// Returns the simulation of a drain's moves.
pub(super) fn clock<'a>(request: &DrainRequest<'a>, moves: &[PlannedMove]) -> Clock<'a> {
    let by_name: HashMap<&str, &DrainVm> =
        request.vms.iter().map(|vm| (vm.vm.name.as_str(), vm)).collect();
    let jobs = moves.iter().zip(0..).filter_map(|(planned, rank)| {
        let vm = by_name.get(planned.vm.as_str())?;
        Some(job(planned, vm, request.now_ms + rank))
    });
    let facts = request.hosts.iter().map(|host| &host.facts);
    Clock::new(jobs.collect(), request.running, facts, request.limits, request.now_ms)
}

/// Converts a planned move to a job of the queue.
pub(super) fn job(planned: &PlannedMove, vm: &DrainVm, submitted_ms: u64) -> WaitingJob {
    WaitingJob {
        id: planned.vm.clone(),
        vm: planned.vm.clone(),
        source: planned.source.clone(),
        targets: vec![planned.target.clone()],
        priority: MovePriority::Normal,
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
    /// Waiting jobs by source and target, each in the order of the queue.
    lines: BTreeMap<(String, String), VecDeque<WaitingJob>>,
    moving: Vec<Moving>,
    hosts: Vec<HostFacts>,
    /// Index of each host.
    index: HashMap<String, usize>,
    /// Fewest jobs of a line that the queue is asked about at a time.
    pub(super) least_asked: usize,
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
        let hosts: Vec<HostFacts> =
            hosts.filter(|host| touched.contains(host.name.as_str())).cloned().collect();
        let named = hosts.iter().enumerate().map(|(index, host)| (host.name.clone(), index));
        let index = named.collect();
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
            lines: lines(waiting),
            moving,
            hosts,
            index,
            least_asked: 1,
            limits,
            expected: BTreeMap::new(),
        }
    }

    fn host(&mut self, name: &str) -> Option<&mut HostFacts> {
        self.index.get(name).map(|&index| &mut self.hosts[index])
    }

    /// Returns the expected times of each job, or what it waits for when nothing moves any more.
    fn run(mut self) -> (BTreeMap<String, Expected>, BTreeMap<String, WaitReason>) {
        loop {
            self.begin();
            if self.moving.is_empty() {
                let waits = self.waits();
                return (self.expected, waits);
            }
            self.advance();
        }
    }

    /// Starts the moves that the queue would start. It is asked about as many jobs of a line as the
    /// line has free places, so that a step does not walk all jobs. If they cannot start for
    /// another reason, it is asked about more.
    fn begin(&mut self) {
        let mut least = self.least_asked;
        loop {
            let running: Vec<RunningMove> =
                self.moving.iter().map(|moving| moving.running.clone()).collect();
            let places = Places::new(self.limits, &running);
            let (mut asked, mut are_all) = (Vec::new(), true);
            for ((source, target), line) in &self.lines {
                let [source, target] = [source, target].map(|name| self.index.get(name));
                let [source, target] = [source, target].map(|at| at.map(|&at| &self.hosts[at]));
                let free = source.zip(target).map_or(0, |(from, to)| places.free(from, to));
                let most = if free == 0 { 0 } else { free.max(least) };
                asked.extend(line.iter().take(most).cloned());
                are_all &= free == 0 || line.len() <= most;
            }
            if asked.is_empty() {
                return;
            }
            let now_ms = self.epoch_ms.saturating_add(millis(self.at_ms));
            let (waiting, hosts, limits) = (&asked, &self.hosts, self.limits);
            let begun = starts(&Situation {
                now_ms,
                waiting,
                running: &running,
                hosts,
                limits,
                served: &[],
            });
            if begun.is_empty() {
                if are_all {
                    return;
                }
                least = least.saturating_mul(2);
            }
            for start in begun {
                self.start(&start.job, (start.source, start.target));
            }
        }
    }

    /// Returns what the waiting jobs wait for.
    fn waits(&self) -> BTreeMap<String, WaitReason> {
        let waiting: Vec<WaitingJob> = self.lines.values().flatten().cloned().collect();
        let running: Vec<RunningMove> =
            self.moving.iter().map(|moving| moving.running.clone()).collect();
        let now_ms = self.epoch_ms.saturating_add(millis(self.at_ms));
        let (waiting, hosts, limits) = (&waiting, &self.hosts, self.limits);
        let decided =
            schedule(&Situation { now_ms, waiting, running: &running, hosts, limits, served: &[] });
        decided.waits.into_iter().map(|wait| (wait.job, wait.reason)).collect()
    }

    /// Starts a job of a line.
    fn start(&mut self, id: &str, ends: (String, String)) {
        let Some(line) = self.lines.get_mut(&ends) else { return };
        let Some(index) = line.iter().position(|job| job.id == id) else { return };
        let Some(job) = line.remove(index) else { return };
        let target = ends.1;
        if let Some(target) = self.host(&target) {
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
                target,
                group: Some(job.group),
                datastores: job.datastores,
                reference_group: job.reference_group,
            },
        });
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

/// Sorts jobs, each with one target, into lines.
fn lines(waiting: Vec<WaitingJob>) -> BTreeMap<(String, String), VecDeque<WaitingJob>> {
    let mut lines = BTreeMap::<_, VecDeque<WaitingJob>>::new();
    for job in waiting {
        let target = job.targets.first().cloned().unwrap_or_default();
        lines.entry((job.source.clone(), target)).or_default().push_back(job);
    }
    for line in lines.values_mut() {
        let by_place = |job: &WaitingJob| (stands_at(job), job.id.clone());
        line.make_contiguous().sort_by_cached_key(by_place);
    }
    lines
}

/// Places that the running moves leave free.
struct Places<'a> {
    limits: &'a Limits,
    in_all: u32,
    out: HashMap<&'a str, u32>,
    into: HashMap<&'a str, u32>,
}

impl<'a> Places<'a> {
    fn new(limits: &'a Limits, running: &'a [RunningMove]) -> Self {
        let (mut out, mut into) = (HashMap::new(), HashMap::new());
        for one in running {
            *out.entry(one.source.as_str()).or_insert(0) += 1;
            *into.entry(one.target.as_str()).or_insert(0) += 1;
        }
        let running = u32::try_from(running.len()).unwrap_or(u32::MAX);
        let in_all = limits.in_all.unwrap_or(u32::MAX).saturating_sub(running);
        Places { limits, in_all, out, into }
    }

    /// Returns the number of moves between two hosts that the limits admit now.
    fn free(&self, from: &HostFacts, to: &HostFacts) -> usize {
        let left = |limit: u32, taken: &HashMap<&str, u32>, host: &HostFacts| {
            limit.saturating_sub(taken.get(host.name.as_str()).copied().unwrap_or(0))
        };
        let out = left(self.limits.out_of(&from.name, from.link_bits_per_s), &self.out, from);
        let into = left(self.limits.into_host(&to.name, to.link_bits_per_s), &self.into, to);
        usize::try_from(out.min(into).min(self.in_all)).unwrap_or(usize::MAX)
    }
}
